"""Dialling: channel options, the handshake, and waiting for peers with a line that names who is missing."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
import tenacity

from pscluster.core.cluster.spec import split_address
from pscluster.core.errors import AuthenticationError, PsClusterError, UnavailableError, from_rpc
from pscluster.core.limits import MAX_MESSAGE_BYTES
from pscluster.core.security.aio_channel import AuthenticatedAioChannel
from pscluster.core.security.channel import AuthenticatedChannel
from pscluster.core.security.handshake import Secret
from pscluster.core.security.tls import Tls, check_plain, why_not_plain
from pscluster.core.transport.grpc_streams import Metadata, Stream, open_raw_stream
from pscluster.core.transport.methods import Stub
from pscluster.core.transport.unix_sockets import connect, path_of, why_unsafe
from pscluster.v1 import node_pb2

logger = logging.getLogger(__name__)

MAX_INLINE_BYTES = MAX_MESSAGE_BYTES // 2
"""Of one function's arguments or result, what travels beside the message not counted; several may share one."""

NODE_SERVICE = node_pb2.DESCRIPTOR.services_by_name["Node"]

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A restarted peer is found within seconds, not after grpc's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 10_000),  # also how long one attempt may take, on a busy machine
    ("grpc.max_reconnect_backoff_ms", 200),
    # One that comes back under another address of the same name, as containers do, too; grpc's own limit is 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # Lenient, and matched by the servers': a process that holds the GIL for seconds is not dead.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Every channel its own connection: bulk must not delay control.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # Nobody of ours compresses: a reply that is small on the way and large here is refused.
    ("grpc.compression_enabled_algorithms_bitset", 1),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A peer whose machine is gone says no goodbye: without this it would hold the role for hours.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
)

HELLO_SECONDS = 5.0
_REMIND_SECONDS = 10.0  # how often somebody who waits is told for whom, and what is seen of them
_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """A task of the cluster and where it listens."""

    role: str
    index: int
    address: str
    tls: Tls | None = field(default=None, compare=False, repr=False)  # how it is dialled
    token: str | None = field(default=None, compare=False, repr=False)  # what both sides know
    why_gone: Callable[[], str] = field(default=str, compare=False, repr=False)
    """Why it makes no sense to wait for it: whoever runs it will not start it again. Empty: it may come."""

    @property
    def task(self) -> str:
        """Its name, such as "worker 2"."""
        return f"{self.role} {self.index}"

    def __str__(self) -> str:
        return f"{self.task} at {self.address}"

    def check_plain(self, *, insecure: bool) -> None:
        """ConfigurationError if what is secret would be sent there as anyone on the path can read it."""
        check_plain(self, self.address, self.token, self.tls, insecure=insecure)


def open_channel(
    address: str,
    tls: Tls | None,
    token: str | None = None,
    more: Sequence[tuple[str, int]] = (),
    task: tuple[str, int] | None = None,
) -> grpc.Channel:
    """A channel of its own connection to the address; nothing is dialled before the first call.

    With a token, every call of it is authenticated, and the server is, too, before anything is sent to it; it has to be
    this task, a role and its index, if one is given.
    """
    options = [*CHANNEL_OPTIONS, *more]
    if tls is None:
        channel = grpc.insecure_channel(address, options=options)
    else:
        channel = grpc.secure_channel(address, tls.channel_credentials(), options=options)
    return channel if token is None else AuthenticatedChannel(channel, Secret.of(token), address, task)


def open_aio_channel(peer: PeerAddress) -> grpc.aio.Channel | AuthenticatedAioChannel:
    """The same for the loop."""
    if peer.tls is None:
        channel = grpc.aio.insecure_channel(peer.address, options=CHANNEL_OPTIONS)
    else:
        channel = grpc.aio.secure_channel(peer.address, peer.tls.channel_credentials(), options=CHANNEL_OPTIONS)
    if peer.token is None:
        return channel
    return AuthenticatedAioChannel(channel, Secret.of(peer.token), peer.address, (peer.role, peer.index))


def open_peer_channel(peer: PeerAddress, more: Sequence[tuple[str, int]] = ()) -> grpc.Channel:
    """The same for threads."""
    return open_channel(peer.address, peer.tls, peer.token, more, (peer.role, peer.index))


def open_stream(channel: grpc.Channel, path: str, metadata: Metadata) -> Stream:
    """A stream of raw bytes for a method by its path, authenticated as the channel's calls are."""
    if isinstance(channel, AuthenticatedChannel):
        return channel.open_stream(path, metadata)
    return open_raw_stream(channel, path, metadata)


def why_untrusted(peer: PeerAddress) -> AuthenticationError | None:
    """Why the two sides can't come to trust each other, where it is that for which a peer can't be reached."""
    why = why_not_plain(peer.address) if peer.tls is None else peer.tls.why_not(peer.address)
    return None if why is None else AuthenticationError(f"{peer} can't be talked to: {why}")


