"""Almost valid inputs, and some that are not valid at all: examples with bits flipped, ends cut off, declared lengths
changed, and parts of one put into another. The same random numbers give the same input."""

from __future__ import annotations

import random
from collections.abc import Sequence

_VARINTS = (0, 1, 2, 7, 15, 16, 63, 64, 65, 127, 128, 255, 2**14, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**45, 2**62)
_VARINTS_LARGE = (2**63 - 1, 2**63, 2**64 - 1)
_TEXTS = (
    *(b"null", b"true", b"-1", b"1e999", b"NaN", b"99999999999999999999", b'"', b"[", b"]", b"{", b"}", b"[[[[[[[["),
    *(b"..", b"/", b"../../etc/passwd", b"file:///", b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"%00", b"::", b"<U9", b"S0"),
    *(b"float32", b"bfloat16", b"bool", b"<U1048576", b"datetime64[ns]", b"object", b"1" * 5000, b"[" * 3000),
)
_MOST = 1 << 16


def varint(value: int) -> bytes:
    """Encode as protobuf does."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def mutated(source: random.Random, examples: Sequence[bytes]) -> bytes:
    """An input made from the examples, or from nothing."""
    if source.randrange(40) == 0:
        return source.randbytes(source.choice((0, 1, 2, 8, 40, 300)))
    data = bytearray(source.choice(examples))
    for _ in range(source.choice((0, 1, 1, 1, 1, 1, 2, 2, 3, 6))):
        data = _once(source, data, examples)
    return bytes(data[:_MOST])


def _once(source: random.Random, data: bytearray, examples: Sequence[bytes]) -> bytearray:
    at = source.randrange(len(data) + 1)
    mutation = source.randrange(11)
    if mutation <= 1 and data:
        data[at % len(data)] ^= 1 << source.randrange(8)
    elif mutation == 2 and data:
        data[at % len(data)] = source.randrange(256)
    elif mutation == 3:
        del data[at:]
    elif mutation == 4:
        del data[at : at + source.choice((1, 1, 2, 4, 16, 64))]
    elif mutation == 5:
        data[at:at] = source.randbytes(source.choice((1, 1, 2, 4, 16)))
    elif mutation == 6:  # a number that may declare a length or a count
        data[at : at + 1] = varint(source.choice(_VARINTS + _VARINTS_LARGE))
    elif mutation == 7:
        data[at : at + source.choice((0, 0, 4))] = source.choice(_TEXTS)
    elif mutation == 8:  # a part of another example, or of this one again
        other = source.choice(examples)
        start = source.randrange(len(other) + 1)
        piece = other[start : start + source.choice((1, 4, 16, 64, 4096))]
        data[at : at + source.choice((0, len(piece)))] = piece
    elif mutation == 9:
        piece = bytes(data[at : at + source.choice((2, 8, 32))])
        data[at:at] = piece * source.choice((2, 10, 200))
    else:
        data[at : at + 8] = source.choice((0, 1, 2**31, 2**63, 2**64 - 1)).to_bytes(8, "little")
    return data
