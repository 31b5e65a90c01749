"""verify: whether a file is whole, which of its tensors are, and what loading it would run.

Knows: what may be given: a file, a folder, an index. Must not know: printing, how it is checked.
"""

from __future__ import annotations

import os

from ckptool.limits import DEFAULT, Limits
from ckptool.places import PlaceLike
from ckptool.verbs.opening import doubting, is_folder, open_place
from ckptool.verbs.reading import is_index
from ckptool.verbs.verify_file import verify_source
from ckptool.verbs.verify_report import Verification
from ckptool.verbs.verify_sums import Progress


def verify_place(
    place: PlaceLike, finite: bool = False, limits: Limits = DEFAULT,
    progress: Progress | None = None,
) -> Verification:  # fmt: skip
    """Check one file, or a folder of shards (or its index). Raises CkptError for what is no
    checkpoint at all, or cannot be opened.
    """
    path = os.fsdecode(place) if isinstance(place, str | bytes | os.PathLike) else ""
    if path and is_index(path):
        place = path = os.path.dirname(path) or "."
    if is_folder(place) or path.endswith(".index.json"):
        from ckptool.verbs.verify_shards import verify_folder

        return verify_folder(path, finite, limits, progress)

    def checked(patient: bool) -> Verification:
        source, said = open_place(place, strict=True, patient=patient)
        with source:
            return verify_source(source, finite, limits, progress, said)

    return doubting(checked)
