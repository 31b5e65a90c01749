"""Which cards CUDA shows to a process, and in which order.

Knows: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER as CUDA reads them, and what it makes of MIG.
Must not know: torch, how the cards were found, the environment itself.

Rules (CUDA programming guide, MIG user guide): entries count in their order; the first one that
names nothing ends the list; a card named twice hides all; a word counts as far as it is a number;
`GPU-…` may be cut short as long as one card begins so; all entries are of the kind of the first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckptool.models.smi import Card, Slice

_KINDS = ("GPU-", "MIG-")
_NUMBER = re.compile(r"\s*([+-]?\d+)", re.ASCII)
_MANY_SLICES = 570
"""Driver from which on CUDA shows a process one slice of every GPU instance, and whole cards
beside them; before, one slice and nothing else."""


class Target(NamedTuple):
    """A card, or a slice of it, that is visible; no card: CUDA shows one, not known which."""

    card: Card | None
    slice: Slice | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """`targets` in CUDA's order, or in nvidia-smi's where not `ordered`. `ended` says why the
    list is shorter than the mask, `doubt` what cannot be known, `aside` what else to know.
    `count` is None when not even their number is known.
    """

    targets: tuple[Target, ...]
    count: int | None
    ordered: bool = True
    ended: str = ""
    doubt: str = ""
    aside: str = ""


class _Unsure(Exception):
    """CUDA's answer is not documented; the text says what to write instead."""


def choose(mask: str | None, by_bus: bool, cards: Sequence[Card], whole: bool = True) -> Choice:
    """What the value `mask` (None: not set) makes visible. `by_bus`: CUDA_DEVICE_ORDER is
    PCI_BUS_ID. `whole`: `cards` are surely all there are.
    """
    try:
        if not whole and any(card.mig for card in cards):
            raise _Unsure("nvidia-smi may not have listed every card and MIG slice")
        if mask is not None and mask.startswith("MIG-"):
            return _by_slice(mask, cards)
        entries, ended = read(mask) if mask is not None else (list(range(len(cards))), "")
        if mask is not None and mask.startswith("GPU-"):
            return _sliced(*_by_uuid(entries, cards, ended))
        return _by_number(mask, entries, ended, cards, _doubt(cards, by_bus, whole), whole)
    except _Unsure as error:
        return Choice((), None, doubt=str(error))


def read(mask: str) -> tuple[list[str | int], str]:
    """The entries that count, and what ended them early ("": nothing)."""
    kind = next((kind for kind in _KINDS if mask.startswith(kind)), None)
    found: list[str | int] = []
    words = mask.split(",")
    for at, word in enumerate(words):
        entry = _number(word) if kind is None else word if word.startswith(kind) else None
        if entry is None:
            return found, _end(word, last=at + 1 == len(words))
        if entry in found:
            return [], f"{word.strip()!r} stands there twice, which hides every card"
        found.append(entry)
    return found, ""


def _number(word: str) -> int | None:
    """As C's strtoul reads it: `1gpu` is 1. None: no number, or a negative one."""
    found = _NUMBER.match(word)
    if found is None or len(found[1]) > _DIGITS:
        return None
    number = int(found[1])
    return number if number >= 0 else None


_DIGITS = 1_000  # no card has such a number, and Python refuses to read longer ones


def _end(word: str, *, last: bool) -> str:
    if word.strip():
        return f"{word.strip()!r} ends the list"
    return "" if last else "an empty entry ends the list"


def _doubt(cards: Sequence[Card], by_bus: bool, whole: bool) -> str:
    """Why the number of a card is not its place in nvidia-smi's list; empty when it is.
    Cards of one kind are equally fast, and CUDA keeps those in the order of the bus.
    """
    if not whole:
        return "a card may be missing from nvidia-smi's list, so numbers cannot be trusted"
    if by_bus or len({(card.name, card.memory.total_bytes) for card in cards}) < 2:
        return ""
    return "the cards differ: CUDA numbers the fastest first, nvidia-smi goes by the bus"


