"""Key rules: keys in, `{old: new}` out; conflicts found before a byte is written.

Knows: dotted names, what wrappers leave in them, globs. Must not know: anything else.

1. A name is components joined by dots; a rule removes or adds whole components only.
2. A component is removed only where something remains after it, so no name becomes empty.
3. Rules run in order, each on the names as they stand; what is worth saying, and whether two
   names became one, is judged on the final names.

A new rule is one function and one row in `RULES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from shlex import quote
from typing import NamedTuple

from ckptool.errors import KeyCollision, UsageError

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


class Rule(NamedTuple):
    """One row of `RULES` by name; `argument` is its path, for the rules that take one."""

    name: str
    argument: str | None = None


class Remark(NamedTuple):
    """Something to tell about the names; `command`, where set, is the flag that settles it.

    The fields are those of `checkpoint.Note`, which stands on this module's own floor.
    """

    slug: str
    text: str
    command: str | None = None


class Outcome(NamedTuple):
    """`renames` holds changed keys only, in key order; `idle` the rules that changed nothing."""

    renames: dict[str, str]
    notes: tuple[Remark, ...] = ()
    idle: tuple[Rule, ...] = ()


RuleFunction = Callable[[Sequence[str], str], dict[str, str]]


def apply(rules: Sequence[Rule], keys: Sequence[str]) -> Outcome:
    """Run `rules` in order over `keys`, each on the names as they stand.

    Raises KeyCollision when two keys would become one, UsageError on an unknown rule or a
    missing path.
    """
    names = list(keys)
    idle = []
    for rule in rules:
        changed = _function(rule)(names, _path(rule))
        if changed:
            names = [changed.get(name, name) for name in names]
        else:
            idle.append(rule)
    renames = {key: name for key, name in zip(keys, names, strict=True) if key != name}
    check_collisions(keys, renames)
    notes = [note for rule in rules if rule.name in _REMARKS for note in _REMARKS[rule.name](names)]
    return Outcome(renames, tuple(dict.fromkeys(notes)), tuple(idle))


def check_collisions(keys: Iterable[str], renames: Mapping[str, str]) -> None:
    """Raise KeyCollision when two of `keys` have the same name after `renames`."""
    owner: dict[str, str] = {}
    clashes = []
    for key in dict.fromkeys(keys):
        name = renames.get(key, key)
        if name in owner:
            clashes.append((owner[name], key, name))
        else:
            owner[name] = key
    if not clashes:
        return
    first, second, name = clashes[0]
    if first not in renames:  # the one that moves is named first
        first, second = second, first
    more = f" (and {len(clashes) - 1:,} more)" if len(clashes) > 1 else ""
    raise KeyCollision(
        f"'{first}' and '{second}' would both become '{name}'{more}; nothing written",
        hint="rename one of them before saving, or leave names alone with --keep-module",
    )


# The rules


def _strip_module_if_all(names: Sequence[str], _: str) -> dict[str, str]:
    start = _common_depth(names) * len(_MODULE)
    return {n: n[start:] for n in names if start and n not in UNCOUNTED}


def _strip_module(names: Sequence[str], _: str) -> dict[str, str]:
    return {n: n[lead.end() :] for n in names if (lead := _LEAD.match(n))}


def _add_module(names: Sequence[str], _: str) -> dict[str, str]:
    return {} if _common_depth(names) else {n: _MODULE + n for n in names}


def _add_module_at(names: Sequence[str], path: str) -> dict[str, str]:
    under, there = path + ".", f"{path}.{_MODULE}"
    cut = len(under)
    return {
        n: there + n[cut:] for n in names if n.startswith(under) and not n.startswith(_MODULE, cut)
    }


def _unwrap_at(names: Sequence[str], path: str) -> dict[str, str]:
    there = f"{path}.{_MODULE}"
    cut = len(there)
    return {n: f"{path}.{n[cut:]}" for n in names if n.startswith(there) and len(n) > cut}


def _unwrap(names: Sequence[str], _: str) -> dict[str, str]:
    bare = _bare(names)
    while len(parents := _interior(bare)) == 1:
        inner = _unwrap_at(bare, next(iter(parents)))
        if not inner:
            break  # `features.module.`: nothing remains after it
        bare = [inner.get(name, name) for name in bare]
    return {old: new for old, new in zip(names, bare, strict=True) if old != new}


RULES: dict[str, RuleFunction] = {
    "strip-module-if-all": _strip_module_if_all,
    "strip-module": _strip_module,
    "add-module": _add_module,
    "add-module-at": _add_module_at,
    "unwrap": _unwrap,
    "unwrap-at": _unwrap_at,
}
_WITH_PATH = frozenset({"add-module-at", "unwrap-at"})


def _function(rule: Rule) -> RuleFunction:
    try:
        return RULES[rule.name]
    except KeyError:
        raise UsageError(f"no key rule is called '{rule.name}'") from None


def _path(rule: Rule) -> str:
    path = (rule.argument or "").strip(".")
    if rule.name in _WITH_PATH and not path:
        raise UsageError(f"--{rule.name} needs the path of a module, as in --{rule.name} features")
    return path


def _counted(names: Iterable[str]) -> Iterator[str]:
    return (name for name in names if name not in UNCOUNTED)


def _common_depth(names: Sequence[str]) -> int:
    """How many leading `module` every counted name carries."""
    leads = (_LEAD.match(name) for name in _counted(names))
    return min((lead.end() // len(_MODULE) if lead else 0 for lead in leads), default=0)


def _bare(names: Sequence[str]) -> list[str]:
    """The names without known wrappers, and without the leading `module` that all carry."""
    known = [_KNOWN.sub("", name) if _may_wrap(name) else name for name in names]
    lead = _strip_module_if_all(known, "")
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


def _partial(names: Sequence[str]) -> list[Remark]:
    counted = list(_counted(names))
    carry = sum(1 for name in counted if _LEAD.match(name))
    if carry in (0, len(counted)):
        return []
    text = f"{carry:,} of {len(counted):,} keys carry 'module.'; names left alone"
    return [Remark("partial-prefix", text, "--strip-module")]


def _left_inside(names: Sequence[str]) -> list[Remark]:
    # deepest first: the flags run in order, and an outer one would move the inner path
    parents = sorted(_interior(names), key=lambda path: -path.count("."))
    if not parents:
        return []
    places = ", ".join(parents[:3]) + (f" and {len(parents) - 3:,} more" if parents[3:] else "")
    text = f"'module' under {places} is left: it may be an honest name; name its place to remove it"
    flags = " ".join(f"--unwrap-at {quote(path)}" for path in parents)
    return [Remark("interior-module", text, flags)]


_REMARKS: dict[str, Callable[[Sequence[str]], list[Remark]]] = {
    "strip-module-if-all": _partial,
    "unwrap": lambda names: _partial(names) + _left_inside(names),
}


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


# `_metadata` follows the keys


def metadata_renames(
    module_paths: Sequence[str], renames: Mapping[str, str], keys: Iterable[str] = ()
) -> tuple[dict[str, str], tuple[str, ...]]:
    """How the entries of `_metadata` follow `renames`: (changed paths, dropped paths).

    `module_paths` are its keys, also of modules without parameters. `keys` are all keys of the
    table: where some stay, the modules above them stay too. A path without keys follows its
    nearest ancestor that moved. A wrapper's own entry is dropped when the module it wrapped
    takes its place.
    """
    moved: dict[str, str] = {}
    wrapping: dict[str, str] = {}
    for key in keys:
        if key not in renames:
            _learn(key, key, moved, wrapping)
    for old, new in renames.items():
        _learn(old, new, moved, wrapping)
    owner: dict[str, str] = {}
    target: dict[str, str] = {}
    # who has keys of its own comes first, then who is deeper: a wrapper yields to what it wraps
    for path in sorted(module_paths, key=lambda p: (p not in moved, -len(p))):
        target[path] = _follow(path, moved, wrapping)
        owner.setdefault(target[path], path)
    stay = [path for path in module_paths if owner[target[path]] == path]
    dropped = tuple(path for path in module_paths if owner[target[path]] != path)
    return {path: target[path] for path in stay if target[path] != path}, dropped


def _learn(old: str, new: str, moved: dict[str, str], wrapping: dict[str, str]) -> None:
    """Match the components of one key pair from the right and note where each path above went.

    `moved`: a path whose next component went along; `wrapping`: one whose next was removed.
    """
    left, right = old.count(".") + 1, new.count(".") + 1
    if max(left, right) > DEEPEST:
        return
    while left:
        above, _, last = old.rpartition(".")
        goal, _, name = new.rpartition(".")
        if left == right or (right and last == name):
            if moved.get(above) == goal:
                return  # from here on another key has shown the same
            moved.setdefault(above, goal)
            old, new, left, right = above, goal, left - 1, right - 1
        elif left > right:
            wrapping.setdefault(above, new)
            old, left = above, left - 1
        else:
            new, right = goal, right - 1


def _follow(path: str, moved: Mapping[str, str], wrapping: Mapping[str, str]) -> str:
    """Where `path` goes: by its own keys, as a wrapper, or with its nearest ancestor."""
    above, rest = path, ""
    for _ in range(DEEPEST):
        goal = moved.get(above, wrapping.get(above))
        if goal is not None:
            return f"{goal}.{rest}" if goal and rest else goal + rest
        if not above:
            break
        above, _, last = above.rpartition(".")
        rest = f"{last}.{rest}" if rest else last
    return path


# Globs


def match_glob(pattern: str, key: str) -> bool:
    """Whether the glob `pattern` selects `key`.

    `*` and `?` stay within a component, `**` crosses dots. Without a dot the pattern is tried on
    each component (`fc` selects `fc.weight`, not `fc2.weight`); with dots it must match the key
    from its start to the end of a component (`layers.1` selects `layers.1.weight`).
    """
    return _glob(pattern).search(key) is not None


_WILD = {"**": ".*", "*": "[^.]*", "?": "[^.]"}


@lru_cache(maxsize=256)
def _glob(pattern: str) -> re.Pattern[str]:
    pieces = re.split(r"(\*\*|\*|\?)", re.sub(r"\*{3,}", "**", pattern))
    body = "".join(_WILD.get(piece) or re.escape(piece) for piece in pieces)
    start = r"\A" if "." in pattern else r"(?:\A|(?<=\.))"
    return re.compile(rf"(?s){start}{body}(?=\.|\Z)")
