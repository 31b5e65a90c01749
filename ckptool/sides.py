"""One file of a comparison: what it holds, and the common place of each thing in it.

Knows: state_dicts, plain values and tensors by their places, new names of keys. Must not know:
files, bytes, the other side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from ckptool.alignment import AS_IT_IS, Naming, under
from ckptool.checkpoint import Extra, Path, Table, Tensor
from ckptool.layer_versions import metadata_renames


class Inside(Protocol):
    """What a compound tensor is made of, by places below its own."""

    @property
    def values(self) -> Mapping[Path, Extra]:
        """Plain values; a container is one without a value."""

    @property
    def tensors(self) -> Mapping[Path, Tensor]:
        """Tensors."""


class Side(NamedTuple):
    """One file: its state_dicts (`weights` indexes the default one), every plain value by its
    place (an Extra without a value stands for a container), the tensors in no state_dict, what
    compound tensors are made of; `complete` whether these are all values of the file.
    """

    name: str
    tables: tuple[Table, ...]
    weights: int | None
    values: Mapping[Path, Extra]
    tensors: Mapping[Path, Tensor]
    inside: Mapping[Path, Inside]
    complete: bool = True


class Placed:
    """One side, with the common places of what it holds."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.namings: list[Naming] = []
        self.skipped: list[Path] = []
        self._tables: dict[int, tuple[int, Path]] = {}  # index -> (number, common place)
        self._roots: list[tuple[Path, int]] = []

    def take(self, number: int, index: int, mine: Naming, theirs: Naming, other: Table) -> None:
        """Compare the state_dict `index` with another, as pair `number`."""
        table = self.side.tables[index]
        root = () if number == 0 else table.path
        self._tables[index] = number, root
        self.namings.append(mine)
        self._roots.append((table.path, index))
        kinds = {table.kind, other.kind}
        if "module" in kinds and (kinds != {"module"} or mine.renames or theirs.renames):
            self.skipped.append(table.path)

    def naming(self, index: int) -> Naming:
        """How the keys of a state_dict are renamed."""
        row = self._tables.get(index)
        return AS_IT_IS if row is None else self.namings[row[0]]

    def tensors(self, bare: bool) -> dict[Path, tuple[Tensor, int | None]]:
        """Every tensor by its common place, with the number of its pair of state_dicts; `bare`:
        of chosen state_dicts only.
        """
        found: dict[Path, tuple[Tensor, int | None]] = {}
        counts: dict[Path, int] = {}
        for index, table in enumerate(self.side.tables):
            number, root = self._tables.get(index, (None, table.path))
            if number is None and bare:
                continue
            renames = self.naming(index).renames
            for t in table.tensors:
                found[_free((*root, renames.get(t.key, t.key)), found, counts)] = (t, number)
        if not bare:
            for path, tensor in self.side.tensors.items():
                if not self._is_skipped(path):
                    common = self.common(path)
                    found[_free(path if common in found else common, found, counts)] = (
                        tensor,
                        None,
                    )
        return found

    def values(self) -> dict[Path, Extra]:
        """Every plain value by its common place; what only leads to a compared state_dict is left
        out.
        """
        found: dict[Path, Extra] = {}
        counts: dict[Path, int] = {}
        roots = [root for root, _ in self._roots]
        leading = {root[:i] for root in roots for i in range(len(root) + 1)}
        for path, extra in self.side.values.items():
            if path not in leading and not self._is_skipped(path):
                common = self.common(path)
                place = _free(path if common in found else common, found, counts)
                found[place] = self._followed(path, extra)
        return found

    def common(self, path: Path) -> Path:
        """The common place of what is at `path`."""
        for root, index in self._roots:
            if under(path, root):
                _, place = self._tables[index]
                key, rest = path[len(root)], path[len(root) + 1 :]
                names = self.naming(index).renames
                return (*place, names.get(key, key) if type(key) is str else key, *rest)
        names = self._optimizer_names(path)
        return tuple(names.get(part, part) if type(part) is str else part for part in path)

    def inside(self, tensor: Tensor) -> Inside | None:
        """What a compound tensor is made of."""
        return self.side.inside.get(tensor.path)

    def has_metadata(self, number: int) -> bool:
        """Whether a state_dict has versions of layers."""
        index = next(i for i, row in self._tables.items() if row[0] == number)
        return self.side.tables[index].metadata is not None

    def metadata(self, number: int) -> dict[str, Any] | None:
        """The versions of layers of a state_dict, by common names."""
        index = next(i for i, row in self._tables.items() if row[0] == number)
        table = self.side.tables[index]
        if table.metadata is None:
            return None
        renames = self.naming(index).renames
        if not renames:
            return dict(table.metadata)
        keys = [t.key for t in table.tensors]
        moved, dropped = metadata_renames(list(table.metadata), renames, keys)
        rows = table.metadata.items()
        return {moved.get(path, path): row for path, row in rows if path not in dropped}

    def order(self, number: int) -> list[str]:
        """The keys of a state_dict in the order of the file, by common names."""
        index = next(i for i, row in self._tables.items() if row[0] == number)
        names = self.naming(index).renames
        return [names.get(t.key, t.key) for t in self.side.tables[index].tensors]

    def _followed(self, path: Path, extra: Extra) -> Extra:
        """Names of parameters that an optimizer notes, by the common names."""
        if type(extra.value) is str and "param_names" in path:
            names = self._optimizer_names(path)
            return extra._replace(value=names.get(extra.value, extra.value))
        return extra

    def _optimizer_names(self, path: Path) -> dict[str, str]:
        """The renames that what is at `path` follows: those of the weights inside an optimizer's
        state, none elsewhere; a text of the user's is a text.
        """
        if not self.namings or not self.namings[0].renames:
            return {}
        values = self.side.values
        roots = (path[:depth] for depth in range(len(path)))
        inside = any(
            (*root, "state") in values and (*root, "param_groups") in values for root in roots
        )
        return self.namings[0].renames if inside else {}

    def _is_skipped(self, path: Path) -> bool:
        return any(path[: len(root)] == root for root in self.skipped)


def _free(place: Path, taken: Mapping[Path, Any], counts: dict[Path, int]) -> Path:
    """The place, or one beside it that nothing has: keys that read alike are told apart. `counts`
    remembers how far that went, since thousands may read alike.
    """
    found = place
    while found in taken:
        counts[place] = counts.get(place, 1) + 1
        found = (*place[:-1], f"{place[-1] if place else ''} ({counts[place]})")
    return found


def dotted(path: Iterable[str | int]) -> str:
    """A place as a name: its components joined by dots."""
    return ".".join(map(str, path))
