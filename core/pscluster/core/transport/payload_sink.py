"""Puts the payload of a message that comes in frames straight where it belongs, received there or copied."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import Message

from pscluster.core.errors import ProtocolError
from pscluster.core.transport.frames import head_of, padding, unpack


class PayloadSink:
    """Puts the bytes of a payload where they belong. They come in order, cut anywhere.

    Args:
        message_class: of the frames.
        targets: memory for the segments of the payload; what pads each is dropped.

    Attributes:
        received: bytes of all frames.
        missing: bytes of the targets, and of what pads them, that have no place in a frame yet.
    """

    def __init__(self, message_class: type[Message], targets: Sequence[memoryview]) -> None:
        self._message_class = message_class
        self._targets = [item for target in targets for item in (target, padding(len(target)))]
        self._which = 0
        self._done = 0
        self._last = False
        self.missing = sum(size if isinstance(size, int) else len(size) for size in self._targets)
        self._before = 0, 0, self.missing  # where the last frame began
        self.received = 0

    def take(self, start: bytes, size: int) -> list[memoryview] | None:
        """Take a frame, or its first bytes: see `tcp.packets.Place`. ProtocolError if it is more than fits."""
        if len(start) == size:
            frame, payload = unpack(start, self._message_class)
        else:
            found = head_of(start, size, self._message_class)
            if found is None:
                return None
            frame, at = found
            payload = memoryview(start)[at:]
        self.received += size
        self.put(frame, payload)
        return self._room(size - len(start))

    def put(self, frame: Message, payload: memoryview) -> None:
        """Put what has come of a frame's payload where it belongs."""
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
        """Return the memory that the next bytes go to."""
        rooms = []
        while size:
            if self._which == len(self._targets):
                raise ProtocolError(f"{size} bytes more came than were asked for")
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
        """Tell whether everything has come, and the last frame with it."""
        return self._last and not self.missing
