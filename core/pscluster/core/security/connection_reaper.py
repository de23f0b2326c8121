"""Closes unauthenticated connections when there are many.

gRPC counts connections, but can't tell one that is used from one that only sits there: as many as there may be, held
open by a caller without a token, would keep everybody else out. So, when half of the places are taken, connections on
which no call was ever accepted are closed as soon as they are a second old. Whoever belongs here comes again by itself.

Connections whose calls are refused again and again are closed, too: `security.refusals` says when. What was refused is
logged once a minute.

Linux only: elsewhere descriptors can't be listed, and the count is all there is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator

from pscluster.core.security.refusals import Refusals

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0

_CLOSE_SECONDS = 0.1
"""Between looks while calls are held: to find a socket all descriptors are listed."""

_LOOKS_TO_FORGET = 10
"""So often, where there is no crowd, those who have left are forgotten."""

_DESCRIPTORS = "/proc/self/fd"


class ConnectionReaper:
    """Closes connections of one port that are unauthenticated, or whose calls are refused again and again.

    Args:
        port: where the role listens.
        places: how many connections it takes.
    """

    def __init__(self, port: int, places: int) -> None:
        self._port = port
        self._crowd = max(1, places // 2)
        self._known: set[str] = set()
        self._unauthenticated: set[str] = set()  # at the last look
        self._closed = 0
        self._looks = 0
        self._over = threading.Event()
        self._refused = threading.Event()  # a call is held: connections may have to be closed soon
        self._lists_descriptors = os.path.isdir(_DESCRIPTORS)
        self.refusals = Refusals(self._lists_descriptors, time.monotonic())

    def start(self) -> None:
        """Look now and then, until `stop`."""
        threading.Thread(target=self._watch, name="connection-reaper", daemon=True).start()

    def stop(self) -> None:
        """Look no more. Connections with held calls are closed: nobody waits for those to end."""
        self._over.set()
        self._refused.set()
        self._shut(self.refusals.close())

    def mark_authenticated(self, peer: str) -> None:
        """Remember that a call of this peer, as gRPC names it, was accepted."""
        self._known.add(peer)
        if self.refusals.pending:
            self.refusals.accepted(peer)

    def refused(self, peer: str, *, unknown_session: bool = False, is_large: bool = False) -> bool:
        """Count a refused call of this peer. Return whether to answer it: if not, its connection is closed soon."""
        answered = self.refusals.refused(peer, time.monotonic(), unknown_session=unknown_session, is_large=is_large)
        if not answered:
            self._known.discard(peer)
            self._refused.set()
        return answered

    def _watch(self) -> None:
        next_look = time.monotonic() + LOOK_SECONDS
        while not self._over.is_set():
            if self._refused.wait(max(0.0, next_look - time.monotonic())):
                self._over.wait(_CLOSE_SECONDS)
                self._refused.clear()
            try:
                self._shut(self.refusals.due(time.monotonic()))
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + LOOK_SECONDS
                    if report := self.refusals.report(time.monotonic()):
                        logger.warning("%s", report)
                    if self._lists_descriptors:
                        self.look()
            except Exception:
                logger.exception("can't inspect connections; trying again")

    def _shut(self, peers: set[str]) -> None:
        """Close these connections."""
        if not peers:
            return
        present = set[str]()
        for peer, connection in self._connections():
            present.add(peer)
            if peer in peers:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self.refusals.forget_absent(present)

    def look(self) -> int:
        """Close what was unauthenticated at the last look, if connections are many. Return how many were closed."""
        before = set(self._known)
        self._looks += 1
        if len(os.listdir(_DESCRIPTORS)) <= self._crowd:
            if self._closed:
                logger.warning(
                    "closed %d unauthenticated connections, as more than half of the places were taken", self._closed
                )
                self._closed = 0
            self._unauthenticated.clear()
            if before and self._looks % _LOOKS_TO_FORGET == 0:
                self._known -= before - {peer for peer, _ in self._connections()}
            return 0
        closed, here, unauthenticated = 0, set[str](), set[str]()
        for peer, connection in self._connections():
            here.add(peer)
            if peer in self._known:
                continue
            if peer not in self._unauthenticated:
                unauthenticated.add(peer)
                continue
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # gRPC finds its end, and closes it
                closed += 1
        if closed and not self._closed:
            logger.warning("more than %d connections are open: closing unauthenticated ones", self._crowd)
        self._closed += closed
        self._unauthenticated = unauthenticated
        self._known -= before - here  # who was authenticated meanwhile may have come after we looked
        return closed

    def _connections(self) -> Iterator[tuple[str, socket.socket]]:
        """Yield the peers of this port, and a socket of each that is ours to close."""
        for name in os.listdir(_DESCRIPTORS):
            try:
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                # Of a descriptor that is closed and taken again meanwhile, all that follows is of the new one.
                with _socket_of(os.dup(int(name))) as connection:
                    internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                    if internet and connection.getsockname()[1] == self._port:
                        yield _peer_of(connection), connection
            except OSError:  # closed meanwhile, or nobody's
                continue


def _socket_of(descriptor: int) -> socket.socket:
    """Return the socket of a descriptor that is ours, which is closed if it is not a socket's."""
    try:
        return socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        raise


def _peer_of(connection: socket.socket) -> str:
    """Return the name that gRPC gives the peer."""
    host, port = connection.getpeername()[:2]
    if connection.family == socket.AF_INET6 and not host.startswith("::ffff:"):
        return f"ipv6:%5B{host}%5D:{port}"
    return f"ipv4:{host.removeprefix('::ffff:')}:{port}"
