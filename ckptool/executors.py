"""Who runs tasks: threads here, or any `concurrent.futures.Executor`.

Knows: which executors there are, what becomes of a task that fails. Must not know: what a task does.
There is no scheduler of our own: what an executor runs again after a worker died, and where, is its
own affair.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any, TypeVar

from ckptool import __version__, places
from ckptool.errors import CkptError, EngineError, UsageError
from ckptool.spans import Address
from ckptool.urls import masked

_T = TypeVar("_T")
_D = TypeVar("_D")
Engine = Executor | str
"""An executor, or `dask=ADDRESS`."""
Far = Callable[[Any], Any]
"""Does a task wherever a worker is."""
Here = Callable[[Any, Callable[[int], object]], Any]
"""Does a task in one of our own threads, telling another function how far it is."""
AGAIN = "run the same command again with --resume: what is done stays done"


def prepare(version: str, sources: Sequence[Address]) -> None:
    """Make a worker ready for a task of a driver of this version. Raises UsageError."""
    if version != __version__:
        text = f"a worker has ckptool {__version__}, the driver {version}"
        raise UsageError(text, hint="install the same version on all machines")
    if places.open_url is None and any(places.is_url(row.uri) for row in sources):
        from ckptool.remote import open_url

        places.open_url = open_url  # a worker has not gone through the verbs, which set it


def refuse_secrets(urls: Iterable[str]) -> None:
    """Raise UsageError for a URL that holds a password or a signature: tasks travel, and are
    shown by schedulers.
    """
    for url in urls:
        if masked(url) != url:
            raise UsageError(
                "the address holds a password or a signature, which would go to the workers",
                path=masked(url), hint="put it into the environment of the workers, or use --jobs",
            )  # fmt: skip


class _Stopped(Exception):
    """A thread of ours has no reason to go on."""


def _run_here(stopped: Callable[[], bool], here: Here, task: Any) -> Any:
    """A task in one of our own threads, which leaves off within 16 MiB when it is `stopped`."""

    def progress(_: int) -> None:
        if stopped():
            raise _Stopped

    progress(0)
    return here(task, progress)


@contextlib.contextmanager
def hands_of(
    engine: Engine | None, jobs: int, far: Far, here: Here
) -> Iterator[tuple[Executor, Far]]:
    """An executor and what it is given to run: `far`, or with the engine `None`, which is as many
    threads as `jobs`, `here`.

    Raises EngineError when a scheduler cannot be reached, UsageError for an unknown engine.
    """
    if isinstance(engine, str):
        with _dask(engine) as executor:
            yield executor, far
    elif engine is not None:
        yield engine, far
    else:
        from threading import Event

        stopped = Event()
        pool = ThreadPoolExecutor(jobs, "ckptool-job")
        try:
            yield pool, partial(_run_here, stopped.is_set, here)
        finally:
            stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _dask(engine: str) -> Iterator[Executor]:
    name, _, address = engine.partition("=")
    if name != "dask" or not address:
        raise UsageError(f"no engine is called '{engine}'", hint="dask=tcp://HOST:PORT")
    try:
        from distributed import Client
    except ImportError as error:
        hint = "pip install 'ckptool[dask]'"
        raise EngineError(f"Dask is not installed: {error}", hint=hint) from error
    where = {"scheduler_file": address} if address.endswith(".json") else {"address": address}
    try:
        client = Client(**where, set_as_default=False)
    except (OSError, ValueError) as error:
        text = f"no Dask scheduler answers at {address}: {error}"
        raise EngineError(text, hint="check the address, and that it runs") from error
    with client:
        yield client.get_executor(pure=False)


def carry_out(
    executor: Executor,
    work: Callable[[_T], _D],
    tasks: Sequence[_T],
    received: Callable[[_T, _D], object],
    failed: Callable[[BaseException, list[Future[_D]]], object] | None = None,
) -> None:
    """Run the tasks in any order; each answer goes to `received`, in this thread.

    Raises the first failure, when none of the others is begun any more: what a worker raises, and
    EngineError where the executor gave up. Before, `failed` gets it, and what is still running.
    """
    waiting: dict[Future[_D], _T] = {}
    try:
        _gather(executor, work, tasks, received, waiting)
    except BaseException as error:
        running = [future for future in waiting if not future.cancel() and not future.done()]
        if failed:
            failed(error, running)
        raise


def _gather(
    executor: Executor, work: Callable[[_T], _D], tasks: Sequence[_T],
    received: Callable[[_T, _D], object], waiting: dict[Future[_D], _T],
) -> None:  # fmt: skip
    try:
        for task in tasks:
            waiting[executor.submit(work, task)] = task
        for future in as_completed(waiting):
            received(waiting[future], future.result())
    except (CkptError, OSError):
        raise
    except Exception as error:
        text = f"the engine gave up: {type(error).__name__}: {str(error)[:300]}"
        raise EngineError(text, hint=AGAIN) from error
