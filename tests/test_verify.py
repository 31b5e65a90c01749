"""verify: what is wrong is found and named by tensor, what is whole is said, nothing is made up."""

from __future__ import annotations

import io
import struct
import warnings
import zipfile

import pytest
import torch
from formats_support import archive, call, dictionary, pickled, refusal, saved, saved_legacy, tensor
from torch.utils.serialization import config
from verbs_support import FIXTURES, TRUTHS
from verify_support import FILES, TRAINING, WEIGHTS, ZIP, entries, flipped, repacked, verified

import ckptool
from ckptool.errors import CkptError
from ckptool.limits import DEFAULT
from ckptool.places import BytesSource
from ckptool.verbs import verify_sums
from ckptool.verbs.verify_file import verify_source

CODE = {"evil.pth", "acme_enum.pth", "torchscript.pt", "torch_package.pt"}
READABLE = sorted(name for name, truth in TRUTHS.items() if not truth.get("error"))


# -- whole files -------------------------------------------------------------------------------
@pytest.mark.parametrize("name", READABLE)
def test_every_fixture_is_whole(name):
    found = ckptool.verify(FIXTURES / name, finite=True)
    assert found.whole
    assert found.safe == (name not in CODE)
    assert found.exit_status == (name in CODE)
    assert found.lost == ()


@pytest.mark.parametrize("kind", FILES)
def test_a_healthy_file_is_whole_and_says_how_far_that_is_proven(kind):
    found = verified(FILES[kind])
    assert (found.exit_status, found.whole, found.safe) == (0, True, True)
    state = sum(len(row) for row in TRAINING["optimizer"]["state"].values())
    assert found.tensor_count == len(WEIGHTS) + (state if kind != "safetensors" else 0)
    if kind in ("legacy", "safetensors"):
        assert "records no checksums" in found.coverage.text
        assert found.coverage.checked_count == 0
    else:
        names = zipfile.ZipFile(io.BytesIO(FILES[kind])).namelist()
        assert found.coverage.record_count == found.coverage.checked_count == len(names)


def test_records_without_a_checksum_are_counted_apart():
    config.save.compute_crc32 = False
    try:
        data = saved({"w": torch.ones(3)})
    finally:
        config.save.compute_crc32 = True
    found = verified(data)
    assert found.exit_status == 0
    assert found.coverage.checked_count == 0
    assert found.coverage.record_count > 0
    assert "none is recorded" in str(_typed(found))


def _typed(found):
    from dataclasses import fields

    from ckptool.api_verify import Verification

    return Verification(**{row.name: getattr(found, row.name) for row in fields(found)})


def test_small_and_empty_tensors_and_ties():
    tied = torch.arange(6.0)
    state = {"a": tied, "b": tied[2:], "none": torch.zeros(0), "one": torch.tensor(3)}
    data = saved(state)
    assert verified(data).exit_status == 0
    damaged = flipped(data, entries(data)["data/0"].data_offset)
    found = verified(damaged)
    assert [finding.keys for finding in found.findings] == [("a", "b")]
    assert found.lost == tuple((key, found.findings[0].text) for key in ("a", "b"))
    assert found.whole_count == 2


