"""Every bound on what a file may ask of us, each with its reason.

Knows: numbers. Must not know: anything else. Overridable from Python by `limits=`.
"""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """Bounds checked before memory or time is spent."""

    pickle_bytes: int = 256 << 20
    """One pickle, inflated. The largest honest one we know (80,000 storages) has 11 MB."""

    opcode_count: int = 50_000_000
    """About eight seconds of walking; honest files stay under four million."""

    nesting: int = 500
    """Containers and calls inside each other; honest files stay under fifty."""

    rank: int = 64
    """Dimensions of a tensor: torch's own limit for most operators."""

    entry_count: int = 1_000_000
    """Entries of a zip directory; the largest honest one we know has 66,001."""

    name_bytes: int = 65_535
    """The length of a zip entry name is a 16-bit field."""

    header_bytes: int = 100_000_000
    """A safetensors header: the limit of the safetensors package."""

    inflate_ratio: int = 200
    """Inflated to deflated size of a pickle above one MB; pickles deflate about 1:10."""

    repeated_key_bytes: int = 16 << 20
    """Of dict keys beyond the bytes of their pickle: the memo repeats one for two bytes. Optimizers
    repeat short ones: three bytes in four million."""

    repeated_value_bytes: int = 32 << 20
    """Of values beside the weights that a report would spell out again where the memo repeats them.
    An entry of a dict takes three bytes in a pickle, and could take a megabyte in a report."""

    place_bytes: int = 64 << 20
    """Of all places that tensors and containers stand at, written out: a long name, or many
    levels, above many things multiply. A million tensors five levels deep have half of it."""

    digits: int = 4_300
    """Decimal digits of a number in text: Python's own limit, since conversion is quadratic."""

    shard_count: int = 10_000
    """Files that one index names; the largest honest ones we know name some hundreds."""

    nested_streams: int = 100_000
    """Legacy streams inside one plain pickle (one a tensor)."""

    value_count: int = 300_000
    """Plain values beside the tensors, where all are compared: a short pickle can spell more than
    any memory holds. The largest honest one we know has about 150,000."""

    repeated_bytes: int = 1 << 30
    """Of a view larger than its storage, which takes elements again and again, for statistics and
    hashes: four bytes in a file can stand for exabytes."""

    listed: int = 50
    """Findings listed before 'and N more'."""


DEFAULT = Limits()
