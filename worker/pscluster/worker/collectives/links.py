"""A member's links to the others of its gang: dialled at first use, for what it sends and for how they end.

There is one exchange in each direction between two members, each opened by its sender, over a connection of its own.
What a member sends goes out on its function's thread. A link's thread opens the exchange, and receives the one reply:
how the other function has ended. So a member that waits for another one opens a link to it, even if it has nothing to
send: otherwise it would not learn of the other's end, nor the other one of the call.

    opening --opened--> open --their function has ended, and this one--> END is sent --> over; the connection is kept
            --refused, or unreachable--> broken      open --the connection breaks, or is cancelled--> broken

Between the two ends the receiver drops what comes. Nothing waits for the links of a function that has ended: a slow
receiver may still read what it was sent.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from pscluster.core.awake import AwakeTime
from pscluster.core.context import FunctionContext
from pscluster.core.errors import (
    MemberTimeoutError,
    MemberUnavailableError,
    MisuseError,
    PsClusterError,
    UnavailableError,
    from_rpc,
)
from pscluster.core.role.options import RoleOptions
from pscluster.core.security.channel import reporting_calls
from pscluster.core.transport.base import Stream
from pscluster.core.transport.channels import PeerAddress, open_peer_channel, say_hello
from pscluster.core.transport.frames import Buffer, parts_of
from pscluster.core.transport.transport import Transport
from pscluster.core.transport.watchdog import WatchedCall, watch
from pscluster.v1 import node_pb2, worker_pb2
from pscluster.worker.collectives.gang import Gang, Member
from pscluster.worker.collectives.mailbox import Mailbox, Posted

_PATH = f"/{worker_pb2.DESCRIPTOR.services_by_name['Worker'].full_name}/Exchange"

CHECK_SECONDS = 0.1
"""How often a wait looks whether its function was told to stop, and after which it opens a link to whom it awaits."""

_ALONE_BYTES = 64 << 10  # of a payload: before a larger one the signature is sent alone, to be received in place

_SEND_BYTES = 1 << 20
"""Of the send buffer. All members send and receive at once, and there may be more of them than cores: with a smaller
one a core changes between them so often that an all-reduce of 40 MiB among four takes a fifth longer."""

OpenStream = Callable[[Callable[[Any], None]], Stream]
"""Opens an exchange; passes each call that it makes to the function it is given, which may cancel it."""


class _Way:
    """The way to one incarnation of a worker."""

    def __init__(self, peer: PeerAddress, incarnation: int, identity: node_pb2.Identity) -> None:
        self.peer, self.incarnation, self._identity = peer, incarnation, identity
        self._lock = threading.Lock()
        self._transport = Transport(peer, self._hello, send_bytes=_SEND_BYTES)
        self._version = 0 if peer.tls is None else peer.tls.refresh()
        self._channel = open_peer_channel(peer)
        self._retired: grpc.Channel | None = None  # of the previous certificate

    def _hello(self) -> None:
        self._transport.learn(self.peer, say_hello(self._channel, self.peer, self._identity))

    def open(self, report: Callable[[Any], None]) -> Stream:
        version = 0 if self.peer.tls is None else self.peer.tls.refresh()  # reads files: not under the lock
        outdated = None
        with self._lock:
            if version > self._version:
                # Calls on the old channel end normally: it is closed at the next renewal.
                outdated, self._retired = self._retired, self._channel
                self._version, self._channel = version, open_peer_channel(self.peer)
        if outdated is not None:
            outdated.close()
        with reporting_calls(report):
            return self._transport.open(self._channel, _PATH)

    def close(self) -> None:
        self._transport.close()
        for channel in (self._retired, self._channel):
            if channel is not None:
                channel.close()


class Ways:
    """The ways to other workers, kept from one gang to the next. Thread-safe."""

    def __init__(self, identity: node_pb2.Identity, options: RoleOptions) -> None:
        self._identity, self._options = identity, options
        self._lock = threading.Lock()
        self._ways: dict[int, _Way] = {}
        self.links: weakref.WeakSet[Link] = weakref.WeakSet()  # that are open, or will be

    def open(self, member: Member, report: Callable[[Any], None]) -> Stream:
        """Open an exchange with a member. Raises grpc.RpcError, or one of our errors."""
        return self._way(member).open(report)

    def _way(self, member: Member) -> _Way:
        options, outdated = self._options, None
        with self._lock:
            way = self._ways.get(member.worker)
            if way is None or (way.peer.address, way.incarnation) != (member.address, member.incarnation):
                peer = PeerAddress(
                    "worker", member.worker, member.address, options.tls, options.token, tls_name=member.tls_name
                )
                peer.check_plain(insecure=options.insecure)
                # A new incarnation may be a new process: connections to the old one would only seem to be usable.
                outdated, way = way, _Way(peer, member.incarnation, self._identity)
                self._ways[member.worker] = way
        if outdated is not None:
            outdated.close()
        return way

    def close(self) -> None:
        with self._lock:
            ways, self._ways = list(self._ways.values()), {}
        for link in list(self.links):
            link.cancel()
        for way in ways:
            way.close()


class Link:
    """The exchange that this member has opened with another one."""

    def __init__(self, member: Member, opening: worker_pb2.Opening, open_stream: OpenStream, gang: Gang) -> None:
        self.member = member
        self.sent = 0  # messages of collectives
        self.begun = 0  # number of the last collective whose signature was sent
        self.ready = threading.Event()  # it is open, or broken
        self.on_ended: Callable[[worker_pb2.ExchangeReply], None] = lambda _reply: None
        self.on_broken: Callable[[PsClusterError], None] = lambda _error: None
        self._opening, self._open, self._seconds = opening, open_stream, gang.seconds
        self._lock = threading.Lock()
        self._stream: Stream | None = None
        self._watched: WatchedCall | None = None
        self._calls: list[Any] = []  # made to open it
        self._has_ended = self._is_over = self._is_cancelled = False  # theirs, ours, this link

    def start(self) -> None:
        threading.Thread(target=self._run, name="exchange", daemon=True).start()

    def _run(self) -> None:
        try:
            error = self._exchange()
        except PsClusterError as refused:
            error = refused
        except Exception as failure:  # a reply that is none, or a call that was cancelled before it began
            error = UnavailableError(f"{type(failure).__name__}: {failure}")
        if error is not None:
            if self._stream is not None:
                self._stream.close()
            if isinstance(error, UnavailableError):
                error = MemberUnavailableError(f"{self.member} is gone: {error}")
            self.on_broken(error)
        self.ready.set()

    def _exchange(self) -> PsClusterError | None:
        """Open the stream, and receive what the other member says. Return why it broke; None at its proper end."""
        try:
            stream = self._open(self._report)
            with self._lock:
                self._stream, cancelled = stream, self._is_cancelled
                self._watched = watch(WatchedCall(stream.cancel, self._seconds))
            if cancelled:
                stream.cancel()
            stream.send(*parts_of(worker_pb2.ExchangeRequest(opening=self._opening)))
            self.ready.set()
            while True:
                reply = worker_pb2.ExchangeReply.FromString(stream.receive())
                self.on_ended(reply)
                self._half(theirs=True)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.OK or not self._has_ended:
                failure = from_rpc(error, f"worker {self.member.worker}")
                error.__traceback__ = None  # gRPC's frames, which hold the error
                return failure
        with self._lock:
            self._stream = None  # a late `cancel` must not break its connection, which another gang may have now
        stream.release()
        return None

    def _report(self, call: Any) -> None:
        self._calls.append(call)
        if self._is_cancelled:
            call.cancel()

    def _half(self, *, theirs: bool) -> None:
        """Note that one of the two functions has ended; end the stream when both have."""
        with self._lock:
            if theirs:
                self._has_ended = True
            else:
                self._is_over = True
            stream = self._stream if self._has_ended and self._is_over else None
        if stream is not None:
            stream.end()

    def send(self, *buffers: Buffer) -> None:
        """Send a message, once it is ready. What fails is reported by `on_broken`. MemberTimeoutError if it hangs."""
        stream, watched = self._stream, self._watched
        if stream is None or watched is None:
            return  # broken
        watched.begin()
        try:
            stream.send(*buffers)
        finally:
            watched.end()
        try:
            watched.raise_if_cancelled()
        except UnavailableError:
            raise MemberTimeoutError(
                f"{self.member} has taken nothing for {self._seconds:g} s: it hangs, or computes for longer than that"
            ) from None

    def end(self) -> None:
        """End it, as soon as the other function has ended, too."""
        self._half(theirs=False)

    def cancel(self) -> None:
        """Break it, from any thread."""
        with self._lock:
            self._is_cancelled = True
            if self._stream is not None:
                self._stream.cancel()
                return
        for call in tuple(self._calls[-1:]):
            call.cancel()


class MemberLinks:
    """All links of one member's function, and its mailbox: see `algorithms.Links`."""

    def __init__(self, gang: Gang, ways: Ways, function: FunctionContext) -> None:
        self.gang, self._ways, self._function = gang, ways, function
        self.rank, self.size = gang.rank, gang.size
        self.mailbox = Mailbox(gang.rank, [str(member) for member in gang.members], self._wait)
        self._lock = threading.Lock()
        self._links: dict[int, Link] = {}
        self._signature = worker_pb2.Signature()
        self._busy = False
        self._over = False
        self._failed: BaseException | None = None
        function.on_cancel(self.cancel)

    @contextmanager
    def collective(self, signature: worker_pb2.Signature) -> Iterator[None]:
        """Make the block a collective. Raises errors that name it; after one, no other may follow."""
        with self._lock:
            if self._over:
                raise MisuseError(f"{_call(signature)}: its function has ended")
            if self._busy:
                raise MisuseError(
                    f"{_call(signature)}: another thread of this function is in {_call(self._signature)}; call "
                    "one after the other"
                )
            self._busy, self._signature = True, signature
        try:
            self._function.check()
            if self._failed is not None:
                raise MisuseError(f"{_call(signature)}: an earlier collective of this function has failed") from (
                    self._failed
                )
            self.mailbox.begin(signature)
            yield
        except PsClusterError as error:
            self._failed = self._failed or error
            self._function.check()  # if it was told to stop, that broke the links
            if isinstance(error, MisuseError):  # it names the call
                raise
            raise type(error)(f"{_call(signature)}: {error}") from None
        except BaseException as error:
            self._failed = self._failed or error
            raise
        finally:
            with self._lock:
                self._busy = False

    @property
    def disagreed(self) -> bool:
        """Whether a collective failed since the members' calls disagree."""
        return isinstance(self._failed, MisuseError)

    def send(self, to: int, *buffers: Buffer) -> None:
        if self._function.turn is None:
            self._send(to, *buffers)
            return
        with self._function.out_of_turn():  # the receiver may run here, and has room for little
            self._send(to, *buffers)

    def _send(self, to: int, *buffers: Buffer) -> None:
        self._function.check()
        self.mailbox.check_target(to)
        link = self._links.get(to) or self._link(to)
        if not link.ready.is_set():
            self._wait_ready(link)
        header = worker_pb2.ExchangeRequest(sequence=self.mailbox.sequence)
        if link.begun != header.sequence:
            if sum(map(len, buffers)) > _ALONE_BYTES:
                self._announce(link)
            else:
                link.begun = header.sequence
                header.signature.CopyFrom(self._signature)
        link.sent += 1  # before: a message that was sent is counted, whenever the function ends
        link.send(*parts_of(header, buffers))

    def _announce(self, link: Link) -> None:
        """Tell a member which collective was called, unless it knows."""
        if link.begun != self.mailbox.sequence:
            link.begun = self.mailbox.sequence
            header = worker_pb2.ExchangeRequest(sequence=link.begun, signature=self._signature, alone=True)
            link.send(*parts_of(header))

    def post(self, source: int, memory: memoryview) -> Posted:
        return self.mailbox.post(source, memory)

    def _link(self, rank: int) -> Link:
        with self._lock:
            if (link := self._links.get(rank)) is not None:
                return link
            member = self.gang.members[rank]
            link = Link(member, self.gang.opening(rank), lambda report: self._ways.open(member, report), self.gang)
            link.on_ended = lambda reply: self.mailbox.ended(rank, reply)
            link.on_broken = lambda error: self.mailbox.broke(rank, error)
            self._links[rank] = link
            self._ways.links.add(link)
        link.start()
        return link

    def _wait(self, posted: Posted) -> None:
        """Wait until a receive is done. Raise an error if it will not be, or not in time."""
        if self._function.turn is None:
            self._wait_for(posted)
            return
        with self._function.out_of_turn():
            self._wait_for(posted)

    def _wait_for(self, posted: Posted) -> None:
        awake = AwakeTime(CHECK_SECONDS)
        while not self.mailbox.wait_for(posted, CHECK_SECONDS):
            self._function.check()
            awake.check()
            if awake.seconds >= self.gang.seconds:
                raise MemberTimeoutError(
                    f"{self.gang.members[posted.source]} has sent nothing for {self.gang.seconds:g} s: it hangs, or it "
                    "computes for longer than that before it makes the same call"
                )
            link = self._links.get(posted.source) or self._link(posted.source)
            if link.ready.is_set():
                self._announce(link)  # it may wait for something else, and never make this call

    def _wait_ready(self, link: Link) -> None:
        awake = AwakeTime(CHECK_SECONDS)
        while not link.ready.wait(CHECK_SECONDS):
            self._function.check()
            awake.check()
            if awake.seconds >= self.gang.seconds:
                raise MemberTimeoutError(f"{link.member} can't be reached for {self.gang.seconds:g} s")
        self.mailbox.check_target(link.member.rank)

    def end(self) -> list[int]:
        """End the links: the function has ended. Return how many messages were sent to each member."""
        with self._lock:
            self._over = True
            links = dict(self._links)
        self.mailbox.close()
        for link in links.values():
            link.end()
        return [links[rank].sent if rank in links else 0 for rank in range(self.size)]

    def cancel(self) -> None:
        """Break all links, and wake the function if it waits for a message: it was told to stop."""
        for link in tuple(self._links.values()):
            link.cancel()
        self.mailbox.wake()


def _call(signature: worker_pb2.Signature) -> str:
    return f"{signature.operation} at {signature.place}"
