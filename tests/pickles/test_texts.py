"""The cheap self-check: it says yes to what the whole check proves, and to nothing else."""

from __future__ import annotations

import collections
import random

import pytest
from pickles_support import Graph, Pickler, SlowPickler, dump, edits_of, stream, text

from ckptool.errors import CkptError
from ckptool.pickles.check import check_rewrite
from ckptool.pickles.splice import Edits, splice
from ckptool.pickles.texts import only_texts_differ
from ckptool.pickles.walk import walk


def agrees(old, data, edits):
    """The whole check's answer."""
    try:
        check_rewrite(old, walk(data), edits)
    except CkptError:
        return False
    return True


def test_random_graphs_and_any_byte_changed():
    """Yes never comes where the whole check says no; each wrong byte is a no."""
    rnd, said = random.Random(7), 0
    for _ in range(600):
        root = Graph(rnd).root(rnd.random() < 0.2)
        data = dump(root, rnd.randint(2, 4), rnd.choice([Pickler, SlowPickler]))
        old = walk(data)
        keys = [key for key in root if rnd.random() < 0.7]
        edits = edits_of(old, renamed=keys, dropped=[], retag=rnd.random() < 0.5)
        try:
            out = splice(old, edits)
        except CkptError:
            continue
        if not only_texts_differ(old, out, edits):
            continue
        said += 1
        assert agrees(old, out, edits)
        for _ in range(10):
            at = rnd.randrange(len(out))
            wrong = out[:at] + bytes([out[at] ^ (1 << rnd.randrange(8))]) + out[at + 1 :]
            assert not only_texts_differ(old, wrong, edits)
        assert not only_texts_differ(old, out + b"\0", edits)
        assert not only_texts_differ(old, out[:-1], edits)
    assert said > 100


def test_yes_to_a_renamed_state_dict():
    root = collections.OrderedDict((f"module.w{i}", (i, "cuda:0")) for i in range(300))
    old = walk(dump(root, 2, Pickler))
    edits = edits_of(old, renamed=list(root), dropped=[], retag=True)
    assert only_texts_differ(old, splice(old, edits), edits)


# PROTO, 'a' memoised as 0, fetched again: ('a', 'a')
TWICE = stream(text("a"), b"q\0", b"h\0", b"\x86")
FIRST, FETCH = 2, 10


@pytest.mark.parametrize(
    ("strings", "new", "answer"),
    [
        ({FIRST: "bb", FETCH: "bb"}, stream(text("bb"), b"q\0", b"h\0", b"\x86"), True),
        ({FIRST: "bb"}, stream(text("bb"), b"q\0", b"h\0", b"\x86"), False),
        ({FETCH: "bb"}, stream(text("bb"), b"q\0", b"h\0", b"\x86"), False),
        ({FIRST: "bb", FETCH: "c"}, stream(text("bb"), b"q\0", b"h\0", b"\x86"), False),
        ({FIRST: "bb", FETCH: "bb"}, stream(text("bb"), b"q\1", b"h\0", b"\x86"), False),
        ({FIRST: "bb", FETCH: "bb"}, stream(text("bc"), b"q\0", b"h\0", b"\x86"), False),
        ({FIRST: "bb", FETCH: "bb"}, stream(b"U\2bb", b"q\0", b"h\0", b"\x86"), False),
    ],
)
def test_fetches_change_with_their_definition(strings, new, answer):
    assert only_texts_differ(walk(TWICE), new, Edits(strings=strings)) is answer


@pytest.mark.parametrize(
    "edits",
    [
        Edits(strings={FIRST: "bb", FETCH: "bb"}, deletions=[(0, 0)]),
        Edits(strings={FIRST: "bb", FETCH: "bb"}, values={3: (4, b"N")}),
        Edits(strings={FIRST: "bb", FETCH: "bb"}, respell=lambda node: b""),
        Edits(strings={FIRST: "bb", FETCH: "bb"}, decoded=True),
    ],
)
def test_no_to_every_other_kind_of_edit(edits):
    new = stream(text("bb"), b"q\0", b"h\0", b"\x86")
    assert not only_texts_differ(walk(TWICE), new, edits)


def test_no_to_texts_that_name_a_class():
    named = stream(text("os"), text("system"), b"\x93", protocol=4)
    new = stream(text("os"), text("popen"), b"\x93", protocol=4)
    assert not only_texts_differ(walk(named), new, Edits(strings={9: "popen"}))
