"""A new .pth from tensors without a pickle: .safetensors files and shards.

Knows: that a state_dict comes out, with its `_metadata` and what `__metadata__` said.
Must not know: verbs, how pickles are edited.
"""

from __future__ import annotations

from ckptool.checkpoint import Changes, Checkpoint
from ckptool.errors import Unsupported
from ckptool.formats import expressions
from ckptool.formats.contents import Filler
from ckptool.formats.homes import Housing, User, house
from ckptool.formats.readback import compare
from ckptool.formats.rehouse import Expected
from ckptool.formats.rewrite import Rewritten, refuse_unsafe
from ckptool.formats.rows import Row, chosen_table, final_metadata, kept_metadata, rows_of
from ckptool.formats.torch_legacy_edit import stream_parts
from ckptool.formats.torch_zip_edit import new_records, storage_record
from ckptool.limits import Limits
from ckptool.pickles.write import whole
from ckptool.places import Source
from ckptool.plans import Output, Plan, total_size
from ckptool.zipplan import plan_zip


def write(checkpoint: Checkpoint, changes: Changes, target: str) -> tuple[Plan, Rewritten]:
    """A `torch-zip` or `torch-legacy` of the one table. Raises Unsupported by name, UnsafePickle
    where a pickle it was read from could run code: none of that comes along, yet a .pth should not
    pass for what that file was.
    """
    refuse_unsafe(checkpoint.globals, changes)
    table = chosen_table(checkpoint, changes)
    rows = rows_of(checkpoint, table, changes)
    users = [_user(row, number) for number, row in enumerate(rows)]
    housing = house(users, dict(changes.devices), changes.compact)
    del users
    legacy = target == "torch-legacy"
    expression = expressions.state_dict(
        [(row.key, _tensor(row, number, housing, legacy)) for number, row in enumerate(rows)],
        final_metadata(table, changes),
        kept_metadata(checkpoint, {tensor.key for tensor in table.tensors}),
    )
    result = Rewritten(whole(expression), housing=housing, expected=_expected(rows, housing))
    for home in housing.homes:
        if home.source.device != home.device:
            change = (home.source.device, home.device)
            result.retagged[change] = result.retagged.get(change, 0) + 1
    filler = Filler(changes.check)
    if legacy:
        parts = stream_parts(result.data, housing.homes, filler)
    else:
        stored = [
            storage_record(filler, home, f"archive/data/{number}", False)
            for number, home in enumerate(housing.homes)
        ]
        parts = plan_zip(new_records("archive", result.data, stored))
    result.housing = housing._replace(places={})  # homes are checked, and counted
    return Plan(checkpoint.sources, (Output("", parts, total_size(parts)),)), result


def confirm(checkpoint: Checkpoint, rewritten: Rewritten, written: Source, limits: Limits) -> None:
    """Read it back and compare. Raises OutputError."""
    assert rewritten.housing is not None
    compare(written, rewritten.expected, rewritten.housing, limits)


def _user(row: Row, number: int) -> User:
    t = row.tensor
    if t.kind not in ("tensor", "parameter") or t.storage is None:
        raise Unsupported(f"a {t.kind} tensor cannot be written into a plain state_dict",
                          key=row.key, hint="leave it out with --drop")  # fmt: skip
    return User(number, t, row.target, row.key)


def _tensor(row: Row, number: int, housing: Housing, legacy: bool) -> bytes:
    place = housing.places[number]
    home = housing.homes[place.home]
    storage = expressions.storage_id(home, str(place.home), legacy=legacy)
    return expressions.tensor(
        storage, place.dtype, row.tensor.shape or (), place.stride, place.offset,
        untyped=home.dtype.torch_storage == "UntypedStorage",
        requires_grad=bool(row.tensor.requires_grad),
    )  # fmt: skip


def _expected(rows: list[Row], housing: Housing) -> list[Expected]:
    found = []
    for number, row in enumerate(rows):
        place = housing.places[number]
        shape, home = row.tensor.shape, str(place.home)
        path = row.tensor.path if row.tensor.path == (row.key,) else (row.key,)
        found.append(Expected(path, place.dtype, shape, place.stride, place.offset, home))
    return found
