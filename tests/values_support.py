"""Storages in every encoding, in memory, and recipes run over them."""

import zlib

import torch

from ckptool.plans import Made
from ckptool.spans import Span
from ckptool.values import RECIPES

ENCODINGS = ("stored", "swapped", "deflated", "deflated-swapped", "latin1", "latin1-swapped")
INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
BEFORE = b"before the storage: "


class Place:
    """A reader over bytes that notes what was read and refuses to read elsewhere."""

    def __init__(self, data, outside=0):
        self.data = BEFORE + data + b"behind it"
        self.span = Span(len(BEFORE), len(data) + outside)
        self.reads = []

    def __call__(self, source_id, offset, size):
        assert source_id == 3
        assert self.span.offset <= offset
        assert offset + size <= self.span.end
        self.reads.append((offset, size))
        return self.data[offset : offset + size]


def reversed_in(plain, component):
    """The bytes with every `component` of them back to front."""
    return torch.frombuffer(bytearray(plain), dtype=torch.uint8).reshape(-1, component).flip(
        1
    ).numpy().tobytes() if plain else b""  # fmt: skip


def encode(plain, encoding, component):
    """(place, crc of what is recorded) for plain little-endian bytes."""
    recorded = reversed_in(plain, component) if encoding.endswith("swapped") else plain
    data = recorded
    if encoding.startswith("deflated"):
        deflater = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS)
        data = deflater.compress(recorded) + deflater.flush()
    elif encoding.startswith("latin1"):
        data = recorded.decode("latin-1").encode()
    return Place(data), zlib.crc32(recorded)


def run(reader, recipe, args, size, span=None, label="fc.weight"):
    """(the bytes, what the recipe returned); the bytes are as many as planned."""
    made = Made(((3, span or reader.span),), recipe, args, size, None, label)
    chunks, making = [], RECIPES[recipe](reader, made)
    while True:
        try:
            chunks.append(next(making))
        except StopIteration as end:
            data = b"".join(chunks)
            assert len(data) == size
            return data, end.value
        assert type(chunks[-1]) is bytes
        assert 0 < len(chunks[-1]) <= 8 << 20


def bits_of(tensor):
    """The patterns of a tensor's elements, in order, as signed integers (8-bit: unsigned)."""
    return tensor.contiguous().view(INTS[tensor.element_size()]).flatten()


def bytes_of(tensor):
    """The elements one after another, little-endian."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
