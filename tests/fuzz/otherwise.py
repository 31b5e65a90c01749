"""Mutation of the other containers by their parts: legacy streams, tar, safetensors, indexes."""

from __future__ import annotations

import io
import json
import pickletools
import struct
import tarfile

from fuzz import bytewise, picklewise


# -- streams of pickles ----------------------------------------------------------------------------
def pickles_of(data):
    """(the pickles that stand one behind another, what is behind them)."""
    stream, found = io.BytesIO(data), []
    while True:
        start = stream.tell()
        try:
            for _ in pickletools.genops(stream):
                pass
        except Exception:  # pickletools raises many kinds
            return found, data[start:]
        found.append(data[start : stream.tell()])
        if len(found) == 5:
            return found, data[stream.tell() :]


def _stream(data, dice):
    """A legacy stream: one of its pickles by opcode, or its storages by byte."""
    pickles, rest = pickles_of(data)
    at = dice.choice((0, 1, 2, 3, 3, 3, 3, 3, 3, 4, 4, 5))
    if at >= len(pickles):
        return b"".join(pickles) + bytewise.mutate(rest, dice)
    pickles[at] = picklewise.mutate(pickles[at], dice)
    if dice.random() < 0.05:
        pickles.insert(dice.randrange(len(pickles)), dice.choice(pickles))
    return b"".join(pickles) + rest


def _tar(data, dice):
    """Members mutated and packed again, their header checksums right."""
    with tarfile.open(fileobj=io.BytesIO(data)) as old:
        members = [[i.name, old.extractfile(i).read() if i.isfile() else b"", i.type] for i in old]
    row = dice.choice(members)
    way = dice.randrange(8)
    if way == 0:
        row[0] = dice.choice(
            (dice.choice(members)[0], "storages", "tensors", "pickle", "../x", "a/b")
        )
    elif way == 1:
        members.insert(dice.randrange(len(members) + 1), list(row))
    elif way == 2:
        members.remove(row)
    elif way == 3:
        row[2] = dice.choice((b"0", b"\0", b"1", b"2", b"5", b"L", b"x", b"7"))
    else:
        row[1] = _stream(row[1], dice)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as new:
        for name, body, kind in members:
            info = tarfile.TarInfo(name)
            info.type, info.size = kind, len(body)
            new.addfile(info, io.BytesIO(body))
    return stream.getvalue()


# -- JSON ------------------------------------------------------------------------------------------
_VALUES = (
    None, True, False, 0, 1, -1, 8, 24, 2**53, 2**63, 2**64, 10**400, 10**4200, 1.0, 0.5, 1e400, "", "F32", "I64", "BF16", "F8_E4M3",
    "F4", "C64", "BOOL", "U8", "a", "__metadata__", "dtype", "shape", "data_offsets", "\ud800", "\0",
    "../x", "/etc/passwd", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "weight_map",
    [], [0], [1, 2], [0, 24], [2, 3], {}, {"a": 1}, {"total_size": -1},
)  # fmt: skip


def _places(value, found):
    """Every (container, key) of parsed JSON."""
    rows = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in rows:
        found.append((value, key))
        if isinstance(inner, dict | list):
            _places(inner, found)
    return found


def _json(text, dice):
    """A value, a key or a row of JSON changed; now and then its text by byte."""
    if dice.random() < 0.25:
        return bytewise.mutate(text, dice)
    try:
        value = json.loads(text)
        places = _places(value, [])
    except (ValueError, TypeError, AttributeError, RecursionError):
        return bytewise.mutate(text, dice)
    for _ in range(dice.choice((1, 1, 2))):
        if places and dice.random() < 0.5:
            value = _rearranged(value, dice)
        elif places:
            _change(*dice.choice(places), places, dice)
    out = json.dumps(value, ensure_ascii=dice.random() < 0.5).encode("utf-8", "surrogatepass")
    if dice.random() < 0.1:  # the same name twice, which json.dumps never writes
        out = out[:-1] + b"," + out[1:]
    return out


def _change(holder, key, places, dice):
    way = dice.randrange(5)
    other = dice.choice(places)
    try:
        if way == 0:
            holder[key] = dice.choice(_VALUES)
        elif way == 1 and isinstance(holder[key], int):
            holder[key] += dice.choice((-1, 1, 4, 8, -8))
        elif way == 2 and isinstance(holder, dict):
            holder[str(dice.choice(_VALUES))] = holder.pop(key)
        elif way == 3:
            del holder[key]
        else:
            copied = json.loads(json.dumps(other[0][other[1]]))
            holder[key] = copied
    except (KeyError, IndexError):
        pass  # an earlier change took it away


_WIDE = {1: ("U8", "I8", "BOOL", "F8_E5M2"), 2: ("F16", "BF16", "I16"), 4: ("F32", "I32", "U32"),
         8: ("F64", "I64", "C64")}  # fmt: skip


def _rearranged(value, dice):
    """What stays sound: rows in another order, other keys, types as wide, shapes as large."""
    rows = list(value.items()) if isinstance(value, dict) else []
    if not rows:
        return value
    at = dice.randrange(len(rows))
    key, row = rows[at]
    way = dice.randrange(4)
    if way == 0:
        dice.shuffle(rows)
    elif way == 1:
        rows[at] = (str(dice.choice((*_VALUES, *picklewise.TEXTS))), row)
    elif way == 2 and isinstance(row, dict) and "dtype" in row:
        alike = next((kinds for kinds in _WIDE.values() if row["dtype"] in kinds), ("F32",))
        rows[at] = (key, {**row, "dtype": dice.choice(alike)})
    elif isinstance(row, dict) and isinstance(row.get("shape"), list):
        shape = dice.choice(([1, *row["shape"]], row["shape"][::-1], [*row["shape"], 1]))
        rows[at] = (key, {**row, "shape": shape})
    elif isinstance(row, dict) and row:
        rows[at] = (key, _rearranged(row, dice))
    return dict(rows)


def _header(data, dice):
    """The header of a .safetensors file, its length right again."""
    size = int.from_bytes(data[:8], "little")
    if size > len(data) or dice.random() < 0.15:
        return bytewise.mutate(data, dice)
    header, rest = data[8 : 8 + size], data[8 + size :]
    header = _json(header.rstrip(), dice)
    header += b" " * (-len(header) % 8)
    if dice.random() < 0.1:
        rest = bytewise.mutate(rest, dice)
    return struct.pack("<Q", len(header)) + header + rest


def _or_bytes(way, share):
    """`way` where the data lets it, else (and now and then) bytes."""

    def mutate(data, dice):
        if dice.random() < share:
            try:
                return way(data, dice)
            except Exception:  # readers of the standard library raise many kinds
                pass
        return bytewise.mutate(data, dice)

    return mutate


mutate_stream = _or_bytes(_stream, 0.85)
mutate_tar = _or_bytes(_tar, 0.8)
mutate_header = _or_bytes(_header, 1)
mutate_index = _or_bytes(_json, 1)
