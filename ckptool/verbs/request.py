"""What a conversion is asked for, its contradictions refused.

Knows: which options exclude each other. Must not know: files, printing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from ckptool.checkpoint import DTYPE_ALIASES, DTYPES, DType
from ckptool.errors import UsageError
from ckptool.keynames import Rule
from ckptool.rules import OF_TENSORS
from ckptool.values import CASTABLE

TARGETS = {"zip": "torch-zip", "legacy": "torch-legacy", "safetensors": "safetensors",
           "shards": "hf-shards", "dcp": "dcp"}  # fmt: skip
FOLDERS = ("hf-shards", "dcp")
"""Containers of several files."""
ONE_TABLE = ("safetensors", "hf-shards")
"""Containers that hold the tensors of one state_dict, and nothing beside them."""
NO_DEVICES = (*ONE_TABLE, "dcp")
"""Containers that record no device."""
TIED = ("alias", "duplicate", "error")
SHARD_BYTES = 5_000_000_000
"""What transformers takes where no size is given."""
_SCALES = "float8_e8m0fnu"  # powers of two alone: no weight survives
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)
_FLOATS = {"fp16": "float16", "fp32": "float32", "fp64": "float64", "bf16": "bfloat16",
           "f16": "float16", "f32": "float32", "f64": "float64", "fp8": "float8_e4m3fn"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for. `device` is 'cpu' or 'cuda:N'; `mapped` are (from, to) tags;
    `rules` in the order given; `keep_module` leaves names alone under a device move; `target`
    is a container's name; `extras` the path of a JSON file; `shard_bytes` 0 for one file; `fit`
    is the SPEC of a model (or, from Python, the model), `model_arguments` texts by name; `engine`
    is `dask=ADDRESS` or, from Python, an executor.
    """

    device: str | None = None
    mapped: tuple[tuple[str, str], ...] = ()
    rules: tuple[Rule, ...] = ()
    keep_module: bool = False
    at: tuple[str, ...] = ()
    keep_unknown: bool = False
    check: bool = True
    fsync: bool = True
    force: bool = False
    dry_run: bool = False
    select: str | None = None
    entries: tuple[str, ...] = ()
    compact: bool = False
    dtype: DType | None = None
    keep_dtype: tuple[str, ...] = ()
    target: str | None = None
    shard_bytes: int = 0
    extras: str | None = None
    tied: str = "alias"
    keep_object: bool = False
    in_place: bool = False
    fit: Any = None
    model_arguments: tuple[tuple[str, str], ...] = ()
    partial: bool = False
    salvage: bool = False
    jobs: int = 1
    engine: Any = None
    resume: bool = False

    @property
    def by_tasks(self) -> bool:
        """Whether the plan is cut into tasks that several may run."""
        return self.jobs > 1 or self.engine is not None or self.resume

    @property
    def changes_something(self) -> bool:
        """Whether anything but the container is asked to change."""
        names = (self.device, self.mapped, self.rules, self.select, self.entries, self.dtype)
        return any(names) or self.compact or self.fit is not None or self.salvage


def build_request(*, to_cpu: bool, to_gpu: int | None, **rest: Any) -> Request:
    """A Request, its contradictions refused. Raises UsageError."""
    mapped, rules = rest["mapped"], rest["rules"]
    if (to_cpu and to_gpu is not None) or (mapped and (to_cpu or to_gpu is not None)):
        raise UsageError("only one of to-cpu, to-gpu and map-location can be given")
    if any(new == "meta" for _, new in mapped):
        raise UsageError("nothing can move to meta: torch would find no data there")
    if to_gpu is not None and to_gpu < 0:
        raise UsageError(f"there is no GPU {to_gpu}")
    _check_rules(rules, rest["keep_module"], rest.get("keep_object", False))
    device = "cpu" if to_cpu else f"cuda:{to_gpu}" if to_gpu is not None else None
    rest["dtype"] = None if rest.get("dtype") is None else parse_dtype(rest["dtype"])
    rest["shard_bytes"] = parse_size(rest.pop("max_shard_size", None))
    rest["target"] = parse_target(rest.pop("to", None))
    request = Request(device=device, **rest)
    for broken, text in _contradictions(request):
        if broken:
            raise UsageError(text)
    return request


