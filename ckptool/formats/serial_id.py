"""`.data/serialization_id`: torch's fingerprint of an archive, kept true after an edit.

Knows: its 40 digits: 20 of the record names, 20 of the checksums. Must not know: anything else.
Source: PyTorchStreamWriter::writeSerializationId, caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

import zlib

from ckptool.formats.torch_zip import Archive
from ckptool.plans import Literal
from ckptool.zipplan import Record

_MASK = (1 << 64) - 1
_NAME = ".data/serialization_id"


def serialization_id(archive: Archive, records: list[Record]) -> list[Record]:
    """The records with the id's second half computed anew; the first half hashes names
    only, and stays. Dropped when a checksum is not known.
    """
    entry = archive.find(_NAME)
    if entry is None:
        return records
    old = archive.read(_NAME)
    others = [record for record in records if record.name != entry.name]
    if len(old) != 40 or not old.isdigit():
        return records
    if {r.name for r in others} != {e.name for e in archive.directory.entries if e is not entry}:
        return others
    new = old[:20] + b"%020d" % combined([record.crc or 0 for record in others])
    kept = Record(entry.name, (Literal(new),), 40, zlib.crc32(new) if entry.crc else 0)
    return [kept if record.name == entry.name else record for record in records]


def combined(checksums: list[int]) -> int:
    """c10::hash_combine over the records' CRC-32s, in the order in which they were written."""
    seed = 0
    for value in checksums:
        seed ^= (value + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & _MASK
    return seed & _MASK
