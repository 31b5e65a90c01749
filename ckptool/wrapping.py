"""What DataParallel, torch.compile, FSDP and checkpointing leave in names, and its removal.

Knows: wrapper components, which of them are safe to remove. Must not know: other rules.

A component is removed only where something remains after it, so no name becomes empty.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from shlex import quote

from ckptool.keynames import Remark, Rule, some

WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Components that no honest module has: torch.compile, FSDP, activation checkpointing."""

UNCOUNTED = frozenset({"n_averaged", "total_ops", "total_params", "_extra_state"})
"""Root entries of a wrapper or a profiler; they do not count when "all keys" is asked."""

DEEPEST = 32
"""Components of a name that is searched for interior wrappers (the cost is quadratic in it);
honest names stay under twenty."""

_MODULE = "module."
_LEAD = re.compile(r"(?s)(?:module\.)+(?=.)")
_ANY = "|".join(WRAPPERS)
_STACK = re.compile(rf"(?s)(?:(?:module|{_ANY})\.)+(?=.)")
_KNOWN = re.compile(rf"(?s)(?:\A|(?<=\.))(?:{_ANY})\.(?=.)")


# The rules


def strip_module_if_all(names: Sequence[str], _: Rule) -> dict[str, str]:
    """`module` goes from the front, as many as all counted names carry."""
    return _strip_common(names)


def _strip_common(names: Sequence[str]) -> dict[str, str]:
    start = _common_depth(names) * len(_MODULE)
    return {n: n[start:] for n in names if start and n not in UNCOUNTED}


def strip_module(names: Sequence[str], _: Rule) -> dict[str, str]:
    """Every leading `module` goes, from the names that carry one."""
    return {n: n[lead.end() :] for n in names if (lead := _LEAD.match(n))}


def add_module(names: Sequence[str], _: Rule) -> dict[str, str]:
    """`module` before every name, unless all have it."""
    return {} if _common_depth(names) else {n: _MODULE + n for n in names}


def add_module_at(names: Sequence[str], rule: Rule) -> dict[str, str]:
    """`module` right under a path, where there is none."""
    path = _path(rule)
    under, there = path + ".", f"{path}.{_MODULE}"
    cut = len(under)
    return {
        n: there + n[cut:] for n in names if n.startswith(under) and not n.startswith(_MODULE, cut)
    }


def unwrap_at(names: Sequence[str], rule: Rule) -> dict[str, str]:
    """The `module` right under a path goes."""
    return _unwrap_at(names, _path(rule))


def _path(rule: Rule) -> str:
    return (rule.argument or "").strip(".")


def _unwrap_at(names: Sequence[str], path: str) -> dict[str, str]:
    there = f"{path}.{_MODULE}"
    cut = len(there)
    return {n: f"{path}.{n[cut:]}" for n in names if n.startswith(there) and len(n) > cut}


def unwrap(names: Sequence[str], _: Rule) -> dict[str, str]:
    """What wrappers left goes: known components anywhere, `module` where it is certain."""
    bare = _bare(names)
    while len(parents := _interior(bare)) == 1:
        inner = _unwrap_at(bare, next(iter(parents)))
        if not inner:
            break  # `features.module.`: nothing remains after it
        bare = [inner.get(name, name) for name in bare]
    return {old: new for old, new in zip(names, bare, strict=True) if old != new}


def _counted(names: Iterable[str]) -> Iterator[str]:
    return (name for name in names if name not in UNCOUNTED)


def _common_depth(names: Sequence[str]) -> int:
    """How many leading `module` every counted name carries."""
    leads = (_LEAD.match(name) for name in _counted(names))
    return min((lead.end() // len(_MODULE) if lead else 0 for lead in leads), default=0)


def _bare(names: Sequence[str]) -> list[str]:
    """The names without known wrappers, and without the leading `module` that all carry."""
    known = [_KNOWN.sub("", name) if _may_wrap(name) else name for name in names]
    lead = _strip_common(known)
    return [lead.get(name, name) for name in known]


def _may_wrap(name: str) -> bool:
    """A quick no for most names: the pattern takes ten times longer."""
    return "_orig_mod." in name or "_wrapped_module." in name


def _interior(names: Sequence[str]) -> dict[str, int]:
    """Paths whose single child is `module`, with the number of keys below.

    Of a stack (`features.module.module`) the outermost path stands for all.
    """
    found: dict[str, int] = {}
    if not any(".module." in name for name in names):
        return found
    split = [n.split(".") for n in names if "." in n and n.count(".") < DEEPEST]
    for parts in split:
        for at in range(1, len(parts) - 1):
            if parts[at] == "module":
                path = ".".join(parts[:at])
                found[path] = found.get(path, 0) + 1
    depths = {path.count(".") + 1 for path in found}
    for parts in split:
        for at in depths:
            if at < len(parts) and parts[at] != "module":
                found.pop(".".join(parts[:at]), None)
    inner = {path for path in found if path.endswith(".module") and path[:-7] in found}
    return {path: n for path, n in found.items() if path not in inner}


# What is worth saying about the names that came out


def partial(names: Sequence[str]) -> list[Remark]:
    """A leading `module` that some names carry and others do not."""
    counted = list(_counted(names))
    carry = sum(1 for name in counted if _LEAD.match(name))
    if carry in (0, len(counted)):
        return []
    text = f"{carry:,} of {len(counted):,} keys carry 'module.'; names left alone"
    return [Remark("partial-prefix", text, "--strip-module")]


def left(names: Sequence[str]) -> list[Remark]:
    """What `unwrap` left because it may be honest."""
    return partial(names) + _left_inside(names)


def _left_inside(names: Sequence[str]) -> list[Remark]:
    """A `module` inside, and the flags that remove it."""
    # deepest first: the flags run in order, and an outer one would move the inner path
    parents = sorted(_interior(names), key=lambda path: -path.count("."))
    if not parents:
        return []
    text = f"'module' under {some(parents)} is left: it may be an honest name; name its place to remove it"
    flags = " ".join(f"--unwrap-at {quote(path)}" for path in parents)
    return [Remark("interior-module", text, flags)]


def wrappers(keys: Sequence[str]) -> list[tuple[str, int, int]]:
    """What wrappers left in `keys`: (name, keys that carry it, keys that count).

    Leading stacks end in a dot (`module.`, `_orig_mod.module.`), known components inside are
    bare (`_orig_mod`), a `module` that is its parent's only child comes with its path
    (`features.module`), counted from below the leading stack.
    """
    counted = list(_counted(keys))
    total = len(counted)
    stacks: dict[str, tuple[list[str], int]] = {}
    inside = dict.fromkeys(WRAPPERS, 0)
    for key in counted:
        lead = _STACK.match(key)
        if lead:
            stack = lead.group()[:-1].split(".")
            known, n = stacks.get(stack[0], (stack, 0))
            stacks[stack[0]] = _common(known, stack), n + 1
        if _may_wrap(key):
            for name in set(_KNOWN.findall(key, lead.end() if lead else 0)):
                inside[name[:-1]] += 1
    found = [(".".join(stack) + ".", n, total) for stack, n in stacks.values()]
    found += [(name, n, total) for name, n in inside.items() if n]
    return found + [(f"{path}.module", n, total) for path, n in _interior(_bare(counted)).items()]


def _common(left: list[str], right: list[str]) -> list[str]:
    """The components that both stacks begin with."""
    same = 0
    while same < min(len(left), len(right)) and left[same] == right[same]:
        same += 1
    return left[:same]
