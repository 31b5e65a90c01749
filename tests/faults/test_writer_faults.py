"""Every kind of write under every fault that a kernel, a disk or a signal can put to it.

After each: the old files to the byte or the new ones complete, a status and a slug that say
which, no temp file but after SIGKILL, and then the next run names it.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest
from faults_support import ROWS, Bench, lay_inputs, temps, why_no_strace

pytestmark = pytest.mark.skipif(bool(why_no_strace()), reason=why_no_strace())

MOST = 30  # of the calls of one kind that are made to fail
DONE, REFUSED = frozenset({0}), frozenset({2})
EITHER = DONE | REFUSED  # both are right, each with its own files
TEMP, FOLDER = ".tmp", "O_DIRECTORY"


class Fault(NamedTuple):
    """What strace does to which call; statuses that are right; the slug of a refusal, if it
    matters; what must stand in the traced line for the call to count.
    """

    call: str
    how: str
    statuses: frozenset = REFUSED
    slug: str = ""
    mark: str | None = None


SPACE, IO, WHERE = "output-space", "output-io", "output-folder"
FAULTS = {
    "the disk is full": Fault("write", "error=ENOSPC", slug=SPACE),
    "the quota is used up": Fault("write", "error=EDQUOT", slug=SPACE),
    "a write fails": Fault("write", "error=EIO", slug=IO),
    "a write is interrupted": Fault("write", "error=EINTR", DONE),
    "a write lies": Fault("write", "retval=10"),
    "a write takes nothing": Fault("write", "retval=0", EITHER),
    "the disk is full for the kernel": Fault("copy_file_range", "error=ENOSPC", slug=SPACE),
    "a copy fails": Fault("copy_file_range", "error=EIO", slug=IO),
    "a copy is interrupted": Fault("copy_file_range", "error=EINTR", DONE),
    "a copy lies": Fault("copy_file_range", "retval=1000"),
    "the kernel cannot copy": Fault("copy_file_range", "error=EXDEV", DONE),
    "a written file cannot be read": Fault("pread64", "error=EIO"),
    "too many open files": Fault("openat", "error=EMFILE", mark="O_EXCL"),
    "the disk is read-only": Fault("openat", "error=EROFS", slug=WHERE, mark="O_EXCL"),
    "a temp file cannot be read": Fault("openat", "error=EIO", EITHER),
    "a flush fails": Fault("fsync", "error=EIO", EITHER, slug=IO),
    "the flush of a temp file fails": Fault("fsync", "error=EIO", slug=IO, mark=TEMP),
    "the disk is full at the flush": Fault("fsync", "error=ENOSPC", EITHER, slug=SPACE),
    "a flush is interrupted": Fault("fsync", "error=EINTR", DONE),
    "a close fails": Fault("close", "error=EIO", EITHER),
    "a rename is denied": Fault("rename", "error=EACCES", slug=WHERE),
    "a rename fails": Fault("rename", "error=EIO", slug=IO),
    "a link fails": Fault("link", "error=EIO", slug=IO),
    "a disk without links": Fault("link", "error=EPERM", DONE),
    "an unlink fails": Fault("unlink", "error=EIO", EITHER),
    "a cut fails": Fault("ftruncate", "error=EIO", slug=IO),
    "a cut is interrupted": Fault("ftruncate", "error=EINTR", DONE),
    "a cut lies": Fault("ftruncate", "retval=0"),
    "no mode bits": Fault("fchmod", "error=EPERM", EITHER),
    "no owners": Fault("fchown", "error=EPERM", DONE),
    "no folder": Fault("mkdir", "error=ENOSPC", slug=SPACE),
    "no locks": Fault("flock", "error=ENOLCK", DONE),
    "locked by another run": Fault("flock", "error=EAGAIN"),
}
STOPPED = ("write", "copy_file_range", "fsync", "rename", "link", "unlink", "ftruncate", "mkdir")
KILLS = {f"killed at {call}": Fault(call, "signal=SIGKILL") for call in STOPPED}
KILLS["killed at open"] = Fault("openat", "signal=SIGKILL", mark="O_EXCL")
INTERRUPTS = {f"^C at {call}": Fault(call, "signal=SIGINT") for call in STOPPED}
INTERRUPTS["^C at open"] = Fault("openat", "signal=SIGINT", mark="O_EXCL")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    lay_inputs(folder)
    return folder


@pytest.fixture(params=ROWS)
def bench(request, inputs, tmp_path):
    for path in inputs.iterdir():
        os.link(path, tmp_path / path.name)
    return Bench(tmp_path, ROWS[request.param])


# -- what must be so ---------------------------------------------------------------------------
def whole(bench, after):
    """Every file is the old or the new one, to the byte; nobody else's file is touched."""
    found = {k: v for k, v in after.state.items() if k not in temps(after.state)}
    for name, data in found.items():
        assert data in (bench.old.get(name), bench.new.get(name)), f"{name} is torn"
    kept = bench.old.keys() & bench.new.keys()
    assert kept <= found.keys(), "a file is missing"
    index = "out/model.safetensors.index.json"
    if found.get(index, b"") not in (b"", bench.old.get(index)):
        assert found == bench.new, "the index came before its shards"


