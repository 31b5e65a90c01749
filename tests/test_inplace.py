"""Editing a zip checkpoint where it lies, with torch as the oracle, and giving it back."""

from __future__ import annotations

import io
import os
import time
import zipfile

import pytest
import torch
from fixtures.make_fixtures import save
from inplace_support import changes_of, edit, journal, links, opened
from verbs_support import (
    FIXTURES,
    LEGACY,
    TRUTHS,
    assert_same,
    calculated_offsets,
    default_renames,
    left_alone,
    load,
)

import ckptool
from ckptool.checkpoint import Changes
from ckptool.errors import (
    InputChanged,
    NothingToDo,
    OutputError,
    UnsafePickle,
    Unsupported,
    UsageError,
    ZipAmbiguous,
)
from ckptool.formats import read
from ckptool.places import open_source
from ckptool.verbs.inplace import append_changes, plan_append, undo

SEVERAL = [
    "dp_cuda.pth",
    "deflated.pth",
    "old_zip16.pth",
    "proto4.pth",
    "proto5.pth",
    "proto3.pth",
    "nocrc.pth",
    "align4096.pth",
    "views.pth",
    "tied.pth",
    "mixed_devices.pth",
    "cuda0_tag_shared.pth",
    "namespace_foreign.pth",
    "unicode_keys.pth",
    "meta.pth",
    "quantized.pth",
    "gan.pth",
]


def fixed(path, strip=True):
    """An edit that changes every fixture: to xpu:1 and, where all have it, `module.` off."""
    return edit(path, "xpu:1", strip)


# -- torch reads it ----------------------------------------------------------------------------
@pytest.mark.parametrize("name", SEVERAL)
def test_torch_reads_an_edited_file_in_every_way(name, copy):
    path = copy(name)
    before, plain = load(path), (FIXTURES / name).read_bytes()
    done = edit(path, "cpu", strip=True)
    if done.size_after == done.size_before:
        done = edit(path, "cuda:0", strip=True)
        edit(path, "cpu")
    after = load(path, map_location=None)
    renames = default_renames(before, TRUTHS[name])

    assert assert_same(before, after, renames) > 0
    assert path.read_bytes().startswith(plain)
    assert path.stat().st_size >= done.size_after > done.size_before == len(plain)
    if name == "deflated.pth":  # torch maps the deflated bytes of the base: garbage, as ever
        return
    with calculated_offsets():
        assert_same(after, load(path, map_location=None, mmap=True))
        if name != "quantized.pth":  # torch cannot put these on meta
            assert_same(after, load(path, map_location="meta"), meta=True)
    assert_same(after, load(path, map_location=None, mmap=True))


@pytest.mark.parametrize("name", ["dp_cuda.pth", "old_zip16.pth"])
def test_other_readers_agree(name, copy):
    path = copy(name)
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    fixed(path)

    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == names
        assert archive.testzip() is None
        pickle = archive.read(next(name for name in names if name.endswith("/data.pkl")))
    assert b"xpu:1" in pickle
    assert opened(path).handle.walked.data == pickle


def test_torch_reads_protocol_four_by_default_once_edited(tmp_path):
    path = tmp_path / "net.pth"
    torch.save({"module.w": torch.ones(3)}, path, pickle_protocol=4)
    edit(path, strip=True)

    assert list(torch.load(path, weights_only=True)) == ["w"]


def test_a_record_without_checksum_stays_without(copy):
    path = copy("nocrc.pth")
    fixed(path)

    records = opened(path).handle.container.directory.records
    assert {entry.crc for entry in records.values()} == {0}


# -- chains and undo ---------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["dp_cuda.pth", "deflated.pth", "proto4.pth", "views.pth"])
def test_three_edits_are_undone_bit_by_bit(name, copy):
    path = copy(name)
    states = [path.read_bytes()]
    for tag in ("cuda:3", "xpu", "cpu"):
        edit(path, tag, strip=True)
        states.append(path.read_bytes())
    sizes = [len(state) for state in states]
    found = opened(path)

    assert found.handle.container.directory.links == tuple(sizes[:3])
    assert {s.device for s in found.storages} <= {"cpu", "meta"}
    for number in (2, 1, 0):
        assert undo(str(path)) == (sizes[number + 1], sizes[number])
        assert path.read_bytes() == states[number]
    with pytest.raises(NothingToDo) as caught:
        undo(str(path))
    assert caught.value.exit_status == 1
    assert caught.value.path == str(path)
    assert path.read_bytes() == states[0]
    left_alone(path.parent, path.name)


