"""Frames: hand-written encoding matches protobuf's wire format, and hand-written decoding accepts any bytes safely."""

from __future__ import annotations

import contextlib
import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pscluster.core.errors import ProtocolError
from pscluster.core.transport.frames import (
    ALIGNMENT,
    CHUNK_BYTES,
    Assembler,
    Buffer,
    pack,
    padding,
    pieces,
    unpack,
    view,
)
from pscluster.v1 import ps_pb2, worker_pb2

Frame = Any  # a generated message with the fields of a frame
FRAMES: list[type[Any]] = [ps_pb2.Request, ps_pb2.Reply, worker_pb2.UploadRequest, worker_pb2.DownloadReply]

uint64 = st.integers(0, 2**64 - 1)
payloads = st.lists(st.binary(max_size=70) | st.binary(min_size=120, max_size=140), max_size=4)


@st.composite
def headers(draw: st.DrawFn) -> Any:
    """A frame of any kind without its payload."""
    kind = draw(st.sampled_from(FRAMES))
    frame = kind(total_bytes=draw(uint64), last=draw(st.booleans()))
    if kind is ps_pb2.Request:
        frame.id = draw(uint64)
        body = draw(st.sampled_from(["read", "update", "create", ""]))
        if body:
            getattr(frame, body).job = draw(uint64)
        if body == "read":
            for _ in range(draw(st.integers(0, 3))):
                frame.read.items.add(variable=draw(st.integers(0, 2**32 - 1))).rows.ids = draw(uint64)
        if body == "create":
            frame.create.variable.name = draw(st.text("ab/é🜂", max_size=300))
    elif kind is ps_pb2.Reply:
        frame.refusal.message = draw(st.text("ab/é🜂", max_size=20))
    elif kind is worker_pb2.UploadRequest:
        frame.attachments.sizes.extend(draw(st.lists(uint64, max_size=4)))
    return frame


def without(frame: Frame, *names: str) -> Frame:
    """A copy of the frame with these fields empty."""
    copy = type(frame)()
    copy.CopyFrom(frame)
    for name in names:
        copy.ClearField(name)
    return copy


class TestPack:
    @given(headers(), payloads)
    def test_the_generated_class_reads_a_packed_frame(self, header: Frame, buffers: list[bytes]) -> None:
        """The generated class reads header and payload back from a packed frame."""
        data = pack(header, buffers)
        read = type(header).FromString(data)
        assert read.payload == b"".join(buffers)
        assert without(read, "payload", "pad") == header

    @given(headers(), payloads)
    def test_is_what_unpack_reads(self, header: Frame, buffers: list[bytes]) -> None:
        """Header and payload come back from unpack; the payload is a view of the frame's own bytes."""
        data = pack(header, buffers)
        read, payload = unpack(data, type(header))
        assert bytes(payload) == b"".join(buffers)
        assert without(read, "pad") == header
        if buffers:
            assert payload.obj is data

    @given(headers(), st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=3))
    def test_aligns_the_payload(self, header: Frame, buffers: list[bytes]) -> None:
        """The payload begins at a multiple of 16 bytes from the start of the message."""
        data = pack(header, buffers)
        _, payload = unpack(data, type(header))
        assert (len(data) - len(payload)) % ALIGNMENT == 0

    @given(st.sampled_from([0, 1, 127, 128, 16383, 16384, CHUNK_BYTES, CHUNK_BYTES + 1]))
    def test_lengths_of_every_width(self, size: int) -> None:
        """A length that takes one to four bytes is written as protobuf writes it."""
        data = pack(ps_pb2.Request(id=1), [bytes(size)])
        assert ps_pb2.Request.FromString(data).payload == bytes(size)
        assert len(unpack(data, ps_pb2.Request)[1]) == size

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda b: view(np.frombuffer(b, np.float32))])
    def test_takes_any_buffer(self, kind: Any) -> None:
        """Bytes, bytearrays, memoryviews and views of arrays are written alike."""
        data = pack(ps_pb2.Request(id=1), [kind(b"abcdefgh"), b"ij"])
        assert bytes(unpack(data, ps_pb2.Request)[1]) == b"abcdefghij"