def _check_rules(rules: tuple[Rule, ...], keep_module: bool, keep_object: bool) -> None:
    names = {rule.name for rule in rules}
    if keep_module and names & {"strip-module", "add-module"}:
        raise UsageError("keep-module contradicts strip-module and add-module")
    if {"strip-module", "add-module"} <= names:
        raise UsageError("strip-module contradicts add-module")
    if keep_object and rules:
        raise UsageError("keep-object keeps the names of the object: no key rule can be given")


def _contradictions(request: Request) -> list[tuple[bool, str]]:
    single = request.target not in (None, "hf-shards")
    moved = bool(request.dtype or request.compact or request.select or request.entries)
    return [
        (request.tied not in TIED, f"tied is one of {', '.join(TIED)}"),
        (bool(request.keep_dtype) and request.dtype is None, "keep-dtype needs a dtype"),
        (bool(request.shard_bytes) and single, "max-shard-size writes shards: it contradicts --to"),
        (request.select == "", "select needs the path of a state_dict ('.' is the root)"),
        (request.extras == "", "extras needs the name of a file"),
        (request.keep_object and bool(request.dtype or request.select),
         "keep-object contradicts dtype and select"),
        (request.in_place and (moved or request.target is not None or bool(request.shard_bytes)),
         "in place only names and devices can be changed"),
        (request.in_place and bool(request.extras or request.keep_object),
         "in place nothing is left behind and no object changes"),
        (request.in_place and any(rule.name in OF_TENSORS for rule in request.rules),
         "in place nothing can be dropped: write another file with -o"),
        (request.fit is not None and bool(request.rules or request.keep_object or request.keep_module),
         "fit finds the key rules itself: no other can be given"),
        (request.fit is None and bool(request.partial or request.model_arguments),
         "partial and model-arg need fit"),
        (request.salvage and bool(request.in_place or request.keep_object),
         "salvage writes another file, tensor by tensor: it contradicts in-place and keep-object"),
        (request.jobs < 1, "jobs is a number of threads: 1 or more"),
        (request.jobs > 1 and request.engine is not None,
         "jobs are threads of this machine: an engine has its own workers"),
        (isinstance(request.engine, str) and not request.engine.startswith("dask="),
         "the engine is dask=tcp://HOST:PORT"),
        (request.in_place and request.by_tasks, "in place there is nothing for jobs, engine or resume"),
        (request.in_place and not request.changes_something, "nothing to do in place: no device and no key rule is given"),
    ]  # fmt: skip


def without_device_strip(request: Request) -> Request:
    """The same request, names left alone (a whole object keeps its own)."""
    return replace(request, keep_module=True)


def parse_dtype(word: str | DType) -> DType:
    """`bfloat16`, `bf16`, `half`, `torch.float16` … Raises UsageError for what is no float."""
    name = word.name if isinstance(word, DType) else str(word).removeprefix("torch.").lower()
    found = DTYPE_ALIASES.get(_FLOATS.get(name, name))
    if found is None or found.name not in CASTABLE or found.name == _SCALES:
        known = ", ".join(name for name in DTYPES if name in CASTABLE and name != _SCALES)
        raise UsageError(f"'{word}' is no dtype to cast to", hint=f"one of {known}")
    return found


def parse_size(word: str | int | None) -> int:
    """Bytes of `5GB`, `500MB`, `2GiB` or a number; 0 for None. Raises UsageError."""
    if word is None:
        return 0
    match = _SIZE.fullmatch(str(word).strip())
    if match is None:
        raise UsageError(f"'{word}' is no size", hint="as in --max-shard-size 5GB")
    unit = _UNITS[match.group(2).upper()]
    if match.group(3):
        unit = 1 << (10 * (list(_UNITS).index(match.group(2).upper())))
    size = int(float(match.group(1)) * unit)
    if size < 1:
        raise UsageError("a shard must have at least one byte")
    return size


def parse_target(word: str | None) -> str | None:
    """The container that `--to` names. Raises UsageError."""
    if word is None:
        return None
    if word not in TARGETS:
        raise UsageError(f"'{word}' is no container to write", hint=f"one of {', '.join(TARGETS)}")
    return TARGETS[word]
