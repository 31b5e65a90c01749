"""A bare pickle: pickle.dump(state_dict), numpy dictionaries, legacy streams inside bytes.

Knows: torch.storage._load_from_bytes and numpy arrays as nodes. Must not know: verbs.
"""

from __future__ import annotations

from ckptool.checkpoint import Checkpoint, DType, Global, Piece, Storage
from ckptool.errors import CkptError, LimitExceeded, PickleInvalid
from ckptool.formats.arrays import ArrayReader
from ckptool.formats.assemble import assemble, walk_checked
from ckptool.formats.judge import Judge, inert_raw
from ckptool.formats.measures import View, global_name
from ckptool.formats.torch_legacy import read_nested
from ckptool.formats.torch_pickle import Located, TensorReader
from ckptool.limits import DEFAULT, Limits
from ckptool.pickles.nodes import Obj, Raw, items_of
from ckptool.places import Source
from ckptool.spans import Span

NAME = "pickle"
TITLE = "bare pickle"
SUFFIXES = (".pkl", ".pickle")
LOADER = "torch.storage._load_from_bytes"


def read(source: Source, limits: Limits = DEFAULT) -> Checkpoint:
    """Walk the whole file; streams inside bytes are walked in their turn.

    Raises LimitExceeded for a pickle above `limits.pickle_bytes`.
    """
    if source.size > limits.pickle_bytes:
        raise LimitExceeded(
            "pickle-bytes", f"a bare pickle of {source.size:,} bytes", path=source.name
        )
    walked = walk_checked(source.read(0, source.size), 0, limits, "the pickle")
    nested = _Nested(source, limits)
    reader = TensorReader(_nowhere, limits)
    reader.nested = nested.view
    calls = [call for call in walked.calls if global_name(call.fn) == LOADER]
    if len(calls) > limits.nested_streams:
        raise LimitExceeded("nested-streams", f"{len(calls):,} streams inside the pickle")
    for call in calls:
        nested.add(call)
    verdicts = Judge(walked, "the pickle", [id(call) for call in calls if id(call) in nested.views])
    judged = _merged([*verdicts.run(), *nested.verdicts])
    reader.storages = nested.reader.storages
    arrays = ArrayReader(walked.data, source.absolute)
    return assemble(
        source, NAME, walked, reader, limits,
        container=nested, arrays=arrays.read, judged=judged,
    )  # fmt: skip


def _nowhere(key: str, dtype: DType, count: int) -> Located:
    raise PickleInvalid(f"a storage '{key}' outside of the pickle: a data.pkl without its archive")


def _merged(verdicts: list[Global]) -> tuple[Global, ...]:
    """One row a name and verdict: thousands of nested streams name the same classes."""
    rows: dict[tuple[str, str], Global] = {}
    for row in verdicts:
        rows.setdefault((row.name, row.verdict), row)
    return tuple(rows.values())


class _Nested:
    """The legacy streams inside a pickle: one storage each."""

    def __init__(self, source: Source, limits: Limits) -> None:
        self.source = source
        self.limits = limits
        self.views: dict[int, View] = {}
        self.verdicts: list[Global] = []
        self.layout: dict[str, tuple[Piece, ...]] = {}
        self.reader = TensorReader(self._resolve, limits)
        self._streams: dict[int, View] = {}
        self._spelled: dict[str, tuple[Obj, Span]] = {}

    def inline(self, storage: Storage) -> bytes:
        """The bytes of a storage that protocol 2 spells as text: they have no span."""
        call, span = self._spelled[storage.key]
        data = inert_raw((items_of(call.args) or [None])[0]) or b""
        return data[span.offset : span.end]

    def _resolve(self, key: str, dtype: DType, count: int) -> Located:
        return self.layout[key], None

    def view(self, node: Obj) -> View | None:
        """The storage of a _load_from_bytes call."""
        return self.views.get(id(node))

    def add(self, call: Obj) -> None:
        """Walk one stream. What is no literal is left to the judge, who calls it code."""
        args = items_of(call.args) or ()
        data = inert_raw(args[0]) if len(args) == 1 else None
        if data is None:
            return
        known = self._streams.get(id(args[0]))
        if known is None:
            at = args[0].start if type(args[0]) is Raw else None
            known = self._streams[id(args[0])] = self._read(data, at, call)
        self.views[id(call)] = known

    def _read(self, data: bytes, at: int | None, call: Obj) -> View:
        try:
            storage, span, verdicts = read_nested(data, self.limits)
        except CkptError as error:
            raise PickleInvalid(
                f"a stream inside the pickle: {error.text}", offset=call.end
            ) from None
        self.verdicts = list(_merged([*self.verdicts, *verdicts]))
        key = f"{call.end}/{storage.key}"
        if at is not None and span.size:
            self.layout[key] = (Piece(0, self.source.absolute(Span(at + span.offset, span.size))),)
        else:
            self.layout[key] = ()
            self._spelled[key] = (call, span)
        return View(
            self.reader.add_storage(key, storage.dtype, storage.count, storage.device, call)
        )
