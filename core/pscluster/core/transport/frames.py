"""Frames: messages whose field 15, `payload`, carries bulk bytes that protobuf must not copy.

A frame is an ordinary protobuf message; what is special is only who writes and reads it. Writing puts the
serialised header, padding (field 13) and the payload together in one copy, so that the payload starts at a
multiple of 16 bytes (NumPy's arithmetic is twice as fast on aligned views). Reading walks the top-level
fields, parses what stands before the payload, and gives the payload as a view. A legal writer may order the
fields otherwise: then the generated class does the reading.

gRPC takes exactly `bytes` from a serialiser, so the one copy on each side is the floor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message

from pscluster.core.errors import ProtocolError
from pscluster.core.limits import MAX_HEADER_BYTES

CHUNK_BYTES = 1 << 20
"""Payload bytes of a full frame: about the size of an L2 cache, measured best in both directions."""

DATA_FRAME_BYTES = 4 << 20
"""The same on the data plane, where a frame costs Python's time but no copy: larger ones save a twentieth."""

ALIGNMENT = 16
"""Segments of a payload start at multiples of this."""

Buffer = bytes | bytearray | memoryview
_PAYLOAD_TAG = 15 << 3 | 2
_PAD_TAG = b"\x6a"
_PADDING = bytes(ALIGNMENT)


class FrameMessage(Protocol):
    """A generated message with the two fields of a frame."""

    payload: bytes
    last: bool
    total_bytes: int

    def SerializeToString(self) -> bytes: ...  # noqa: N802  (protobuf's name)


M = TypeVar("M", bound=Message)


def padding(size: int) -> int:
    """Bytes to add to `size` to reach the next multiple of `ALIGNMENT`."""
    return -size % ALIGNMENT


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = data[at]  # IndexError at the end: a truncated message
        at += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, at
        shift += 7
        if shift > 63:
            raise ProtocolError("a frame with a number of more than 64 bits")


def pack(header: Message, buffers: Sequence[Buffer] = ()) -> bytes:
    """Serialise a frame whose payload is the buffers in order; `header.payload` must be empty."""
    if not buffers:
        return header.SerializeToString()
    return b"".join((before_payload(header, sum(map(len, buffers))), *buffers))


def parts_of(header: Message, buffers: Sequence[Buffer] = ()) -> list[Buffer]:
    """What `pack` joins, without the copy."""
    if not buffers:
        return [header.SerializeToString()]
    return [before_payload(header, sum(map(len, buffers))), *buffers]


def before_payload(header: Message, size: int) -> bytes:
    """What stands in a frame before a payload of so many bytes."""
    head = header.SerializeToString()
    tail = b"\x7a" + _varint(size)
    pad = padding(len(head) + len(tail) + 2)
    return b"".join((head, _PAD_TAG, bytes((pad,)), _PADDING[:pad], tail))


def unpack(data: bytes, message_class: type[M], limit: int = MAX_HEADER_BYTES) -> tuple[M, memoryview]:
    """The header (its payload left empty) and a view of the payload.

    Args:
        data: the frame.
        message_class: of the header.
        limit: bytes that the header may take.

    Raises:
        ProtocolError: it is no such frame.
    """
    at, end = 0, len(data)
    try:
        while at < end:
            start = at
            if start > limit:  # no payload yet: what follows need not be walked, field by field, to know that
                raise ProtocolError(f"a frame with {start:,} bytes or more beside its payload, the limit is {limit:,}")
            # Most numbers are of one byte, and a call takes longer than to read it.
            tag, at = (data[at], at + 1) if data[at] < 0x80 else _read_varint(data, at)
            wire_type = tag & 7
            if wire_type == 2:
                length, at = (data[at], at + 1) if data[at] < 0x80 else _read_varint(data, at)
                if length > end - at:
                    raise ProtocolError(f"a frame that declares {length} bytes where {end - at} came")
                if tag == _PAYLOAD_TAG:
                    if at + length != end or data[start] != _PAYLOAD_TAG:
                        _check_header(end - length, limit)
                        return _unpack_any_order(data, message_class)
                    _check_header(start, limit)
                    return message_class.FromString(data[:start]), memoryview(data)[at:]
                at += length
            elif wire_type == 0:
                at = at + 1 if data[at] < 0x80 else _read_varint(data, at)[1]
            elif wire_type in (1, 5):
                at += 8 if wire_type == 1 else 4
            else:
                raise ProtocolError(f"a frame with wire type {wire_type}")
        _check_header(end, limit)
        return message_class.FromString(data), memoryview(b"")
    except IndexError:
        raise ProtocolError(f"not a {message_class.DESCRIPTOR.name}: it ends within a field") from None
    except DecodeError as error:
        raise ProtocolError(f"not a {message_class.DESCRIPTOR.name}: {error}") from None


