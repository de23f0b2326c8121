"""Reads the messages of a stream of functions: on the thread that runs them, or on another one, a message ahead."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import grpc

from pscluster.v1 import worker_pb2

logger = logging.getLogger(__name__)


class RequestReader:
    """Reads one stream, a message at a time. It shares its runner's lock.

    Args:
        accept: called with each message, without the lock. It calls `was_accepted` under the lock.
        wake: called, under the lock, when there will be no more messages.
    """

    def __init__(
        self,
        lock: threading.RLock,
        accept: Callable[[worker_pb2.StepsRequest], object],
        wake: Callable[[], object],
    ) -> None:
        self._lock, self._accept, self._wake = lock, accept, wake
        self._to_read = threading.Condition(lock)
        self.requests: Iterator[worker_pb2.StepsRequest] = iter(())
        self._thread: threading.Thread | None = None
        self._ended = False
        self.is_reading = False
        """The other thread reads, or should read, one message."""
        self.read_all = False
        """There are no more messages."""

    def read_one(self) -> bool:
        """Read a message. Return False at the stream's end. Only one thread does so at a time."""
        request = next(self.requests, None)
        if request is not None:
            self._accept(request)
        return request is not None

    # Under the lock

    def want_next(self) -> None:
        """Have the other thread read the next message while a function runs."""
        if self.is_reading or self.read_all:
            return
        self.is_reading = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._read_ahead, name="functions-ahead", daemon=True)
            self._thread.start()
        self._to_read.notify_all()

    def was_accepted(self) -> None:
        """Note that the message that was read is with the runner."""
        self.is_reading = False

    def end(self) -> None:
        self._ended = True
        self._to_read.notify_all()

    # The other thread

    def _read_ahead(self) -> None:
        """Read a message whenever `want_next` requests one."""
        while True:
            with self._lock:
                self._to_read.wait_for(lambda: self.is_reading or self._ended)
                if self._ended:
                    return
            more = False
            try:
                more = self.read_one()
            except grpc.RpcError:
                pass
            except Exception:
                logger.exception("can't read the stream of functions; other workers will run them")
            if not more:
                with self._lock:
                    self.is_reading, self.read_all = False, True
                    self._wake()
                return
