"""The names that are harmless, and the shapes of their arguments (hostile 3).

Knows: exact (module, name) pairs, never a module as a whole where its functions could be
called. Must not know: nodes beyond their arguments; the judge applies these tables.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from ckptool.checkpoint import DTYPE_ALIASES
from ckptool.formats.rebuild import BUILDERS
from ckptool.pickles.nodes import Global as GlobalNode
from ckptool.pickles.nodes import text_of

# Modules of the standard library that `sys.stdlib_module_names` of this Python leaves out: those
# of other versions, older and newer, and its tests. A class of theirs is not foreign.
_OTHER_STANDARD = frozenset((
    "distutils", "imp", "asynchat", "asyncore", "smtpd", "cgi", "cgitb", "crypt", "pipes", "telnetlib",
    "uu", "xdrlib", "nntplib", "commands", "lib2to3", "binhex", "formatter", "parser", "symbol",
    "macpath", "dummy_threading", "_dummy_thread", "_bootlocale", "aifc", "audioop", "chunk", "imghdr",
    "mailcap", "msilib", "nis", "ossaudiodev", "sndhdr", "spwd", "sunau", "annotationlib",
    "compression", "_colorize", "_pyrepl", "_interpreters", "_interpchannels", "_interpqueues",
    "_android_support", "_apple_support", "_ios_support", "_py_warnings", "_remote_debugging", "_zstd",
    "_hmac", "_types", "test", "xxlimited", "xxlimited_35", "xxsubtype"))  # fmt: skip
_STANDARD_TESTS = ("_test", "_xx")  # _testcapi, _xxtestfuzz …
# What torch brings along wherever it is installed (its Requires-Dist and theirs, and what every
# virtual environment has): not classes that nobody has got. sympy's matrices evaluate texts.
_TORCH_REQUIRES = frozenset((
    "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "setuptools", "sympy",
    "typing_extensions", "isympy", "triton", "nvidia", "cuda", "pip", "pkg_resources", "wheel",
    "_distutils_hack"))  # fmt: skip
_CODECS = ("latin1", "latin-1", "iso-8859-1", "utf-8", "utf8", "ascii", "us-ascii")
_OURS = ("torch", "functorch", "torchgen", "numpy", "builtins", "__builtin__", "copy_reg", "exceptions")  # fmt: skip
_HERE = _OTHER_STANDARD | _TORCH_REQUIRES | frozenset(_OURS)


def _plain(args: Sequence[Any]) -> bool:
    """Whether the arguments are data: nothing that would be called on their behalf."""
    return all(type(arg) is not GlobalNode for arg in args)


def no_arguments(args: Sequence[Any]) -> bool:
    """Called with nothing."""
    return not args


def _texts(args: Sequence[Any]) -> bool:
    return all(text_of(arg) is not None for arg in args)


def _encoded(args: Sequence[Any]) -> bool:
    """A text, and a codec that Python has at hand: any other name is looked up by an import."""
    codec = text_of(args[1]) if len(args) == 2 else "utf-8"
    return _texts(args) and (codec or "").lower().replace("_", "-") in _CODECS


# What a GradScaler fills its dict with: makes a dict of two constants
_FRESH = frozenset(
    f"torch.{where}.grad_scaler._refresh_per_optimizer_state" for where in ("amp", "cuda.amp")
)


def _factory(args: Sequence[Any]) -> bool:
    """defaultdict(list, …): the factory is a plain container type, or makes a plain container."""
    names = ("dict", "list", "set", "int", "float", "str", "tuple", "bool", "OrderedDict")
    first = args[0] if args else None
    if first is None:
        return _plain(args[1:])
    if type(first) is not GlobalNode:
        return False
    module, name = mapped(first, 2)
    plain = name in names and module in ("builtins", "collections")
    return (plain or first.full in _FRESH) and _plain(args[1:])


def _array_parts(args: Sequence[Any]) -> bool:
    """_reconstruct(ndarray, (0,), b'b')."""
    return (
        len(args) == 3
        and type(args[0]) is GlobalNode
        and args[0].full == "numpy.ndarray"
        and _plain(args[1:])
    )


def any_arguments(args: Sequence[Any]) -> bool:
    """Checked elsewhere: torch's rebuild functions by who builds their tensors."""
    return True


Check = Callable[[Sequence[Any]], bool]
DICT_STATE, TUPLE_STATE, _NO_STATE = "dict", "tuple", "none"

