"""Dialling: channel options, the handshake, and waiting for peers while the log names the missing ones."""

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

from pscluster.core.cluster.addresses import is_unregistered, split_address
from pscluster.core.errors import AuthenticationError, PsClusterError, UnavailableError, from_rpc
from pscluster.core.limits import MAX_MESSAGE_BYTES
from pscluster.core.security.aio_channel import AuthenticatedAioChannel
from pscluster.core.security.channel import AuthenticatedChannel
from pscluster.core.security.handshake import Secret
from pscluster.core.security.tls import Tls, check_plain, why_not_plain
from pscluster.core.transport.methods import Stub
from pscluster.core.transport.retry import until
from pscluster.core.transport.unix_sockets import connect, path_of, why_unsafe
from pscluster.v1 import node_pb2

logger = logging.getLogger(__name__)

MAX_INLINE_BYTES = MAX_MESSAGE_BYTES // 2
"""Maximum of one function's arguments or result, attachments not counted; a message may carry several."""

NODE_SERVICE = node_pb2.DESCRIPTOR.services_by_name["Node"]

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A restarted peer is found within seconds, not after grpc's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 10_000),  # also how long one attempt may take, on a busy machine
    ("grpc.max_reconnect_backoff_ms", 200),
    # So is one that comes back under another address of the same name, as containers do; grpc's own limit is 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # Lenient, and matched by the servers': a process that holds the GIL for seconds is not dead.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A connection for every channel: bulk must not delay control.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # We never compress: refuse a reply that is small on the wire and large in memory.
    ("grpc.compression_enabled_algorithms_bitset", 1),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A peer whose machine is down does not close its connections: without this it would hold the role for hours.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
)

HELLO_SECONDS = 5.0
_REMIND_SECONDS = 10.0  # between warnings that say which peers are missing, and why
_MAX_PARALLEL = 32


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """A task of the cluster, and where it listens."""

    role: str
    index: int
    address: str
    tls: Tls | None = field(default=None, compare=False, repr=False)  # how it is dialled
    token: str | None = field(default=None, compare=False, repr=False)  # the shared secret
    why_gone: Callable[[], str] = field(default=str, compare=False, repr=False)
    """Returns why waiting is pointless, since its supervisor will not restart it; empty if it may come."""
    tls_name: str = field(default="", compare=False)
    """The name that its certificate must have; empty: its host. A worker that joined is verified by its role."""

    @property
    def task(self) -> str:
        """Return its name, such as "worker 2"."""
        return f"{self.role} {self.index}"

    def __str__(self) -> str:
        return f"{self.task}, which has not registered" if self.is_unregistered else f"{self.task} at {self.address}"

    @property
    def is_unregistered(self) -> bool:
        """Return whether it is still to say where it is."""
        return is_unregistered(self.address)

    def check_plain(self, *, insecure: bool) -> None:
        """Raise ConfigurationError if secrets would be sent there in plain text over a network."""
        if self.is_unregistered:
            return  # it is checked once it is known
        check_plain(self, self.address, self.token, self.tls, insecure=insecure)


def open_channel(
    address: str,
    tls: Tls | None,
    token: str | None = None,
    more: Sequence[tuple[str, int]] = (),
    task: tuple[str, int] | None = None,
    tls_name: str = "",
) -> grpc.Channel:
    """Return a channel with its own connection to the address; the first call dials.

    With a token, the server is authenticated before anything is sent to it, and must be `task`, if that is given. Its
    certificate must have `tls_name`, if that is given, instead of the host.
    """
    options = [*CHANNEL_OPTIONS, *more, *_expecting(tls_name)]
    if tls is None:
        channel = grpc.insecure_channel(address, options=options)
    else:
        channel = grpc.secure_channel(address, tls.channel_credentials(), options=options)
    return channel if token is None else AuthenticatedChannel(channel, Secret.of(token), address, task)


def _expecting(tls_name: str) -> list[tuple[str, str]]:
    """Return the channel options for a server whose certificate has this name, if one is given."""
    return [("grpc.ssl_target_name_override", tls_name)] if tls_name else []


def open_aio_channel(peer: PeerAddress) -> grpc.aio.Channel | AuthenticatedAioChannel:
    """Return a channel to the peer for the event loop."""
    if peer.tls is None:
        channel = grpc.aio.insecure_channel(peer.address, options=CHANNEL_OPTIONS)
    else:
        options = [*CHANNEL_OPTIONS, *_expecting(peer.tls_name)]
        channel = grpc.aio.secure_channel(peer.address, peer.tls.channel_credentials(), options=options)
    if peer.token is None:
        return channel
    return AuthenticatedAioChannel(channel, Secret.of(peer.token), peer.address, (peer.role, peer.index))


def open_peer_channel(peer: PeerAddress, more: Sequence[tuple[str, int]] = ()) -> grpc.Channel:
    """Return a channel to the peer for threads."""
    return open_channel(peer.address, peer.tls, peer.token, more, (peer.role, peer.index), peer.tls_name)


def why_untrusted(peer: PeerAddress) -> AuthenticationError | None:
    """Return the error of certificates that keep a peer from being reached, if they are the cause."""
    why = why_not_plain(peer.address) if peer.tls is None else peer.tls.why_not(peer.address, peer.tls_name)
    return None if why is None else AuthenticationError(f"can't connect securely to {peer}: {why}")