def field(field_number: int, wire_type: int, content: bytes) -> bytes:
    """One field of a message, as bytes."""
    assert field_number < 16, "so that the tag takes one byte"
    return bytes([field_number << 3 | wire_type]) + content


def chunk(field_number: int, content: bytes) -> bytes:
    """A field with a length."""
    assert len(content) < 128, "so that the length takes one byte"
    return field(field_number, 2, bytes([len(content)]) + content)


class TestUnpack:
    @given(
        st.permutations(
            [
                field(1, 0, b"\x2a"),
                chunk(2, ps_pb2.ReadRequest(job=5).SerializeToString()),
                field(5, 0, b"\x07"),
                field(6, 0, b"\x01"),
                chunk(13, b"pad"),
                chunk(15, b"payload"),
            ]
        )
    )
    def test_fields_in_any_order(self, parts: list[bytes]) -> None:
        """A writer may put the fields in any order, and the frame is the same."""
        read, payload = unpack(b"".join(parts), ps_pb2.Request)
        assert bytes(payload) == b"payload"
        assert (read.id, read.read.job, read.total_bytes, read.last, read.payload) == (42, 5, 7, True, b"")

    @given(st.lists(st.sampled_from([b"", b"a", b"bc"]).map(lambda p: chunk(15, p)) | st.just(field(1, 0, b"\x01"))))
    def test_payload_more_than_once(self, parts: list[bytes]) -> None:
        """As always in protobuf, the last one counts."""
        data = b"".join(parts)
        read, payload = unpack(data, ps_pb2.Request)
        expected = ps_pb2.Request.FromString(data)
        assert bytes(payload) == expected.payload
        assert read == without(expected, "payload")

    @given(headers(), st.binary(max_size=8))
    def test_unknown_fields_are_passed_over(self, header: Frame, content: bytes) -> None:
        """Unknown fields of a newer version, of every wire type, do not prevent reading."""
        unknown = field(9, 0, b"\xff\x01") + field(10, 1, bytes(8)) + field(11, 5, bytes(4)) + chunk(12, content)
        read, payload = unpack(unknown + pack(header, [b"xyz"]), type(header))
        assert bytes(payload) == b"xyz"
        read.DiscardUnknownFields()
        assert without(read, "pad") == header

    @given(st.binary(max_size=200), st.sampled_from(FRAMES))
    @example(b"\x7a", ps_pb2.Request)
    @example(b"\x7a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", ps_pb2.Request)
    @example(b"\x7a\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01", ps_pb2.Request)
    @example(b"\xff" * 12, ps_pb2.Reply)
    @example(b"\x09\x00", ps_pb2.Request)
    @example(b"\x0b", ps_pb2.Request)
    @example(b"\xfa\x00\x03abc", ps_pb2.Request)
    @example(b"\xfa\x80\x80\x80\x80\x00\x03abc", ps_pb2.Request)
    @settings(max_examples=400)
    def test_random_bytes(self, data: bytes, kind: type[Any]) -> None:
        """Random bytes are refused with ProtocolError, or read as the generated class reads them; nothing else."""
        try:
            read, payload = unpack(data, kind)
        except ProtocolError:
            return
        expected = kind.FromString(data)
        assert bytes(payload) == expected.payload
        assert read == without(expected, "payload")

    @given(headers(), payloads, st.data())
    def test_truncated(self, header: Frame, buffers: list[bytes], data: st.DataObject) -> None:
        """A frame that was cut off is refused, or is a frame that ends elsewhere: never another error."""
        whole = pack(header, buffers)
        cut = data.draw(st.integers(0, len(whole)))
        try:
            _, payload = unpack(whole[:cut], type(header))
        except ProtocolError:
            return
        assert bytes(payload) in (b"", b"".join(buffers))

    @given(headers(), payloads, st.data())
    def test_changed(self, header: Frame, buffers: list[bytes], data: st.DataObject) -> None:
        """A frame with a changed byte is refused or read, without any other error."""
        whole = bytearray(pack(header, buffers))
        if whole:
            whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
        with contextlib.suppress(ProtocolError):
            unpack(bytes(whole), type(header))

    def test_many_small_fields(self) -> None:
        """A header over the limit is refused where it exceeds it; what follows is not parsed, field by field."""
        fields = b"\x48\x01" * 51 + b"\x0f"  # number 9, 51 times, and finally something that is not a field
        with pytest.raises(ProtocolError, match="wire type 7"):
            unpack(fields, ps_pb2.Request, limit=102)
        with pytest.raises(ProtocolError, match="a frame with 102 bytes or more beside its payload; the limit is 100"):
            unpack(fields, ps_pb2.Request, limit=100)

    @pytest.mark.parametrize("declared", [2**31, 2**32, 2**62, 2**63, 2**64 - 1])
    @pytest.mark.parametrize("tag", [b"\x7a", b"\x6a", b"\x12"])
    def test_declared_length(self, declared: int, tag: bytes) -> None:
        """A field that declares more bytes than arrived is refused, and nothing is allocated for it."""
        length, rest = bytearray(), declared
        while rest > 0x7F:
            length.append(rest & 0x7F | 0x80)
            rest >>= 7
        data = tag + bytes(length) + bytes([rest]) + b"xx"
        tracemalloc.start()
        try:
            with pytest.raises(ProtocolError, match=rf"declares {declared} bytes, but contains 2"):
                unpack(data, ps_pb2.Request)
            assert tracemalloc.get_traced_memory()[1] < 1 << 16
        finally:
            tracemalloc.stop()


