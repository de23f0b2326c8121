"""Requests as they come in: frame by frame, watched for standing still, those with large headers one at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager

import grpc

from pscluster.core.errors import ProtocolError
from pscluster.core.transport.frames import Assembler, unpack
from pscluster.core.transport.watchdog import StallWatchdog
from pscluster.v1 import ps_pb2

LARGE_HEADER_BYTES = 64 << 10
"""Requests with more to look at than this are looked at one at a time: others go on beside them."""

CUT_OFF = "the stream ended before its last frame: nothing was applied"


class Incoming:
    """What receives requests of more than one frame.

    Args:
        watchdog: for frames that do not come.
    """

    def __init__(self, watchdog: StallWatchdog) -> None:
        self.watchdog = watchdog
        self._large = threading.Lock()

    def turn(self, data: bytes, payload: memoryview) -> AbstractContextManager[object]:
        """Return what to look at a request in: one of those with large headers at a time."""
        return self._large if len(data) - len(payload) > LARGE_HEADER_BYTES else contextlib.nullcontext()

    def assemble(self, assembler: Assembler, frames: Iterator[bytes], context: grpc.ServicerContext) -> None:
        """Take the rest of a request's frames. ProtocolError if they end too early."""
        with self.watchdog.with_call(context) as progress:
            while not assembler.complete:
                data = next(frames, None)
                if data is None:
                    raise ProtocolError(CUT_OFF)
                request, payload = unpack(data, ps_pb2.Request)
                assembler.add(request, payload)
                if len(payload):
                    progress()
