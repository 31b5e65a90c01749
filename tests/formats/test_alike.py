"""Files whose pickles are the same bytes: of each, what is said of it alone."""

import io
import json
import pickletools
import zipfile

import pytest
import torch
from formats_support import (
    HOOKS,
    SIX,
    archive,
    call,
    dictionary,
    pickled,
    storage,
    tensor,
    text,
    tup,
)
from hostile.corpus import CORPUS, lay
from verbs_support import FIXTURES, TRUTHS, cli

from ckptool.errors import CkptError
from ckptool.formats import alike, assemble, loose, read, torch_zip
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
            return read(source, DEFAULT, alike=known)._replace(handle=None)
        except CkptError as error:
            return type(error), str(error), error.where(), error.hint, error.key, error.path


def two(lengths=(24, 24), **more):
    """A net of two tensors over storages of their own."""
    data = pickled(dictionary(("a", tensor(storage("0"))), ("b", tensor(storage("1")))))
    records = {str(at): bytes([at + 1]) * length for at, length in enumerate(lengths)}
    return archive(data, records, **more)


def packed_again(data, method=zipfile.ZIP_STORED, pickle=None):
    """The same records, in another order and way, with another pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", method) as new:
        for name in sorted(old.namelist(), reverse=True):
            is_it = pickle is not None and name.endswith("/data.pkl")
            new.writestr(name, pickle if is_it else old.read(name))
    return out.getvalue()


def pickle_of(data):
    with zipfile.ZipFile(io.BytesIO(data)) as old:
        name = next(name for name in old.namelist() if name.endswith("/data.pkl"))
        return old.read(name)


def with_other_numbers(data):
    """The pickle with one number changed, for each number that stands in it (thirty at most)."""
    rows = list(pickletools.genops(data))
    places = [(pos, row.name) for row, _, pos in rows if row.name in ARGUMENTS]
    for pos, name in places[:: len(places) // 30 + 1]:
        for argument in ARGUMENTS[name]:
            yield data[: pos + 1] + argument + data[pos + 1 + len(argument) :]


ARGUMENTS = {
    "BININT1": (b"\0", b"\1", b"\5"), "BININT2": (b"\0\1", b"\xff\xff"), "BININT": (b"\xff" * 4,),
    "BINFLOAT": (b"?\xf0\0\0\0\0\0\0", b"\x7f\xf8\0\0\0\0\0\0"),
}  # fmt: skip


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


@pytest.mark.parametrize("name", ZIPS)
def test_whatever_number_of_a_fixture_is_another_is_told_as_of_the_file_alone(name):
    """Epochs, sizes, offsets, versions, keys: some are no more than told, some change it all."""
    net = (FIXTURES / name).read_bytes()
    if isinstance(said(BytesSource(net, "x.pth")), tuple) or len(net) > 100_000:
        return
    known = Alike()
    for pickle in (pickle_of(net), *with_other_numbers(pickle_of(net)), pickle_of(net)):
        data = packed_again(net, pickle=pickle)
        alone = said(BytesSource(data, "x.pth"))
        assert [said(BytesSource(data, "x.pth"), known) for _ in range(2)] == [alone] * 2


W = ("w", tensor())
LIST = b"](K\x02K\x03e"
GROUP = dictionary(("lr", 0.5), ("params", [0, 1]))
NUMBERS = {
    "beside": dictionary(W, ("epoch", 3), ("loss", 0.5)),
    "nested": dictionary(
        W, ("optimizer", dictionary(("state", b"}"), ("param_groups", b"](" + GROUP + b"e")))),
    "in a list": dictionary(W, ("losses", [0.5, 3, [4, 5.0]])),
    "one by one": b"}" + text("w") + tensor() + b"s" + text("n") + b"K\x03s",
    "twice": dictionary(W, ("n", 3), ("n", 4)),
    "a size later": dictionary(("n", b"K\x02q\x09"), ("w", tensor(size=(b"h\x09", 3)))),
    "doubled": dictionary(W, ("n", b"K\x032"), (b"", "m")),
    "a key": dictionary(W, ("n", dictionary((5, 6), (6, 7)))),
    "a key at the root": dictionary(W, (5, 6), (6, 7)),
    "in a tuple": dictionary(W, ("n", tup(3, 4))),
    "in a set": dictionary(W, ("n", b"\x8f(K\x03K\x04\x90")),
    "in a dict that is ordered": dictionary(W, ("n", HOOKS + b"(" + text("m") + b"K\x03u")),
    "in a list fetched as a size": dictionary(
        ("n", LIST + b"q\x09"), ("w", tensor(size=call("torch.Size", b"h\x09")))),
    "in a list that is a size": dictionary(("n", 3), ("w", tensor(size=LIST))),
    "in a list that a call is given": dictionary(W, ("n", call("torch.Size", LIST))),
    "in a dict fetched": dictionary(
        W, ("n", b"}q\x09(" + text("m") + b"K\x03u"), ("again", b"h\x09")),
    "a root fetched": b"}q\x09(" + text("w") + tensor() + text("n") + b"K\x03" + text("me") + b"h\x09u",
    "a slot in text": dictionary(W, ("n", b"](K\x03ep9\n"), ("again", b"g9\n")),
    "an object": dictionary(W, ("n", b"cacme\nNet\n)\x81" + dictionary(("m", 3)) + b"b")),
    "beside in one": dictionary(("net", dictionary(W, ("n", 3), ("m", [4])))),
    "a state": dictionary(W, ("n", b"}(" + text("m") + b"K\x03u" + dictionary(("k", 4)) + b"b")),
    "beside a list that holds itself": dictionary(W, ("n", 3), ("l", b"]q\x09(K\x04h\x09e")),
    "beside a dict that grows once fetched": dictionary(
        W, ("n", 3), ("d", b"}q\x09(" + text("m") + b"h\x09" + text("k") + b"K\x03u")),
}  # fmt: skip


@pytest.mark.parametrize("case", NUMBERS)
def test_whatever_number_is_another_is_told_as_of_the_file_alone(case):
    first = pickled(NUMBERS[case], protocol=4)
    for pickle in with_other_numbers(first):
        known = Alike()
        for data in (archive(first), archive(first), archive(pickle), archive(first)):
            assert said(BytesSource(data, "x.pth"), known) == said(BytesSource(data, "x.pth"))


@pytest.mark.parametrize(("case", "count"), [
    ("beside", 2), ("nested", 3), ("in a list", 4), ("one by one", 1), ("twice", 0),
    ("a size later", 0), ("doubled", 0), ("a key", 2), ("a key at the root", 0), ("in a tuple", 0),
    ("in a set", 0), ("in a dict that is ordered", 0), ("in a list fetched as a size", 0),
    ("a root fetched", 0), ("in a dict fetched", 0), ("a slot in text", 0), ("an object", 0),
    ("in a list that is a size", 1), ("in a list that a call is given", 0), ("a state", 0),
    ("beside a list that holds itself", 0), ("beside a dict that grows once fetched", 0),
])  # fmt: skip
def test_which_numbers_are_told_without_a_walk(case, count):
    known = Alike()
    for _ in range(2):
        said(BytesSource(archive(pickled(NUMBERS[case], protocol=4)), "x.pth"), known)
    assert [len(one.loose.numbers) for one in known._known] == [count]


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
        read(BytesSource(two(), "x.pth"), tight, alike=known)


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


def test_thousands_of_entries_cost_each_its_own_look(monkeypatch):
    """All under one key, or each under its own: an entry is not compared with all the others."""
    looks = []

    class Watched(tuple):
        def __eq__(self, other):
            looks.append(0)
            return tuple(self) == tuple(other)

        __hash__ = tuple.__hash__

    net = dictionary(W, *((f"n{number % 700}", 3) for number in range(1_400)))
    found = read(BytesSource(archive(pickled(net)), "x.pth"), DEFAULT)
    extras = [extra._replace(path=Watched(extra.path)) for extra in found.extras]
    assert len(loose.loose_numbers(found.handle.walked, extras).numbers) == 0, "each is set twice"
    net = dictionary(W, *((f"n{number}", 3) for number in range(1_400)))
    found = read(BytesSource(archive(pickled(net)), "x.pth"), DEFAULT)
    extras = [extra._replace(path=Watched(extra.path)) for extra in found.extras]
    assert len(loose.loose_numbers(found.handle.walked, extras).numbers) == 1_400
    assert len(looks) < 20_000


def test_other_entries_are_not_kept_for_the_numbers_of_one():
    data = archive(pickled(dictionary(W, ("n", [3, 4]), ("other", [b"]"] * 100))))
    known = Alike()
    for _ in range(2):
        said(BytesSource(data, "x.pth"), known)
    ((entry,),) = [one.loose.entries for one in known._known]
    (held,) = entry.holder
    assert [batch.items for batch in held.batches] == [[3, 4]]


def test_where_no_files_are_alike_few_are_looked_at_and_alike_ones_still_found(walks, monkeypatch):
    looked, known = [], Alike()
    real = alike.loose_numbers
    monkeypatch.setattr(alike, "loose_numbers", lambda *args: looked.append(0) or real(*args))
    for number in range(204):
        said(BytesSource(archive(pickled(dictionary((f"w{number}", tensor())))), "x.pth"), known)
    assert len(looked) == 64 + 20
    walks.clear()
    for _ in range(40):
        said(BytesSource(two(), "x.pth"), known)
    assert 2 <= len(walks) <= 14


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
        assert many == (12 if flags == ["--hash"] else 7)  # 7: the cut one's too
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
