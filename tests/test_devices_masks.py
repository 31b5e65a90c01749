"""CUDA_VISIBLE_DEVICES: what is visible, in which order; torch's own parser is the oracle."""

from __future__ import annotations

import pytest
import torch
from devices_support import A, B, C
from hypothesis import example, given
from hypothesis import strategies as st

from ckptool.models.masks import choose
from ckptool.models.smi import Card, Memory, Slice

UUIDS = (A, B, C)
CARDS = tuple(Card(i, uuid, "NVIDIA H200", Memory(1, 1, 2)) for i, uuid in enumerate(UUIDS))
UNEQUAL = (
    Card(0, A, "NVIDIA T400", Memory(1, 1, 2)),
    Card(1, B, "NVIDIA H200", Memory(1, 1, 9)),
    Card(2, C, "NVIDIA H200", Memory(1, 1, 9)),
)


def numbers(mask, cards=CARDS, by_bus=False, whole=True):
    """Physical numbers in CUDA's order; '?' where it shows a card that cannot be named."""
    found = choose(mask, by_bus, cards, whole)
    return [target.card.physical if target.card else "?" for target in found.targets]


@pytest.mark.parametrize(
    ("mask", "shown"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1", [1]),
        ("2,0", [2, 0]),
        (" 2 , 0 ", [2, 0]),
        ("0,2,-1,1", [0, 2]),
        ("0,3,1", [0]),
        ("3", []),
        ("0,,1", [0]),
        ("0,1,", [0, 1]),
        (",0", []),
        ("0,1,0", []),
        ("1gpu2,2ampere", [1, 2]),
        ("+1", [1]),
        ("-", []),
        ("0x1", [0]),
        ("0;1", [0]),
        ("9" * 5000, []),
        (A, [0]),
        (f"{C},{A}", [2, 0]),
        ("GPU-c", [2]),
        ("GPU-aaaa,GPU-aaab", [0, 1]),
        ("GPU-aaa", []),
        ("GPU-", []),
        (f"{A},GPU-aaa,{C}", [0]),
        (f"{A},GPU-dddd,{C}", [0]),
        (f"{A}0", []),
        (f"{A},{A}", []),
        (f"{A},GPU-aaaa", []),
        (f"{A}, {C}", [0]),
        (f"{A},1", [0]),
        (f"1,{A}", [1]),
        ("gpu-aaaa", []),
        ("MIG-11111111", []),
    ],
)
def test_what_a_mask_shows(mask, shown):
    assert numbers(mask) == shown


_WORDS = st.one_of(
    st.integers(-2, 5).map(str),
    st.sampled_from([A, B, C, "GPU-a", "GPU-aaaa", "GPU-aaab22", "GPU-c", "GPU-", "GPU-d"]),
    st.sampled_from(["", " ", "x", "1x", " 2", "0 ", "+1", "00", "0x1", "-0", "1.5", " GPU-c"]),
    st.text("012GPU-ac, ", max_size=6),
)


@given(st.lists(_WORDS, max_size=5).map(",".join))
@example("0,7,0")
@example("0,-1,0")
@example(f"{A},GPU-d,{A}")
def test_it_is_what_torch_counts(mask):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", mask)
        patch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: len(UUIDS))
        patch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: list(UUIDS))
        try:
            count, parsed = torch.cuda._device_count_nvml(), torch.cuda._parse_visible_devices()
        except ValueError:  # torch fails on a sign without digits, CUDA does not
            return
    if parsed and isinstance(parsed[0], str):
        parsed = torch.cuda._transform_uuid_to_ordinals(parsed, list(UUIDS))

    assert numbers(mask) == parsed[:count]


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        ("0,3,1", "there is no card 3: the list ends there"),
        ("0,-1,1", "'-1' ends the list"),
        ("0,,1", "an empty entry ends the list"),
        ("0,1,", ""),
        ("1,1", "'1' stands there twice, which hides every card"),
        ("GPU-aaa", "'GPU-aaa' begins the UUID of 2 cards: the list ends there"),
        ("GPU-c,GPU-x", "'GPU-x' is no card's UUID: the list ends there"),
        ("GPU-c,GPU-cc", "'GPU-cc' names a card for the second time, which hides every card"),
        ("0,\x1b[2J", "'\\x1b[2J' ends the list"),
    ],
)
def test_it_says_what_ended_the_list(mask, said):
    assert choose(mask, False, CARDS).ended == said


# -- unequal cards -------------------------------------------------------------------------------
def test_the_order_of_unequal_cards_is_not_guessed():
    found = choose(None, False, UNEQUAL)

    assert numbers(None, UNEQUAL) == [0, 1, 2]
    assert (found.ordered, found.count) == (False, 3)
    assert "CUDA numbers the fastest first" in found.doubt