def test_the_ninth_edit_is_refused(copy):
    path = copy("net_plain.pth")
    for number in range(8):
        edit(path, f"cuda:{number}", fsync=False)
    assert len(links(path)) == 8
    before = path.read_bytes()

    with pytest.raises(Unsupported, match="8 times") as caught:
        edit(path, "cpu")
    assert "ordinary convert" in caught.value.hint
    assert path.read_bytes() == before
    ckptool.convert(path, path.with_name("new.pth"), to_cpu=True)
    edit(path.with_name("new.pth"), "cuda:1")


@pytest.mark.parametrize("name", [*SEVERAL, "big_endian.pth"])
def test_an_ordinary_convert_gives_what_it_gives_of_the_former_file(name, copy, tmp_path):
    path = copy(name)
    one, two = tmp_path / "one.pth", tmp_path / "two.pth"
    ckptool.convert(path, one, to_cpu=True, keep_module=True)
    edit(path, "xpu")
    edit(path, "cpu")
    ckptool.convert(path, two, to_cpu=True, keep_module=True)

    assert one.read_bytes() == two.read_bytes()
    assert two.stat().st_size < path.stat().st_size
    assert links(two) == ()


def test_undo_refuses_a_base_it_cannot_read(copy):
    """The chain is right and the older pickle is not: nothing is cut off."""
    path = copy("net_plain.pth")
    base = path.read_bytes()
    fixed(path)
    data = bytearray(path.read_bytes())
    data[opened(path).handle.container.directory.older[0].data_offset + 9] ^= 0x40
    path.write_bytes(data)

    with pytest.raises(ckptool.CkptError, match="checksum"):
        undo(str(path))
    assert path.read_bytes() == bytes(data)
    assert len(data) > len(base)


@pytest.mark.parametrize("name", ["legacy.pth", "model.safetensors", "tar_01x.pth"])
def test_nothing_to_undo_elsewhere(name, copy):
    with pytest.raises(NothingToDo, match="only PyTorch zip"):
        undo(str(copy(name)))


# -- what reading says -------------------------------------------------------------------------
def test_an_edited_file_says_so(copy, monkeypatch):
    path = copy("dp_cuda.pth", "-a file.pth")
    before = opened(path)
    fixed(path)
    monkeypatch.chdir(path.parent)
    found = ckptool.inspect("-a file.pth").checkpoint
    note = next(note for note in found.notes if note.slug == "edited-in-place")

    assert note.text.startswith("edited in place once, undo possible")
    assert note.command == "ckptool convert './-a file.pth' --undo"
    names = [(row.name, row.verdict) for row in found.globals]
    assert names == [(row.name, row.verdict) for row in before.globals]
    fixed_again = edit(path, "cpu")
    assert fixed_again.size_after > fixed_again.size_before
    assert any(note.text.startswith("edited in place 2 times") for note in opened(path).notes)


def chained(base, pickle, path):
    """A chain made by hand: `pickle` behind a file that somebody else wrote."""
    from test_zip_chain import link

    path.write_bytes(link(base.read_bytes(), pickle))
    return path


def pickle_of(path):
    return opened(path).handle.walked.data


@pytest.mark.parametrize("order", ["evil first", "evil last", "evil between"])
def test_every_pickle_of_a_chain_is_judged(order, tmp_path):
    evil, good = pickle_of(FIXTURES / "evil.pth"), pickle_of(FIXTURES / "net_plain.pth")
    path = tmp_path / "net.pth"
    if order == "evil first":
        chained(FIXTURES / "evil.pth", good, path)
    elif order == "evil last":
        chained(FIXTURES / "net_plain.pth", evil, path)
    else:
        chained(chained(FIXTURES / "net_plain.pth", evil, path), good, path)
    found = opened(path)
    code = [row for row in found.globals if row.verdict == "code"]
    places = {"evil first": "data.pkl before edit 1", "evil last": "data.pkl"}

    assert [row.member for row in code] == [places.get(order, "data.pkl before edit 2")]
    with pytest.raises(UnsafePickle):
        edit(path, "cpu")
    with pytest.raises(UnsafePickle):
        ckptool.convert(path, tmp_path / "out.pth", to_cpu=True)


