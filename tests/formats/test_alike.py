"""Files whose pickles are the same bytes: of each, what is said of it alone."""

import io
import json
import zipfile

import pytest
import torch
from formats_support import SIX, archive, dictionary, pickled, storage, tensor
from hostile.corpus import CORPUS, lay
from verbs_support import FIXTURES, TRUTHS, cli

from ckptool.errors import CkptError
from ckptool.formats import alike, assemble, read, torch_zip
from ckptool.formats.alike import Alike
from ckptool.limits import DEFAULT
from ckptool.places import BytesSource, open_source

ZIPS = [name for name, truth in TRUTHS.items() if truth["format"] == "torch-zip"]
SUBJECTS = ("control", "call", "stream", "zip", "tensor", "double", "text")


@pytest.fixture
def walks(monkeypatch):
    """How many pickles were walked."""
    done = []

    def counted(*args):
        done.append(args)
        return assemble.walk_checked(*args)

    monkeypatch.setattr(torch_zip, "walk_checked", counted)
    return done


def said(source, known=None):
    """All that is read of a file but the handle, or all that is said against it."""
    with source:
        try:
            return read(source, DEFAULT, known)._replace(handle=None)
        except CkptError as error:
            return type(error), str(error), error.where(), error.hint, error.key, error.path


def two(lengths=(24, 24), **more):
    """A net of two tensors over storages of their own."""
    data = pickled(dictionary(("a", tensor(storage("0"))), ("b", tensor(storage("1")))))
    records = {str(at): bytes([at + 1]) * length for at, length in enumerate(lengths)}
    return archive(data, records, **more)


def packed_again(data, method):
    """The same records, in another order and way."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", method) as new:
        for name in sorted(old.namelist(), reverse=True):
            new.writestr(name, old.read(name))
    return out.getvalue()


@pytest.mark.parametrize("name", ZIPS)
def test_each_fixture_met_again_is_told_as_it_was_read(name, walks):
    alone, known = said(open_source(FIXTURES / name)), Alike()
    walks.clear()
    for _ in range(4):
        assert said(open_source(FIXTURES / name), known) == alone
    if not isinstance(alone, tuple):
        assert len(walks) == 2, "not kept"


@pytest.mark.long
def test_hostile_files_met_again_are_told_as_they_were_read(tmp_path):
    kept = 0
    for label, case in CORPUS.items():
        if label.partition("/")[0] not in SUBJECTS or case.file not in case.files():
            continue
        folder = tmp_path / label.replace("/", "-")
        folder.mkdir()
        path = lay(case, folder)
        if not path.is_file() or path.read_bytes()[:4] != b"PK\3\4":
            continue
        alone, known = said(open_source(path)), Alike()
        for _ in range(3):
            assert said(open_source(path), known) == alone, label
        kept += len(known._known)
    assert kept > 20


def test_storages_are_those_of_the_file_itself(walks):
    net = two()
    others = [
        packed_again(net, zipfile.ZIP_STORED), packed_again(net, zipfile.ZIP_DEFLATED),
        two(byteorder=b"big"), archive_of_other_numbers(), net,
    ]  # fmt: skip
    alone = [said(BytesSource(data, "x.pth")) for data in others]
    assert len({one.storages for one in alone}) == 5
    known = Alike()
    said(BytesSource(net, "1.pth"), known), said(BytesSource(net, "2.pth"), known)
    walks.clear()
    assert [said(BytesSource(data, "x.pth"), known) for data in others] == alone
    assert not walks
    assert "big-endian" in alone[2].traits


def archive_of_other_numbers():
    data = pickled(dictionary(("a", tensor(storage("0"))), ("b", tensor(storage("1")))))
    return archive(data, {"0": SIX, "1": SIX})


@pytest.mark.parametrize("lengths", [(24,), (24, 20), (20, 20), (0, 24), ()])
def test_a_storage_that_is_missing_or_too_short_is_told_as_of_the_file_alone(lengths):
    known, bad = Alike(), two(lengths)
    for number in range(2):
        said(BytesSource(two(), f"{number}.pth"), known)
    alone = said(BytesSource(bad, "bad.pth"))
    assert isinstance(alone, tuple)
    assert said(BytesSource(bad, "bad.pth"), known) == alone
    assert said(BytesSource(two(), "z.pth"), known) == said(BytesSource(two(), "z.pth"))


def test_a_file_edited_in_place_is_read_the_whole_way(tmp_path):
    import ckptool

    net = tmp_path / "net.pth"
    torch.save({"module.w": torch.zeros(3)}, net)
    ckptool.convert(net, in_place=True, strip_module=True)
    edited = said(open_source(net))
    assert any(note.slug == "edited-in-place" for note in edited.notes)
    known = Alike()
    assert [said(open_source(net), known) for _ in range(3)] == [edited] * 3


def test_other_limits_are_not_passed_over():
    known, tight = Alike(), DEFAULT._replace(opcode_count=5)
    for number in range(3):
        said(BytesSource(two(), f"{number}.pth"), known)
    with pytest.raises(CkptError, match="opcodes"):
        read(BytesSource(two(), "x.pth"), tight, known)


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(alike, "_FOUND_BYTES", 3_000)
    known = Alike()
    nets = [{f"layer{number}": tensor()} for number in range(30)]
    large = {f"layer{number}": tensor() for number in range(30)}
    for net in (*nets, large):
        data = archive(pickled(dictionary(*net.items())))
        for _ in range(2):
            said(BytesSource(data, "x.pth"), known)
        assert len(known._known) <= 8
    assert max(len(one.tensors) for one in known._known) == 1


def test_lines_of_many_files_are_those_of_each_alone(tmp_path, capsys, walks):
    """Three nets in turn, of which all files have other numbers; one is cut, one says an epoch."""
    for number in range(12):
        torch.manual_seed(number)
        torch.save(MADE[number % 3](number), tmp_path / f"{number:02}.pth")
    damaged = tmp_path / "06.pth"
    damaged.write_bytes(damaged.read_bytes()[:-30])

    for flags in ([], ["--sort", "name"], ["--only", "*weight"], ["--hash"]):
        walks.clear()
        lines = cli(capsys, "inspect", "-r", tmp_path, "--format", "jsonl", *flags)[1].splitlines()
        many = len(walks)
        alone = [
            cli(capsys, "inspect", tmp_path / f"{n:02}.pth", "--format", "jsonl", *flags)[1].strip()
            for n in range(12)
        ]
        assert lines == alone
        assert many == (
            12 if flags == ["--hash"] else 9
        )  # 9: one of them to say what the cut one lost
    rows = [json.loads(line) for line in lines]
    assert "error" in rows[6]
    assert len({row["tables"][0]["tensors"][0]["sha256"] for row in rows if "error" not in row}) > 8


def linear(number):
    return torch.nn.Linear(3, 2 + number % 3).state_dict()


MADE = (
    linear,
    lambda number: {"net": linear(number), "optim": {"state": {}, "param_groups": [{"lr": 0.1}]}},
    lambda number: {"net": linear(number), "epoch": number},
)
