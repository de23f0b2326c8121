"""Bounds of what a peer may ask for, declare or send, in one place. docs/security.md has the table.

Each is checked before anything is allocated for what is only declared. They are far above what a job needs: whoever
meets one has made a mistake, or means harm.
"""

from __future__ import annotations

import contextlib
import resource

from pscluster.core.errors import ProtocolError
from pscluster.core.sanitize import shown

MAX_MESSAGE_BYTES = 64 << 20
"""Of one message. Nothing we send comes near it; what is larger goes in frames."""

MAX_HEADER_BYTES = 1 << 20
"""Of what stands before a frame's payload. Parsed, small fields take up to forty times as much memory."""

MAX_CONTROL_BYTES = 16 << 20
"""Of a request that is not a frame, but for those that bring arguments of functions. The largest names all tensors of a
server's part of a checkpoint, some eighty thousand: it comes in frames itself."""

MAX_RANK = 64
"""Axes of an array: NumPy's own limit."""

MAX_NAME = 1024
"""Characters of a name: of a variable, an optimizer, an element type, a peer."""

MAX_PICKLE_BYTES = 1 << 30
"""Of a function or class by value."""

MAX_ROWS_BYTES = 64 << 20
"""Of rows by number in one item of a read: they are copied before they are sent. Clients divide what is larger."""

MAX_COUNT = 1 << 15
"""Of intervals of functions, and of arrays beside a message, in one request."""

MAX_ERROR_BYTES = 2400
"""Of an error's text, in UTF-8, which travels as metadata: three times that many are well below gRPC's 8 KiB."""

MAX_STREAMS = 1024
"""Calls at a time on one connection. Those beyond it wait, at the client."""

MAX_CONNECTIONS = 8192
"""Connections at a time to one role, as far as there are descriptors; see `connections`."""

HANDSHAKE_SECONDS = 10.0
"""For a new connection to say that it speaks HTTP/2 (and TLS): as long as a client tries."""

MAX_CALL_BYTES = 64 << 10
"""Of what opens a call on the data plane: its method and its metadata."""

MAX_METADATA = 64
"""Pairs of metadata of a call. Ours have fewer than ten."""

_UNREAD_BYTES = 64 << 10

_DESCRIPTORS = 10240
"""What every system allows a process to have."""


def raise_descriptor_limit() -> None:
    """Let this process have as many descriptors as it may: every connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # macOS names an endless hard limit, and refuses more than this
        endless = hard == resource.RLIM_INFINITY
        if soft < (least := _DESCRIPTORS if endless else min(hard, _DESCRIPTORS)):
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (least, hard))


def connections() -> int:
    """How many connections a role takes: a quarter of the descriptors, at least, is for its files and its own calls."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, soft * 3 // 4))


def data_connections() -> int:
    """How many connections the data plane takes of them. Whoever finds no place stays with gRPC."""
    return max(1, connections() // 4)


def server_options() -> tuple[tuple[str, int], ...]:
    """What gRPC bounds by itself, beside the size of messages, at this process' limit of descriptors."""
    return (
        # Of a call of which nothing is asked for yet gRPC takes in so much, and no more: left to itself it comes to
        # take 32 MiB of each. A message that is waited for has all of its room besides.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", _UNREAD_BYTES),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", connections()),
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_SECONDS * 1000)),
        # Nobody of ours compresses: a compressed message is refused before it is unpacked, whatever it would become.
        ("grpc.compression_enabled_algorithms_bitset", 1),
    )


def check_count(count: int, limit: int, what: str) -> None:
    """ProtocolError, naming both numbers, if there are more than the limit."""
    if count > limit:
        raise ProtocolError(f"{count:,} {what} in one request, the limit is {limit:,}: send several")


def check_name(name: str, what: str) -> None:
    """ProtocolError if a name is longer than names are."""
    if len(name) > MAX_NAME:
        raise ProtocolError(f"{what} of {len(name):,} characters, {name[:20]!r}..., the limit is {MAX_NAME:,}")


def shortened(text: str) -> str:
    """A text that travels as an error: cut where it would be refused on its way."""
    data = text.encode(errors="replace")
    if len(data) <= MAX_ERROR_BYTES:
        return text
    return data[:MAX_ERROR_BYTES].decode(errors="ignore") + " ..."


def one_line(text: str) -> str:
    """What a peer says of itself, as it may stand in a log: short, and without line ends or colours."""
    return shown(text[:200])
