"""Look inside, compare and convert PyTorch checkpoints without running them.

The public names are imported when they are first used: `import ckptool` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptool.api import (
        Conversion,
        Devices,
        Inspection,
        OpenCheckpoint,
        convert,
        devices,
        inspect,
        open,  # noqa: A004 - the API's word
        recover,
        undo,
    )
    from ckptool.api_compare import Diff, diff
    from ckptool.api_into import Frozen, Loading, freeze, load_into
    from ckptool.api_load import load
    from ckptool.api_stats import Stats, TensorStats, stats
    from ckptool.api_verify import Verification, verify
    from ckptool.errors import CkptError
    from ckptool.limits import Limits
    from ckptool.records import Record, Reference

__version__ = "0.1.0"

_HOMES = {
    "CkptError": "ckptool.errors",
    "Conversion": "ckptool.api",
    "Devices": "ckptool.api",
    "Diff": "ckptool.api_compare",
    "Frozen": "ckptool.api_into",
    "Inspection": "ckptool.api",
    "Limits": "ckptool.limits",
    "Loading": "ckptool.api_into",
    "OpenCheckpoint": "ckptool.api",
    "Record": "ckptool.records",
    "Reference": "ckptool.records",
    "Stats": "ckptool.api_stats",
    "TensorStats": "ckptool.api_stats",
    "Verification": "ckptool.api_verify",
    "convert": "ckptool.api",
    "devices": "ckptool.api",
    "diff": "ckptool.api_compare",
    "freeze": "ckptool.api_into",
    "inspect": "ckptool.api",
    "load": "ckptool.api_load",
    "load_into": "ckptool.api_into",
    "open": "ckptool.api",
    "recover": "ckptool.api",
    "stats": "ckptool.api_stats",
    "undo": "ckptool.api",
    "verify": "ckptool.api_verify",
}
__all__ = [
    "CkptError",
    "Conversion",
    "Devices",
    "Diff",
    "Frozen",
    "Inspection",
    "Limits",
    "Loading",
    "OpenCheckpoint",
    "Record",
    "Reference",
    "Stats",
    "TensorStats",
    "Verification",
    "__version__",
    "convert",
    "devices",
    "diff",
    "freeze",
    "inspect",
    "load",
    "load_into",
    "open",
    "recover",
    "stats",
    "undo",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ckptool' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
