"""Closes unauthenticated connections when there are many.

gRPC limits the number of connections, but can't distinguish used from idle ones: a caller without a token could open
all of them and lock everyone else out. So, when half of the places are taken, connections on which no call was ever
accepted are closed once they are a second old. Legitimate clients reconnect by themselves.

Connections whose calls are refused again and again are closed, too: `security.refusals` says when. The log reports
refusals once a minute.

Linux only: elsewhere descriptors can't be listed, and only gRPC's limit applies.
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
from pscluster.core.transport.peer_names import grpc_name

logger = logging.getLogger(__name__)

CHECK_SECONDS = 1.0

_CLOSE_SECONDS = 0.1
"""Between checks while calls are held: finding a socket takes a list of all descriptors."""

_CHECKS_TO_FORGET = 10
"""Checks after which closed connections are forgotten while few are open."""

_DESCRIPTORS = "/proc/self/fd"


class ConnectionReaper:
    """Closes connections to a port that takes `capacity`: unauthenticated and repeatedly refused ones."""

    def __init__(self, capacity: int) -> None:
        self.port = 0  # set once the role listens
        self._crowd = max(1, capacity // 2)
        self._known: set[str] = set()
        self._unauthenticated: set[str] = set()  # at the last check
        self._closed = 0
        self._checks = 0
        self._over = threading.Event()
        self._refused = threading.Event()  # a call is held: connections may have to be closed soon
        self._lists_descriptors = os.path.isdir(_DESCRIPTORS)
        self.refusals = Refusals(self._lists_descriptors, time.monotonic())

    def start(self) -> None:
        """Begin to check, until `stop`."""
        threading.Thread(target=self._watch, name="connection-reaper", daemon=True).start()

    def stop(self) -> None:
        """Stop checking, and close connections with held calls, which would never end."""
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
        next_check = time.monotonic() + CHECK_SECONDS
        while not self._over.is_set():
            if self._refused.wait(max(0.0, next_check - time.monotonic())):
                self._over.wait(_CLOSE_SECONDS)
                self._refused.clear()
            try:
                self._shut(self.refusals.due(time.monotonic()))
                if time.monotonic() >= next_check:
                    next_check = time.monotonic() + CHECK_SECONDS
                    if report := self.refusals.report(time.monotonic()):
                        logger.warning("%s", report)
                    if self._lists_descriptors:
                        self.check()
            except Exception:
                logger.exception("can't inspect connections; trying again")

    def _shut(self, peers: set[str]) -> None:
        if not peers:
            return
        present = set[str]()
        for peer, connection in self._connections():
            present.add(peer)
            if peer in peers:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self.refusals.forget_absent(present)

    def check(self) -> int:
        """Close connections unauthenticated since the last check, if there are many. Return how many it closed."""
        before = set(self._known)
        self._checks += 1
        if len(os.listdir(_DESCRIPTORS)) <= self._crowd:
            if self._closed:
                logger.warning(
                    "closed %d unauthenticated connections: more than half of the capacity was taken", self._closed
                )
                self._closed = 0
            self._unauthenticated.clear()
            if before and self._checks % _CHECKS_TO_FORGET == 0:
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
                connection.shutdown(socket.SHUT_RDWR)  # gRPC notices, and closes it
                closed += 1
        if closed and not self._closed:
            logger.warning("more than %d connections are open: closing unauthenticated ones", self._crowd)
        self._closed += closed
        self._unauthenticated = unauthenticated
        self._known -= before - here  # not those authenticated meanwhile, which may have connected after the listing
        return closed

    def _connections(self) -> Iterator[tuple[str, socket.socket]]:
        """Yield the peers of this port, each with a duplicate of its socket."""
        for name in os.listdir(_DESCRIPTORS):
            try:
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                # If the descriptor is closed and reused meanwhile, all that follows refers to the new one.
                with _socket_of(os.dup(int(name))) as connection:
                    internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                    if internet and connection.getsockname()[1] == self.port:
                        yield grpc_name(connection), connection
            except OSError:  # closed meanwhile, or not connected
                continue


def _socket_of(descriptor: int) -> socket.socket:
    """Return the socket of a descriptor that we own; close the descriptor if it is not a socket's."""
    try:
        return socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        raise
