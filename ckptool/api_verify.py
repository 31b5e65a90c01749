"""The Python API of verify: one function with a typed result.

Knows: verbs, the look. Must not know: click; nothing here prints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from ckptool.limits import DEFAULT, Limits
from ckptool.places import PlaceLike
from ckptool.verbs import verify_report as _reporting
from ckptool.verbs.verify import verify_place


@dataclass(frozen=True, slots=True)
class Verification(_reporting.Verification):
    """What `verify` found; as text it is what the command prints. True: whole, and nothing in it
    could run code.
    """

    def __bool__(self) -> bool:
        return not self.exit_status

    def __str__(self) -> str:
        from ckptool.render.verify import verify_text

        return verify_text(self.to_dict())

    def _repr_html_(self) -> str:
        from ckptool.render.verify import verify_html

        return verify_html(self.to_dict())


def verify(
    place: PlaceLike,
    *,
    finite: bool = False,
    progress: Callable[[int, int], None] | None = None,
    limits: Limits = DEFAULT,
) -> Verification:
    """Whether a file (or a folder of shards) is whole, which of its tensors are, and what
    torch.load would make of it. Damage does not raise: it is what is reported.

    `finite` counts NaN and infinities too, `progress` is called with (bytes done, bytes in all).
    Raises CkptError for what is no checkpoint at all or cannot be opened.
    """
    found = verify_place(place, finite, limits, progress)
    return Verification(**{row.name: getattr(found, row.name) for row in fields(found)})
