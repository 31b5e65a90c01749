"""The rules of a view as flags of `ckptool convert`.

Knows: which flags choose a table, when rules would touch tables that they are not meant for.
Must not know: how rules are found, files, torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from shlex import quote

from ckptool.causes.spelling import MOST, flags
from ckptool.causes.trials import Step
from ckptool.causes.views import View
from ckptool.checkpoint import Path, Table
from ckptool.errors import CkptError
from ckptool.keynames import Rule
from ckptool.rules import apply


def options_of(view: View, default: Table, tables: Sequence[Table]) -> str:
    """The flags that do what the view's rules do; empty where nothing is to be done or no flags
    say it.
    """
    said = flags(view.trial.rules)
    if said is None:
        return ""
    if view.table is not default:
        chosen = _chosen("--select", view.table, tables)
        return f"{chosen} {said}".rstrip() if chosen else ""
    if not said or not _harms_others(view, tables):
        return said
    chosen = _chosen("--at", view.table, tables)
    return f"{chosen} {said}" if chosen else ""


def partial_of(view: View, default: Table, tables: Sequence[Table]) -> str:
    """The flags that also leave out what differs in shape; empty where nothing does, where no
    flags say it, or where little would be left.
    """
    names = [row.key for row in view.after.mismatched]
    if not names or len(view.after.loaded) < len(names):
        return ""
    for globs in _globs(names):
        rules = tuple(Rule("drop", glob) for glob in globs)
        done = view.trials.run(view.trial, Step(rules, "leaving out what differs in shape"))
        if len(rules) <= MOST and done is not None and _left(view, done.names) == set(names):
            return options_of(view._replace(trial=done), default, tables)
    return ""


def _globs(names: Sequence[str]) -> list[list[str]]:
    owners = {name: name.rpartition(".")[0] for name in names}
    modules = [f"{owner}.*" if owner else name for name, owner in owners.items()]
    return [list(dict.fromkeys(modules)), list(names)]


def _left(view: View, names: Sequence[str | None]) -> set[str | None]:
    rows = zip(view.trial.names, names, strict=True)
    return {name for name, left in rows if left is None and name is not None}


def _chosen(flag: str, table: Table, tables: Sequence[Table]) -> str:
    """The flag that names a table; empty where another goes by the same dotted path."""
    same = [other for other in tables if dotted(other.path) == dotted(table.path)]
    return f"{flag} {quote(dotted(table.path))}" if len(same) == 1 else ""


def _harms_others(view: View, tables: Sequence[Table]) -> bool:
    """Whether the rules would change a table that has other names than this one."""
    keys = {tensor.key for tensor in view.table.tensors}
    for table in tables:
        names = [tensor.key for tensor in table.tensors]
        if table is view.table or table.kind == "tensors" or set(names) == keys:
            continue
        try:
            outcome = apply(view.trial.rules, names, [key for key, _ in table.others])
        except CkptError:
            return True
        if outcome.renames or outcome.drops:
            return True
    return False


def dotted(path: Path) -> str:
    """The path of a table as --at and --select take it; `.` is the root."""
    return ".".join(map(str, path)) or "."
