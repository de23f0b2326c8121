"""Frames: messages whose field 15, `payload`, carries bulk bytes that protobuf must not copy.

A frame is an ordinary protobuf message; only its writer and reader are special. Writing joins the serialized header,
padding (field 13) and the payload in one copy, so that the payload starts at a multiple of 16 bytes (NumPy's arithmetic
is twice as fast on aligned views). Reading walks the top-level fields, parses those before the payload, and returns the
payload as a view. If another writer has ordered the fields differently, the generated class reads the frame.

gRPC takes exactly `bytes` from a serializer, so one copy on each side is the minimum.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from pscluster.core.errors import ProtocolError
from pscluster.core.limits import MAX_HEADER_BYTES

if TYPE_CHECKING:  # light commands import this, and must not load NumPy
    import numpy.typing as npt

CHUNK_BYTES = 1 << 20
"""Payload bytes of a full frame: about the size of an L2 cache, measured best in both directions."""

DATA_FRAME_BYTES = 4 << 20
"""The same on the data plane, where a frame costs interpreter time but no copy: larger frames save 5 %."""

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
    """Return the bytes to add to `size` to reach the next multiple of `ALIGNMENT`."""
    return -size % ALIGNMENT


def padded(buffers: Iterable[memoryview]) -> list[Buffer]:
    """Return the buffers, each followed by the padding that aligns the next."""
    segments: list[Buffer] = []
    for buffer in buffers:
        segments.append(buffer)
        if gap := -len(buffer) % ALIGNMENT:  # as `padding` does
            segments.append(bytes(gap))
    return segments


def cut(whole: memoryview, sizes: Iterable[int]) -> list[memoryview]:
    """Cut a buffer into views of these sizes."""
    return [whole[start:end] for start, end in itertools.pairwise(itertools.accumulate(sizes, initial=0))]


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _read_varint(data: bytes, offset: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = data[offset]  # IndexError at the end: a truncated message
        offset += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, offset
        shift += 7
        if shift > 63:
            raise ProtocolError("a frame with a number of more than 64 bits")


def pack(header: Message, buffers: Sequence[Buffer] = ()) -> bytes:
    """Serialize a frame whose payload is the buffers in order; `header.payload` must be empty."""
    return b"".join(parts_of(header, buffers))


def parts_of(header: Message, buffers: Sequence[Buffer] = ()) -> list[Buffer]:
    """Return the parts that `pack` joins, without copying them."""
    if not buffers:
        return [header.SerializeToString()]
    return [before_payload(header, sum(map(len, buffers))), *buffers]


def before_payload(header: Message, size: int) -> bytes:
    """Serialize the part of a frame before a payload of `size` bytes."""
    head = header.SerializeToString()
    tail = b"\x7a" + _varint(size)
    pad = padding(len(head) + len(tail) + 2)
    return b"".join((head, _PAD_TAG, bytes((pad,)), _PADDING[:pad], tail))


def unpack(data: bytes, message_class: type[M], limit: int = MAX_HEADER_BYTES) -> tuple[M, memoryview]:
    """Return the header, of at most `limit` bytes, and a view of the payload. ProtocolError if it is no such frame."""
    offset, end = 0, len(data)
    try:
        while offset < end:
            start = offset
            if start > limit:  # no payload yet: no need to walk the remaining fields
                raise ProtocolError(f"a frame with {start:,} bytes or more beside its payload; the limit is {limit:,}")
            # Most numbers take one byte, and a function call takes longer than reading it.
            tag, offset = (data[offset], offset + 1) if data[offset] < 0x80 else _read_varint(data, offset)
            wire_type = tag & 7
            if wire_type == 2:
                length, offset = (data[offset], offset + 1) if data[offset] < 0x80 else _read_varint(data, offset)
                if length > end - offset:
                    raise ProtocolError(f"a frame that declares {length} bytes, but contains {end - offset}")
                if tag == _PAYLOAD_TAG:
                    if offset + length != end or data[start] != _PAYLOAD_TAG:
                        _check_header(end - length, limit)
                        return _unpack_any_order(data, message_class)
                    _check_header(start, limit)
                    return message_class.FromString(data[:start]), memoryview(data)[offset:]
                offset += length
            elif wire_type == 0:
                offset = offset + 1 if data[offset] < 0x80 else _read_varint(data, offset)[1]
            elif wire_type in (1, 5):
                offset += 8 if wire_type == 1 else 4
            else:
                raise ProtocolError(f"a frame with wire type {wire_type}")
        _check_header(end, limit)
        return message_class.FromString(data), memoryview(b"")
    except IndexError:
        raise ProtocolError(f"not a {message_class.DESCRIPTOR.name}: it ends within a field") from None
    except DecodeError as error:
        raise ProtocolError(f"not a {message_class.DESCRIPTOR.name}: {error}") from None


def head_of(start: bytes, size: int, message_class: type[M]) -> tuple[M, int] | None:
    """Return the header and the offset of the payload, from the first bytes of a frame of `size` bytes.

    None if they do not suffice, or if the payload is not last: pass the whole frame to `unpack`.
    """
    offset = 0
    try:
        while True:
            tag_at = offset
            tag, offset = (start[offset], offset + 1) if start[offset] < 0x80 else _read_varint(start, offset)
            if tag & 7 == 2:
                length, offset = (start[offset], offset + 1) if start[offset] < 0x80 else _read_varint(start, offset)
                if tag == _PAYLOAD_TAG:
                    return (message_class.FromString(start[:tag_at]), offset) if offset + length == size else None
                offset += length
            elif tag & 7 == 0:
                offset = offset + 1 if start[offset] < 0x80 else _read_varint(start, offset)[1]
            elif tag & 7 in (1, 5):
                offset += 8 if tag & 7 == 1 else 4
            else:
                return None
    except (IndexError, DecodeError, ProtocolError):
        return None


def _check_header(size: int, limit: int) -> None:
    if size > limit:
        raise ProtocolError(f"a frame with {size:,} bytes beside its payload; the limit is {limit:,}")


def _unpack_any_order(data: bytes, message_class: type[M]) -> tuple[M, memoryview]:
    message = message_class.FromString(data)
    payload = memoryview(message.payload)  # type: ignore[attr-defined]
    message.ClearField("payload")
    return message, payload


def view(array: npt.NDArray[Any]) -> memoryview:
    """Return a flat byte view of a C-contiguous array of any type and rank, even an empty one."""
    try:
        return array.data.cast("B")  # a quarter of the time of the other way
    except (TypeError, ValueError):  # it is empty, or of a type that only NumPy knows
        return array.reshape(-1).view("uint8").data


def pieces(buffers: Iterable[Buffer], size: int = CHUNK_BYTES) -> Iterator[list[Buffer]]:
    """Yield the bytes of the buffers in order, in groups of `size` bytes; the last may be smaller."""
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
    """Collects the payload of a framed message.

    Allocates nothing for bytes that were only declared: it keeps the pieces as received. A stream cut off by a deadline
    or a kill can look complete, so `complete` requires both the `last` flag and the declared byte count.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._declared: int | None = None
        self._received = 0
        self.chunks: list[memoryview] = []
        self.complete = False

    def add(self, frame: FrameMessage, payload: memoryview) -> None:
        """Take a frame. Raise ProtocolError if it contradicts earlier ones."""
        if self.complete:
            raise ProtocolError("a frame came after the last one")
        if self._declared is None:
            self._declared = frame.total_bytes
            if self._declared > self._limit:
                raise ProtocolError(f"a payload of {self._declared} bytes is declared; the limit is {self._limit}")
        self._received += len(payload)
        if self._received > self._declared:
            raise ProtocolError(f"received {self._received} bytes where {self._declared} were declared")
        if len(payload):
            self.chunks.append(payload)
        if frame.last:
            if self._received != self._declared:
                raise ProtocolError(f"the message ended after {self._received} of {self._declared} bytes")
            self.complete = True

    def joined(self) -> memoryview:
        """Return the whole payload, contiguous; without a copy if it came in one frame."""
        if len(self.chunks) == 1:
            return self.chunks[0]
        return memoryview(b"".join(self.chunks))
