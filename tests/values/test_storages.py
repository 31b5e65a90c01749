"""Whole storages, decoded: every encoding, every lie about a size, every checksum."""

import random
import sys
import tracemalloc

import pytest
from values_support import BEFORE, ENCODINGS, Place, encode, reversed_in, run

from ckptool.errors import CrcMismatch, StorageSize, Truncated, Unsupported
from ckptool.plans import Made
from ckptool.spans import Span
from ckptool.values import RECIPES

storages = sys.modules["ckptool.values.storages"]
PLAIN = random.Random(0).randbytes(1_300_008)


@pytest.mark.parametrize("component", [1, 2, 4, 8])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_decode_gives_plain_little_endian_bytes(encoding, component):
    place, crc = encode(PLAIN, encoding, component)
    for recorded in (None, 0, crc):
        args = (encoding, component, len(PLAIN), recorded)
        assert run(place, "decode", args, len(PLAIN)) == (PLAIN, None)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_an_empty_storage_has_no_bytes(encoding):
    place, crc = encode(b"", encoding, 4)
    assert run(place, "decode", (encoding, 4, 0, crc), 0) == (b"", None)


@pytest.mark.parametrize("encoding", ["latin1", "latin1-swapped", "deflated-swapped"])
@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_numbers_and_characters_that_a_chunk_cuts_in_two(encoding, chunk, monkeypatch):
    monkeypatch.setattr(storages, "CHUNK", chunk)
    plain = bytes(range(256)) * 2
    place, crc = encode(plain, encoding, 8)
    assert run(place, "decode", (encoding, 8, 512, crc), 512)[0] == plain


def test_a_stored_encoding_is_not_swapped_whatever_its_component():
    place, _ = encode(b"abcdefgh", "stored", 1)
    assert run(place, "decode", ("stored", 4, 8, None), 8)[0] == b"abcdefgh"
    assert run(place, "decode", ("swapped", 4, 8, None), 8)[0] == b"dcbahgfe"


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_wrong_checksum_is_told_after_all_bytes_and_before_the_end(encoding):
    place, crc = encode(PLAIN, encoding, 4)
    made = Made(((3, place.span),), "decode", (encoding, 4, len(PLAIN), crc ^ 1), len(PLAIN))
    have = []
    with pytest.raises(CrcMismatch, match=r"^bytes do not have their recorded checksum$"):
        have.extend(RECIPES["decode"](place, made))
    assert b"".join(have) == PLAIN


def test_a_wrong_checksum_names_the_tensor_and_the_way_out():
    place, crc = encode(PLAIN, "swapped", 4)
    with pytest.raises(CrcMismatch, match=r"bytes of 'fc\.weight' do not have") as caught:
        run(place, "decode", ("swapped", 4, len(PLAIN), crc ^ 1), len(PLAIN))
    assert "--no-check" in caught.value.hint


def test_the_checksum_is_that_of_the_bytes_before_the_swap():
    place, crc = encode(PLAIN, "swapped", 4)
    assert reversed_in(PLAIN, 4) == place.data[len(BEFORE) : len(BEFORE) + len(PLAIN)]
    assert run(place, "decode", ("swapped", 4, len(PLAIN), crc), len(PLAIN))[0] == PLAIN


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("more", "error"), [(8, Truncated), (-8, StorageSize)])
def test_more_or_fewer_bytes_than_the_storage_has(encoding, more, error):
    place, _ = encode(PLAIN, encoding, 4)
    with pytest.raises(error):
        run(place, "decode", (encoding, 4, len(PLAIN) + more, None), len(PLAIN) + more)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("naïve €".encode(), "ordinal not in range"),
        (b"abc\xff", "invalid start byte"),
        (b"abc\xc3", "unexpected end of data"),
    ],
)
def test_text_that_does_not_stand_for_bytes(data, reason):
    with pytest.raises(StorageSize, match=f"does not stand for bytes: .*{reason}"):
        run(Place(data), "decode", ("latin1", 1, 4, None), 4)


def test_damaged_deflated_bytes():
    plain = b"easily deflated " * 100_000
    place, _ = encode(plain, "deflated-swapped", 4)
    place.data = place.data[:1000] + b"\xff" * 100 + place.data[1100:]
    with pytest.raises((CrcMismatch, Truncated), match=r"^the deflated bytes (are damaged|end)"):
        run(place, "decode", ("deflated-swapped", 4, len(plain), None), len(plain))


def test_what_is_no_storage_is_refused():
    place = Place(b"abcdefgh")
    with pytest.raises(Unsupported, match="encoding 'rot13'"):
        run(place, "decode", ("rot13", 4, 8, None), 8)
    with pytest.raises(StorageSize, match="no whole number of 8-byte numbers"):
        run(Place(b"abcd"), "decode", ("swapped", 8, 4, None), 4)
    two = Made(((3, Span(0, 4)), (3, Span(4, 4))), "decode", ("deflated", 1, 8, None), 8)
    with pytest.raises(Unsupported, match="2 pieces"):
        list(RECIPES["decode"](place, two))


@pytest.mark.parametrize("encoding", ["swapped", "latin1-swapped"])
def test_decoding_takes_constant_memory(encoding):
    size = 64 << 20
    chunk = bytes(2 << 20)
    made = Made(((0, Span(0, size)),), "decode", (encoding, 4, size, 1), size)
    tracemalloc.start()
    try:
        with pytest.raises(CrcMismatch):
            for _ in RECIPES["decode"](lambda _, __, count: chunk[:count], made):
                pass
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()
