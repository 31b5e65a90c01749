"""Mutation of any bytes: spans flipped, inserted, deleted, doubled, spliced; numbers made odd.

A mutator is `mutate(data, dice) -> bytes`; `dice` is a random.Random, so that a seed repeats it.
"""

from __future__ import annotations

import struct

ODD_NUMBERS = (
    0, 1, 2, 3, 5, 6, 7, 8, 23, 24, 25, 63, 64, 127, 128, 255, 256, 65535, 1 << 20, 2**31 - 1, 2**31,
    2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, -2, -(2**31), -(2**63),
)  # fmt: skip
_LONGEST = 1 << 16


def span(data, dice, most=24):
    """(start, end) of a short piece, possibly empty."""
    start = dice.randrange(len(data) + 1)
    return start, min(len(data), start + dice.randrange(1, most + 1))


def flip(data, dice):
    out = bytearray(data or b"\0")
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        out[dice.randrange(len(out))] ^= 1 << dice.randrange(8)
    return bytes(out)


def overwrite(data, dice):
    start, end = span(data, dice, 8)
    return data[:start] + dice.randbytes(end - start) + data[end:]


def insert(data, dice):
    start, _ = span(data, dice)
    return data[:start] + dice.randbytes(dice.randrange(1, 9)) + data[start:]


def delete(data, dice):
    start, end = span(data, dice)
    return data[:start] + data[end:]


def double(data, dice):
    start, end = span(data, dice)
    return data[:end] + data[start:end] + data[end:]


def move(data, dice):
    start, end = span(data, dice)
    rest = data[:start] + data[end:]
    at = dice.randrange(len(rest) + 1)
    return rest[:at] + data[start:end] + rest[at:]


def splice(data, dice):
    """A piece written over another."""
    start, end = span(data, dice, 64)
    at = dice.randrange(len(data) + 1)
    return data[:at] + data[start:end] + data[at + end - start :]


def cut(data, dice):
    return data[: dice.randrange(len(data) + 1)]


def number(data, dice):
    """A field of 1, 2, 4 or 8 bytes set to an odd number, in either byte order."""
    letter, size = dice.choice((("b", 1), ("h", 2), ("i", 4), ("q", 8)))
    if len(data) < size:
        return data
    at = dice.randrange(len(data) - size + 1)
    value = dice.choice(ODD_NUMBERS) & (1 << 8 * size) - 1
    return data[:at] + struct.pack(dice.choice("<>") + letter.upper(), value) + data[at + size :]


WAYS = (flip, flip, overwrite, insert, delete, double, move, splice, cut, number, number)


def mutate(data, dice):
    """One to three of these in a row."""
    for _ in range(dice.choice((1, 1, 2, 3))):
        data = dice.choice(WAYS)(data, dice)[:_LONGEST]
    return data