class TestPieces:
    @given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 20))
    def test_regroups(self, buffers: list[bytes], size: int) -> None:
        """The bytes come out in order, in groups of that size; only the last may be smaller, and none is empty."""
        groups = [b"".join(group) for group in pieces(buffers, size)]
        assert b"".join(groups) == b"".join(buffers)
        assert all(len(group) == size for group in groups[:-1])
        assert all(0 < len(group) <= size for group in groups[-1:])

    @given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 20))
    def test_copies_nothing(self, sizes: list[int], size: int) -> None:
        """The output consists of views of the input."""
        buffers: list[Buffer] = [bytearray(length) for length in sizes]
        for group in pieces(buffers, size):
            for piece in group:
                assert isinstance(piece, memoryview)
                assert any(piece.obj is buffer for buffer in buffers)

    def test_is_lazy(self) -> None:
        """A buffer is requested only when its turn comes: a large read is never whole in memory."""
        asked = []

        def source() -> Any:
            for index in range(3):
                asked.append(index)
                yield bytes(10)

        groups = pieces(source(), 10)
        next(groups)
        assert asked == [0, 1], "one more, to see that the first group is full"


class TestView:
    @given(
        st.lists(st.integers(0, 4), max_size=3),
        st.sampled_from([np.float32, np.int64, np.bool_, np.complex64, np.float16]),
    )
    def test_bytes_of_any_array(self, shape: list[int], dtype: Any) -> None:
        """A flat view of an array's bytes, of any rank, type and size, for reading and for writing."""
        array = np.zeros(shape, dtype)
        flat = view(array)
        assert len(flat) == array.nbytes == math.prod(shape) * np.dtype(dtype).itemsize
        assert bytes(flat) == array.tobytes()
        if len(flat):
            flat[0] = 1
            assert array.tobytes()[0] == 1


@given(st.integers(0, 10**6))
def test_padding(size: int) -> None:
    """Padding reaches the next multiple of 16, and is less than 16."""
    assert 0 <= padding(size) < ALIGNMENT
    assert (size + padding(size)) % ALIGNMENT == 0