# -- wrong bytes -------------------------------------------------------------------------------
def test_every_damaged_storage_is_named_as_zipfile_names_it():
    loaded = torch.load(io.BytesIO(ZIP))
    for record, entry in entries(ZIP).items():
        if not record.startswith("data/"):
            continue
        damaged = flipped(ZIP, entry.data_offset + entry.size // 2, 6)
        assert zipfile.ZipFile(io.BytesIO(damaged)).testzip() == entry.name
        found = verified(damaged)
        assert [finding.slug for finding in found.findings] == ["crc-mismatch"]
        assert found.findings[0].member == record
        assert (found.exit_status, found.whole, found.safe) == (1, False, True)
        changed = [
            key
            for key, value in torch.load(io.BytesIO(damaged))["state_dict"].items()
            if not torch.equal(value, loaded["state_dict"][key])
        ]  # torch loads it without a word
        assert [k for k, _ in found.lost if not k.startswith("optimizer")] == changed
        if not changed:
            assert found.lost[0][0].startswith("optimizer.state.")


@pytest.mark.parametrize("record", [".data/serialization_id", ".format_version"])
def test_a_damaged_record_that_is_no_storage_costs_no_tensor(record):
    entry = entries(ZIP)[record]
    found = verified(flipped(ZIP, entry.data_offset))
    assert [(f.slug, f.member, f.keys) for f in found.findings] == [("crc-mismatch", record, ())]
    assert found.exit_status == 1
    assert found.whole_count == found.tensor_count


@pytest.mark.parametrize("record", ["data.pkl", "version", "byteorder"])
def test_a_damaged_record_that_loaders_read_makes_the_file_unreadable(record):
    entry = entries(ZIP)[record]
    found = verified(flipped(ZIP, entry.data_offset))
    assert found.exit_status == 2
    assert found.findings[0].slug == "crc-mismatch"
    assert found.findings[0].member == entry.name
    if record == "data.pkl":
        count = sum(name.startswith("data/") for name in entries(ZIP))
        assert found.tensor_count is None
        assert (
            f"{count} of {count} storages have their recorded checksums" in found.findings[1].text
        )
    else:
        assert found.whole_count == found.tensor_count


def test_a_deflated_storage_that_does_not_inflate():
    data = FILES["deflated"]
    entry = entries(data)["data/0"]
    found = verified(flipped(data, entry.data_offset, 1))
    assert found.findings[0].keys == ("0.weight",)
    assert found.exit_status == 1


def test_wrong_bytes_in_an_older_pickle_of_a_file_edited_in_place(tmp_path):
    path = tmp_path / "net.pth"
    torch.save({"module.w": torch.ones(4)}, path)
    old = entries(path.read_bytes())["data.pkl"]
    ckptool.convert(path, in_place=True, strip_module=True)
    assert ckptool.verify(path).exit_status == 0
    path.write_bytes(flipped(path.read_bytes(), old.data_offset + 5))
    with pytest.raises(CkptError):
        ckptool.inspect(path)
    found = ckptool.verify(path)
    assert found.exit_status == 2
    assert found.tensor_count == found.whole_count == 1


class BadDisk(BytesSource):
    """A disk that does not give some bytes."""

    def __init__(self, data, bad):
        super().__init__(data, "net.pth")
        self.bad = bad

    def _fetch(self, offset, size):
        if offset < self.bad < offset + size:
            raise OSError(5, "Input/output error")
        return super()._fetch(offset, size)


def test_a_bad_sector_is_told_by_tensor_and_the_rest_is_checked():
    data = saved({f"w{i}": torch.full((n,), 1.0) for i, n in enumerate((30_000, 400_000, 30_000))})
    for key, record in (("w0", "data/0"), ("w1", "data/1")):
        at = entries(data)[record].data_offset + 90_000
        found = verify_source(BadDisk(data, at), False, DEFAULT, None)
        assert found.exit_status == 2
        assert [(f.member, f.keys) for f in found.findings] == [(record, (key,))]
        assert "reading failed" in found.findings[0].text
        assert (found.whole_count, found.tensor_count) == (2, 3)


def test_threads_find_what_one_finds(monkeypatch):
    big = saved({f"w{i}": torch.full((300_000 + i,), float(i)) for i in range(12)})
    where = entries(big)
    damaged = flipped(
        flipped(big, where["data/5"].data_offset + 999_999), where["data/9"].data_offset
    )
    alone = verified(damaged)
    monkeypatch.setattr(verify_sums, "_WORTH_A_THREAD", 1 << 16)
    monkeypatch.setattr(verify_sums.os, "cpu_count", lambda: 4)
    seen = []
    together = verify_source(
        BytesSource(damaged, "net.pth"), False, DEFAULT, lambda *row: seen.append(row)
    )
    assert together == alone
    assert [f.keys for f in together.findings] == [("w5",), ("w9",)]
    assert seen[-1][0] == seen[-1][1] > sum(e.size for e in where.values())
    assert seen == sorted(seen)


# -- files that are cut ------------------------------------------------------------------------
@pytest.mark.parametrize("kind", FILES)
def test_a_cut_file_says_which_tensors_are_whole(kind):
    """Whole is what the bytes left hold in full; never a tensor more."""
    data = FILES[kind]
    counts = set()
    for size in range(len(data) - 1, 40, -len(data) // 40):
        found = verified(data[:size])
        assert found.exit_status == 2
        assert not found.whole
        if found.tensor_count is None:
            continue
        lost = {key for key, _ in found.lost}
        counts.add(len(lost))
        for key, stored in _ends(kind, data).items():
            assert (key in lost) == (stored > size), (size, key)
    assert len(counts) >= 3


def _ends(kind, data):
    """{key: the byte that a file must have for the tensor to be whole and provable}."""
    from formats_support import read_bytes

    behind = 16 if kind == "zip" else 0  # torch writes the checksum behind the data
    found = read_bytes(data)
    return {t.key: t.storage.pieces[0].span.end + behind for t in found.tables[0].tensors}


def test_a_cut_in_the_pickle_tells_no_tensor():
    pickle_end = entries(ZIP)["data.pkl"].data_offset + 100
    found = verified(ZIP[:pickle_end])
    assert (found.exit_status, found.tensor_count, found.safe) == (2, None, None)
    assert found.findings[0].slug == "truncated"
    legacy = saved_legacy(TRAINING)
    for size in range(60, 1400, 13):
        finding = verified(legacy[:size]).findings[0]
        assert finding.slug == "truncated", (size, finding.text)
        assert "would call" not in finding.text


def test_a_legacy_count_that_was_hit_costs_its_tensor_alone():
    data = saved_legacy({"a": torch.ones(4), "b": torch.ones(5)})
    at = data.rindex(struct.pack("<q", 5))
    found = verified(flipped(data, at, 3))
    assert found.exit_status == 2
    assert [key for key, _ in found.lost] == ["b"]
    assert "its count is 13 in its header and 5 in the pickle" in found.lost[0][1]


# -- structure ---------------------------------------------------------------------------------
def test_a_missing_and_a_short_storage():
    two = dictionary(("w", tensor()), ("b", tensor(size=(2,), stride=(1,), offset=1)))
    found = verified(archive(pickled(two), records={}))
    assert (found.findings[0].slug, found.exit_status) == ("storage-size", 2)
    assert [key for key, _ in found.lost] == ["w", "b"]
    short = verified(archive(pickled(dictionary(("w", tensor()))), records={"0": b"\0" * 20}))
    assert short.lost == (("w", "20 bytes where its tensors need 24"),)


def test_hostile_archives_tell_no_tensor():
    """Two readers could see two files: nothing is called whole."""
    twice = io.BytesIO()
    rows = [("data.pkl", pickled(dictionary(("w", tensor()), ("v", v)))) for v in (1.0, 2.0)]
    rows += [("data/0", b"\0" * 24), ("version", b"3\n")]
    with warnings.catch_warnings(), zipfile.ZipFile(twice, "w") as out:
        warnings.simplefilter("ignore")
        for record, data in rows:
            out.writestr(f"a/{record}", data)
    appended = ZIP + archive(pickled(dictionary(("w", tensor()))))
    for data in (twice.getvalue(), appended, ZIP + ZIP):
        found = verified(data)
        assert (found.exit_status, found.tensor_count) == (2, None)
        assert found.findings[0].slug in ("zip-ambiguous", "truncated")


def test_a_first_header_that_was_hit_is_still_an_archive():
    """Not one byte of `PK` is left to tell it by, but the directory at the end is."""
    damaged = b"\0\0\0\0" + ZIP[4:]
    assert refusal(damaged).slug == "not-a-checkpoint"
    found = verified(damaged)
    assert (found.exit_status, found.format) == (2, "torch-zip")
    assert found.whole_count == found.tensor_count


@pytest.mark.parametrize("name", ["html.pth", "lfs.pth", "empty.pth"])
def test_what_is_no_checkpoint_is_refused_as_by_inspect(name):
    with pytest.raises(CkptError) as caught:
        ckptool.verify(FIXTURES / name)
    with pytest.raises(CkptError) as known:
        ckptool.inspect(FIXTURES / name)
    assert str(caught.value) == str(known.value)


# -- code --------------------------------------------------------------------------------------
def test_code_is_named_with_its_byte_and_place():
    found = ckptool.verify(FIXTURES / "evil.pth")
    assert (found.exit_status, found.whole, found.safe) == (1, True, False)
    (finding,) = found.findings
    assert (finding.slug, finding.kind, finding.member) == ("unsafe-pickle", "code", "data.pkl")
    data = zipfile.ZipFile(FIXTURES / "evil.pth").read("evil/data.pkl")
    assert data[finding.offset : finding.offset + 1] == b"R"
    assert data[: finding.offset].rindex(b"cposix\nsystem\n") > finding.offset - 80
    blocker = next(row for row in found.loading.blockers if row.name == "posix.system")
    assert blocker.path is not None


def test_code_before_the_damage_is_told():
    broken = b"\x80\x02" + call("os.system", "x") + b"0\xff"
    found = verified(archive(broken))
    assert (found.exit_status, found.safe) == (2, False)
    assert [f.kind for f in found.findings[:2]] == ["damage", "code"]


def test_foreign_classes_are_no_code():
    found = ckptool.verify(FIXTURES / "namespace_foreign.pth")
    assert (found.exit_status, found.safe) == (0, True)
    assert {row.verdict for row in found.loading.blockers} == {"known", "foreign", "refused"}
    assert (
        "another class"
        in {row.detail: row for row in found.loading.blockers if not row.name}.popitem()[0]
    )
    assert found.loading.weights_only is False


def test_a_pickle_inside_an_exported_program_is_judged(tmp_path):
    with zipfile.ZipFile(FIXTURES / "exported.pt2") as old:
        records = {name: old.read(name) for name in old.namelist()}
    name = next(name for name in records if name.endswith("/data/sample_inputs/model.pt"))
    inner = saved({"x": torch.ones(2)})
    evil = pickled(dictionary(("x", call("os.system", "true"))))
    swapped = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(inner)) as old, zipfile.ZipFile(swapped, "w") as new:
        for row in old.namelist():
            new.writestr(row, evil if row.endswith("data.pkl") else old.read(row))
    for inside, status in ((inner, 0), (swapped.getvalue(), 1)):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as new:
            for row, data in records.items():
                new.writestr(row, inside if row == name else data)
        found = verified(out.getvalue())
        assert (found.format, found.exit_status) == ("torch-export", status)
        assert found.safe == (not status)


# -- notes -------------------------------------------------------------------------------------
def test_what_is_odd_and_harmless_is_a_note():
    data = saved_legacy({"w": torch.ones(2)})
    assert [note.slug for note in verified(data).notes] == []
    assert [note.slug for note in verified(data + b"more").notes] == ["trailing-bytes"]
    at = data.index(b"type_sizes")
    found = verified(flipped(data, at))
    assert [note.slug for note in found.notes] == ["system-info"]
    assert found.exit_status == 0


def test_other_writers_files_are_whole():
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        assert verified(repacked(ZIP, method)).findings == ()


def test_a_file_object_and_an_interrupted_edit(tmp_path):
    assert ckptool.verify(io.BytesIO(ZIP)).whole
    assert ckptool.verify(str(FIXTURES / "net_plain.pth")).whole
    with pytest.raises(CkptError):
        ckptool.verify(tmp_path / "none.pth")