def test_a_chain_whose_older_pickle_is_broken_is_refused(tmp_path):
    good = pickle_of(FIXTURES / "net_plain.pth")
    path = chained(FIXTURES / "net_plain.pth", b"\x80\x02garbage", tmp_path / "net.pth")
    chained(path, good, path)

    with pytest.raises(ckptool.CkptError) as caught:
        opened(path)
    assert caught.value.member == "data.pkl before edit 2"


def test_a_chain_of_torchscript_is_refused(tmp_path):
    good = pickle_of(FIXTURES / "net_plain.pth")
    path = chained(FIXTURES / "torchscript.pt", good, tmp_path / "net.pt")

    with pytest.raises(ZipAmbiguous, match="TorchScript"):
        opened(path)


# -- what is refused ---------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["legacy.pth", "model.safetensors"])
def test_only_zip_files_are_edited(name, copy):
    path = copy(name)
    before = path.read_bytes()

    with pytest.raises(Unsupported, match="only PyTorch zip files"):
        edit(path, "cuda:1")
    assert path.read_bytes() == before


def test_a_pickle_with_another_name_is_refused(tmp_path):
    """torch looks records up without regard to case; a chain does not."""
    path = tmp_path / "net.pth"
    good = (FIXTURES / "net_plain.pth").read_bytes()
    path.write_bytes(good.replace(b"/data.pkl", b"/DATA.PKL"))

    with pytest.raises(Unsupported, match=r"not called data\.pkl"):
        edit(path, "cuda:1")


def test_more_than_names_and_devices_is_refused(copy):
    path = copy("dp_cuda.pth")
    table, tensor = next((t, t.tensors[0]) for t in opened(path).tables)
    before = path.read_bytes()

    with pytest.raises(Unsupported, match="only names and devices"):
        edit(path, "cpu", drops=frozenset({(table.path, tensor.key)}))
    assert path.read_bytes() == before


def test_a_file_object_is_refused():
    data = io.BytesIO((FIXTURES / "net_plain.pth").read_bytes())
    with open_source(data) as source:
        checkpoint = read(source)
        with pytest.raises(UsageError, match="file object"):
            append_changes(source, checkpoint, changes_of(checkpoint, "cuda:1"))


def test_a_file_that_changed_since_is_refused(copy):
    path = copy("net_plain.pth")
    with open_source(str(path)) as source:
        checkpoint = read(source)
        os.utime(path, ns=(1, 1))
        with pytest.raises(InputChanged) as caught:
            append_changes(source, checkpoint, changes_of(checkpoint, "cuda:1"))
    assert caught.value.path == str(path)
    assert path.read_bytes() == (FIXTURES / "net_plain.pth").read_bytes()
    left_alone(path.parent, path.name)


def test_a_file_that_was_replaced_since_is_refused(copy):
    path = copy("net_plain.pth")
    with open_source(str(path)) as source:
        checkpoint = read(source)
        path.rename(path.with_name("old.pth"))
        copy("net_plain.pth")
        with pytest.raises(InputChanged):
            append_changes(source, checkpoint, changes_of(checkpoint, "cuda:1"))


def test_a_file_that_cannot_be_written_is_refused(copy, monkeypatch):
    path = copy("net_plain.pth")
    real = os.open

    def refusing(name, flags, *rest):
        if flags & os.O_RDWR and name == str(path):
            raise PermissionError(13, "Permission denied")
        return real(name, flags, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refusing)
        with pytest.raises(OutputError, match="opened for writing: Permission denied") as caught:
            edit(path, "cuda:1")
    assert "-o OUT" in caught.value.hint
    assert caught.value.slug == "output-file"
    left_alone(path.parent, path.name)


def test_nothing_to_change_writes_nothing(copy):
    path = copy("net_plain.pth")
    before = path.read_bytes()
    with open_source(str(path)) as source:
        checkpoint = read(source)
        assert plan_append(source, checkpoint, Changes())[0] == b""
        done = append_changes(source, checkpoint, Changes())
    assert done.size_before == done.size_after == len(before)
    assert path.read_bytes() == before


def test_a_plan_writes_nothing_and_knows_every_byte(copy):
    path = copy("dp_cuda.pth")
    before = path.read_bytes()
    with open_source(str(path)) as source:
        checkpoint = read(source)
        data, _ = plan_append(source, checkpoint, changes_of(checkpoint, "cpu"))
    assert path.read_bytes() == before
    edit(path, "cpu")
    assert path.read_bytes() == before + data


