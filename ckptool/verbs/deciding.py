"""From what was asked to what changes: which keys, tensors, storages and entries it means.

Knows: which keys and storages a flag means. Must not know: files, printing, how it is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from shlex import quote
from typing import NamedTuple

from ckptool.checkpoint import Changes, Checkpoint, DType, Note, Path, Table
from ckptool.commands import convert_command
from ckptool.errors import RuleMatchesNothing, Unsupported, UsageError
from ckptool.formats.rows import odd_keys
from ckptool.globs import match_glob
from ckptool.keynames import Rule
from ckptool.rules import OF_TENSORS, apply
from ckptool.values import CASTABLE
from ckptool.verbs.moving import devices_of
from ckptool.verbs.naming import suffixed
from ckptool.verbs.request import NO_DEVICES, ONE_TABLE, Request
from ckptool.verbs.tables import path_name, table_at

_CAST_KINDS = ("tensor", "parameter", "subclass", "ndarray", "device-argument")


class Decision(NamedTuple):
    """`renames` and `dropped` for reports: {old: new} of all tables, keys and entries."""

    changes: Changes
    renames: dict[str, str]
    dropped: tuple[str, ...]
    notes: tuple[Note, ...]


def decide(checkpoint: Checkpoint, request: Request, target: str) -> Decision:
    """Changes for the container `target`. Raises KeyCollision, RuleMatchesNothing, UsageError."""
    select = _selected(checkpoint, request, target)
    tables = _tables(checkpoint, request, select)
    entries = _entries(checkpoint, request)
    named = [t for t in tables if t.kind != "tensors" or target in ONE_TABLE]
    rooted = _rooted(checkpoint, entries)
    renames, drops, notes = _names(checkpoint, named, request, rooted)
    devices: dict[str, str] = {}
    arguments: dict[str, str] = {}
    if target not in NO_DEVICES:
        devices, arguments = devices_of(checkpoint, tables, request)
    if request.mapped and not devices and not arguments:
        tags = ", ".join(f"'{old}'" for old, _ in request.mapped)
        raise RuleMatchesNothing(
            f"no storage is tagged {tags}; nothing written", path=checkpoint.file
        )
    dtypes, said = _dtypes(checkpoint, named, request, renames, drops | rooted)
    changes = Changes(
        renames, devices, arguments, request.keep_unknown, drops | rooted, dtypes,
        frozenset(entries) - {key for _, key in rooted},
        select.path if select is not None and _leaves(checkpoint, select) else None,
        request.compact, request.tied, request.keep_object, request.check,
    )  # fmt: skip
    if any(rule.name == "leave-out" for rule in request.rules) and select is None:
        said = (*said, *_of_optimizers(checkpoint, entries))
    flat = {key: new for (_, key), new in renames.items()}
    dropped = (*dict.fromkeys(key for t in tables for key in _in_order(t, drops)), *entries)
    return Decision(changes, flat, dropped, (*notes, *said))


def _of_optimizers(checkpoint: Checkpoint, entries: tuple[str, ...]) -> list[Note]:
    """Its state goes by the number of a parameter, and some of those are left out."""
    names = [str(e.path[0]) for e in checkpoint.extras if e.type == "optimizer" and e.path]
    kept = [name for name in dict.fromkeys(names) if name not in entries]
    text = "'{}' still holds the state of all parameters of the file, and would not load: --drop-entry {}"
    return [Note("optimizer-whole", text.format(name, quote(name))) for name in kept]


def _in_order(table: Table, drops: frozenset[tuple[Path, str]]) -> list[str]:
    keys = (*(t.key for t in table.tensors), *(key for key, _ in table.others))
    return [key for key in keys if (table.path, key) in drops]


# -- which part --------------------------------------------------------------------------------
def _selected(checkpoint: Checkpoint, request: Request, target: str) -> Table | None:
    """The one table that comes out; None: the file stays whole."""
    if request.select is None and target not in ONE_TABLE:
        return None
    if request.select is None and len(request.at) > 1:
        raise UsageError(f"one {target} file holds one state_dict: give --at once")
    asked = request.select if request.select is not None else next(iter(request.at), None)
    if asked is not None:
        table = table_at(checkpoint, asked)
        if _is_gone(table, request):
            raise UsageError(f"the state_dict at '{asked}' is dropped with its entry")
        return table
    left = [table for table in checkpoint.tables if not _is_gone(table, request)]
    if checkpoint.tables and not left:
        raise UsageError("every state_dict is dropped with its entry: nothing to write")
    best = None if checkpoint.weights is None else checkpoint.tables[checkpoint.weights]
    return best if best in left else left[0] if left else None


def _is_gone(table: Table, request: Request) -> bool:
    """Whether its top-level entry is dropped."""
    return bool(table.path) and table.path[0] in request.entries


def _leaves(checkpoint: Checkpoint, select: Table) -> bool:
    """Whether taking this table leaves anything behind."""
    return bool(select.path) or len(checkpoint.tables) > 1


def _tables(checkpoint: Checkpoint, request: Request, select: Table | None) -> list[Table]:
    """Those that rules apply to: named ones, or all that come out."""
    tables = [table_at(checkpoint, at) for at in request.at] or list(checkpoint.tables)
    if select is not None:
        if request.at and select not in tables:
            raise UsageError("--at and --select name different parts of the file")
        tables = [select]
    return [table for table in tables if not _is_gone(table, request)]


def top_level(checkpoint: Checkpoint) -> list[str]:
    """Names of the entries of the outermost dict, in no promised order."""
    names: dict[str, None] = {}
    for table in checkpoint.tables:
        if table.path and isinstance(table.path[0], str):
            names[table.path[0]] = None
        elif table.kind == "state_dict":
            names.update(
                dict.fromkeys([*(t.key for t in table.tensors), *(k for k, _ in table.others)])
            )
    firsts = [extra.path[0] for extra in checkpoint.extras if extra.path]
    names.update(dict.fromkeys(name for name in firsts if isinstance(name, str)))
    return list(names)


def _entries(checkpoint: Checkpoint, request: Request) -> tuple[str, ...]:
    known = [] if checkpoint.format in ONE_TABLE or not request.entries else top_level(checkpoint)
    unknown = [name for name in request.entries if name not in known]
    if unknown:
        listed = ", ".join(known[:8])
        raise RuleMatchesNothing(
            f"there is no top-level entry '{unknown[0]}' to drop; nothing written",
            path=checkpoint.file,
            hint=f"there are {listed}" if listed else "tensors are dropped with --drop",
        )
    return tuple(dict.fromkeys(request.entries))


def _rooted(checkpoint: Checkpoint, entries: tuple[str, ...]) -> frozenset[tuple[Path, str]]:
    """Entries that are tensors of a state_dict at the root."""
    gone = set(entries)
    tables = [t for t in checkpoint.tables if not t.path and t.kind == "state_dict"]
    return frozenset(((), t.key) for table in tables for t in table.tensors if t.key in gone)


# -- names -------------------------------------------------------------------------------------
Renames = dict[tuple[Path, str], str]
Drops = frozenset[tuple[Path, str]]


def _names(
    checkpoint: Checkpoint, tables: Sequence[Table], request: Request, gone: Drops
) -> tuple[Renames, Drops, tuple[Note, ...]]:
    rules = list(request.rules)
    renaming = any(rule.name not in OF_TENSORS for rule in rules)
    if request.device and not renaming and not request.keep_module and not request.keep_object:
        rules.insert(0, Rule("strip-module-if-all"))  # globs see the names that come out
    found: Renames = {}
    drops: set[tuple[Path, str]] = set()
    notes: dict[Note, None] = {}
    idle = set(rules)
    for table in tables:
        others = () if table.path else request.entries
        outcome = apply(
            rules,
            [t.key for t in table.tensors if (table.path, t.key) not in gone],
            [key for key, _ in table.others if key not in others],
        )
        odd = odd_keys(checkpoint, table) if outcome.renames else ()
        kept = [key for key in odd if outcome.renames.pop(key, None) is not None]
        if kept:
            text = f"keys that are no text keep their names: {', '.join(sorted(kept)[:8])}"
            notes[Note("odd-keys", text)] = None
        found.update({(table.path, key): new for key, new in outcome.renames.items()})
        drops.update((table.path, key) for key in outcome.drops)
        for remark in outcome.notes:
            command = _again(checkpoint, request, remark.command)
            notes[Note(remark.slug, remark.text, command)] = None
        idle &= set(outcome.idle)
    explicit = [rule for rule in rules if rule in idle and rule.name != "strip-module-if-all"]
    if explicit:
        raise RuleMatchesNothing(
            f"{explicit[0].flag} matches no key; nothing written", path=checkpoint.file,
            hint="see the keys with ckptool inspect",
        )  # fmt: skip
    notes.update(dict.fromkeys(_emptied(tables, drops)))
    return found, frozenset(drops), tuple(notes)


def _emptied(tables: Sequence[Table], drops: set[tuple[Path, str]]) -> list[Note]:
    """State_dicts of which nothing is left."""
    gone = [t for t in tables if t.tensors and all((t.path, x.key) in drops for x in t.tensors)]
    names = ", ".join(f"'{path_name(table.path) or '.'}'" for table in gone)
    return [Note("emptied", f"nothing is left of the state_dict at {names}")] if gone else []


def _again(checkpoint: Checkpoint, request: Request, flags: str | None) -> str | None:
    """The command as it was given, with the flag that settles what was left."""
    if flags is None:
        return None
    device = {None: [], "cpu": ["--to-cpu"]}.get(
        request.device, [f"--to-gpu {str(request.device)[5:]}"]
    )
    places = [f"--at {quote(at)}" for at in request.at]
    rules = [rule.flag for rule in request.rules if rule.flag != flags]
    output = f"-o {quote(suffixed(checkpoint.file, 'plain'))}"
    return convert_command(checkpoint.file, " ".join([*device, *places, *rules, flags, output]))


# -- types -------------------------------------------------------------------------------------
Dtypes = dict[tuple[Path, str], DType]


def _dtypes(
    checkpoint: Checkpoint,
    tables: Sequence[Table],
    request: Request,
    renames: Renames,
    drops: Drops,
) -> tuple[Dtypes, tuple[Note, ...]]:
    """The tensors to cast: floating ones of state_dicts that no --keep-dtype names."""
    if request.dtype is None:
        return {}, ()
    found: Dtypes = {}
    odd: list[str] = []
    matched: set[str] = set()
    for table in tables:
        for t in table.tensors:
            place = (table.path, t.key)
            if place in drops or t.dtype is None or t.dtype.kind != "float":
                continue
            name = renames.get(place, t.key)
            kept = [glob for glob in request.keep_dtype if match_glob(glob, name)]
            matched.update(kept)
            if kept or t.dtype is request.dtype:
                continue
            if t.dtype.name not in CASTABLE or t.kind not in _CAST_KINDS or t.storage is None:
                odd.append(t.key)
                continue
            found[place] = request.dtype
    _refuse_idle(checkpoint, request, matched)
    notes = (
        [
            Note(
                "not-cast",
                f"{len(odd)} left as they are, being of another kind: {', '.join(odd[:4])}",
            )
        ]
        if odd
        else []
    )
    if not found:
        notes.append(
            Note("nothing-to-cast", f"no floating-point tensor to cast to {request.dtype.name}")
        )
    return found, tuple(notes)


def _refuse_idle(checkpoint: Checkpoint, request: Request, matched: set[str]) -> None:
    idle = [glob for glob in request.keep_dtype if glob not in matched]
    if idle:
        raise RuleMatchesNothing(
            f"--keep-dtype {quote(idle[0])} matches no floating-point tensor; nothing written",
            path=checkpoint.file, hint="see the keys with ckptool inspect",
        )  # fmt: skip


# -- what can be converted ---------------------------------------------------------------------
_SCRIPT = ("its code may hold devices of its own", None)
_NOT_CONVERTED = {
    "megatron": (
        "which layers are cut along which side is not in the files",
        "merge the ranks with Megatron's tools/checkpoint/convert.py, or convert the "
        "model_optim_rng.pt of one rank",
    )
}


def refuse_kind(checkpoint: Checkpoint, request: Request) -> None:
    """Raise Unsupported for what is inspect only, UsageError for --keep-object without one."""
    if "inspect-only" in checkpoint.traits:
        why, hint = _NOT_CONVERTED.get(checkpoint.format, _SCRIPT)
        text = f"{checkpoint.format} can be inspected, not converted: {why}"
        raise Unsupported(text, path=checkpoint.file, hint=hint)
    modules = [table for table in checkpoint.tables if table.kind == "module"]
    if not request.keep_object:
        return
    if not modules:
        raise UsageError("--keep-object: the file holds no pickled model", path=checkpoint.file)
    for row in checkpoint.globals:
        if row.name.rpartition(".")[2] in ("DataParallel", "DistributedDataParallel"):
            raise Unsupported(
                f"a pickled {row.name} keeps device numbers of its own: it is not retagged as an object",
                path=checkpoint.file, hint="without --keep-object it comes out as its state_dict",
            )  # fmt: skip
