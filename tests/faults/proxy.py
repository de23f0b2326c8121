"""A bad network: connections that can be cut, deprived of answers, stalled in one direction, or slowed down.

It works on streams: late data arrives later, in order, and none of it is lost. For lost packets see `namespaces`.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Self

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset, immediately


class Proxy:
    """Forwards TCP connections to an address until they are cut. Listens at a given address, or on a free port."""

    def __init__(self, address: str, at: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        host, port = address.rsplit(":", 1)
        self._target = host, int(port)
        self._listener = socket.create_server(at)
        self.port: int = self._listener.getsockname()[1]
        self.address = f"{at[0]}:{self.port}"
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._deaf = False
        self._deaf_from = float("inf")  # bytes that clients have sent
        self._part = False
        self._closed = False
        self._flowing = threading.Condition()
        self._stalled: set[bool] = set()  # directions; True: back, from the server
        self._rate = self._longest = 0.0
        self._random = random.Random(0)
        self.swallowed = 0
        self.forwarded = 0
        self._sent = 0  # of these, by clients
        self.refused = 0
        self.held = 0  # pieces held up by a stalled link
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self._part:
                    raise ConnectionRefusedError
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                self.refused += 1
                continue
            with self._lock:
                if self._closed:
                    near.close()
                    far.close()
                    return
                for end in (near, far):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # delays only what it is told to
                self._pairs.add((near, far))
                for back, source, sink in ((False, near, far), (True, far, near)):
                    thread = threading.Thread(target=self._forward, args=(source, sink, back, (near, far)), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _forward(
        self, source: socket.socket, sink: socket.socket, back: bool, pair: tuple[socket.socket, socket.socket]
    ) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 18):
                if back and self._deaf:
                    self.swallowed += len(data)
                    continue
                self._hold(len(data), back, pair)
                self.forwarded += len(data)
                if not back:
                    self._sent += len(data)
                    if self._sent >= self._deaf_from:
                        self._deaf = True
                sink.sendall(data)
        self._cut(pair)

    def _hold(self, nbytes: int, back: bool, pair: tuple[socket.socket, socket.socket]) -> None:
        """Hold back this many bytes for as long as they take."""
        with self._flowing:
            self.held += back in self._stalled
            until = time.monotonic() + (nbytes / self._rate if self._rate else 0.0)
            if self._longest and self._random.random() < 0.2:
                until += self._random.uniform(0.0, self._longest)
            while pair in self._pairs:
                left = until - time.monotonic()
                if back in self._stalled:
                    self._flowing.wait()
                elif left > 0 and (self._rate or self._longest):
                    self._flowing.wait(left)
                else:
                    return

    def _cut(self, pair: tuple[socket.socket, socket.socket]) -> None:
        with self._lock:
            if pair not in self._pairs:
                return
            self._pairs.discard(pair)
        with self._flowing:
            self._flowing.notify_all()
        for end in pair:
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
            end.close()

    def stall(self, back: bool) -> None:
        """From now on nothing gets through in one direction: from the server (`back`), or to it. No connection ends."""
        with self._flowing:
            self._stalled.add(back)

    def slow(self, rate: float) -> None:
        """From now on a connection carries this many bytes/s in each direction."""
        self._rate = rate

    def stutter(self, longest: float, seed: int) -> None:
        """From now on a fifth of all pieces is late, by up to this many seconds, as when packets are lost."""
        self._random, self._longest = random.Random(seed), longest

    def flow(self) -> None:
        """Stop all stalls and delays."""
        with self._flowing:
            self._stalled.clear()
            self._rate = self._longest = 0.0
            self._flowing.notify_all()

    def swallow_answers(self, after: int = 0) -> None:
        """Drop what the server sends, from now on or once this many more bytes have been sent to it."""
        if after:
            self._deaf_from = self._sent + after
        else:
            self._deaf = True

    def part(self) -> None:
        """Reset all connections, and allow no new ones until `join` is called."""
        self._part = True
        self.cut()

    def join(self) -> None:
        """Allow new connections again."""
        self._part = False

    def cut(self) -> None:
        """Reset all connections; new ones work, in both directions."""
        self._deaf = False
        self._deaf_from = float("inf")  # bytes that clients have sent
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            self._cut(pair)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, and close all connections."""
        with self._lock:
            self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()
