"""The names of connected peers, as both transports give them, and what they tell about a peer."""

from __future__ import annotations

import socket
from ipaddress import ip_address

OTHER_USER = "unix:another user"
"""The name of a connection over a Unix socket by another user's process; it is never answered."""


def grpc_name(connection: socket.socket) -> str:
    """Return the name that gRPC gives the peer of a TCP connection."""
    host, port = connection.getpeername()[:2]
    if connection.family == socket.AF_INET6 and not host.startswith("::ffff:"):
        return f"ipv6:%5B{host}%5D:{port}"
    return f"ipv4:{host.removeprefix('::ffff:')}:{port}"


def data_name(connection: socket.socket) -> str:
    """Return the name that the data plane gives the peer of a connection."""
    if connection.family == socket.AF_UNIX:
        return f"unix:data:{connection.fileno()}"
    host, port = connection.getpeername()[:2]
    return f"data:{host}:{port}"


def is_on_unix_socket(peer: str) -> bool:
    """Return whether a peer is connected over a Unix socket."""
    return peer.startswith("unix:")


def host_of(peer: str) -> str:
    """Return the IP address of a peer, as text without brackets; not of one on a Unix socket."""
    _, _, rest = peer.partition(":")
    host = rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")
    return host.removeprefix("::ffff:") if "." in host else host


def address_of(peer: str) -> str:
    """Return where a peer is, for counting and for logs; an IPv6 network counts as one address."""
    host = host_of(peer)
    try:
        address = ip_address(host)
    except ValueError:
        if peer == OTHER_USER:
            return "another user of this machine"
        return "this machine" if is_on_unix_socket(peer) else "an unknown address"
    if address.is_loopback:
        return "127.0.0.1"
    if address.version == 6:
        if (plain := address.ipv4_mapped) is not None:
            return str(plain)
        return f"{ip_address(int(address) >> 64 << 64)}/64"
    return host
