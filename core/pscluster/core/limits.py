"""Limits on what a peer may request, declare or send, in one place. docs/security.md has the table.

Each is checked before memory is allocated for a declared size. They are far above what a job needs: a peer that exceeds
one is faulty or hostile.
"""

from __future__ import annotations

import contextlib
import resource

from pscluster.core.display.sanitize import shown
from pscluster.core.errors import ProtocolError

MAX_MESSAGE_BYTES = 64 << 20  # of one message. None of ours come near it; larger data goes in frames
MAX_HEADER_BYTES = 1 << 20  # of a frame's header. Once parsed, small fields take up to forty times as much memory
# Of a request that is neither a frame nor carries arguments of functions. The largest request, which names all tensors
# of a server's part of a checkpoint, some eighty thousand, is sent in frames.
MAX_CONTROL_BYTES = 16 << 20
MAX_RANK = 64  # axes of an array: NumPy's own limit
MAX_NAME = 1024  # characters of a name: of a variable, an optimizer, an element type, a peer
MAX_TEXT_BYTES = 64 << 10  # of a text of a job's metadata, in UTF-8
MAX_TEXTS = 16  # of a job's metadata. The library itself uses three
MAX_PICKLE_BYTES = 1 << 30  # of a function or class by value
# Of rows by number in one item of a read: they are copied before they are sent. Clients split larger reads.
MAX_ROWS_BYTES = 64 << 20
MAX_COUNT = 1 << 15  # of intervals of functions, and of arrays beside a message, in one request
# Of intervals of functions that have ended, when a server is taken: it must know all of them before it serves. There
# may be one for each function that is queued, if others that were scheduled between these have ended.
MAX_ENDED = 1 << 20
# Of an error's text, in UTF-8. It travels as metadata: three times this is well below gRPC's 8 KiB.
MAX_ERROR_BYTES = 2400
MAX_STREAMS = 1024  # concurrent calls on one connection. More wait at the client
MAX_CONNECTIONS = 8192  # concurrent connections to one role, if there are descriptors for them; see `connections`
MAX_BACKLOG = 1024  # connections that the kernel keeps until they are accepted: all clients may come back at once
# For a new connection to complete the handshake of HTTP/2 (and TLS): as long as a client tries.
HANDSHAKE_SECONDS = 10.0
MAX_CALL_BYTES = 64 << 10  # of the method and metadata that open a call on the data plane
MAX_METADATA = 64  # pairs of metadata of a call. Ours have fewer than ten
MAX_DEPTH = 44  # containers inside each other in a value. Each is two messages, and protobuf's parsers stop at 100
MAX_ELEMENT_BYTES = 1 << 20  # of one element of an array, such as a string
MAX_INNER_DEFINITIONS = 10_000  # functions and classes among the arguments of a partial
MAX_ADDRESS = 512  # characters of the address that a client says it has dialled
MAX_PENDING = 1024  # sessions of one role that were opened and never used. A new one replaces the oldest
MAX_SESSIONS = 8192  # sessions of one role
PENDING_SECONDS = 60.0  # after which an unused session is dropped
IDLE_SECONDS = 300.0  # after which a session without an open call is dropped
MAX_QUESTION_BYTES = 1 << 20  # of what a running function asks its coordinator, and of the answer
MAX_QUESTIONS = 64  # of one function, without an answer
MAX_WAITING_EXCHANGES = 256  # of members of gangs whose functions have not started on this worker
MAX_UNAUTHENTICATED = 64  # connections to the data plane on which no call was accepted yet

_UNREAD_BYTES = 64 << 10
_DESCRIPTORS = 10240  # what every system allows a process


def raise_descriptor_limit() -> None:
    """Raise this process' limit of descriptors to the most it may have: every connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # macOS reports an infinite hard limit, and refuses more than _DESCRIPTORS
        endless = hard == resource.RLIM_INFINITY
        if soft < (least := _DESCRIPTORS if endless else min(hard, _DESCRIPTORS)):
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (least, hard))


def connections() -> int:
    """Return how many connections a role accepts: at least a quarter of the descriptors is left for its own use."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, soft * 3 // 4))


def data_connections() -> int:
    """Return how many of them the data plane accepts. Peers beyond that stay with gRPC."""
    return max(1, connections() // 4)


def server_options() -> tuple[tuple[str, int], ...]:
    """Return the limits that gRPC enforces, except message sizes, for this process' limit of descriptors."""
    return (
        # What gRPC buffers of a call that is not being read: by default, up to 32 MiB each. A message that is being
        # read has its full size in addition.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", _UNREAD_BYTES),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", connections()),
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_SECONDS * 1000)),
        # Our peers do not compress: a compressed message is refused before it is unpacked.
        ("grpc.compression_enabled_algorithms_bitset", 1),
    )


def check_count(count: int, limit: int, noun: str) -> None:
    """Raise ProtocolError, naming both numbers, if the count is above the limit."""
    if count > limit:
        raise ProtocolError(f"{count:,} {noun} in one request; the limit is {limit:,}: send several")


def check_name(name: str, noun: str) -> None:
    """Raise ProtocolError if a name is too long."""
    if len(name) > MAX_NAME:
        raise ProtocolError(f"{noun} of {len(name):,} characters, {name[:20]!r}...; the limit is {MAX_NAME:,}")


def shortened(text: str) -> str:
    """Cut the text of an error to the length that can travel."""
    data = text.encode(errors="replace")
    if len(data) <= MAX_ERROR_BYTES:
        return text
    return data[:MAX_ERROR_BYTES].decode(errors="ignore") + " ..."


def one_line(text: str) -> str:
    """Make a peer's text fit for a log: short, and without line ends or colours."""
    return shown(text[:200])
