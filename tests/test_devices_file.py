"""`ckptool devices FILE`: what a file needs, whether it fits, tags of devices that are not here."""

from __future__ import annotations

import json
import shlex

import pytest
import torch
from devices_support import MIB, A, B, card, slugs, with_cards  # noqa: F401 - a fixture
from verbs_support import cli, run

import ckptool
from ckptool.errors import CkptError


def gpu_bytes(path):
    """Bytes of the storages torch puts on a GPU when it loads what --to-gpu wrote."""
    with ckptool.open(path) as file:
        storages = file._checkpoint.storages
    return sum(storage.size_bytes for storage in storages if storage.device == "cuda:0")


@pytest.mark.parametrize("name", ["dp_cuda.pth", "net_plain.pth", "legacy_cuda1.pth", "ema.pth", "cpu_tag_shared.pth", "mixed_devices.pth", "model.safetensors"])  # fmt: skip
def test_it_needs_what_to_gpu_moves(copy, machine, name, tmp_path):
    path = copy(name)
    machine(card(0, A))
    ckptool.convert(path, tmp_path / "out.pth", to_gpu=0)

    needs = ckptool.devices(path).to_dict()["needs_bytes"]

    assert needs == gpu_bytes(tmp_path / "out.pth") > 0


def test_counters_and_random_states_take_no_room(tmp_path, machine):
    net = torch.nn.Linear(1000, 10)
    adam = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 1000)).sum().backward()
    adam.step()
    whole = {"net": net.state_dict(), "optimizer": adam.state_dict(), "rng": torch.get_rng_state()}
    torch.save(whole, tmp_path / "net.pth")
    machine(card(0, A))
    report = ckptool.devices(tmp_path / "net.pth").to_dict()

    assert report["needs_bytes"] == 3 * 4 * 10_010
    assert report["weights_bytes"] == 4 * 10_010
    assert (report["fits"], report["devices"][0]["fits"]) == (True, True)


def test_tensors_without_a_state_dict_count_too(tmp_path, machine):
    torch.save([torch.zeros(100), torch.zeros(50)], tmp_path / "list.pth")
    machine(card(0, A))
    assert ckptool.devices(tmp_path / "list.pth").to_dict()["needs_bytes"] == 600


def test_a_storage_counts_once_and_whole(tmp_path, machine):
    base = torch.zeros(1000)
    torch.save({"a": base[:10], "b": base[5:]}, tmp_path / "views.pth")
    machine(card(0, A))
    assert ckptool.devices(tmp_path / "views.pth").to_dict()["needs_bytes"] == 4000


def big(path, size_bytes):
    """A file whose optimizer takes three quarters of its bytes."""
    count = size_bytes // 16
    weights = {"w": torch.zeros(count)}
    state = {0: {"exp_avg": torch.zeros(3 * count)}}
    groups = [{"lr": 0.1, "params": [0]}]
    torch.save({"net": weights, "optimizer": {"state": state, "param_groups": groups}}, path)


@pytest.mark.parametrize(
    ("free", "fits", "status"),
    [((8, 9), True, 0), ((3, 8), True, 0), ((3, 7), False, 1), (("[N/A]", 3), None, 0), (("[N/A]", 8), True, 0)],
)  # fmt: skip
def test_whether_it_fits(machine, capsys, tmp_path, free, fits, status):
    big(tmp_path / "net.pth", 8 * MIB)
    machine(card(0, A, free=free[0]), card(1, B, free=free[1]))
    got, out, _ = cli(capsys, "devices", tmp_path / "net.pth", "--json")
    report = json.loads(out)

    assert (report["fits"], got) == (fits, status)
    assert report["needs_bytes"] == 8 * MIB
    assert [row["fits"] for row in report["devices"]] == [
        None if isinstance(word, str) else word >= 8 for word in free
    ]


def test_when_only_the_weights_fit_the_command_leaves_the_rest_out(machine, tmp_path):
    path = tmp_path / "my net.pth"
    big(path, 8 * MIB)
    machine(card(0, A, free=3))
    found = ckptool.devices(path)
    note = next(n for n in found.to_dict()["notes"] if n["slug"] == "weights-fit")

    done = run(*shlex.split(note["command"])[1:])

    assert "does not fit" in str(found)
    assert done.returncode == 0, done.stderr
    assert ckptool.devices(tmp_path / "my net.weights.pth").fits is True


def test_little_room_is_said(machine, tmp_path):
    big(tmp_path / "net.pth", 8 * MIB)
    machine(card(0, A, free=100))
    assert "tight" in slugs(ckptool.devices(tmp_path / "net.pth").to_dict())
    machine(card(0, A, free=2000))
    assert "tight" not in slugs(ckptool.devices(tmp_path / "net.pth").to_dict())


def test_a_tag_that_does_not_exist_here(machine, copy):
    path = copy("net_cuda3.pth")
    machine(card(0, A), card(1, B), mask="1")
    note = next(
        n for n in ckptool.devices(path).to_dict()["notes"] if n["slug"] == "device-missing"
    )
    done = run(*shlex.split(note["command"])[1:])

    assert note["text"].startswith("saved on cuda:3, and only cuda:0 is visible: torch.load fails")
    assert note["command"].endswith("--to-gpu 0")
    assert done.returncode == 0, done.stderr
    assert "device-missing" not in slugs(
        ckptool.devices(path.with_name("net_cuda3.cuda0.pth")).to_dict()
    )


def test_the_command_takes_a_device_with_room(machine, copy):
    machine(card(0, A, free=0), card(1, B))
    notes = ckptool.devices(copy("net_cuda3.pth")).to_dict()["notes"]

    assert [n["command"].split()[-2:] for n in notes if n["command"]] == [["--to-gpu", "1"]]


def test_a_tag_that_exists_here_is_no_trouble(machine, copy):
    machine(*(card(i, f"GPU-{i}") for i in range(4)))
    assert "device-missing" not in slugs(ckptool.devices(copy("net_cuda3.pth")).to_dict())


def test_without_cuda_the_command_is_to_cpu(machine, copy, capsys):
    path = copy("net_cuda3.pth")
    machine(card(0, A), mask="")
    status, out, _ = cli(capsys, "devices", path)

    assert status == 0
    assert "no GPU to hold it" in out
    assert f"ckptool convert {path} --to-cpu" in out


def test_when_nothing_is_known_nothing_is_claimed(machine, copy):
    machine(status=3)
    report = ckptool.devices(copy("net_cuda3.pth")).to_dict()

    assert (report["fits"], "device-missing" in slugs(report)) == (None, False)


def test_a_file_that_is_none_is_an_error(machine, copy, capsys):
    machine(card(0, A))
    status, out, _ = cli(capsys, "devices", copy("html.pth"), "--json")

    assert (status, json.loads(out)["error"]["slug"]) == (2, "not-a-checkpoint")
    with pytest.raises(CkptError):
        ckptool.devices("nowhere.pth")


def test_quiet_keeps_the_notes_back(machine, copy, capsys):
    machine(card(0, A), mask="")
    assert "Notes" not in cli(capsys, "devices", copy("net_cuda3.pth"), "-q")[1]
