"""The fields of the zip format, for those who read, plan and search archives.

Knows: structs, marks, the zip64 field. Must not know: anything else.
Facts: PKWARE APPNOTE 6.3.10, sections 4.3 to 4.5; values little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NoReturn

from ckptool.errors import ZipAmbiguous

LOCAL = struct.Struct("<4s5H3I2H")
CENTRAL = struct.Struct("<4s6H3I5H2I")
END = struct.Struct("<4s4H2IH")
END64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR = struct.Struct("<4sIQI")
DESCRIPTOR = struct.Struct("<4s3I")
DESCRIPTOR64 = struct.Struct("<4sI2Q")
LOCAL_MARK, CENTRAL_MARK, END_MARK = b"PK\3\4", b"PK\1\2", b"PK\5\6"
END64_MARK, LOCATOR_MARK, DESCRIPTOR_MARK = b"PK\6\6", b"PK\6\7", b"PK\7\x08"
FULL16, FULL32 = 0xFFFF, 0xFFFFFFFF  # "the true value is in the zip64 record"
ZIP64_FIELD = 1
STORED, DEFLATED = 0, 8
HAS_DESCRIPTOR = 0x8
USUAL_FLAGS = 0x808  # a descriptor follows, names are UTF-8
REPACK = "unpack it and save it again with torch.save"  # the hint of every refusal


def ambiguous(text: str, member: str | None = None, hint: str = REPACK) -> NoReturn:
    """Raise ZipAmbiguous."""
    raise ZipAmbiguous(text, member=member, hint=hint)


def zip64_values(extra: bytes, values: Sequence[int], name: str) -> list[int]:
    """`values` with each saturated one replaced, in this order, from the zip64 field.

    Raises ZipAmbiguous when `extra` has not one such field, or a short one.
    """
    fields = [data for tag, data in _extra_fields(extra) if tag == ZIP64_FIELD]
    wanted = [index for index, value in enumerate(values) if value == FULL32]
    if len(fields) != 1 or len(fields[0]) < 8 * len(wanted):
        text = "a missing, doubled or short zip64 field"
        raise ZipAmbiguous(text, member=name, hint=REPACK)
    result = list(values)
    for place, index in enumerate(wanted):
        result[index] = int.from_bytes(fields[0][8 * place : 8 * place + 8], "little")
    return result


def _extra_fields(extra: bytes) -> list[tuple[int, bytes]]:
    fields = []
    at = 0
    while at + 4 <= len(extra):
        tag, size = struct.unpack_from("<2H", extra, at)
        fields.append((tag, extra[at + 4 : at + 4 + size]))
        at += 4 + size
    return fields
