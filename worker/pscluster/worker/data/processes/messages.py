"""The messages between a worker and a process of its pool. What they are about is in a slot: see `slots`.

worker to process:  SETUP (once), then TASK, each with the slot that says what; or NOTHING in place of a task
process to worker:  READY or UNLOADABLE, then for each task DONE or RAISED, with its slot
"""

from __future__ import annotations

import enum
import socket
import struct

_MESSAGE = struct.Struct("<II")


class Kind(enum.IntEnum):
    """What a message says."""

    SETUP = 1
    TASK = 2
    READY = 3
    UNLOADABLE = 4
    DONE = 5
    RAISED = 6
    NOTHING = 7


class Connection:
    """A stream of messages over a socket, which this object owns. They are so short that sending one never waits."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._came = b""

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self.socket.fileno()

    def send(self, kind: Kind, slot: int) -> None:
        """Send a message. OSError if the other end is gone."""
        self.socket.sendall(_MESSAGE.pack(kind, slot))

    def receive(self) -> list[tuple[Kind, int]] | None:
        """Wait for messages: for at least a part of one. None: the other end is gone."""
        try:
            data = self.socket.recv(4096)
        except ConnectionError:
            return None
        if not data:
            return None
        self._came += data
        whole = len(self._came) // _MESSAGE.size * _MESSAGE.size
        messages = [(Kind(kind), slot) for kind, slot in _MESSAGE.iter_unpack(self._came[:whole])]
        self._came = self._came[whole:]
        return messages
