"""Every hostile case, every verb: the right answer, and what must hold whatever the answer is."""

from __future__ import annotations

import json
import os
import re
import struct

import pytest
import torch
from hostile.blocks import SHOWN
from hostile.cases import DONE, TROUBLE
from hostile.corpus import CORPUS
from hostile.runner import TAKES_OUT, TASKS

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the runner forks")

UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\xa0\xad\u034f\u061c\u115f\u1160\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u2800"
    "\u3000\u3164\ufe00-\ufe0f\ufeff\uffa0\ud800-\udfff\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
SHARED_CPU = 2
"""CPU seconds on a core that others use, for one second on a core of one's own."""
CALLS = {"api": 4}
"""How many answers a task asks for."""
LINES = 150
"""No answer about one of these files fills more of a screen, but for the table of its keys."""


def operation(task):
    return task.partition("-")[0]


def check(label, asker, tasks):
    """Ask about one case; all that is wrong with the answers at once."""
    case = CORPUS[label]
    file = asker.laid(label)
    before = listing(file.parent)
    out, answers = asker.ask(file, tasks)
    assert not asker.marker.exists(), "code of the file ran"
    assert list(answers) == list(tasks)
    wrong = []
    for task, row in answers.items():
        found = (*held(case, task, row), *heard(row, asker), *right(case, task, row))
        wrong += [f"{task}: {text}" for text in found]
    assert not wrong, "\n".join(wrong)
    assert listing(file.parent) == before
    return out, answers


def listing(folder):
    stats = ((path.name, path.lstat()) for path in folder.iterdir())
    return {name: (stat.st_size, stat.st_mtime_ns, stat.st_mode) for name, stat in stats}


def held(case, task, row):
    """What holds for every answer."""
    text = row["out"] + row["err"]
    if "Traceback (most recent call last)" in text:
        yield f"a traceback: {text[-2000:]}"
    if row["status"] not in (0, 1, 2):
        yield f"exit status {row['status']}: {row['err'][-300:]}"
    if found := UNSEEN.search(text):
        yield f"{found.group()!r} reaches the terminal"
    if row["cpu"] > case.seconds * SHARED_CPU * CALLS.get(task, 1):
        yield f"{row['cpu']:.1f} s"
    if row["megabytes"] > case.megabytes:
        yield f"{row['megabytes']} MB"
    if row["left"]:
        yield f"left in the folder of outputs: {row['left']}"
    if row["err"].count("\n") > LINES:
        yield f"{row['err'].count(chr(10))} lines on stderr"


def heard(row, asker):
    """Nothing is imported, started or unpickled; nothing is opened but the files asked about."""
    for event in row["events"]:
        kind, *words = event.split(" ", 2)
        if kind != "open":
            yield f"heard: {event}"
            continue
        mode, path = words
        inside = path.startswith((f"{asker.home}/", "/proc/self/"))
        if not inside or (mode == "w" and not path.startswith(f"{asker.home}/out")):
            yield f"opened ({mode}): {path}"


def right(case, task, row):
    """The answer itself."""
    if task == "api":
        yield from api(case, json.loads(row["out"]))
        return
    if task == "usage":
        if row["status"] != TROUBLE:
            yield f"exit status {row['status']} for a path that is not there"
        return
    want = case.wanted(operation(task), dry=task == "pth-json")
    if row["status"] != want:
        yield f"exit status {row['status']}, not {want}: {row['err'][:500]}"
    elif "json" in task:
        yield from slugs(case, task, json.loads(row["out"]))
    elif want == TROUBLE and task != "verify":
        lines = row["err"].splitlines()
        if not lines or not lines[0].startswith("ckptool: "):
            yield f"no reason: {row['err'][:300]}"
        if len(lines) > 4 or len(lines[0]) > 2000:
            yield f"more than a reason and a hint: {row['err'][:600]}"


def slugs(case, task, data):
    """The slug stands in the JSON of every refusal, and in the notes of the verbs that warn."""
    data = data[0] if isinstance(data, list) else data
    said = {row["slug"] for row in (*data.get("notes", ()), *data.get("findings", ()))}
    if "error" in data:
        said.add(data["error"]["slug"])
    silent = task == "diff-json" and case.want.diff != TROUBLE  # it compares, and judges nothing
    if case.want.slug and not silent and case.want.slug not in said:
        yield f"{sorted(said)}, not {case.want.slug}"


def api(case, said):
    """Exceptions of the same status; `could_run_code` where inspect exits 1."""
    for name, (status, slug, text) in said.items():
        want = case.wanted("inspect" if name == "open" else name, dry=name in TAKES_OUT)
        if name == "open" and want != TROUBLE:
            want = DONE
        if status != want:
            yield f"{name} says {status}, not {want}: {slug} {text[:300]}"
        elif want == TROUBLE and not (slug and text):
            yield f"{name} refuses without a reason"


# -- what comes out ------------------------------------------------------------------------------
def tensors_of(path):
    """{key: numbers} of a .safetensors, by the format's own words."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    body = data[8 + size :]
    found = {}
    for key, row in header.items():
        first, last = row["data_offsets"]
        code = {"F32": "f", "I64": "q"}[row["dtype"]]
        found[key] = list(
            struct.unpack(f"<{(last - first) // struct.calcsize(code)}{code}", body[first:last])
        )
    return found


def check_outputs(case, out):
    """Every `w` and `b` has its numbers, a control all its keys; nothing in a .pth runs code."""
    safe, pth = out / "out.safetensors", out / "out.pth"
    if safe.exists():
        found = tensors_of(safe)
        for key in set(found) & set(SHOWN) if case.weights else ():
            assert found[key] == SHOWN[key]
        assert not case.keys or set(found) == set(case.keys)
    if pth.exists() and case.keys and case.loads:
        loaded = torch.load(pth, "cpu", weights_only=True)
        loaded = loaded.get("state_dict", loaded)
        assert set(loaded) == set(case.keys)
        for key in set(loaded) & set(SHOWN):
            assert loaded[key].flatten().tolist() == SHOWN[key]


# -- the tests -----------------------------------------------------------------------------------
def usual(case):
    return [task for task in TASKS if operation(task) not in case.long]


@pytest.mark.parametrize("label", CORPUS)
def test_case(label, asker):
    case = CORPUS[label]
    out, answers = check(label, asker, usual(case))
    check_outputs(case, out)
    for task, name in (("pth", "out.pth"), ("safetensors", "out.safetensors")):
        if task in answers:
            assert (out / name).exists() is (answers[task]["status"] == DONE)


@pytest.mark.long
@pytest.mark.parametrize("label", [label for label, case in CORPUS.items() if case.long])
def test_case_that_takes_long(label, asker):
    case = CORPUS[label]
    out, _ = check(label, asker, [task for task in TASKS if operation(task) in case.long])
    check_outputs(case, out)


def test_the_watch_hears_what_it_must(asker):
    """The checks above can fail: where a payload does run, it is heard and leaves its marker."""
    out, answers = asker.ask(asker.laid("file/bare"), ["unpickle"])
    row = answers["unpickle"]
    try:
        assert asker.marker.exists()
        told = " ".join(heard(row, asker))
        assert "pickle.find_class" in told
        assert "os.system" in told
        assert list(right(CORPUS["control/plain"], "inspect", row | {"status": 1}))
    finally:
        asker.marker.unlink(missing_ok=True)
    assert not any(out.iterdir())
