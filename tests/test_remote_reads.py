"""How few bytes and requests the reads of an object cost, whoever reads, in whatever order."""

from __future__ import annotations

import random
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from remote_support import serving
from verbs_support import cli

import ckptool
from ckptool import remote_ahead
from ckptool.errors import CkptError
from ckptool.places import open_source
from ckptool.remote_ahead import PIECE, Ahead, Order
from ckptool.remote_kept import KEPT, Asked, Kept
from ckptool.spans import Span
from ckptool.verbs import verify_sums

pytest.importorskip("obstore")
MANY, LARGE = (40, 300_000), (3, 6_000_000)  # storages of 1.2 and of 24 MB: both 50 to 70 MB


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    made = {}
    for name, (count, numbers) in {"many.pth": MANY, "large.pth": LARGE}.items():
        made[name] = tmp_path_factory.mktemp("net") / name
        torch.save({f"l.{i}.w": torch.randn(numbers) for i in range(count)}, made[name])
    return made


@pytest.fixture
def site(files):
    with serving(files=dict(files)) as made:
        yield made


def spent(site, name):
    """Bytes sent for each byte of the file, and requests of more than a few kB."""
    long = [row for row in site.asked if _size(row[1]) > 10_000]
    return site.sent_bytes / site.size(name), len(long)


def _size(wanted):
    start, end = map(int, wanted.removeprefix("bytes=").split("-"))
    return end - start + 1


# -- the price of a whole file -----------------------------------------------------------------
@pytest.mark.parametrize("name", ["many.pth", "large.pth"])
@pytest.mark.parametrize("threads", [1, 4])
def test_verify_fetches_a_file_once(name, threads, site, monkeypatch):
    monkeypatch.setattr(verify_sums, "_MOST_THREADS", threads)
    monkeypatch.setattr(verify_sums.os, "cpu_count", lambda: threads)
    assert ckptool.verify(site.url(name)).exit_status == 0
    share, requests = spent(site, name)
    assert 1 <= share <= 1.05
    assert requests <= 30


@pytest.mark.parametrize("name", ["many.pth", "large.pth"])
@pytest.mark.parametrize("jobs", [1, 3])
def test_convert_fetches_a_file_once(name, jobs, site, files, tmp_path, capsys):
    args = ("--add-module", "--jobs", jobs, "-o")
    assert cli(capsys, "convert", site.url(name), *args, tmp_path / "there")[0] == 0
    share, requests = spent(site, name)
    assert 1 <= share <= 1.05
    assert requests <= 30
    assert cli(capsys, "convert", files[name], *args, tmp_path / "here")[0] == 0
    assert (tmp_path / "there").read_bytes() == (tmp_path / "here").read_bytes()


@pytest.mark.parametrize("name", ["many.pth", "large.pth"])
def test_load_fetches_a_file_once(name, site, files):
    there, here = ckptool.load(site.url(name)), torch.load(files[name])
    assert all(torch.equal(there[key], here[key]) for key in here)
    share, requests = spent(site, name)
    assert share <= 1.05
    assert requests <= 30


def test_a_part_of_a_file_costs_that_part(site, tmp_path):
    ckptool.convert(site.url("large.pth"), tmp_path / "o.pth", only=["l.1.w"], compact=True)
    assert spent(site, "large.pth")[0] <= 1.02 / 3


# -- threads -----------------------------------------------------------------------------------
@pytest.fixture
def blob(site):
    site.files["blob"] = random.Random(7).randbytes(48 << 20)
    return site


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("threads", [1, 5])
def test_threads_get_the_right_bytes_once(told, threads, blob):
    """Parts of 3 MB in one order, taken by whoever is free."""
    data, step = blob.files["blob"], 3 << 20
    starts = list(range(0, len(data), step))
    with open_source(blob.url("blob")) as source, ThreadPoolExecutor(threads) as pool:
        if told:
            source.will_read(Span(start, step) for start in starts)

        def read(start):
            blocks = range(start, start + step, 1 << 20)
            return b"".join(source.read(at, 1 << 20) for at in blocks)

        for start, found in zip(starts, pool.map(read, starts), strict=True):
            assert found == data[start : start + step]
    share, _ = spent(blob, "blob")
    assert share <= (1.05 if told else 1.8)


def test_what_was_told_may_be_in_any_order(blob):
    data, step = blob.files["blob"], 500_000
    starts = list(range(0, len(data) - step, 2 * step))
    random.Random(3).shuffle(starts)
    with open_source(blob.url("blob")) as source:
        source.will_read(Span(start, step) for start in starts)
        for start in starts:
            assert source.read(start, step) == data[start : start + step]
        assert source.read(777_777, 10) == data[777_777:777_787]  # what was not told, too
    assert blob.sent_bytes <= 1.05 * step * len(starts) + 100_000
    assert len(blob.asked) <= len(starts) + 3


def test_reading_twice_gives_the_same(blob):
    data = blob.files["blob"]
    with open_source(blob.url("blob")) as source:
        for _ in range(2):
            for at in range(0, len(data), 1 << 20):
                assert source.read(at, 1 << 20) == data[at : at + (1 << 20)]
    assert spent(blob, "blob")[0] <= 2.1