def test_a_number_of_unequal_cards_names_none_of_them():
    assert numbers("1", UNEQUAL) == ["?"]
    assert numbers("2,0", UNEQUAL) == ["?", "?"]
    assert choose("2,0,7", False, UNEQUAL).count == 2


def test_all_numbers_of_unequal_cards_are_all_cards_in_no_known_order():
    found = choose("2,0,1", False, UNEQUAL)

    assert (found.ordered, found.count, len(found.targets)) == (False, 3, 3)


def test_by_bus_or_by_uuid_unequal_cards_are_certain():
    for mask, by_bus, shown in (("2,0", True, [2, 0]), (None, True, [0, 1, 2]), (B, False, [1])):
        found = choose(mask, by_bus, UNEQUAL)
        assert numbers(mask, UNEQUAL, by_bus) == shown
        assert (found.ordered, found.doubt) == (True, "")


def test_same_name_with_other_memory_is_unequal():
    cards = (CARDS[0], CARDS[1]._replace(memory=Memory(1, 1, 4)))
    assert choose("0", False, cards).doubt


def test_one_card_has_no_order():
    assert choose(None, False, UNEQUAL[:1]) == choose(None, True, UNEQUAL[:1])


def test_a_list_that_may_lack_a_card_gives_no_numbers():
    found = choose("1", True, CARDS, whole=False)

    assert (numbers("1", whole=False), found.count) == (["?"], None)
    assert "may be missing" in found.doubt
    assert choose(None, True, CARDS, whole=False).count is None
    assert numbers(B, whole=False) == [1]


# -- MIG -----------------------------------------------------------------------------------------
def sliced(driver, *rows):
    """Cards of (uuid, slices as (uuid, GPU instance, compute instance)); None: not in MIG mode."""
    return [
        Card(
            i, uuid, "NVIDIA A100", driver=driver, mig=slices is not None,
            slices=tuple(Slice(u, "1g.5gb", gi, ci) for u, gi, ci in slices or ()),
        )
        for i, (uuid, slices) in enumerate(rows)
    ]  # fmt: skip


HALVES = [("MIG-1", 1, 0), ("MIG-2", 1, 1), ("MIG-3", 9, 0)]
MIXED = ((A, HALVES), (B, [("MIG-4", 2, 0)]), (C, None))
OLD, NEW = sliced("535.129.03", *MIXED), sliced("570.124.06", *MIXED)


def slices(mask, cards):
    found = choose(mask, False, cards)
    return [t.slice.uuid if t.slice else t.card.physical for t in found.targets]


@pytest.mark.parametrize(
    ("mask", "old", "new"),
    [
        (None, ["MIG-1"], ["MIG-1", "MIG-3", "MIG-4", 2]),
        ("MIG-3", ["MIG-3"], ["MIG-3"]),
        ("MIG-4,MIG-1", ["MIG-4"], ["MIG-4", "MIG-1"]),
        ("MIG-4,MIG-x,MIG-1", ["MIG-4"], ["MIG-4"]),
        ("MIG-x", [], []),
        ("MIG-4,MIG-4", [], []),
        (f"MIG-{A}/9/0", ["MIG-3"], ["MIG-3"]),
        (f"MIG-{A}/9/1", [], []),
        (C, [2], [2]),
        (A, ["MIG-1"], ["MIG-1", "MIG-3"]),
        (f"{C},{B}", ["MIG-4"], [2, "MIG-4"]),
    ],
)
def test_slices_that_are_shown(mask, old, new):
    assert (slices(mask, OLD), slices(mask, NEW)) == (old, new)


@pytest.mark.parametrize(("mask", "shown"), [("1", ["MIG-4"]), ("2", [2]), ("0,1", ["MIG-1"])])
def test_before_570_a_number_is_a_card(mask, shown):
    assert slices(mask, OLD) == shown


@pytest.mark.parametrize(
    ("mask", "cards", "why"),
    [
        ("1", NEW, "not documented"),
        ("2", NEW, "not documented"),
        ("MIG-1,MIG-2", NEW, "share a GPU instance"),
        ("MIG-", NEW, "beginning of a MIG UUID"),
        (None, sliced("", *MIXED), "version of the driver"),
        (None, sliced("570", (A, [("MIG-1", None, None)])), "does not tell"),
    ],
)
def test_what_nobody_documents_is_not_guessed(mask, cards, why):
    found = choose(mask, False, cards)

    assert (found.targets, found.count) == ((), None)
    assert why in found.doubt


def test_mig_mode_without_a_slice_shows_nothing():
    found = choose(None, False, sliced("570", (A, [])))

    assert (found.count, found.ended) == (0, "a card in MIG mode has no slice")


def test_an_old_driver_says_that_it_shows_one_slice():
    assert "one MIG slice" in choose(None, False, OLD).aside
