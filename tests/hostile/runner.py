"""Runs ckptool on one hostile file after another, each in a forked child that is watched.

Started by test_corpus as a fresh interpreter without torch: what a child holds is what the command
holds. It reads jobs as lines of JSON and answers each with one line. An audit hook hears in the
child every import, process, socket, loaded pickle and opened file, whoever causes it.

    job     {"file", "out": an empty folder, "plain": a control, "marker", "tasks": [name]}
    answer  {"tasks": {name: {"status", "out", "err", "cpu", "megabytes", "events", "left"}},
             "died": how the child ended, or ""}
"""

from __future__ import annotations

import codecs
import contextlib
import gc
import io
import json
import os
import pkgutil
import resource
import signal
import sys
import tempfile
import traceback
from importlib import import_module

ADDRESS_BYTES, WALL_SECONDS = 4 << 30, 300
TELLING = ("import", "pickle.find_class", "os.system", "os.exec", "os.fork", "os.forkpty",
           "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn", "socket.connect",
           "socket.__new__", "ctypes.dlopen", "urllib.Request", "marshal.loads", "exec", "compile",
           "open")  # fmt: skip
TASKS = ("inspect", "inspect-json", "inspect-csv", "verify", "verify-json", "pth", "pth-json",
         "safetensors", "diff", "diff-json", "usage", "api")  # fmt: skip
TAKES_OUT = {"pth": "out.pth", "safetensors": "out.safetensors"}
ACCESS = os.O_WRONLY | os.O_RDWR


def command(task: str, job: dict[str, str]) -> list[str]:
    """The command line of a task."""
    file, plain = job["file"], job["plain"]
    if task in TAKES_OUT:
        return ["convert", file, "-o", os.path.join(job["out"], TAKES_OUT[task]), "--no-fsync"]
    return {
        "inspect": ["inspect", file, "-v"],
        "inspect-json": ["inspect", file, "--json"],
        "inspect-csv": ["inspect", file, "--format", "csv"],
        "verify": ["verify", file],
        "verify-json": ["verify", file, "--json"],
        "pth-json": ["convert", file, "-o", os.path.join(job["out"], "j.pth"), "--json", "-n"],
        "diff": ["diff", file, plain],
        "diff-json": ["diff", plain, file, "--json"],
        "usage": ["inspect", file, "--at", "nowhere"],
    }[task]


def ask_api(job: dict[str, str]) -> dict[str, object]:
    """What Python callers get: an exception's status and slug, or what the report says."""
    import ckptool

    said: dict[str, object] = {}
    for name, ask in (
        ("inspect", lambda: ckptool.inspect(job["file"])),
        ("open", lambda: ckptool.open(job["file"])),
        ("pth", lambda: ckptool.convert(job["file"], os.path.join(job["out"], "a.pth"), dry_run=True)),
        ("safetensors", lambda: ckptool.convert(
            job["file"], os.path.join(job["out"], "a.safetensors"), dry_run=True)),
    ):  # fmt: skip
        try:
            answer = ask()
        except ckptool.CkptError as error:
            said[name] = [error.exit_status, error.slug, str(error)]
            continue
        code = getattr(answer, "could_run_code", False)
        said[name] = [int(code), "", ""]
        if name == "open":
            answer.close()
    return said


def run_task(task: str, job: dict[str, str]) -> int:
    from ckptool.cli.main import main

    if task == "api":
        sys.stdout.write(json.dumps(ask_api(job)))
        return 0
    if task == "unpickle":  # what must never happen; the test of the watch itself
        import pickle

        with open(job["file"], "rb") as stream:
            pickle.load(stream)
        return 0
    return main(command(task, job))


def used() -> float:
    now = resource.getrusage(resource.RUSAGE_SELF)
    return now.ru_utime + now.ru_stime


def watched(event: str, args: tuple[object, ...]) -> str | None:
    """A line about an event that must not happen without a reason, or None."""
    if not event.startswith(TELLING):
        return None
    if event != "open":
        return f"{event} {str(args)[:200]}"
    path, mode, flags = args
    if isinstance(path, int):
        return None
    writes = "w" if flags & ACCESS or (isinstance(mode, str) and set(mode) & set("wax+")) else "r"
    return f"open {writes} {os.fsdecode(path)}"


def in_child(job: dict[str, str], answers: int) -> None:
    """All tasks of a job: to `answers` a line before each and a line after it."""
    events: list[str] = []

    def hear(event: str, args: tuple[object, ...]) -> None:
        if (line := watched(event, args)) is not None:
            events.append(line)

    os.environ["MARKER"] = job["marker"]
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(WALL_SECONDS)
    gc.disable()
    sys.addaudithook(hear)
    base = peak()
    for task in job["tasks"]:
        tell(answers, {"begins": task})
        gc.collect()
        events.clear()
        row = {"task": task, **run_caught(task, job)}
        row |= {"events": list(events), "megabytes": (peak() - base) >> 10}
        tell(answers, row | {"left": tidy(job["out"], row["status"], task)})


def run_caught(task: str, job: dict[str, str]) -> dict[str, object]:
    """Exit status, what was printed, CPU seconds; status -1 for what even main() let through."""
    out, err = io.StringIO(), io.StringIO()
    started = used()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = run_task(task, job)
        except BaseException:
            traceback.print_exc()
            status = -1
    return {"status": status, "out": out.getvalue(), "err": err.getvalue(), "cpu": used() - started}


def tidy(folder: str, status: object, task: str) -> list[str]:
    """What a task left in the folder of outputs, and should not have; that is removed."""
    wanted = TAKES_OUT.get(task) if status == 0 else None
    left = sorted(set(os.listdir(folder)) - {TAKES_OUT[name] for name in TAKES_OUT if name != task})
    for name in left:
        if name != wanted:
            os.unlink(os.path.join(folder, name))
    return ["nothing"] if wanted and wanted not in left else [n for n in left if n != wanted]


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def tell(answers: int, row: dict[str, object]) -> None:
    data = (json.dumps(row) + "\n").encode()
    while data:
        data = data[os.write(answers, data) :]


def answer(job: dict[str, str]) -> dict[str, object]:
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if not child:
            status = 99
            try:
                in_child(job, said.fileno())
                status = 0
            finally:
                os._exit(status)
        _, ended = os.waitpid(child, 0)
        said.seek(0)
        rows = [json.loads(line) for line in said]
    begun = [row["begins"] for row in rows if "begins" in row]
    died = f"{os.waitstatus_to_exitcode(ended)} in {begun[-1:]}" if ended else ""
    return {"tasks": {row["task"]: row for row in rows if "task" in row}, "died": died}


def warm(job: dict[str, str]) -> None:
    """Import all that a command may import, so that a child has nothing left to import."""
    import ckptool

    codecs.lookup("raw_unicode_escape")
    for module in pkgutil.walk_packages(ckptool.__path__, "ckptool."):
        if not module.name.startswith(("ckptool.models", "ckptool.__main__")):
            import_module(module.name)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for task in job["tasks"]:
            run_task(task, job)
    for name in os.listdir(job["out"]):
        os.unlink(os.path.join(job["out"], name))


def serve() -> None:
    lines = iter(sys.stdin.readline, "")
    warm(json.loads(next(lines)))
    gc.freeze()  # a child that collects would copy every page of what we imported
    for line in lines:
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