def say_hello(
    channel: grpc.Channel, peer: PeerAddress, ours: node_pb2.Identity, timeout: float = HELLO_SECONDS, num_ps: int = 0
) -> node_pb2.HelloReply:
    """Shake hands. Raises one of our errors if anything goes wrong, or if another role answers at the address.

    `num_ps` is the number of parameter servers that this coordinator lists; 0: unspecified.
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


def explain(address: str, tls: Tls | None = None, tls_name: str = "") -> str:
    """Return why no role answers at an address, as far as a plain connection can tell."""
    if is_unregistered(address):
        return "start it with `pscluster ps --join`, the coordinator's address, and its --task"
    if (path := path_of(address)) is not None:
        why: str | None = why_unsafe(os.path.dirname(path))
    else:
        why = why_not_plain(address) if tls is None else tls.why_not(address, tls_name)
    if why:
        return why
    try:
        connected = connect(path, 2.0) if path else socket.create_connection(split_address(address), timeout=2.0)
        connected.close()
    except FileNotFoundError:
        return "there is no such socket"
    except socket.gaierror as error:
        return f"the host {split_address(address)[0]} does not resolve ({error.strerror})"
    except ConnectionRefusedError:
        return "nothing is listening there"
    except OSError as error:
        return f"no connection: {error.strerror or error}"
    return "something is listening there, but calls to it fail: check that it is a pscluster role, and not frozen"


def _why_missing(peers: Iterable[PeerAddress]) -> str:
    peers = list(peers)
    with ThreadPoolExecutor(_MAX_PARALLEL) as pool:
        reasons = pool.map(lambda peer: explain(peer.address, peer.tls, peer.tls_name), peers)
        return "; ".join(f"{peer}: {reason}" for peer, reason in zip(peers, reasons, strict=True))


def wait_for_peers(
    peers: Iterable[PeerAddress],
    ours: node_pb2.Identity,
    *,
    timeout: float,
    stop: threading.Event | None = None,
    purpose: str = "",
    num_ps: int = 0,
    place_of: Callable[[PeerAddress], PeerAddress | None] = lambda peer: peer,
) -> None:
    """Shake hands with all peers, however late they start.

    `place_of` returns where one is by now, if it has moved; None if it is needed no more.

    Logs which peers are missing whenever that changes and, as a warning, why, after a while and whenever that changes.

    Raises:
        UnavailableError: `timeout` seconds have passed or `stop` is set; names the missing peers and the reasons.
        PsClusterError: a refusal (token, certificate, version, another role, another number of servers), or a peer
            will not be started again. Raised at once, since waiting does not help.
    """
    missing = {peer: open_peer_channel(peer) for peer in peers}
    total = len(missing)
    stop = stop or threading.Event()
    began = time.monotonic()
    remind_at = began + _REMIND_SECONDS
    last_said: list[PeerAddress] = []
    last_reasons = ""
    prefix = f"{purpose}: " if purpose else ""

    def answers_hello(peer: PeerAddress) -> bool:
        if peer.is_unregistered:
            return False
        seconds_left = began + timeout - time.monotonic()
        try:
            say_hello(missing[peer], peer, ours, min(HELLO_SECONDS, max(seconds_left, 0.5)), num_ps)
        except UnavailableError:
            if untrusted := why_untrusted(peer):
                raise untrusted from None
            if why := peer.why_gone():
                raise PsClusterError(f"not waiting for {peer}: {why}") from None
            return False
        return True

    def follow() -> None:
        for peer in list(missing):
            place = place_of(peer)
            if place is None:
                missing.pop(peer).close()
            elif (place.address, place.tls_name) != (peer.address, peer.tls_name):
                missing.pop(peer).close()
                missing[place] = open_peer_channel(place)

    def try_once() -> None:
        nonlocal last_said, last_reasons, remind_at
        follow()
        tried = list(missing)
        for peer, answers in zip(tried, pool.map(answers_hello, tried), strict=True):
            if answers:
                missing.pop(peer).close()
        if missing:
            names, now = list(missing), time.monotonic()
            if names != last_said:
                last_said = names
                logger.info("%swaiting for %s", prefix, ", ".join(map(str, names)))
            if now >= remind_at and not stop.is_set():
                remind_at = now + _REMIND_SECONDS
                if (reasons := _why_missing(names)) != last_reasons:  # repeated only when it changes
                    last_reasons = reasons
                    logger.warning("%sstill waiting after %.0f s for %s", prefix, now - began, reasons)
            raise UnavailableError("not all peers answer")

    retrying = tenacity.Retrying(**until(seconds=timeout, over=stop.is_set), sleep=tenacity.sleep_using_event(stop))
    try:
        with ThreadPoolExecutor(_MAX_PARALLEL, thread_name_prefix="hello") as pool:  # a peer that hangs delays no other
            retrying(try_once)
    except tenacity.RetryError:
        why = "stopped while waiting" if stop.is_set() else f"gave up after {timeout:g} s"
        raise UnavailableError(f"{why}: {len(missing)} of {total} tasks are missing: {_why_missing(missing)}") from None
    finally:
        for channel in missing.values():
            channel.close()
