"""Bytes changed at random: only CkptError ever comes out of read()."""

import sys

from formats_support import FIXTURES, archive, tried
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# -- only CkptError escapes --------------------------------------------------------------------
SEEDS = (
    "tied.pth",
    "views.pth",
    "quantized.pth",
    "sparse.pth",
    "legacy_py2.pth",
    "legacy_shared.pth",
    "tar_01x.pth",
    "plain_pickle.pkl",
    "numpy_pickle.pkl",
    "model.safetensors",
    "torchscript.pt",
    "exported.pt2",
    "torch_package.pt",
    "whole_model_dp.pth",
    "proto5.pth",
    "big_endian.pth",
)
BYTES = {seed: (FIXTURES / seed).read_bytes() for seed in SEEDS}
INTERESTING = [
    0,
    1,
    0x28,
    0x2E,
    0x51,
    0x52,
    0x62,
    0x68,
    0x71,
    0x7D,
    0x7F,
    0x80,
    0x81,
    0x85,
    0x95,
    0xFF,
]


@st.composite
def mutations(draw):
    seed = draw(st.sampled_from(SEEDS))
    data = bytearray(BYTES[seed])
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        match draw(st.integers(0, 4)):
            case 0:
                data[at : at + 1] = bytes([draw(st.sampled_from(INTERESTING))])
            case 1:
                data[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case 2:
                del data[at : at + draw(st.integers(1, 8))]
            case 3:
                data[at:at] = draw(st.binary(min_size=1, max_size=6))
            case 4:
                data[at : at + 8] = draw(
                    st.sampled_from((b"\xff" * 8, b"\0" * 8, b"\xff" * 7 + b"\x7f"))
                )
    return seed, bytes(data)


def inside(data):
    """The data.pkl of a fixture with one byte changed, in a fresh archive: past the CRC."""
    start = data.index(b"\x80\x02")
    return data[start : data.index(b"PK", start)]


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(mutations())
def test_a_damaged_file_raises_nothing_else(case):
    seed, data = case
    error = tried(data, seed)
    if error is not None:
        assert error.text
        assert error.path == seed


PICKLES = {
    seed: inside(BYTES[seed])
    for seed in ("tied.pth", "quantized.pth", "sparse.pth", "whole_model_dp.pth", "params.pth")
    if seed in BYTES
}


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(PICKLES)), st.data())
def test_a_damaged_pickle_raises_nothing_else(seed, draw):
    data = bytearray(PICKLES[seed])
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.integers(2, len(data) - 2))
        data[at] = draw.draw(st.one_of(st.sampled_from(INTERESTING), st.integers(0, 255)))
    records = {str(i): b"\0" * n for i, n in enumerate((32, 12, 12, 48))}
    error = tried(archive(bytes(data), records), "file.pth")
    assert error is None or error.text


def test_nothing_was_imported_on_the_way():
    """Reading names of user code never looks for that code."""
    assert not [module for module in sys.modules if module.startswith("acme")]