def frame(payload: bytes = b"", *, total: int = 0, last: bool = False) -> tuple[ps_pb2.Request, memoryview]:
    """A frame as unpack gives it."""
    return unpack(pack(ps_pb2.Request(total_bytes=total, last=last), [payload]), ps_pb2.Request)


class TestAssembler:
    @given(st.binary(max_size=100), st.integers(1, 30))
    def test_puts_together(self, data: bytes, size: int) -> None:
        """However it is cut, the payload is complete with the last frame and not before."""
        parts = [data[i : i + size] for i in range(0, len(data), size)] or [b""]
        assembler = Assembler(100)
        for nth, piece in enumerate(parts, 1):
            assert not assembler.complete
            assembler.add(*frame(piece, total=len(data) if nth == 1 else 0, last=nth == len(parts)))
        assert assembler.complete
        assert bytes(assembler.joined()) == data
        assert b"".join(assembler.chunks) == data

    def test_one_frame_is_not_copied(self) -> None:
        """A payload in one frame is passed on as it came."""
        assembler = Assembler(100)
        head, payload = frame(b"abc", total=3, last=True)
        assembler.add(head, payload)
        assert assembler.joined() is payload

    @pytest.mark.parametrize("declared", [101, 2**31, 2**62, 2**64 - 1])
    def test_declared_beyond_the_limit(self, declared: int) -> None:
        """More than the limit is refused with the first frame."""
        with pytest.raises(ProtocolError, match=rf"a payload of {declared} bytes is declared; the limit is 100"):
            Assembler(100).add(*frame(b"abc", total=declared))

    def test_declared_is_not_allocated(self) -> None:
        """Nothing is allocated for bytes that are only declared, even below the limit."""
        tracemalloc.start()
        try:
            assembler = Assembler(2**63)
            assembler.add(*frame(b"abc", total=2**62))
            assert tracemalloc.get_traced_memory()[1] < 1 << 16
            assert not assembler.complete
        finally:
            tracemalloc.stop()

    def test_more_than_declared(self) -> None:
        """Bytes beyond the declared number are refused when they arrive, not when all have."""
        assembler = Assembler(100)
        assembler.add(*frame(b"abc", total=4))
        with pytest.raises(ProtocolError, match="received 6 bytes where 4 were declared"):
            assembler.add(*frame(b"abc"))

    def test_ended_too_early(self) -> None:
        """A last frame before the declared number of bytes is refused: the stream was truncated."""
        assembler = Assembler(100)
        assembler.add(*frame(b"abc", total=4))
        with pytest.raises(ProtocolError, match="the message ended after 3 of 4 bytes"):
            assembler.add(*frame(last=True))
        assert not assembler.complete

    def test_all_bytes_without_the_last_flag(self) -> None:
        """A stream that has all its bytes but not its last flag is not complete."""
        assembler = Assembler(100)
        assembler.add(*frame(b"abcd", total=4))
        assert not assembler.complete

    def test_frame_after_the_last(self) -> None:
        """Nothing may follow the last frame."""
        assembler = Assembler(100)
        assembler.add(*frame(b"abcd", total=4, last=True))
        with pytest.raises(ProtocolError, match="a frame came after the last one"):
            assembler.add(*frame())

    @given(st.lists(st.tuples(st.binary(max_size=5), st.integers(0, 12) | uint64, st.booleans()), max_size=6))
    def test_any_sequence_of_frames(self, frames: list[tuple[bytes, int, bool]]) -> None:
        """Any sequence of frames is a ProtocolError, or complete exactly at the last flag with the declared count."""
        assembler = Assembler(10)
        taken = b""
        for payload, total, last in frames:
            try:
                assembler.add(*frame(payload, total=total, last=last))
            except ProtocolError:
                return
            taken += payload
            assert assembler.complete == last
        if assembler.complete:
            assert bytes(assembler.joined()) == taken
            assert len(taken) == frames[0][1]