def _by_number(
    mask: str | None,
    entries: Sequence[str | int],
    ended: str,
    cards: Sequence[Card],
    doubt: str,
    whole: bool,
) -> Choice:
    numbers: list[int] = []
    for entry in map(int, entries):
        if entry >= len(cards):
            ended = f"there is no card {entry}: the list ends there"
            break
        numbers.append(entry)
    every = mask is None or sorted(numbers) == list(range(len(cards)))
    if doubt and any(card.mig for card in cards):
        raise _Unsure(f"{doubt}; write CUDA_VISIBLE_DEVICES with UUIDs (nvidia-smi -L)")
    if doubt and every:
        targets = tuple(Target(card) for card in cards)
        return Choice(targets, len(cards) if whole else None, False, ended, doubt)
    if doubt:
        unknown = (Target(None),) * len(numbers)
        return Choice(unknown, len(numbers) if whole else None, True, ended, doubt)
    before = cards[: max(numbers, default=-1) + 1]
    if mask is not None and any(card.mig for card in before) and _shows_many(cards):
        raise _Unsure("how numbers count MIG slices is not documented; write UUIDs (nvidia-smi -L)")
    return _sliced([cards[number] for number in numbers], ended)


def _by_uuid(
    entries: Sequence[str | int], cards: Sequence[Card], ended: str
) -> tuple[list[Card], str]:
    found: list[Card] = []
    for entry in map(str, entries):
        fitting = [card for card in cards if card.uuid.startswith(entry)]
        if len(fitting) != 1:
            what = f"begins the UUID of {len(fitting)} cards" if fitting else "is no card's UUID"
            return found, f"{entry!r} {what}: the list ends there"
        if fitting[0] in found:
            return [], f"{entry!r} names a card for the second time, which hides every card"
        found += fitting
    return found, ended


# -- MIG ---------------------------------------------------------------------------------------
def _sliced(cards: Sequence[Card], ended: str) -> Choice:
    """Cards that are cut up give slices; the others themselves."""
    if not any(card.mig for card in cards):
        return Choice(tuple(map(Target, cards)), len(cards), ended=ended)
    slices = [Target(card, one) for card in cards if card.mig for one in card.slices]
    if not slices:
        plain = tuple(Target(card) for card in cards if not card.mig)
        return Choice(plain, len(plain), ended=ended or "a card in MIG mode has no slice")
    if not _shows_many(cards):
        return Choice((slices[0],), 1, ended=ended, aside=_ONE)
    targets = [
        target
        for card in cards
        for target in (_one_each(card) if card.mig else [Target(card)])
    ]  # fmt: skip
    return Choice(tuple(targets), len(targets), ended=ended)


_ONE = "this driver shows a process one MIG slice, and no other card beside it"


def _shows_many(cards: Sequence[Card]) -> bool:
    number = re.match(r"\d+", cards[0].driver, re.ASCII)
    if number is None:
        raise _Unsure("the version of the driver is not known, and with it how it shows MIG slices")
    return int(number[0]) >= _MANY_SLICES


def _one_each(card: Card) -> list[Target]:
    """The first slice of each GPU instance."""
    first: dict[int, Slice] = {}
    for one in card.slices:
        if one.instance is None:
            raise _Unsure("nvidia-smi does not tell which MIG slices share a GPU instance")
        first.setdefault(one.instance, one)
    return [Target(card, one) for one in first.values()]


def _by_slice(mask: str, cards: Sequence[Card]) -> Choice:
    entries, ended = read(mask)
    found: list[Target] = []
    for entry in map(str, entries):
        target = _slice(entry, cards)
        if target is None:
            ended = f"{entry!r} is no MIG slice here: the list ends there"
            break
        found.append(target)
    if len(found) < 2:
        return Choice(tuple(found), len(found), ended=ended)
    if not _shows_many(cards):
        return Choice((found[0],), 1, ended=ended, aside=_ONE)
    places = [(t.card.uuid, t.slice.instance) for t in found if t.card and t.slice]
    if len(set(places)) < len(places) or any(instance is None for _, instance in places):
        raise _Unsure("two of these MIG slices share a GPU instance, and CUDA shows one of them")
    return Choice(tuple(found), len(found), ended=ended)


def _slice(entry: str, cards: Sequence[Card]) -> Target | None:
    """The slice of that UUID, or of the older spelling MIG-GPU-…/instance/compute."""
    every = [Target(card, one) for card in cards for one in card.slices]
    for target in every:
        card, one = target
        if card and one and entry in (one.uuid, f"MIG-{card.uuid}/{one.instance}/{one.compute}"):
            return target
    if any(one and one.uuid.startswith(entry) for _, one in every):
        raise _Unsure(f"{entry!r} is the beginning of a MIG UUID: write all of it")
    return None
