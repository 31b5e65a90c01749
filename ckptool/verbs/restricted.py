"""What torch.load(weights_only=True) would refuse to name.

Knows: the names torch's restricted loader allows. Must not know: printing.
Source: torch/_weights_only_unpickler.py, _get_allowed_globals, torch 2.13; a test compares.
"""

from __future__ import annotations

from ckptool.checkpoint import BY_TORCH_STORAGE, DTYPES, Checkpoint

_UTILS = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter",
          "_rebuild_parameter_with_state", "_rebuild_qtensor", "_rebuild_sparse_tensor",
          "_rebuild_nested_tensor", "_rebuild_meta_tensor_no_storage", "_rebuild_wrapper_subclass",
          "_rebuild_device_tensor_from_cpu_tensor", "_rebuild_device_tensor_from_numpy")  # fmt: skip
_SCHEMES = ("per_tensor_affine", "per_channel_affine", "per_tensor_symmetric",
            "per_channel_symmetric", "per_channel_affine_float_qparams")  # fmt: skip
ALLOWED = frozenset((
    "_codecs.encode", "builtins.bytearray", "builtins.complex", "builtins.set",
    "collections.Counter", "collections.OrderedDict", "torch.Size", "torch.Tensor", "torch.device",
    "torch._tensor._rebuild_from_type_v2", "torch.nn.parameter.Parameter",
    "torch.serialization._get_layout", "torch.storage.TypedStorage", "torch.storage.UntypedStorage",
    *(f"torch._utils.{name}" for name in _UTILS),
    *(f"torch.{name}" for name in (*DTYPES, *_SCHEMES)),
    *(f"torch.{name}" for name in BY_TORCH_STORAGE),
    *(f"torch.{name.replace('Storage', 'Tensor')}" for name in BY_TORCH_STORAGE if name[0] not in "QC" or name == "CharStorage"),
))  # fmt: skip


def refused_by_torch(checkpoint: Checkpoint) -> list[str]:
    """Names in the file that the restricted loader does not allow, in file order."""
    return [row.name for row in checkpoint.globals if row.name not in ALLOWED]
