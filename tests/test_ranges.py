"""A plan cut into tasks: every byte in one of them, the checksums joined again as of the whole."""

import os
import random
import zlib
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.crcs import joined
from ckptool.errors import CrcMismatch, InputChanged, StorageSize
from ckptool.places import open_source
from ckptool.plans import Copy, Late, Literal, Made, Output, Plan, total_size
from ckptool.ranges import MOST, STEP, Sums, cut, same_file, step_for, task_of, write_task
from ckptool.spans import Address, Span
from ckptool.values import RECIPES

SIZE = 5_000
DATA = random.Random(0).randbytes(SIZE)


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_a_crc_of_two_runs_is_that_of_the_whole(first, second):
    crcs = zlib.crc32(first), zlib.crc32(second)
    assert joined(crcs, (len(first), len(second))) == zlib.crc32(first + second)


def test_a_crc_over_a_tebibyte_of_zeros():
    """Of halves, and of a byte and the rest: two ways to the same."""

    def zeros(size):
        if size == 1:
            return zlib.crc32(b"\0")
        half = zeros(size // 2)
        return joined((half, half), (size // 2, size // 2))

    assert zeros(1 << 20) == zlib.crc32(bytes(1 << 20))
    size = 1 << 40
    rest = 0
    for power in range(40):  # 1 + 2 + 4 + ... = size - 1
        rest = joined((rest, zeros(1 << power)), ((1 << power) - 1, 1 << power))
    assert joined((zlib.crc32(b"\0"), rest), (1, size - 1)) == zeros(size)


def ends(crcs, *, size):
    return b"".join(crc.to_bytes(4, "little") for crc in crcs).ljust(size, b"!")


spans = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(
    lambda pair: Span(min(pair), abs(pair[0] - pair[1]))
)
part = st.one_of(
    st.binary(max_size=40).map(Literal),
    spans.map(lambda span: Copy(0, span, None, "free")),
    spans.map(lambda span: Copy(0, span, zlib.crc32(DATA[span.offset : span.end]), "recorded")),
    spans.map(lambda span: Made(((0, span),), "gather", ("stored", 1, 1, span.size, (span.size,), (1,), 0, None), span.size)),
)  # fmt: skip


@st.composite
def parts(draw):
    found = draw(st.lists(part, min_size=1, max_size=12))
    for at in range(len(found), 0, -1):
        if draw(st.booleans()):
            needs = tuple(draw(st.lists(st.integers(0, at - 1), max_size=3)))
            size = 4 * len(needs) + draw(st.integers(0, 3))
            late = [i for i in needs if i < at]
            found.insert(at, Late(size, partial(ends, size=size), tuple(late)))
            break  # indexes of later parts would move
    return tuple(found)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranges")
    (folder / "in").write_bytes(DATA)
    return folder


def plan_of(place, found):
    with open_source(place / "in") as source:
        return Plan((source.address,), (Output("out", found, total_size(found)),))


def run(place, plan, step, *, check=True):
    """The output as tasks in a random order make it, some of them twice."""
    path = place / "out"
    path.write_bytes(bytes(plan.outputs[0].size_bytes))
    rows = cut(plan, step)
    tasks = [
        task_of(number, row, str(path), plan.sources, check=check, fsync=False, version="1")
        for number, row in enumerate(rows)
    ]
    sums = Sums(plan.outputs[0], check)
    order = random.Random(1).sample(range(len(rows)), len(rows))
    for number in order[:2]:  # as after a worker that was thought dead
        write_task(tasks[number], RECIPES)
    for number in order:
        sums.add(rows[number], write_task(tasks[number], RECIPES).crcs)
    data = bytearray(path.read_bytes())
    for at, late in sums.finish(plan.sources):
        data[at : at + len(late)] = late
    return bytes(data), sums


def expected(found):
    pieces = []
    for row in found:
        if isinstance(row, Literal):
            pieces.append(row.data)
        elif isinstance(row, Copy):
            pieces.append(DATA[row.span.offset : row.span.end])
        elif isinstance(row, Made):
            pieces.append(DATA[row.pieces[0][1].offset : row.pieces[0][1].end])
        else:
            pieces.append(ends([zlib.crc32(pieces[i]) for i in row.needs], size=row.size))
    return b"".join(pieces)


@settings(max_examples=60, deadline=None)
@given(parts(), st.sampled_from([64, 333, 1024, 10_000]))
def test_tasks_in_any_order_give_the_bytes_of_the_plan(place, found, step):
    data, sums = run(place, plan_of(place, found), step)

    assert data == expected(found)
    recorded = sum(row.size for row in found if isinstance(row, Copy) and row.crc)
    assert sums.checked_bytes == recorded


def test_no_task_is_longer_than_its_step_but_by_what_cannot_be_cut(place):
    made = Made(((0, Span(0, 700)),), "gather", (), 700)
    found = (Literal(b"x" * 10), Copy(0, Span(0, 5_000)), made, Copy(0, Span(0, 90)))
    sizes = [row.size for row in cut(plan_of(place, found), 500)]

    assert sizes == [500] * 10 + [10, 700, 90]


def test_late_parts_are_in_no_task(place):
    late = Late(4, partial(ends, size=4), (0,))
    rows = cut(plan_of(place, (Copy(0, Span(0, 9)), late, Literal(b"ab"))), 100)

    assert [(row.start, row.size) for row in rows] == [(0, 9), (13, 2)]


def test_a_cut_part_with_wrong_bytes_is_found(place):
    plan = plan_of(place, (Copy(0, Span(0, 4_000), 12345, "fc.weight"),))
    with pytest.raises(CrcMismatch, match=r"fc\.weight"):
        run(place, plan, 500)
    run(place, plan, 500, check=False)


def test_a_missing_answer_is_found(place):
    plan = plan_of(place, (Copy(0, Span(0, 4_000)),))
    (output,), rows = plan.outputs, cut(plan, 500)
    sums = Sums(output, True)
    for row in rows[1:]:
        sums.add(row, [0])
    with pytest.raises(StorageSize, match="not all"):
        sums.finish(plan.sources)
    with pytest.raises(StorageSize):
        sums.add(rows[0], [0, 0])


def test_a_plan_that_does_not_add_up_is_refused(place):
    plan = plan_of(place, (Copy(0, Span(0, 9)),))
    wrong = plan._replace(outputs=(plan.outputs[0]._replace(size_bytes=10),))
    with pytest.raises(StorageSize):
        cut(wrong, 100)


def test_two_terabytes_are_some_thousand_tasks():
    assert step_for(10**9) == STEP
    size = 2 * 10**12
    assert MOST / 2 < size / step_for(size) <= MOST


def test_the_device_may_have_another_number_elsewhere(place):
    with open_source(place / "in") as source:
        address = source.address
    device, *rest = address.identity
    same_file(address._replace(identity=(device + 1, *rest))).close()
    for other in ((device, rest[0] + 1, *rest[1:]), (device, *rest[:2], rest[2] + 1)):
        with pytest.raises(InputChanged):
            same_file(Address(address.uri, address.size_bytes, other))


def test_paths_of_a_task_hold_elsewhere(place, monkeypatch):
    monkeypatch.chdir(place)
    with open_source("in") as source:
        plan = Plan((source.address,), (Output("out", (Copy(0, Span(0, 9)),), 9),))
    task = task_of(0, cut(plan, 5)[0], "out", plan.sources, check=True, fsync=False, version="1")

    assert task.path == str(place / "out")
    assert [address.uri for address in task.sources] == [os.path.abspath("in")]