# name -> (what its arguments must be, what BUILD may give it, whether items may be added)
CALLS: dict[str, tuple[Check, str, bool]] = {
    **{name: (any_arguments, TUPLE_STATE if name.endswith("Tensor") else _NO_STATE, False) for name in BUILDERS},
    "collections.OrderedDict": (_plain, DICT_STATE, True),
    "collections.defaultdict": (_factory, _NO_STATE, True),
    "collections.Counter": (_plain, DICT_STATE, True),
    "collections.deque": (_plain, _NO_STATE, True),
    "builtins.set": (_plain, _NO_STATE, False),
    "builtins.frozenset": (_plain, _NO_STATE, False),
    "builtins.bytearray": (_plain, _NO_STATE, False),
    "builtins.bytes": (_plain, _NO_STATE, False),
    "builtins.complex": (_plain, _NO_STATE, False),
    "builtins.slice": (_plain, _NO_STATE, False),
    "builtins.range": (_plain, _NO_STATE, False),
    "builtins.xrange": (_plain, _NO_STATE, False),
    "_codecs.encode": (_encoded, _NO_STATE, False),
    "argparse.Namespace": (no_arguments, DICT_STATE, False),
    "types.SimpleNamespace": (no_arguments, DICT_STATE, False),
    "datetime.datetime": (_plain, _NO_STATE, False),
    "datetime.date": (_plain, _NO_STATE, False),
    "datetime.time": (_plain, _NO_STATE, False),
    "datetime.timedelta": (_plain, _NO_STATE, False),
    "datetime.timezone": (_plain, _NO_STATE, False),
    "decimal.Decimal": (_texts, _NO_STATE, False),
    "fractions.Fraction": (_plain, _NO_STATE, False),
    "uuid.UUID": (no_arguments, DICT_STATE, False),
    "_io.BytesIO": (no_arguments, TUPLE_STATE, False),
    **{
        f"pathlib.{name}": (_texts, _NO_STATE, False)
        for name in ("Path", "PurePath", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
    **{
        f"omegaconf.{name}": (_plain, DICT_STATE, True)
        for name in ("listconfig.ListConfig", "dictconfig.DictConfig", "base.ContainerMetadata", "base.Metadata")
    },
    **{
        f"{module}.AttributeDict": (_plain, DICT_STATE, True)
        for module in ("pytorch_lightning.utilities.parsing", "lightning.pytorch.utilities.parsing",
                       "lightning_fabric.utilities.data", "lightning.fabric.utilities.data")
    },
    "numpy.dtype": (_plain, TUPLE_STATE, False),
    "torch.Size": (_plain, _NO_STATE, False),
    "torch.device": (_plain, _NO_STATE, False),
    "torch.serialization._get_layout": (_texts, _NO_STATE, False),
    "torch.torch_version.TorchVersion": (_texts, DICT_STATE, False),
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": (_plain, _NO_STATE, False),
    "torch._C.Generator": (_plain, "any", False),
    "deepspeed.runtime.zero.config.ZeroStageEnum": (_plain, _NO_STATE, False),
    "torch.nested._internal.nested_tensor._rebuild_njt": (any_arguments, _NO_STATE, False),
}  # fmt: skip
for _core in ("numpy.core", "numpy._core"):
    CALLS[f"{_core}.multiarray.scalar"] = (_plain, _NO_STATE, False)
    CALLS[f"{_core}.multiarray._reconstruct"] = (_array_parts, TUPLE_STATE, False)
    CALLS[f"{_core}.numeric._frombuffer"] = (_plain, _NO_STATE, False)

# Instances of these packages' classes: made without arguments, filled by a dict.
INSTANCES = ("torch.nn.", "torch.ao.nn.", "torch.optim.",
              "torch.amp.grad_scaler.", "torch.cuda.amp.grad_scaler.", "omegaconf.")  # fmt: skip

# Records of torch.distributed and nested tensors: NEWOBJ with data, any data as state.
_SHARDED = "torch.distributed._shard.sharded_tensor"
RECORDS = ("torch.distributed.tensor.", "torch.distributed._tensor.", f"{_SHARDED}.",
            "torch.distributed._shard.metadata.", "torch.distributed._shard.sharding_spec.",
            "torch.distributed._mesh_layout.", "torch.distributed.device_mesh.",
            "torch.distributed.remote_device.", "torch.distributed.checkpoint.metadata.",
            "torch.distributed.checkpoint.filesystem._StorageInfo",
            "torch._dynamo.decorators._DimRange")  # fmt: skip
DOTTED = frozenset(
    (f"{_SHARDED}.api.ShardedTensor.ProcessGroupState", f"{_SHARDED}.metadata.MEM_FORMAT_ENCODING")
)

REFERENCES = frozenset((
    "typing.Any", "collections.OrderedDict", "collections.defaultdict", "torch.Tensor", "torch.Size",
    "torch.device", "torch.nn.parameter.Parameter", "numpy.ndarray", "numpy.dtype",
    "torch.storage.UntypedStorage", "torch.storage.TypedStorage", "argparse.Namespace", *_FRESH,
    *(f"builtins.{name}" for name in ("bool", "bytes", "bytearray", "complex", "dict", "float",
      "frozenset", "int", "long", "list", "object", "set", "str", "tuple", "unicode", "range", "slice", "Ellipsis", "NotImplemented")),
    *(f"torch.{name}" for name in DTYPE_ALIASES),
    *(f"torch.{name}" for name in (
      "strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged",
      "per_tensor_affine", "per_channel_affine", "per_tensor_symmetric", "per_channel_symmetric",
      "per_channel_affine_float_qparams", "contiguous_format", "channels_last", "preserve_format")),
    *(f"numpy.{name}" for name in ("float16", "float32", "float64", "int8", "int16", "int32",
      "int64", "uint8", "uint16", "uint32", "uint64", "bool_", "complex64", "complex128")),
))  # fmt: skip
BY_ARGUMENTS = frozenset(("builtins.getattr", "torch.storage._load_from_bytes"))
# Pure functions that modules hold as values; what these modules import is not theirs.
_FUNCTIONAL = frozenset((
    "alpha_dropout", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d",
    "adaptive_max_pool3d", "batch_norm", "bilinear", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "celu", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "cosine_embedding_loss", "cosine_similarity",
    "cross_entropy", "ctc_loss", "dropout", "dropout1d", "dropout2d", "dropout3d", "elu",
    "embedding", "feature_alpha_dropout", "fold", "gaussian_nll_loss", "gelu", "glu",
    "grid_sample", "group_norm", "gumbel_softmax", "hardshrink", "hardsigmoid", "hardswish",
    "hardtanh", "hinge_embedding_loss", "huber_loss", "instance_norm", "interpolate", "kl_div",
    "l1_loss", "layer_norm", "leaky_relu", "linear", "local_response_norm", "log_softmax",
    "logsigmoid", "margin_ranking_loss", "max_pool1d", "max_pool2d", "max_pool3d", "mish",
    "mse_loss", "multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss",
    "nll_loss", "normalize", "one_hot", "pad", "pairwise_distance", "pixel_shuffle",
    "pixel_unshuffle", "poisson_nll_loss", "prelu", "relu", "relu6", "rms_norm", "rrelu",
    "scaled_dot_product_attention", "selu", "sigmoid", "silu", "smooth_l1_loss",
    "soft_margin_loss", "softmax", "softmin", "softplus", "softshrink", "softsign", "tanh",
    "tanhshrink", "threshold", "triplet_margin_loss", "unfold", "upsample"))  # fmt: skip


def is_class(name: str) -> bool:
    """Whether a name is spelled as torch spells classes; what its modules import mostly is not."""
    return "." not in name and name.lstrip("_")[:1].isupper()


def is_value(module: str, name: str) -> bool:
    """Whether a name may stand in a file as a value: harmless with whatever arguments its
    holder calls it.
    """
    full = f"{module}.{name}"
    if module == "torch.nn.functional":
        return name.rstrip("_") in _FUNCTIONAL
    if module in ("torch._C._nn", "torch.nn.init"):
        return name[:1] != "_" and "." not in name and (name[-1:] == "_" or module[-1] == "n")
    if full in CALLS:
        return is_class(name) or CALLS[full][0] is not any_arguments
    return full in REFERENCES or (full.startswith(INSTANCES) and is_class(name))


NJT = "torch.nested._internal.nested_tensor._rebuild_njt"
# A tensor subclass stands among the arguments of these, after its builder or alone.
CLASS_ARGUMENT = {
    "torch._tensor._rebuild_from_type": 1,
    "torch._tensor._rebuild_from_type_v2": 1,
    "torch.tensor._rebuild_from_type": 1,
    "torch.tensor._rebuild_from_type_v2": 1,
    "torch._utils._rebuild_wrapper_subclass": 0,
}


def mapped(node: GlobalNode, protocol: int) -> tuple[str, str]:
    """(module, name) as a Python 3 loader looks it up: protocols below 3 are mapped first."""
    return (node.module, node.name) if protocol >= 3 else _of_python_3(node.module, node.name)


@lru_cache(1024)  # the same few in file after file
def _of_python_3(module: str, name: str) -> tuple[str, str]:
    from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING

    module, name = NAME_MAPPING.get((module, name), (module, name))
    return IMPORT_MAPPING.get(module, module), name


def is_foreign_class(module: str, name: str) -> bool:
    """The same of a class; `Outer.Inner` is one, `os.system` of a module that imports os not."""
    first, *rest = name.split(".")
    nested = first.lstrip("_")[:1].isupper() and not any(part.startswith("__") for part in rest)
    return is_foreign(module) and (nested or not rest)


def is_foreign(module: str) -> bool:
    """Whether a module belongs to neither the standard library nor torch, what it requires, nor
    numpy.
    """
    top = module.partition(".")[0]
    known = top in sys.stdlib_module_names or top in _HERE or top.startswith(_STANDARD_TESTS)
    return bool(top) and not known
