"""What needs torch: model definitions, tensors on devices. `devices` alone works without it."""

from __future__ import annotations

from ckptool.errors import CkptError, Unsupported


def torch_missing(error: Exception) -> CkptError:
    """The error where torch is needed and cannot be imported."""
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        text, hint = "this needs torch, which is not installed here", "pip install 'ckptool[torch]'"
    else:
        text, hint = f"torch cannot be imported: {error}", None
    return Unsupported(text, hint=hint, slug="torch-missing")
