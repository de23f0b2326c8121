"""The bytes of the log: the head of a segment with its marks, and the headers of records. `writer` explains them."""

from __future__ import annotations

import functools
import struct
import uuid
import zlib
from pathlib import Path
from typing import Any

import xxhash

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

# Magic, generation, that of the previous segment (0: none), boot id, CRC-32 of these.
SEGMENT = struct.Struct("<8sQQ16sI")
SEGMENT_MAGIC = b"PSSLOG02"
# End of what is acknowledged, end of what was synced (0: nothing), number of acknowledged records; CRC-32 of these.
MARK = struct.Struct("<QQQI")
FIRST = SEGMENT.size + 2 * MARK.size
"""Where the first record begins. The mark is stored twice, so that one survives a flipped bit in the other."""

MAGIC = 0x5053_4C47
# Magic; checksums of the rest of the header, and of the record; its length; where its batch begins; the segment's
# generation; its number in the segment, from 1.
HEAD = struct.Struct("<IIIQQQQ")
HEAD_REST = 8


@functools.cache
def machine_boot_id() -> bytes:
    """Return the id of this boot of the machine; b"" if the system has none."""
    try:
        return uuid.UUID(_BOOT_ID.read_text().strip()).bytes
    except (OSError, ValueError):
        return b""


def with_crc(form: struct.Struct, *fields: bytes | int) -> bytes:
    """Return the fields with their CRC after them."""
    data = form.pack(*fields, 0)[:-4]
    return data + struct.pack("<I", zlib.crc32(data))


def checked(form: struct.Struct, data: bytes, offset: int) -> tuple[Any, ...] | None:
    """Return the fields without their CRC; None if that does not match."""
    *fields, crc = form.unpack_from(data, offset)
    return tuple(fields) if crc == zlib.crc32(data[offset : offset + form.size - 4]) else None


def header_of(checksum: int, size: int, batch: int, generation: int, record: int) -> bytes:
    """Return the header of a record, which `HEAD` describes."""
    rest = HEAD.pack(MAGIC, 0, checksum, size, batch, generation, record)[HEAD_REST:]
    return struct.pack("<II", MAGIC, zlib.crc32(rest)) + rest


def mark_twice(end: int, count: int, synced: bool) -> list[bytes | memoryview]:
    """Return the two marks of a segment whose first `count` records, up to `end`, are acknowledged."""
    return [with_crc(MARK, end, end if synced else 0, count)] * 2


def checksum_of(*buffers: memoryview) -> int:
    """Return half of XXH3's 64 bits: every update waits for it, and a CRC takes four times as long."""
    checksum = xxhash.xxh3_64()
    for buffer in buffers:
        checksum.update(buffer)
    return checksum.intdigest() & 0xFFFF_FFFF
