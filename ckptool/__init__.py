"""Look inside, compare and convert PyTorch checkpoints without running them.

The public names are imported when they are first used: `import ckptool` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptool.api import (
        Conversion,
        Inspection,
        OpenCheckpoint,
        convert,
        inspect,
        open,  # noqa: A004 - the API's word
        recover,
        undo,
    )
    from ckptool.errors import CkptError
    from ckptool.limits import Limits

__version__ = "0.1.0"

_HOMES = {
    "CkptError": "ckptool.errors",
    "Conversion": "ckptool.api",
    "Inspection": "ckptool.api",
    "Limits": "ckptool.limits",
    "OpenCheckpoint": "ckptool.api",
    "convert": "ckptool.api",
    "inspect": "ckptool.api",
    "open": "ckptool.api",
    "recover": "ckptool.api",
    "undo": "ckptool.api",
}
__all__ = [
    "CkptError",
    "Conversion",
    "Inspection",
    "Limits",
    "OpenCheckpoint",
    "__version__",
    "convert",
    "inspect",
    "open",
    "recover",
    "undo",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ckptool' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