def head_of(start: bytes, size: int, message_class: type[M]) -> tuple[M, int] | None:
    """From the first bytes of a frame of that size: the header, and where the payload begins, which takes the rest.

    None where that can't be told: the whole frame has to be given to `unpack`.
    """
    at = 0
    try:
        while True:
            tag_at = at
            tag, at = (start[at], at + 1) if start[at] < 0x80 else _read_varint(start, at)
            if tag & 7 == 2:
                length, at = (start[at], at + 1) if start[at] < 0x80 else _read_varint(start, at)
                if tag == _PAYLOAD_TAG:
                    return (message_class.FromString(start[:tag_at]), at) if at + length == size else None
                at += length
            elif tag & 7 == 0:
                at = at + 1 if start[at] < 0x80 else _read_varint(start, at)[1]
            elif tag & 7 in (1, 5):
                at += 8 if tag & 7 == 1 else 4
            else:
                return None
    except (IndexError, DecodeError, ProtocolError):
        return None


def _check_header(size: int, limit: int) -> None:
    if size > limit:
        raise ProtocolError(f"a frame with {size:,} bytes beside its payload, the limit is {limit:,}")


def _unpack_any_order(data: bytes, message_class: type[M]) -> tuple[M, memoryview]:
    message = message_class.FromString(data)
    payload = memoryview(message.payload)  # type: ignore[attr-defined]
    message.ClearField("payload")
    return message, payload


def view(array: npt.NDArray[Any]) -> memoryview:
    """A flat byte view of a C-contiguous array, of any type and rank, empty ones included."""
    return array.reshape(-1).view(np.uint8).data


def pieces(buffers: Iterable[Buffer], size: int = CHUNK_BYTES) -> Iterator[list[Buffer]]:
    """The bytes of the buffers in order, regrouped into lists of `size` bytes (the last one may be less)."""
    group: list[Buffer] = []
    room = size
    for buffer in buffers:
        rest = memoryview(buffer)
        while len(rest) > room:
            group.append(rest[:room])
            yield group
            rest, group, room = rest[room:], [], size
        if len(rest):
            group.append(rest)
            room -= len(rest)
    if group:
        yield group


class Assembler:
    """Collects the payload of a message that comes in frames, and says when it is whole.

    Nothing is allocated for what was only declared: the pieces are kept as they came. A stream that a
    deadline or a kill cut off can look complete, so whole means: the `last` flag and the declared byte count.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._declared: int | None = None
        self._received = 0
        self.chunks: list[memoryview] = []
        self.complete = False

    def add(self, frame: FrameMessage, payload: memoryview) -> None:
        """Take one frame. ProtocolError if it contradicts the ones before."""
        if self.complete:
            raise ProtocolError("a frame came after the last one")
        if self._declared is None:
            self._declared = frame.total_bytes
            if self._declared > self._limit:
                raise ProtocolError(f"a payload of {self._declared} bytes is declared, the limit is {self._limit}")
        self._received += len(payload)
        if self._received > self._declared:
            raise ProtocolError(f"{self._received} bytes came where {self._declared} were declared")
        if len(payload):
            self.chunks.append(payload)
        if frame.last:
            if self._received != self._declared:
                raise ProtocolError(f"the message ended after {self._received} of {self._declared} bytes")
            self.complete = True

    def joined(self) -> memoryview:
        """The whole payload, contiguous (without a copy where it came in one frame)."""
        if len(self.chunks) == 1:
            return self.chunks[0]
        return memoryview(b"".join(self.chunks))
