"""Valid files with spans flipped, inserted, deleted, doubled and spliced, fields set to odd
numbers: an answer or a CkptError, and inspect and verify refuse the same files.

Hypothesis draws the edits, so that what fails is made small. In a zip they are made inside the
records, and the checksums are right again.
"""

from __future__ import annotations

import struct

import pytest
from formats_support import saved, saved_legacy, tar
from fuzz import bytewise, otherwise, zipwise
from fuzz.asked import Desk
from fuzz.targets import FIXTURES, TARGETS, zipped
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from verify_support import TRAINING

PLACE = st.floats(0, 1, exclude_max=True)
EDIT = st.one_of(
    st.tuples(st.just("flip"), PLACE, st.integers(0, 7)),
    st.tuples(st.just("insert"), PLACE, st.binary(min_size=1, max_size=8)),
    st.tuples(st.just("delete"), PLACE, st.integers(1, 40)),
    st.tuples(st.just("double"), PLACE, st.integers(1, 40)),
    st.tuples(st.just("splice"), PLACE, st.tuples(PLACE, st.integers(1, 64))),
    st.tuples(st.just("number"), PLACE, st.tuples(st.sampled_from("BHIQ"), st.sampled_from("<>"),
                                                  st.sampled_from(bytewise.ODD_NUMBERS))),
)  # fmt: skip
EDITS = st.lists(EDIT, min_size=1, max_size=4)
SOME = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(max_examples=3_000, deadline=None, suppress_health_check=list(HealthCheck))


def edited(data, edits):
    for way, place, more in edits:
        at = int(place * len(data))
        if way == "flip" and data:
            data = data[:at] + bytes([data[at] ^ 1 << more]) + data[at + 1 :]
        elif way == "insert":
            data = data[:at] + more + data[at:]
        elif way == "delete":
            data = data[:at] + data[at + more :]
        elif way == "double":
            data = data[: at + more] + data[at:]
        elif way == "splice":
            start, size = int(more[0] * len(data)), more[1]
            data = data[:at] + data[start : start + size] + data[at + size :]
        elif way == "number":
            letter, order, value = more
            size = struct.calcsize(letter)
            field = struct.pack(order + letter, value & (1 << 8 * size) - 1)
            data = data[:at] + field + data[at + size :]
    return data


def _whole(data, edits, _):
    return edited(data, edits)


def _record(data, edits, which):
    """Inside one record of a zip, checksums right."""
    entries = zipwise.entries_of(data)
    entry = entries[int(which * len(entries))]
    entry.data = edited(entry.data, edits)
    return zipwise.built(entries)


def _pickle(data, edits, _):
    return zipped(edited(data, edits))


def _pickle_of_stream(data, edits, which):
    """Inside one of the five pickles of a legacy stream."""
    pickles, rest = otherwise.pickles_of(data)
    at = int(which * len(pickles))
    pickles[at] = edited(pickles[at], edits)
    return b"".join(pickles) + rest


def _header(data, edits, _):
    """Inside the header of a .safetensors file, its length right."""
    size = int.from_bytes(data[:8], "little")
    header = edited(data[8 : 8 + size], edits)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def _member(data, edits, which):
    """Inside a member of a tar, its header right."""
    import io
    import tarfile

    with tarfile.open(fileobj=io.BytesIO(data)) as old:
        members = {i.name: old.extractfile(i).read() for i in old if i.isfile()}
    name = list(members)[int(which * len(members))]
    return tar({**members, name: edited(members[name], edits)})


ZIP, LEGACY = saved(TRAINING), saved_legacy(TRAINING)
PICKLE = next(e.data for e in zipwise.entries_of(ZIP) if e.name.endswith("data.pkl"))
SAFETENSORS = (FIXTURES / "model.safetensors").read_bytes()
TAR = (FIXTURES / "tar_01x.pth").read_bytes()
CASES = {
    "zip": (ZIP, _whole), "records of a zip": (ZIP, _record), "pickle of a zip": (PICKLE, _pickle),
    "legacy": (LEGACY, _whole), "pickles of a legacy stream": (LEGACY, _pickle_of_stream),
    "safetensors": (SAFETENSORS, _whole), "safetensors header": (SAFETENSORS, _header),
    "tar": (TAR, _whole), "members of a tar": (TAR, _member),
}  # fmt: skip


def ask_mutated(case, settings_):
    data, make = CASES[case]
    desk = Desk()

    @settings_
    @given(EDITS, PLACE)
    def ask(edits, which):
        desk.ask(desk.put("net.bin", make(data, edits, which)))

    try:
        ask()
    finally:
        desk.close()
    return desk.answers


@pytest.mark.parametrize("case", CASES)
def test_a_mutated_file_is_read_or_refused(case):
    answers = ask_mutated(case, SOME)
    assert sum(answers.values()) >= 60


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_many_mutated_files_are_read_or_refused(case):
    answers = ask_mutated(case, MANY)
    assert answers["read"] > 0
    assert len(answers) > 3  # refused in more than one way


@pytest.mark.parametrize("target", TARGETS)
def test_the_files_to_start_from_are_read(target):
    """A seed that is refused teaches a fuzzer nothing of what lies behind."""
    desk = Desk()
    try:
        for seed in TARGETS[target].seeds():
            TARGETS[target].ask(desk, seed)
    finally:
        desk.close()
    refused = sum(n for word, n in desk.answers.items() if ":" not in word and word != "read")
    assert desk.answers["read"] > refused
