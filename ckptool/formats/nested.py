"""A nested state_dict put together from the places of its values, as an expression of a pickle.

Knows: dicts by text, lists by number. Must not know: what the values are. The rules are those of
torch/distributed/checkpoint/_traverse.py, set_element.
"""

from __future__ import annotations

from ckptool.checkpoint import Path
from ckptool.errors import HeaderInvalid, LimitExceeded
from ckptool.pickles.write import filled

_GAPS = 10_000  # list entries that nothing was saved for (empty dicts, mostly)


class _Branch:
    """A dict (all names are text) or a list (all are numbers)."""

    __slots__ = ("below",)

    def __init__(self) -> None:
        self.below: dict[str | int, _Branch | bytes] = {}


class Nested:
    """Values put at their places, in order."""

    def __init__(self) -> None:
        self._root = _Branch()

    def put(self, path: Path, value: bytes, key: str) -> None:
        """Raise HeaderInvalid where something else stands at this place already."""
        branch = self._root
        for name in path[:-1]:
            inner = branch.below.setdefault(name, _Branch())
            if type(inner) is not _Branch:
                raise _taken(path, key)
            branch = inner
        if path[-1] in branch.below:
            raise _taken(path, key)
        branch.below[path[-1]] = value

    def expression(self) -> bytes:
        """All of it. Raises HeaderInvalid where numbers and texts name parts of one container."""
        return _expression(self._root, top=True)


def _taken(path: Path, key: str) -> HeaderInvalid:
    where = ".".join(map(str, path))
    return HeaderInvalid(f"two values at one place of the state_dict: {where}", key=key)


def _expression(node: _Branch | bytes, top: bool = False) -> bytes:
    if isinstance(node, bytes):
        return node
    rows = {name: _expression(value) for name, value in node.below.items()}
    texts = {name: made for name, made in rows.items() if isinstance(name, str)}
    if len(texts) == len(rows):
        return filled(b"}", texts.items())
    if texts or top:
        raise HeaderInvalid("a container that is both a dict and a list")
    places = {name: made for name, made in rows.items() if isinstance(name, int)}
    count = max(places) + 1
    if count - len(places) > _GAPS:
        raise LimitExceeded("value-count", f"a list of {count:,} with {len(places):,} values")
    return b"](" + b"".join(places.get(at, b"N") for at in range(count)) + b"e"