def say_hello(
    channel: grpc.Channel,
    peer: PeerAddress,
    ours: node_pb2.Identity,
    timeout: float = HELLO_SECONDS,
    num_ps: int = 0,
) -> node_pb2.HelloReply:
    """The handshake. Raises our error for whatever goes wrong.

    A server in the peer's place that has another role is refused too: two lines of TF_CONFIG were swapped.

    Args:
        num_ps: how many parameter servers this coordinator lists; 0: it does not say.
    """
    try:
        reply: node_pb2.HelloReply = Stub(channel, NODE_SERVICE).hello(
            node_pb2.HelloRequest(identity=ours, num_ps=num_ps), timeout=timeout
        )
    except grpc.RpcError as error:
        raise from_rpc(error, str(peer)) from None
    theirs = reply.identity
    if (theirs.role, theirs.index) != (peer.role, peer.index):
        raise PsClusterError(
            f"{peer.address} should be {peer.role} {peer.index}, but {theirs.name} answers there: "
            "compare the cluster in TF_CONFIG on both"
        )
    return reply


_SILENT = "something listens there, but it does not answer as a pscluster role"


def _explain_socket(path: str) -> str:
    if why := why_unsafe(os.path.dirname(path)):
        return why
    try:
        connect(path, 2.0).close()
    except FileNotFoundError:
        return "there is no such socket"
    except ConnectionRefusedError:
        return "nothing listens there"
    except OSError as error:
        return f"no connection: {error.strerror or error}"
    return _SILENT


def explain(address: str, tls: Tls | None = None) -> str:
    """Why nobody answers at an address, as far as a connection of another kind can tell."""
    if (path := path_of(address)) is not None:
        return _explain_socket(path)
    host, port = split_address(address)
    if why := why_not_plain(address) if tls is None else tls.why_not(address):
        return why
    try:
        with socket.create_connection((host, port), timeout=2.0):
            return _SILENT
    except socket.gaierror as error:
        return f"the host {host} does not resolve ({error.strerror})"
    except ConnectionRefusedError:
        return "nothing listens there"
    except OSError as error:
        return f"no connection: {error.strerror or error}"


def _seen(peers: Iterable[PeerAddress]) -> str:
    peers = list(peers)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        reasons = pool.map(lambda peer: explain(peer.address, peer.tls), peers)
        return "; ".join(f"{peer}: {reason}" for peer, reason in zip(peers, reasons, strict=True))


def wait_for_peers(
    peers: Iterable[PeerAddress],
    ours: node_pb2.Identity,
    *,
    timeout: float,
    stop: threading.Event | None = None,
    purpose: str = "",
    num_ps: int = 0,
) -> None:
    """Shake hands with all the peers, however late they start.

    Logs who is missing whenever that changes and, as a warning, what is seen of them once it has lasted, and when that
    changes. Raises UnavailableError,
    naming the missing and what was seen of each, when `timeout` seconds have passed or `stop` is set; a refusal
    (token, certificate, version, another role, another number of servers) is raised at once: waiting does not mend it;
    nor does it where a peer will not be started again.
    """
    missing = {peer: open_peer_channel(peer) for peer in peers}
    total = len(missing)
    stop = stop or threading.Event()
    began = time.monotonic()
    remind_at = began + _REMIND_SECONDS
    last_said: list[PeerAddress] = []
    last_seen = ""
    prefix = f"{purpose}: " if purpose else ""

    def greet(peer: PeerAddress) -> bool:
        left = began + timeout - time.monotonic()
        try:
            say_hello(missing[peer], peer, ours, min(HELLO_SECONDS, max(left, 0.5)), num_ps)
        except UnavailableError:
            if untrusted := why_untrusted(peer):
                raise untrusted from None
            if why := peer.why_gone():
                raise PsClusterError(f"{peer} is not waited for: {why}") from None
            return False
        return True

    def try_once() -> None:
        nonlocal last_said, last_seen, remind_at
        asked = list(missing)
        for peer, answers in zip(asked, pool.map(greet, asked), strict=True):
            if answers:
                missing.pop(peer).close()
        if missing:
            names, now = list(missing), time.monotonic()
            if names != last_said:
                last_said = names
                logger.info("%swaiting for %s", prefix, ", ".join(map(str, names)))
            if now >= remind_at and not stop.is_set():
                remind_at = now + _REMIND_SECONDS
                if (seen := _seen(names)) != last_seen:  # what stays as it is is said once
                    last_seen = seen
                    logger.warning("%sstill waiting after %.0f s for %s", prefix, now - began, seen)
            raise UnavailableError("not all are there")

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(UnavailableError),
        wait=tenacity.wait_random_exponential(multiplier=0.05, max=0.25),
        stop=tenacity.stop_after_delay(timeout) | tenacity.stop_when_event_set(stop),
        sleep=tenacity.sleep_using_event(stop),
    )
    try:
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="hello") as pool:  # one that hangs delays no other
            retrying(try_once)
    except tenacity.RetryError:
        why = "stopped while waiting" if stop.is_set() else f"gave up after {timeout:g} s"
        raise UnavailableError(f"{why}: {len(missing)} of {total} tasks are missing: {_seen(missing)}") from None
    finally:
        for channel in missing.values():
            channel.close()
