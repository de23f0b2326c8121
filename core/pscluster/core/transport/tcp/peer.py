"""A peer of the data plane, as its server sees it: one connection, and the call on it."""

from __future__ import annotations

import select
import socket
import time
from typing import Any

from pscluster.core.limits import MAX_CALL_BYTES
from pscluster.core.security.revocation import why_refused
from pscluster.core.security.tls import Tls
from pscluster.core.transport.peer_names import data_name
from pscluster.core.transport.tcp.context import DataContext
from pscluster.core.transport.tcp.encryption import TlsConnection
from pscluster.core.transport.tcp.packets import Connection, tuned


class Peer:
    """A connection, and the call on it."""

    def __init__(self, connected: socket.socket, tls: Tls | None) -> None:
        connected = tuned(connected)
        self.connection = Connection(connected) if tls is None else TlsConnection(connected, tls)
        self.connection.limit = MAX_CALL_BYTES
        self.shown: dict[str, Any] = {}  # in its certificate; see `DataContext.auth_context`
        self.name = data_name(connected)
        self.since = time.monotonic()
        self.known = False
        self.turned_out = False
        self.busy = False  # with a call, until its status is sent
        self.context: DataContext | None = None

    @property
    def is_unauthenticated(self) -> bool:
        """Return whether no call of it has been accepted, though one may be."""
        return not (self.known or self.turned_out)

    def why_refused(self, revoked: frozenset[str]) -> str | None:
        """Return what is wrong with its certificate, if it has shown one."""
        shown = self.shown.get("x509_pem_cert", ())
        return next((why for pem in shown if (why := why_refused(pem, revoked, resumed=False))), None)

    def cancel(self) -> None:
        """End the connection: its token or certificate is no longer accepted."""
        self.connection.shut()
        self.gone()

    def turn_out(self) -> None:
        """Close the connection for its thread, and never authenticate it."""
        self.turned_out = True
        self.connection.shut()

    def hold(self, seconds: float) -> None:
        """Wait for `seconds` seconds, or until either side closes the connection."""
        waiting = select.poll()
        waiting.register(self.connection.fileno(), select.POLLRDHUP)
        waiting.poll(seconds * 1000)

    def gone(self) -> None:
        """End the call: the client has disconnected."""
        if (context := self.context) is not None:
            context.end()
