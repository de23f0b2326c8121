"""Puts the payload of a framed message straight into its targets, received there or copied."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import Message

from pscluster.core.errors import ProtocolError
from pscluster.core.transport.frames import head_of, padding, unpack


class PayloadSink:
    """Puts the segments of a payload, which arrive in order and cut anywhere, into their targets; drops the padding."""

    def __init__(self, message_class: type[Message], targets: Sequence[memoryview]) -> None:
        self._message_class = message_class
        self._targets = [item for target in targets for item in (target, padding(len(target)))]
        self._which = 0
        self._done = 0
        self._last = False
        self.missing = sum(size if isinstance(size, int) else len(size) for size in self._targets)  # not announced yet
        self._before = 0, 0, self.missing  # where the last frame began
        self.received = 0  # bytes of all frames so far

    def take(self, start: bytes, size: int) -> list[memoryview] | None:
        """Take a frame, or its first bytes: see `base.Place`. Raise ProtocolError if it exceeds the targets."""
        if len(start) == size:
            frame, payload = unpack(start, self._message_class)
        else:
            head = head_of(start, size, self._message_class)
            if head is None:
                return None
            frame, at = head
            payload = memoryview(start)[at:]
        self.received += size
        self.put(frame, payload)
        return self._room(size - len(start))

    def put(self, frame: Message, payload: memoryview) -> None:
        """Copy the bytes of a frame's payload that have arrived into their targets."""
        again = getattr(frame, "again", False)
        if self._last and not again:
            raise ProtocolError("a frame came after the last one")
        if again:
            self._which, self._done, self.missing = self._before
        self._before = self._which, self._done, self.missing
        self._last = frame.last  # type: ignore[attr-defined]
        at = 0
        for room in self._room(len(payload)):
            room[:] = payload[at : at + len(room)]
            at += len(room)

    def _room(self, size: int) -> list[memoryview]:
        rooms = []
        while size:
            if self._which == len(self._targets):
                raise ProtocolError(f"received {size} bytes more than were requested")
            target = self._targets[self._which]
            room = memoryview(bytearray(target)) if isinstance(target, int) else target
            count = min(len(room) - self._done, size)
            rooms.append(room[self._done : self._done + count])
            size -= count
            self.missing -= count
            self._done += count
            if self._done == len(room):
                self._which, self._done = self._which + 1, 0
        return rooms

    @property
    def complete(self) -> bool:
        return self._last and not self.missing
