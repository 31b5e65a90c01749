"""Objects of classes that were not imported, and names that were not looked up.

Knows: what a file says of an object: its class's name, its arguments, its fields.
Must not know: pickles, torch. A record is bare data with a class's name on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_SHOWN, _WIDTH = 6, 60


class Record:
    """An object whose class ckptool does not import: inert, with its fields.

    `class_name` is `module.Class` as the file spells it, `arguments` what the class was called
    with, `keywords` likewise by name, `fields` the attributes, `state` what the object was given
    instead of attributes (None mostly), `entries` the items of a list or dict of its own kind.
    `record.lr` reads a field, `record["lr"]` and iteration read the entries; both can be set.
    Two records are equal only when they are the same one.
    """

    __slots__ = ("__weakref__", "arguments", "class_name", "entries", "fields", "keywords", "state")

    class_name: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    fields: dict[Any, Any]
    state: Any
    entries: Any

    def __init__(
        self,
        class_name: str,
        arguments: tuple[Any, ...] = (),
        fields: dict[Any, Any] | None = None,
        entries: Any = None,
        keywords: dict[str, Any] | None = None,
        state: Any = None,
    ) -> None:
        self.class_name = class_name
        self.arguments = arguments
        self.fields = {} if fields is None else fields
        self.entries = entries
        self.keywords = {} if keywords is None else keywords
        self.state = state

    def __getattr__(self, name: str) -> Any:
        """A field by its name. Raises AttributeError."""
        fields = object.__getattribute__(self, "fields")
        if name[:2] != "__" and name in fields:
            return fields[name]
        raise AttributeError(f"the record of a {_plain(self.class_name)} has no field {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in Record.__slots__:
            object.__setattr__(self, name, value)
        else:
            self.fields[name] = value

    def __getitem__(self, key: Any) -> Any:
        return self._held()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._held()[key] = value

    def __contains__(self, key: Any) -> bool:
        return self.entries is not None and key in self.entries

    def __iter__(self) -> Iterator[Any]:
        return iter(self._held())

    def __len__(self) -> int:
        return 0 if self.entries is None else len(self.entries)

    def __bool__(self) -> bool:
        return True  # also where it holds no items

    def _held(self) -> Any:
        if self.entries is None:
            raise TypeError(f"the record of a {_plain(self.class_name)} holds no items")
        return self.entries

    def __dir__(self) -> list[str]:
        names = (name for name in self.fields if isinstance(name, str) and name.isidentifier())
        return sorted({*object.__dir__(self), *names})

    def __repr__(self) -> str:
        shown = [_short(value) for value in self.arguments[:_SHOWN]]
        shown += [f"{_word(k)}={_short(v)}" for k, v in list(self.fields.items())[:_SHOWN]]
        if len(self.arguments) > _SHOWN or len(self.fields) > _SHOWN:
            shown.append("…")
        if self.entries is not None:
            shown.append(f"{len(self.entries)} entries")
        return f"<{_plain(self.class_name)}: {', '.join(shown)}>" if shown else f"<{_plain(self.class_name)}>"  # fmt: skip


class Reference:
    """A class or function that a file names without calling it; it was not imported."""

    __slots__ = ("__weakref__", "name")

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and self.name == other.name

    def __hash__(self) -> int:
        return hash((Reference, self.name))

    def __repr__(self) -> str:
        return f"<name {_plain(self.name)}>"


def first_record(value: Any) -> Record | None:
    """The first record in a value, or in the containers it is made of; None where there is none."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        part = stack.pop()
        if isinstance(part, Record):
            return part
        if isinstance(part, dict | list | tuple | set | frozenset) and id(part) not in seen:
            seen.add(id(part))
            stack += [*part.keys(), *part.values()] if isinstance(part, dict) else part
    return None


def _plain(text: str) -> str:
    """A name from a file in one line, what cannot be printed escaped."""
    return repr(text)[1:-1]


def _word(key: Any) -> str:
    return _plain(key) if isinstance(key, str) else _short(key)


def _short(value: Any) -> str:
    """One value; containers by their size, since they may hold themselves."""
    if isinstance(value, dict | list | tuple | set | frozenset):
        return f"<{type(value).__name__} of {len(value)}>"
    if isinstance(value, str | bytes):
        return repr(value[:_WIDTH]) + ("…" if len(value) > _WIDTH else "")
    if isinstance(value, int) and value.bit_length() > 200:
        return f"<{value.bit_length()}-bit int>"
    if isinstance(value, bool | int | float | type(None)):
        return repr(value)
    if isinstance(value, Reference):
        return repr(value)
    return f"<{_plain(value.class_name if isinstance(value, Record) else type(value).__name__)}>"
