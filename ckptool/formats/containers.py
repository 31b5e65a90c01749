"""Lists and sets that a call makes: what a file writes into them is what they hold, or it is refused.

Knows: nodes, Python's own containers. Must not know: dicts (`dicts`), tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ckptool.errors import PickleInvalid
from ckptool.formats.measures import SETS, global_name
from ckptool.pickles.nodes import DICT, PAIR_OPS, Box, Obj, elements, items_of

_DEQUE = "collections.deque"


def check_contents(node: Any, is_tensor: Callable[[Any], bool]) -> None:
    """Raise PickleInvalid for a deque, set or frozenset that would hold other things than are
    written in it: made of a tensor (whose rows it would hold) or of a dict (its keys), items set
    by number, or a deque of more items than its `maxlen`, which drops the first.
    """
    name = global_name(node.fn)
    if name not in (_DEQUE, *SETS):
        return
    args = items_of(node.args) or ()
    given = args[0] if args else ()
    if (type(given) is Box and given.kind == DICT) or is_tensor(given):
        raise PickleInvalid(f"a {name} that is made of no list", offset=node.end)
    if any(batch.op in PAIR_OPS for batch in node.batches or ()):
        raise PickleInvalid(f"a {name} whose items are set again", offset=node.end)
    most = args[1] if name == _DEQUE and len(args) > 1 else None
    count = len(items_of(given) or ()) + sum(1 for box in (given, node) for _ in _added(box))
    if most is not None and not (type(most) is int and count <= most):
        text = f"a deque of {count:,} items and of less room: some would be dropped"
        raise PickleInvalid(text, offset=node.end)


def _added(node: Any) -> Iterable[Any]:
    return elements(node) if type(node) in (Box, Obj) else ()
