"""convert, with torch as the oracle: what it says of the input it must say of the output."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from fixtures.make_fixtures import Net, save
from torch import nn
from torch.utils.serialization import config
from verbs_support import (
    CONVERTIBLE,
    FIXTURES,
    LEGACY,
    TRUTHS,
    assert_same,
    calculated_offsets,
    cli,
    default_renames,
    device_of,
    devices,
    left_alone,
    load,
    members,
    notes,
    resume,
    save_resume,
    stripped,
)

import ckptool
from ckptool.errors import RuleMatchesNothing

NO_OMEGACONF = {"omegaconf_like.pth"}
LOADABLE = [name for name in CONVERTIBLE if name not in NO_OMEGACONF]
ZIPS = [name for name in LOADABLE if TRUTHS[name]["format"] == "torch-zip"]
RECORDS_OF_ITS_OWN = {"data.pkl", ".data/serialization_id", ".format_version", ".storage_alignment"}
OTHER_LAYOUT = {"deflated.pth"}


# -- --to-cpu on every file --------------------------------------------------------------------
@pytest.mark.parametrize("name", LOADABLE)
def test_to_cpu_gives_what_torch_gives(name, tmp_path):
    out = tmp_path / "out.pth"
    done = ckptool.convert(FIXTURES / name, out, to_cpu=True)

    before, after = load(FIXTURES / name), load(out)
    renames = default_renames(before, TRUTHS[name])
    assert assert_same(before, after, renames) > 0
    assert done.renames == {old: new for row in renames.values() for old, new in row.items()}
    assert set(devices(out).values()) <= {"cpu", "meta"}


@pytest.mark.parametrize("name", [n for n in LOADABLE if TRUTHS[n]["torch_load"] == "weights_only"])
def test_what_torch_reads_by_default_stays_so(name, tmp_path):
    out = tmp_path / "out.pth"
    ckptool.convert(FIXTURES / name, out, to_cpu=True)

    assert torch.load(out, weights_only=True) is not None  # no map_location, no GPU


# torch 2.13 dies (SIGSEGV) when it swaps the bytes of a big-endian file that is mapped
@pytest.mark.parametrize("name", [name for name in ZIPS if name != "big_endian.pth"])
def test_every_way_of_torch_to_read_a_zip_reads_ours(name, tmp_path):
    out = tmp_path / "out.pth"
    ckptool.convert(FIXTURES / name, out, to_cpu=True)

    plain = load(out, map_location=None)
    with calculated_offsets():
        assert_same(plain, load(out, map_location=None, mmap=True))
        if name not in ("sparse.pth", "quantized.pth"):  # torch cannot put these on meta
            assert_same(plain, load(out, map_location="meta"), meta=True)
    assert_same(plain, load(out, map_location=None, mmap=True))


@pytest.mark.parametrize("name", [n for n in ZIPS if n not in OTHER_LAYOUT])
def test_records_that_are_not_edited_are_identical(name, tmp_path):
    out = tmp_path / "out.pth"
    ckptool.convert(FIXTURES / name, out, to_cpu=True)

    before, after = members(FIXTURES / name), members(out)
    assert {k: v for k, v in before.items() if k not in RECORDS_OF_ITS_OWN} == {
        k: v for k, v in after.items() if k not in RECORDS_OF_ITS_OWN
    }


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_what_is_on_the_cpu_converts_to_itself(name, tmp_path):
    once, twice = tmp_path / "once.pth", tmp_path / "twice.pth"
    ckptool.convert(FIXTURES / name, once, to_cpu=True)
    again = ckptool.convert(once, twice, to_cpu=True)

    assert "nothing-to-change" in notes(again)
    assert once.read_bytes() == twice.read_bytes()


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_inspect_says_of_the_output_what_it_said_of_the_input(name, tmp_path):
    out = tmp_path / "out.pth"
    done = ckptool.convert(FIXTURES / name, out, to_cpu=True, keep_module=True)
    assert done.renames == {}

    before, after = ckptool.inspect(FIXTURES / name), ckptool.inspect(out)
    texts = [
        [extra.text for extra in found.checkpoint.extras if extra.type != "optimizer"]
        for found in (before, after)
    ]
    if name != "proto5.pth":  # sets and bytes are calls in protocol 2 and look a little different
        assert texts[0] == texts[1]
    for one, two in zip(before.checkpoint.tables, after.checkpoint.tables, strict=True):
        assert [(t.key, t.shape, t.stride, t.offset, t.dtype, t.kind) for t in one.tensors] == [
            (t.key, t.shape, t.stride, t.offset, t.dtype, t.kind) for t in two.tensors
        ]


# -- files as torch saves them now -------------------------------------------------------------
SAVES = {
    "zip": {},
    "legacy": LEGACY,
    **{f"protocol {n}": {"pickle_protocol": n} for n in (3, 4, 5)},
    **{f"legacy, protocol {n}": {"pickle_protocol": n, **LEGACY} for n in (3, 4, 5)},
}


@pytest.mark.parametrize("options", SAVES.values(), ids=SAVES)
def test_a_resume_file_comes_out_whole(options, tmp_path):
    path = save_resume(tmp_path / "net.pth", **options)
    done = ckptool.convert(path, to_cpu=True)
    out = tmp_path / "net.cpu.pth"

    before, after = load(path), load(out, map_location=None)
    renames = {("state_dict",): stripped(before["state_dict"])}
    assert len(renames["state_dict",]) == 14
    assert_same(before, after, renames)
    assert done.output == str(out)
    assert set(devices(out).values()) == {"cpu"}
    assert after["args"].device == "cuda:0"
    assert after["best_key"] == "module.fc.weight"
    assert after["history"][0]["keys"] == list(before["state_dict"])
    assert any(path == ("args", "device") for path, _ in done.left_behind)
    sd = after["state_dict"]
    assert sd["head.weight"].data_ptr() == sd["fc.weight"].data_ptr()
    assert sd["slice"].untyped_storage().data_ptr() == sd["view"].untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "setting", [("save.compute_crc32", False), ("save.storage_alignment", 4096)], ids=str
)
def test_saving_options_of_torch_survive(setting, tmp_path):
    with config.patch(*setting):
        path = save_resume(tmp_path / "net.pth")
    ckptool.convert(path, to_cpu=True)
    out = tmp_path / "net.cpu.pth"

    before = load(path)
    assert_same(before, load(out), {("state_dict",): stripped(before["state_dict"])})
    with calculated_offsets():
        assert_same(load(out), load(out, mmap=True))
    with zipfile.ZipFile(path) as one, zipfile.ZipFile(out) as two:
        sums = [[i.CRC for i in z.infolist() if "/data/" in i.filename] for z in (one, two)]
    assert sums[0] == sums[1]


def test_metadata_follows_as_torch_moves_it(tmp_path):
    path = save_resume(tmp_path / "net.pth")
    ckptool.convert(path, to_cpu=True)
    oracle = load(path)["state_dict"]
    nn.modules.utils.consume_prefix_in_state_dict_if_present(oracle, "module.")
    ours = load(tmp_path / "net.cpu.pth")["state_dict"]

    assert list(ours) == list(oracle)
    assert list(ours._metadata.items()) == list(oracle._metadata.items())


def test_the_output_loads_into_a_plain_net(tmp_path):
    out = tmp_path / "out.pth"
    ckptool.convert(FIXTURES / "dp_cuda.pth", out, to_cpu=True)
    with torch.serialization.safe_globals([__import__("argparse").Namespace]):
        made = torch.load(out, weights_only=True)
    net = Net(5)
    net.load_state_dict(made["state_dict"], strict=True)
    optimizer = torch.optim.Adam(net.parameters())
    optimizer.load_state_dict(made["optimizer"])

    assert made["args"].device == "cuda:0"
    before = load(FIXTURES / "dp_cuda.pth")["state_dict"]
    assert torch.equal(net.fc.weight, before["module.fc.weight"])


def test_meta_is_never_retagged(tmp_path):
    out = tmp_path / "out.pth"
    for options in ({"to_cpu": True}, {"to_gpu": 0}):
        ckptool.convert(FIXTURES / "meta.pth", out, force=True, **options)
        assert {t.device for t in ckptool.inspect(out).rows if t.kind == "meta"} == {"meta"}


def test_a_storage_tagged_meta_stays_so_whatever_is_asked(tmp_path):
    path, out = tmp_path / "net.pth", tmp_path / "out.pth"
    save({"w": torch.ones(2), "bare": torch.ones(2).untyped_storage()}, path, "meta")
    for options in ({"to_cpu": True}, {"to_gpu": 0}):
        ckptool.convert(path, out, force=True, **options)
        assert set(devices(out).values()) == {"meta"}
    with pytest.raises(RuleMatchesNothing):
        ckptool.convert(path, out, map_location={"meta": "cpu"}, force=True)


def test_any_tag_becomes_cpu(tmp_path):
    for tag in ("xpu:1", "privateuseone", "a tag of ours", "a -> b", ""):
        path = tmp_path / "net.pth"
        save(Net().state_dict(), path, tag)
        done = ckptool.convert(path, tmp_path / "out.pth", to_cpu=True, force=True)
        assert done.devices == {tag: "cpu"}
        assert set(devices(tmp_path / "out.pth").values()) == {"cpu"}


def test_two_objects_in_one_file(copy):
    path = copy("legacy_two_in_one.pth")
    done = ckptool.convert(path, to_cpu=True)

    assert len(Path(done.output).read_bytes()) < len(path.read_bytes())
    assert any("bytes" in note.text for note in done.notes)
    assert_same(load(path), load(done.output))


# -- --to-gpu, --map-location ------------------------------------------------------------------
@pytest.mark.parametrize("options", [{}, LEGACY], ids=["zip", "legacy"])
def test_to_gpu_moves_weights_and_moments_alone(options, tmp_path):
    path = save_resume(tmp_path / "net.pth", "cpu", **options)
    ckptool.convert(path, to_gpu=1)

    for path, tag in device_of(tmp_path / "net.cuda1.pth").items():
        moves = path[0] == "state_dict" or path[-1] in ("exp_avg", "exp_avg_sq")
        assert tag == ("cuda:1" if moves else "cpu"), path


def test_to_gpu_takes_every_accelerator_along(tmp_path):
    path = tmp_path / "net.pth"
    obj, tags = resume()
    tags.put(obj["curve"], "mps")
    tags.put(obj["scalar"], "xpu:3")
    save(obj, path, tags)
    ckptool.convert(path, to_gpu=0, keep_module=True)
    there = device_of(tmp_path / "net.cuda0.pth")

    assert there["curve",] == there["scalar",] == "cuda:0"
    assert there["rng", "cpu"] == there["optimizer", "state", 0, "step"] == "cpu"


@pytest.mark.parametrize("options", [{}, LEGACY], ids=["zip", "legacy"])
def test_there_and_back_is_the_same_file(options, tmp_path):
    path = save_resume(tmp_path / "net.pth", **options)
    ckptool.convert(path, to_cpu=True, keep_module=True)
    ckptool.convert(tmp_path / "net.cpu.pth", tmp_path / "back.pth", to_gpu=0, keep_module=True)

    assert path.read_bytes() == (tmp_path / "back.pth").read_bytes()


def test_map_location_changes_exactly_the_tag_named(tmp_path):
    out = tmp_path / "out.pth"
    before = devices(FIXTURES / "mixed_devices.pth")
    done = ckptool.convert(FIXTURES / "mixed_devices.pth", out, map_location={"cuda:1": "cuda:5"})

    swap = {"cuda:1": "cuda:5"}
    assert devices(out) == {key: swap.get(tag, tag) for key, tag in before.items()}
    assert done.devices == swap
    assert done.renames == {}


def test_map_location_swaps(tmp_path):
    out = tmp_path / "out.pth"
    swap = {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}
    before = devices(FIXTURES / "mixed_devices.pth")
    ckptool.convert(FIXTURES / "mixed_devices.pth", out, map_location=swap)

    assert devices(out) == {key: swap.get(tag, tag) for key, tag in before.items()}


@pytest.mark.parametrize("tag", ["cuda", "cuda:", "cuda:00", "CUDA:3", "cuda:33"])
def test_map_location_without_a_match_says_no(tag, tmp_path, capsys):
    out = tmp_path / "out.pth"
    flags = ["--map-location", tag, "cpu", "-o", out]
    status, _, err = cli(capsys, "convert", FIXTURES / "net_cuda3.pth", *flags)

    assert status == 1
    assert repr(tag) in err
    left_alone(tmp_path)


def test_shared_tags_of_user_data_stay(tmp_path):
    for name, options, tag in (
        ("cpu_tag_shared.pth", {"to_gpu": 2}, "cuda:2"),
        ("cuda0_tag_shared.pth", {"to_cpu": True}, "cpu"),
    ):
        out = tmp_path / name
        ckptool.convert(FIXTURES / name, out, **options)
        before, after = load(FIXTURES / name), load(out)
        assert vars(before["args"]) == vars(after["args"])
        assert before.get("device") == after.get("device")
        assert set(devices(out).values()) == {tag}


# -- protocols ---------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["proto3.pth", "proto4.pth", "proto5.pth"])
def test_newer_protocols_come_out_as_2(name, copy):
    import argparse

    done = ckptool.convert(copy(name), to_cpu=True)
    assert "protocol-2" in notes(done)
    assert members(done.output)["data.pkl"][:2] == b"\x80\x02"
    allowed = [argparse.Namespace, bytearray]
    with torch.serialization.safe_globals(allowed):
        assert torch.load(done.output, weights_only=True)["epoch"] == 3


def test_a_protocol_without_an_older_spelling_is_kept_and_said(tmp_path):
    path = tmp_path / "net.pth"
    save({"w": torch.ones(2), "frozen": frozenset((1, 2))}, path, "cuda:0", pickle_protocol=5)
    done = ckptool.convert(path, to_cpu=True)

    after = load(done.output, map_location=None)
    assert after["frozen"] == frozenset((1, 2))
    protocol = members(done.output)["data.pkl"][1]
    assert ("protocol-kept" in notes(done)) == (protocol == 5)
    assert ("protocol-2" in notes(done)) == (protocol == 2)