def test_a_failed_piece_is_asked_for_again(blob, monkeypatch):
    """An error of a piece fetched ahead reaches who reads it, and the next read is a new one."""
    data = blob.files["blob"]
    with open_source(blob.url("blob")) as source:
        source.will_read([Span(0, len(data))])
        get, failed = source._get, []

        def fails_once(start, end):
            if start > PIECE and not failed:
                failed.append(start)
                raise CkptError("the line is cut")
            return get(start, end)

        monkeypatch.setattr(source, "_get", fails_once)
        with pytest.raises(CkptError, match="line is cut"):
            source.read(0, len(data))
        assert source.read(failed[0], 1000) == data[failed[0] : failed[0] + 1000]
        assert source.read(0, len(data)) == data


def test_closing_wakes_who_waits():
    ahead = Ahead(100 << 20, 0)
    ahead.foresee([Span(0, 100 << 20)])
    first = ahead.begin(*ahead.wanted(0, 1 << 20))
    waiting = ahead.ahead(0, first)
    assert waiting
    ahead.give_up()
    assert all(request.future.cancelled() for request in waiting)


# -- the parts ---------------------------------------------------------------------------------
def test_pieces_ahead_are_of_what_was_told_and_bounded():
    ahead = Ahead(1 << 40, 65536)
    spans = [Span(1 << 30, 100), Span(5 << 30, 40 << 20), Span(2 << 30, 1 << 40)]
    ahead.foresee(spans)
    first = ahead.begin(*ahead.wanted(1 << 30, 100))
    assert (first.start, first.end) == (1 << 30, (1 << 30) + 100)
    found = [(r.start, r.end - r.start) for r in ahead.ahead(1 << 30, first)]
    assert found == [((5 << 30) + at * PIECE, PIECE) for at in range(3)]
    ahead.end(first)
    second = ahead.under_way(5 << 30)
    ahead.end(second)
    more = ahead.ahead(5 << 30, second)
    assert [r.start for r in more] == [(5 << 30) + 3 * PIECE]


def test_pieces_nobody_comes_for_give_way():
    ahead = Ahead(1 << 40, 0)
    ahead.foresee([Span(0, 1 << 30), Span(1 << 35, 1 << 30)])
    first = ahead.begin(*ahead.wanted(0, 1 << 20))
    lost = ahead.ahead(0, first)
    ahead.end(first)
    for _ in range(remote_ahead._STALE):
        ahead.wanted(1 << 39, 10)
    second = ahead.begin(*ahead.wanted(1 << 35, 1 << 20))
    assert len(ahead.ahead(1 << 35, second)) == 3
    assert any(request.future.cancelled() for request in lost)


def test_an_order_joins_what_nearly_touches():
    order = Order([Span(0, 100), Span(164, 100), Span(90_000, 10), Span(50_000, 10)], 1 << 20)
    assert [order.end_at(at) for at in (0, 120, 263, 264, 50_000, 50_010)] == [
        264, 264, 264, 0, 50_010, 0,
    ]  # fmt: skip
    assert list(order.after(200)) == [(200, 264), (90_000, 90_010), (50_000, 50_010)]


def test_what_was_asked_for_agrees_with_a_bitmap():
    chance, asked, map_ = random.Random(11), Asked(), bytearray(400)
    for _ in range(300):
        start = chance.randrange(390)
        end = min(start + chance.randrange(1, 9), 400)
        asked.add(start, end)
        map_[start:end] = b"\1" * (end - start)
        at = chance.randrange(399)
        free = map_.find(0, at)
        assert asked.end_at(at) == ((free if free >= 0 else 400) if map_[at] else at)
        if not map_[at]:
            following = map_.find(1, at)
            assert asked.next(at, 400) == (following if following >= 0 else 400)


def test_kept_runs_lie_inside_of_each_other_and_are_bounded():
    kept, data = Kept(), memoryview(bytes(range(256)) * (1 << 14))
    kept.add(0, data)
    for at in range(100, 2000, 100):
        kept.add(at, data[at : at + 10], pinned=True)
    assert kept.find(3000, 5) == bytes(data[3000:3005])
    for number in range(1, 20):
        kept.add(number << 22, data)
    assert kept.size <= KEPT + len(data)
    assert not kept.find(50, 1)  # the one that was not read for longest
    assert kept.find(105, 3) == bytes(data[105:108])  # pinned


def test_a_large_run_that_was_read_goes():
    kept, data = Kept(), memoryview(bytes(4 << 20))
    kept.add(0, data)
    for at in range(0, 4 << 20, 1 << 20):
        assert kept.size == 4 << 20
        assert len(kept.find(at, 1 << 20)) == 1 << 20
    assert kept.size == 0


def test_a_request_is_ended_once():
    ahead = Ahead(1 << 20, 0)
    request = ahead.begin(0, 10)
    assert isinstance(request.future, Future)
    assert ahead.end(request)
    assert not ahead.end(request)
