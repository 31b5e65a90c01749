"""`ckptool devices` on machines of our choice: what nvidia-smi says, what is shown."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from devices_support import (  # noqa: F401 - fixtures
    GIB,
    LISTED,
    MIB,
    XML,
    A,
    B,
    C,
    card,
    mig,
    slugs,
    with_cards,
    without_smi,
)
from verbs_support import FIXTURES, ROOT, cli, run

import ckptool
from ckptool.checkpoint import Note
from ckptool.models import devices as models_devices
from ckptool.models import smi

DP_CUDA = str(FIXTURES / "dp_cuda.pth")
TWO = (card(0, A, free=141_000, used=771, total=143_771), card(1, B, free=23, used=9, total=41))


# -- what is shown -------------------------------------------------------------------------------
def test_the_report_is_schema_1(machine):
    machine(*TWO, mask="1,0", order="PCI_BUS_ID")
    report = ckptool.devices().to_dict()

    assert report["schema"] == 1
    assert report["cuda_visible_devices"] == "1,0"
    assert report["fits"] is None
    assert report["devices"] == [
        {
            "index": 0, "physical": 1, "uuid": B, "name": "NVIDIA H200",
            "free_bytes": 23 * MIB, "used_bytes": 9 * MIB, "total_bytes": 41 * MIB,
            "utilisation_percent": 7,
        },
        {
            "index": 1, "physical": 0, "uuid": A, "name": "NVIDIA H200",
            "free_bytes": 141_000 * MIB, "used_bytes": 771 * MIB, "total_bytes": 143_771 * MIB,
            "utilisation_percent": 7,
        },
    ]  # fmt: skip


def test_the_screen(machine, capsys):
    machine(card(0, A, free=141_000, used=771, total=143_771), card(1, B, total=143_771), mask="0")
    status, out, err = cli(capsys, "devices")

    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "CUDA shows 1 device of 2 cards (CUDA_VISIBLE_DEVICES is 0)"
    assert " ".join(lines[2].split()) == "device physical name free used total busy uuid"
    assert lines[3].split() == [
        "cuda:0", "0", "NVIDIA", "H200", "147.8", "GB", "808.5", "MB", "150.8", "GB", "7", "%", A,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("mask", "sentence"),
    [
        (None, "CUDA shows 2 devices of 2 cards (CUDA_VISIBLE_DEVICES is not set)"),
        ("", "CUDA shows no device of 2 cards: CUDA_VISIBLE_DEVICES is empty"),
        ("-1", "CUDA shows no device of 2 cards: CUDA_VISIBLE_DEVICES is -1 ('-1' ends the list)"),
        ("1,1", "CUDA shows no device of 2 cards: CUDA_VISIBLE_DEVICES is 1,1 ('1' stands there twice, which hides every card)"),
        ("1,5", "CUDA shows 1 device of 2 cards (CUDA_VISIBLE_DEVICES is 1,5)"),
    ],
)  # fmt: skip
def test_the_first_line(machine, capsys, mask, sentence):
    machine(card(0, A), card(1, B), mask=mask)
    status, out, _ = cli(capsys, "devices")

    assert (status, out.splitlines()[0]) == (0, sentence)


def test_an_entry_that_ends_the_list_is_named(machine):
    machine(card(0, A), card(1, B), mask="1,5")
    notes = [n["text"] for n in ckptool.devices().to_dict()["notes"] if n["slug"] == "mask-ended"]

    assert notes == ["CUDA_VISIBLE_DEVICES=1,5: there is no card 5: the list ends there"]


def test_unequal_cards_have_no_number_until_the_order_is_told(machine, capsys):
    cards = (card(0, A, name="NVIDIA T400"), card(1, B))
    machine(*cards)
    unsure = ckptool.devices().to_dict()
    _, screen, _ = cli(capsys, "devices")
    machine(*cards, order="PCI_BUS_ID")
    sure = ckptool.devices().to_dict()

    assert [row["index"] for row in unsure["devices"]] == [None, None]
    assert "order-unknown" in slugs(unsure)
    assert "with CUDA_DEVICE_ORDER=PCI_BUS_ID both count alike" in screen
    assert [line.split()[0] for line in screen.splitlines()[3:5]] == ["cuda:?", "cuda:?"]
    assert [row["index"] for row in sure["devices"]] == [0, 1]
    assert "order-unknown" not in slugs(sure)


def test_one_of_unequal_cards_is_a_row_without_a_name(machine):
    machine(card(0, A, name="NVIDIA T400"), card(1, B), mask="0")
    row = ckptool.devices().to_dict()["devices"][0]

    assert row.pop("index") == 0
    assert set(row.values()) == {None}


def test_slices_have_memory_of_their_own(machine):
    machine(mig(0, A), mig(1, B), card(2, C, name="NVIDIA A100"), slices=LISTED, xml=XML)
    rows = ckptool.devices().to_dict()["devices"]

    assert [(r["index"], r["physical"], r["uuid"], r["name"], r["free_bytes"]) for r in rows] == [
        (0, 0, "MIG-11111111-a", "NVIDIA A100 MIG 1c.3g.20gb", 20077 * MIB),
        (1, 0, "MIG-33333333-a", "NVIDIA A100 MIG 1g.5gb", 4852 * MIB),
        (2, 1, "MIG-44444444-b", "NVIDIA A100 MIG 3g.20gb", 20000 * MIB),
        (3, 2, C, "NVIDIA A100", 100 * MIB),
    ]


def test_an_old_driver_and_a_broken_xml_still_show_the_slice(machine):
    old = {"driver_version": "535.129.03"}
    machine(mig(0, A, **old), mig(1, B, **old), mask="MIG-44444444-b", slices=LISTED, xml="<oops")
    row = ckptool.devices().to_dict()["devices"][0]

    assert (row["physical"], row["uuid"], row["free_bytes"]) == (1, "MIG-44444444-b", None)


def test_str_is_the_screen_and_html_is_escaped(machine, capsys):
    machine(card(0, A, name="<b>"))
    found = ckptool.devices()

    assert f"{found}\n" == cli(capsys, "devices")[1]
    assert "&lt;b&gt;" in found._repr_html_()


@pytest.mark.parametrize(
    "listed", ["", "GPU 0: NVIDIA A100 (UUID: GPU-aaaa1111-0000)\n  MIG what is this"]
)
def test_slices_that_cannot_be_listed_are_not_called_absent(machine, listed):
    machine(mig(0, A), mask="MIG-11111111-a", slices=listed, xml=XML, list_status=int(not listed))
    report = ckptool.devices().to_dict()

    assert (report["visible_count"], report["devices"]) == (None, [])
    assert slugs(report) == ["nvidia-smi"]


def test_a_mask_that_comes_after_cuda_was_started_is_told_so(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    machine(card(0, A), card(1, B), mask="1")
    assert "cuda-started" in slugs(ckptool.devices().to_dict())
    machine(card(0, A), card(1, B))
    assert "cuda-started" not in slugs(ckptool.devices().to_dict())


# -- what nvidia-smi may say ---------------------------------------------------------------------
@pytest.mark.parametrize("word", ["[N/A]", "[Not Supported]", "[Unknown Error]", "N/A"])
def test_what_the_driver_does_not_tell_is_null(machine, capsys, word):
    machine(card(0, A, free=word, used=word, total=word, busy=word))
    row = ckptool.devices().to_dict()["devices"][0]
    _, screen, _ = cli(capsys, "devices")

    assert row["index"] == 0
    assert [row[n] for n in ("free_bytes", "used_bytes", "total_bytes")] == [None] * 3
    assert row["utilisation_percent"] is None
    assert screen.splitlines()[3].split()[4:8] == ["?", "?", "?", "?"]


def test_a_name_may_hold_a_comma_and_acts_on_no_terminal(machine, capsys):
    machine(card(0, A, name="Evil, \x1b[2J\u202eCard"))
    status, out, _ = cli(capsys, "devices")

    assert ckptool.devices().to_dict()["devices"][0]["name"] == "Evil, \x1b[2J\u202eCard"
    assert (status, "Evil, \\x1b[2J\\u202eCard" in out) == (0, True)
    assert "\x1b" not in cli(capsys, "devices", "--json")[1]


def test_an_old_driver_that_knows_no_mig(machine):
    machine(card(0, A), unknown_fields=["mig.mode.current"])
    assert ckptool.devices().to_dict()["devices"][0]["uuid"] == A


def test_it_is_asked_in_the_c_locale(machine, monkeypatch):
    monkeypatch.setenv("LC_ALL", "ar_EG.UTF-8")
    machine(card(0, A, free=11))
    assert ckptool.devices().to_dict()["devices"][0]["free_bytes"] == 11 * MIB


@pytest.mark.parametrize(
    ("told", "count", "sentence"),
    [
        ({"lines": ["No devices were found"], "status": 6}, 0, "no CUDA here: nvidia-smi says: No devices were found"),
        ({"lines": ["NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."], "status": 9}, 0, "no CUDA here: nvidia-smi says: NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."),
        ({"lines": ["Failed to initialize NVML: Driver/library version mismatch"], "status": 18}, None, "not known whether there is CUDA: nvidia-smi says: Failed to initialize NVML: Driver/library version mismatch"),
        ({"status": 3}, None, "not known whether there is CUDA: nvidia-smi ended with status 3"),
        ({}, None, "not known whether there is CUDA: nvidia-smi names no card"),
        ({"lines": ["0, GPU-a, 570, lots, 1, 2, 3, Disabled, X"]}, None, "not known whether there is CUDA: nvidia-smi says: 0, GPU-a, 570, lots, 1, 2, 3, Disabled, X"),
        ({"lines": ["\x1b[2Jx"]}, None, "not known whether there is CUDA: nvidia-smi says: \\x1b[2Jx"),
    ],
)  # fmt: skip
def test_answers_without_a_card(machine, capsys, told, count, sentence):
    machine(**told)
    status, out, err = cli(capsys, "devices")
    report = ckptool.devices().to_dict()

    assert (status, out, err) == (0, f"{sentence}\n", "")
    assert (report["devices"], report["visible_count"], report["fits"]) == ([], count, None)


def test_a_warning_is_no_trouble(machine):
    text = "WARNING: infoROM is corrupted at gpu 0000:02:00.0"
    machine(card(0, A), card(1, B), lines=[text])
    report = ckptool.devices().to_dict()

    assert [row["index"] for row in report["devices"]] == [0, 1]
    assert text in [note["text"] for note in report["notes"]]


@pytest.mark.parametrize(
    ("cards", "lines"),
    [
        ((card(0, A),), ["Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost."]),
        ((card(0, A), card(2, C)), []),
        ((card(0, A), card(1, B, busy="7 elephants")), []),
        ((card(0, A), card(1, "[Unknown Error]")), []),
    ],
)  # fmt: skip
def test_when_a_card_is_lost_numbers_are_not_guessed(machine, cards, lines):
    machine(*cards, lines=lines, mask="1", order="PCI_BUS_ID")
    report = ckptool.devices().to_dict()

    assert report["visible_count"] is None
    assert [(row["index"], row["uuid"]) for row in report["devices"]] in ([], [(0, None)])
    assert slugs(report)[0] == "nvidia-smi"


def test_a_stuck_driver_is_given_up(machine, monkeypatch):
    monkeypatch.setattr(smi, "TIMEOUT_S", 0.3)
    machine(card(0, A), stuck=True)
    began = time.monotonic()
    report = ckptool.devices().to_dict()

    assert time.monotonic() - began < 5
    assert report["visible_count"] is None
    assert report["summary"].endswith("nvidia-smi gave no answer in 0.3 seconds")


def test_a_program_that_cannot_run_is_said(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_bytes(b"\x7fELF nonsense")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert "nvidia-smi cannot be run" in ckptool.devices().to_dict()["summary"]


# -- without nvidia-smi --------------------------------------------------------------------------
def test_no_driver_and_a_torch_for_the_cpu(bare, tmp_path):
    done = run("devices", env={"PATH": str(tmp_path)})

    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"no CUDA here: there is no nvidia-smi on the PATH, and torch ")


def test_no_driver_and_no_torch(bare, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(models_devices, "_torch_without_cuda", tuple)
    report = ckptool.devices().to_dict()

    assert report["summary"].endswith("on the PATH, and torch is not installed")
    assert report["visible_count"] == 0


def test_a_loaded_driver_that_nobody_can_ask_is_not_called_absent(bare, monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "torch")
    note = Note("torch-without-cuda", "torch 2 is built without CUDA")
    monkeypatch.setattr(models_devices, "_torch_without_cuda", lambda: (note,))
    monkeypatch.setattr(models_devices, "_LOADED", str(tmp_path))

    assert ckptool.devices().to_dict()["visible_count"] is None


def test_torch_is_asked_where_nvidia_smi_is_missing(bare, monkeypatch):
    facts = SimpleNamespace(name="NVIDIA H200", total_memory=9 * GIB, uuid="aaaa")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: facts)
    memory = {0: (4 * GIB, 9 * GIB)}

    def mem_get_info(i):
        if i not in memory:
            raise RuntimeError("CUDA error: out of memory")
        return memory[i]

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    report = ckptool.devices().to_dict()

    assert "asked torch" in report["summary"]
    assert [(d["index"], d["physical"], d["uuid"]) for d in report["devices"]] == [
        (0, None, "GPU-aaaa"),
        (1, None, "GPU-aaaa"),
    ]
    assert [d["free_bytes"] for d in report["devices"]] == [4 * GIB, None]
    assert [d["used_bytes"] for d in report["devices"]] == [5 * GIB, None]
    assert [d["total_bytes"] for d in report["devices"]] == [9 * GIB, 9 * GIB]


def python(code):
    """In a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_nvidia_smi_is_enough_and_torch_stays_out(machine):
    machine(card(0, A))
    python(
        f"import sys, ckptool.cli.main as m; assert m.main(['devices', {DP_CUDA!r}]) == 0\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )


def test_other_verbs_never_ask_for_devices():
    python(
        f"import sys, ckptool; ckptool.inspect({DP_CUDA!r})\n"
        "assert not [name for name in sys.modules if name.startswith('ckptool.models')]"
    )