def after_error(bench, fault, after):
    assert after.fired
    assert "Traceback" not in after.text
    assert after.status in fault.statuses, after.text
    assert temps(after.state) == [] or fault.call == "unlink"
    if after.status == 0:
        assert {k: v for k, v in after.state.items() if k not in temps(after.state)} == bench.new
        return
    error = after.said["error"]
    assert error["text"]
    assert "bug" not in error["text"]
    assert error["hint"], "it does not say what to do"
    assert error["slug"].startswith("output-") or fault.call in ("pread64", "openat", "close")
    assert fault.slug in ("", error["slug"])
    whole(bench, after)
    in_place_already = bench.row.several and "in place already" in error["text"]
    if in_place_already:
        assert fault.call == "rename"
    elif "the file was cut back" in error["text"]:
        assert fault.call == "fsync"
        assert bench.row.in_place
        assert after.state["net.pth"] == bench.new["net.pth"]
    elif fault.call != "unlink":
        assert after.state == bench.old


def after_interrupt(bench, after):
    assert after.fired
    assert "Traceback" not in after.text
    assert after.status in (130, 0), after.text  # 0: it came when all was done
    assert temps(after.state) == []
    assert after.state in (bench.old, bench.new)


def after_kill(bench, after):
    assert after.fired
    assert after.status == -9
    if not bench.row.in_place:
        whole(bench, after)
        left = temps(after.state)
        again = bench.again()
        notes = [row["text"] for row in again.said["notes"] if row["slug"] == "stale-temp"]
        assert again.status == 0, again.text
        for name in left:
            assert any(os.path.basename(name) in text and "remove it" in text for text in notes)
        assert {k: v for k, v in again.state.items() if k not in left} == bench.new
        return
    path, journal = "net.pth", ".net.pth.ckptool-journal"
    if journal in after.state:
        after = bench.again("convert", "there/net.pth", "--recover")
        assert after.status == 0, after.text
        assert after.said["notes"] == [] or temps(after.state)
    assert journal not in after.state
    assert after.state[path] in (bench.old[path], bench.new[path])
    assert after.state["keep"] == bench.old["keep"]


JUDGES = ((FAULTS, None), (INTERRUPTS, after_interrupt), (KILLS, after_kill))


def injected(bench, choose):
    """Run the chosen points of every fault; what went wrong, one line each, and the count."""
    wrong, count = [], 0
    for faults, judge in JUDGES:
        for number, (name, fault) in enumerate(faults.items()):
            points = bench.points(fault.call, fault.mark)[:MOST]
            for point in choose(points, number, name):
                after, count = bench.run(fault.call, fault.how, point), count + 1
                try:
                    judge(bench, after) if judge else after_error(bench, fault, after)
                except AssertionError as error:
                    said = (str(error) or "no").splitlines()[0][:200]
                    wrong.append(f"{name} {point}: {said}; {after.status} {after.text[-350:]}")
    return wrong, count


QUICK = {"the disk is full", "^C at write", "killed at write", "a copy lies", "a cut lies"}


FEW = ("zip to zip", "zip to shards", "zip to safetensors", "in place")


@pytest.mark.parametrize("bench", FEW, indirect=True)
def test_a_few_faults_of_each_kind(bench):
    """A few points of some rows, others in each; all of them are the next test."""
    row = list(ROWS.values()).index(bench.row)

    def choose(points, number, name):
        if not points or (name not in QUICK and (number + row) % 12):
            return []
        return [points[(7 * number + 3 * row) % len(points)]]

    wrong, count = injected(bench, choose)
    assert not wrong, "\n".join(wrong)
    assert count > 1


@pytest.mark.long
def test_every_fault_at_the_first_thirty_calls(bench, record_property):
    wrong, count = injected(bench, lambda points, number, name: points)
    record_property("injected", count)
    print(f"{count} faults injected")
    assert not wrong, "\n".join(wrong)