# -- links, names, sizes -----------------------------------------------------------------------
def test_a_link_is_followed_and_kept(copy):
    path = copy("net_plain.pth", "real.pth")
    (path.parent / "deep").mkdir()
    way = path.parent / "deep" / "link.pth"
    way.symlink_to(path)
    edit(way, "cuda:1")

    assert way.is_symlink()
    assert links(path) == ((FIXTURES / "net_plain.pth").stat().st_size,)
    undo(str(way))
    assert path.read_bytes() == (FIXTURES / "net_plain.pth").read_bytes()


def test_hard_links_are_told(copy):
    path = copy("net_plain.pth")
    os.link(path, path.with_name("twin.pth"))
    done = edit(path, "cuda:1")

    assert done.findings == ("1 other hard link(s) to the file see the edit too",)


def test_mode_and_inode_stay(copy):
    path = copy("net_plain.pth")
    path.chmod(0o640)
    before = path.stat()
    edit(path, "cuda:1")
    undo(str(path))

    assert (path.stat().st_mode, path.stat().st_ino) == (before.st_mode, before.st_ino)


def test_ten_gigabytes_take_no_longer(tmp_path):
    """The storage is a hole. Offsets beyond 4 GiB need zip64 fields in every header."""
    path, hole = tmp_path / "net.pth", tmp_path / "hole"
    count = 10 << 28
    with hole.open("wb") as stream:
        stream.truncate(count * 4)
    state = {
        "module.w": torch.from_file(str(hole), shared=True, size=count),
        "module.b": torch.arange(3.0),
    }
    with torch.serialization.skip_data():
        save(state, path, "cuda:0")
    size = path.stat().st_size
    started = time.monotonic()
    done = edit(path, "cpu", strip=True)
    elapsed = time.monotonic() - started

    assert elapsed < 1
    assert size > 10 << 30
    assert done.size_after - size < 3_000
    assert path.stat().st_blocks < 1_000
    for options in ({"mmap": True}, {"map_location": "meta"}):
        for calculated in (False, True):
            with calculated_offsets() if calculated else open(os.devnull):
                found = torch.load(path, **options)
            assert {key: tensor.shape[0] for key, tensor in found.items()} == {"w": count, "b": 3}
    assert undo(str(path)) == (done.size_after, size)
    assert path.stat().st_size == size
    left_alone(tmp_path, "hole", "net.pth")


def test_offsets_around_four_gigabytes(tmp_path):
    """Bases that end just before and just behind the size where zip64 begins."""
    hole = tmp_path / "hole"
    for count in (1 << 30, (1 << 30) - 500, (1 << 30) - 2_000):
        with hole.open("wb") as stream:
            stream.truncate(count * 4)
        path = tmp_path / "net.pth"
        state = {"module.w": torch.from_file(str(hole), shared=True, size=count)}
        with torch.serialization.skip_data():
            save(state, path, "cuda:0")
        for tag in ("xpu", "cpu"):
            edit(path, tag, strip=True)
        assert len(links(path)) == 2
        with calculated_offsets():
            found = torch.load(path, mmap=True)
        assert found["w"].shape == (count,)
        assert float(found["w"][-1]) == 0.0


def test_thousands_of_keys_cost_two_walks_and_two_directories(tmp_path):
    """What the edit itself adds to reading and rewriting is little."""
    path = tmp_path / "net.pth"
    torch.save({f"module.layer{i}.weight": torch.zeros(4) for i in range(2_000)}, path)
    with open_source(str(path)) as source:
        started = time.process_time()
        checkpoint = read(source)
        reading = time.process_time() - started
        append_changes(source, checkpoint, changes_of(checkpoint, "cuda:1", strip=True))
        writing = time.process_time() - started - reading
    assert writing < 5 * reading
    assert len(links(path)) == 1


def test_legacy_files_come_out_of_an_ordinary_convert(tmp_path):
    """The hint of the refusal works."""
    path = tmp_path / "net.pth"
    torch.save({"module.w": torch.ones(3)}, path, **LEGACY)
    with pytest.raises(Unsupported) as caught:
        edit(path, "cuda:0")
    assert caught.value.hint == "write another file with -o OUT"
    assert not journal(path).exists()
