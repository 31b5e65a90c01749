"""Rules that say the new name: prefixes, regular expressions, a file of names.

Knows: prefixes of whole components, `re.sub`, JSON objects of text to text. Must not know:
wrappers, globs, files.

No rule here makes an empty component: torch has no module without a name.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ckptool.errors import UsageError
from ckptool.keynames import Remark, Rule, some
from ckptool.wrapping import UNCOUNTED


def strip_prefix(names: Sequence[str], rule: Rule) -> dict[str, str]:
    """The prefix goes once from the names that carry it and more."""
    prefix = _prefix(rule) + "."
    cut = len(prefix)
    return {n: n[cut:] for n in names if n.startswith(prefix) and len(n) > cut}


def add_prefix(names: Sequence[str], rule: Rule) -> dict[str, str]:
    """The prefix goes before every name. Raises UsageError when part of it is empty."""
    prefix = _prefix(rule)
    if "" in prefix.split("."):
        raise UsageError(f"{rule.flag}: a part of that prefix is empty")
    return {n: f"{prefix}.{n}" for n in names}


def _prefix(rule: Rule) -> str:
    """The components of a prefix, which may be given with its dot."""
    return (rule.argument or "").removesuffix(".")


def rename(names: Sequence[str], rule: Rule) -> dict[str, str]:
    """One `re.sub` a name, every match in it; the names that changed.

    Raises UsageError on a bad expression and on a name that would lose or gain too much.
    """
    if rule.to is None:
        raise UsageError("--rename needs what to look for and what to put there")
    expression, new = _expression(rule, rule.to), rule.to
    changed = {n: name for n in names if (name := expression.sub(new, n)) != n}
    return _sound(changed, rule)


def _expression(rule: Rule, new: str) -> re.Pattern[str]:
    """Compiled, and its new text tried: both come from a person."""
    old = rule.argument or ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what may change in later Pythons is not the user's
            expression = re.compile(old)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"--rename: '{old}' is no regular expression: {error}") from None
    try:
        expression.sub(new, "")
    except (re.error, IndexError) as error:
        hint = r"the groups of OLD are \1, \2 or \g<name>; a backslash is \\"
        raise UsageError(f"--rename: '{new}' cannot replace '{old}': {error}", hint=hint) from None
    return expression


def rename_file(names: Sequence[str], rule: Rule) -> dict[str, str]:
    """The new name of every name that has an entry, all at once: a swap is fine."""
    entries = dict(rule.pairs)
    return _sound({n: entries[n] for n in names if n in entries}, rule)


def _sound(changed: dict[str, str], rule: Rule) -> dict[str, str]:
    """The same, unless a new name has nothing, or more nothing between dots than the old one."""
    for old, name in changed.items():
        if not name:
            raise UsageError(f"{rule.flag} would leave nothing of '{old}'; nothing written")
        if (name[0] == "." or name[-1] == "." or ".." in name) and _holes(name) > _holes(old):
            text = f"would make '{name}' of '{old}', with nothing before, after or between dots"
            raise UsageError(f"{rule.flag} {text}; nothing written")
    return changed


def _holes(name: str) -> int:
    return name.split(".").count("")


# What is worth saying


def some_carry(names: Sequence[str], rule: Rule, found: Mapping[str, str]) -> list[Remark]:
    """A prefix that only some names carried."""
    total = sum(name not in UNCOUNTED for name in names)
    if not 0 < len(found) < total:
        return []
    text = f"{len(found):,} of {total:,} keys carry '{_prefix(rule)}.'; the others keep their names"
    return [Remark("partial-prefix", text)]


def unmatched(names: Sequence[str], rule: Rule, found: Mapping[str, str]) -> list[Remark]:
    """Entries of a file of names that are no key, where others are."""
    without = [old for old, _ in rule.pairs if old not in found]
    if not found or not without:
        return []
    count = f"{len(without):,} of {len(rule.pairs):,} entries"
    return [Remark("rename-unmatched", f"{count} of {rule.argument} match no key: {some(without)}")]


# The file of names


class _Object(list[tuple[str, Any]]):
    """A JSON object as its (key, value) pairs, told from an array."""


def parse_rename_file(data: bytes, name: str) -> tuple[tuple[str, str], ...]:
    """The (old, new) entries of a JSON object of text to text, in order.

    `name` is the file's, for messages. Raises UsageError, with line and column where the JSON
    is broken, and on a key that stands twice.
    """
    import json

    try:
        found = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_Object)
    except UnicodeDecodeError as error:
        raise _bad(name, f"byte {error.start:,} is no UTF-8") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise _bad(name, f"no JSON: {error.msg} ({where})") from None
    except (RecursionError, ValueError):
        raise _bad(name, "nested too deep or with a number too long") from None
    if type(found) is not _Object:
        raise _bad(name, "no JSON object of names")
    seen: dict[str, str] = {}
    for old, new in found:
        if type(new) is not str:
            raise _bad(name, f"the new name of '{old}' is no text")
        if old in seen:
            raise _bad(name, f"'{old}' stands in it twice")
        seen[old] = new
    return tuple(seen.items())


def _bad(name: str, text: str) -> UsageError:
    hint = 'it looks like {"old.weight": "new.weight", …}'
    return UsageError(f"--rename-file: {text}", path=name, hint=hint)
