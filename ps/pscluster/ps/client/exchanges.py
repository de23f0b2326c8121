"""Requests to the servers and their answers: one a server, all servers at once, repeated while a server is away.

Small requests go over sessions, long-lived streams that are taken from a pool for one exchange at a time; large
ones are streamed in frames on a channel of their own, so that they do not delay the small ones. A failed exchange is
repeated under the same key, on a fresh connection, until `retry_seconds` have passed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import grpc
import tenacity

from pscluster.core.context import FunctionContext, current_function
from pscluster.core.errors import PSUnavailableError, StaleError, UnavailableError, from_kind, from_rpc
from pscluster.core.fault_points import reach
from pscluster.core.metrics.trace import SESSION_HEADER, Asked
from pscluster.core.transport.channels import HELLO_SECONDS, PeerAddress, explain
from pscluster.core.transport.frames import Buffer, padding, parts_of, pieces, unpack
from pscluster.ps.client.connections import Server, Session
from pscluster.ps.client.watchdog import SilentError
from pscluster.ps.request_metrics import ClientCounts
from pscluster.v1 import node_pb2, ps_pb2

SLOWEST_BYTES_PER_SECOND = 5 << 20  # a transfer slower than this has hung


class Traffic(NamedTuple):
    """Bytes that this process has moved from and to the parameter servers: values and row numbers, no headers."""

    pulled: int
    pushed: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        """What was moved since."""
        return Traffic(self.pulled - earlier.pulled, self.pushed - earlier.pushed)


def padded(buffers: Iterable[memoryview]) -> list[Buffer]:
    """Return the buffers, each followed by what brings the next one to where it belongs."""
    segments: list[Buffer] = []
    for buffer in buffers:
        segments.append(buffer)
        if gap := padding(len(buffer)):
            segments.append(bytes(gap))
    return segments


def _may_pass(error: BaseException) -> bool:
    """Is it worth to try again? Not where a server is known to be lost."""
    return isinstance(error, UnavailableError) and not isinstance(error, PSUnavailableError)


class Exchanges:
    """What carries a client's requests to its servers. Thread-safe; no lock is held over a network call."""

    def __init__(
        self,
        peers: Sequence[PeerAddress],
        identity: node_pb2.Identity,
        counts: ClientCounts,
        retry_seconds: float,
        request_timeout: float,
    ) -> None:
        self.servers = [Server(peer, identity, retry_seconds) for peer in peers]
        self.timeout = request_timeout
        self.on_lost: Callable[[PSUnavailableError], None] | None = None
        """Is told of each error that says that a server is lost, before that is raised."""
        self.pulled = self.pushed = 0
        self._counts = counts
        self._retry_seconds = retry_seconds
        self._closed = ""  # why
        self._bulk_threads = ThreadPoolExecutor(max(4, len(peers)), thread_name_prefix="ps-bulk")

    @property
    def closed(self) -> bool:
        """Is the job over?"""
        return bool(self._closed)

    def close(self, why: str) -> None:
        """Close all connections."""
        self._closed = why
        for server in self.servers:
            server.close()
        self._bulk_threads.shutdown(wait=False)

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Run this beside whatever else there is."""
        return self._bulk_threads.submit(work)

    def check_open(self) -> None:
        if self._closed:
            raise StaleError(f"this job is over: {self._closed}, and its variables are gone")

    def begin(self) -> FunctionContext | None:
        """The function that runs here, if one does. Raises where nothing more is to be read or updated."""
        self.check_open()
        function = current_function()
        if function is not None:
            function.check()
        return function

    def retrying(self, server: Server, attempt: Callable[[], Any]) -> Any:
        """Repeat what fails because the server can't be reached, until `retry_seconds` behind the first failure.

        Of one that has not answered: since it was heard of last.
        """
        try:
            return self.once(server, attempt)
        except UnavailableError as error:
            if not _may_pass(error):
                raise
            # Not from the beginning of the attempt: it may have been a long transfer.
            silent = error.seconds if isinstance(error, SilentError) else 0.0
            if silent and silent >= self._retry_seconds:
                raise self._gone(server, error) from None
            return self._retry(server, attempt, time.monotonic() - silent)

    def once(self, server: Server, attempt: Callable[[], Any]) -> Any:
        try:
            return attempt()
        except grpc.RpcError as error:
            failure = from_rpc(error, str(server.peer))
            error.__traceback__ = None  # of gRPC's own frames, which hold the error
        except (UnavailableError, StaleError) as error:
            failure = error
        try:
            if isinstance(failure, StaleError):
                self._check_holding(server)  # a server that was restarted knows nothing of the job
            if not _may_pass(failure):
                raise failure
            if why := server.peer.why_gone():
                lost = PSUnavailableError(f"{server.peer} is lost, and with it its shards of all variables: {why}")
                self._tell_lost(lost)
                raise lost
            function = current_function()
            if function is not None:
                function.check()
            server.drop_sessions()
            if server in self.servers:
                self._counts.reconnects[self.servers.index(server)] += 1
            raise failure
        finally:
            # An error and a frame that hold each other hold the callers' frames, too, and the arrays that are being
            # read or sent there: after a retry they would stay until Python looks for such cycles, which it does
            # for what has lived for seconds only once in a long while.
            del failure

    def _retry(self, server: Server, attempt: Callable[[], Any], failing_since: float) -> Any:
        def again() -> Any:
            self.begin()  # it may have been cancelled meanwhile
            # Where nobody serves any more, an attempt may take long to find out.
            left = failing_since + self._retry_seconds - time.monotonic()
            self._check_holding(server, min(HELLO_SECONDS, max(left, 1.0)))
            return self.once(server, attempt)

        try:
            return tenacity.Retrying(
                retry=tenacity.retry_if_exception(_may_pass),
                wait=tenacity.wait_random_exponential(multiplier=0.02, max=0.25),
                stop=lambda _: time.monotonic() - failing_since >= self._retry_seconds,
            )(again)
        except tenacity.RetryError as error:
            raise self._gone(server, error.last_attempt.exception()) from None

    def _gone(self, server: Server, last: BaseException | None) -> PSUnavailableError:
        why = explain(server.peer.address, server.peer.tls)
        what = str(last).removeprefix(f"{server.peer} can't be reached: ")
        error = PSUnavailableError(
            f"{server.peer} is unreachable, retried for {self._retry_seconds:g} s: {why} ({what})"
        )
        self._tell_lost(error)
        return error

    def _check_holding(self, server: Server, timeout: float = HELLO_SECONDS) -> None:
        try:
            server.check_holding(timeout)
        except PSUnavailableError as error:
            self._tell_lost(error)
            raise

    def _tell_lost(self, error: PSUnavailableError) -> None:
        if self.on_lost is not None and not self._closed:
            self.on_lost(error)

    def exchange(
        self,
        what: str,
        requests: Mapping[int, Sequence[Buffer]],
        finish: Callable[[int, ps_pb2.Reply, memoryview], None],
        function: FunctionContext | None,
    ) -> None:
        """Small requests, by server, in parts: sent to all servers, then answered by each in turn."""
        begun: dict[int, Session] = {}
        try:
            for index, data in requests.items():
                with contextlib.suppress(grpc.RpcError, UnavailableError):  # it is tried again, with patience
                    session = self.servers[index].take_session()
                    begun[index] = session
                    session.send(data, self.timeout)
        except BaseException:
            for session in begun.values():
                session.close()  # a reply that nobody takes off must not meet the next request
            raise
        reach("client.exchange.after")
        failure: BaseException | None = None
        for index, data in requests.items():
            try:
                self._finish_exchange(what, index, begun.pop(index, None), data, finish, function)
            except BaseException as error:  # the other servers' replies must still be taken off their sessions
                failure = failure or error
        if failure is not None:
            raise failure

    def _finish_exchange(
        self,
        what: str,
        index: int,
        session: Session | None,
        request: Sequence[Buffer],
        finish: Callable[[int, ps_pb2.Reply, memoryview], None],
        function: FunctionContext | None,
    ) -> None:
        server, begin = self.servers[index], time.monotonic() if session is None else session.begin
        first: list[Session] = [] if session is None else [session]

        def attempt() -> None:
            if first:
                mine = first.pop()
            else:
                mine = server.take_session()
                mine.send(request, self.timeout)
            try:
                data = mine.receive()
            except BaseException:
                mine.close()
                raise
            asked = mine.name, mine.nth
            server.give_back(mine)
            self.count(what, index, asked, begin, sum(map(len, request)), len(data), function)
            reply, payload = unpack(data, ps_pb2.Reply)
            if reply.HasField("refusal"):
                raise from_kind(reply.refusal.kind, reply.refusal.message)
            finish(index, reply, payload)

        self.retrying(server, attempt)

    def count(
        self,
        what: str,
        index: int,
        asked: tuple[str, int],
        begin: float,
        sent: int,
        received: int,
        function: FunctionContext | None,
    ) -> None:
        """A request was answered: as the n-th of its session, with so many bytes sent and received."""
        end, counts = time.monotonic(), self._counts
        if what == "pull":
            counts.pulls[index].add(end - begin)
            counts.pulled_bytes[index] += received
        else:
            counts.pushes[index].add(end - begin)
            counts.pushed_bytes[index] += sent
        if function is not None and function.function:
            name, nth = asked
            counts.recording.asked.append(Asked(function.function, what, index, name, nth, begin, end, sent, received))

    def on_each(self, work: dict[int, Callable[[], object]]) -> None:
        """Run the bulk work of several servers at once; the first error is raised when all have ended."""
        if not work:
            return
        mine, *others = work.values()
        futures = [self._bulk_threads.submit(job) for job in others]
        try:
            mine()
        except KeyboardInterrupt:
            raise
        except BaseException:
            wait(futures)  # of a function that is over nothing is under way
            raise
        wait(futures)
        for future in futures:
            future.result()

    def push(
        self,
        index: int,
        request: ps_pb2.Request,
        buffers: list[Buffer],
        timeout: float = 0.0,
        *,
        patient: bool = True,
        name: str = "",
    ) -> Callable[[], ps_pb2.Reply]:
        """What sends a request in frames.

        Args:
            timeout: what the server needs besides, in seconds.
            patient: wait for a server that is gone.
            name: of the request, for the record.
        """
        server = self.servers[index]
        metadata = ((SESSION_HEADER, name),) if name else ()
        total = sum(map(len, buffers))
        request.total_bytes, request.last = total, not total
        timeout += self.timeout + total / SLOWEST_BYTES_PER_SECOND

        def frames(size: int) -> Iterator[Sequence[Buffer]]:
            yield parts_of(request)  # alone: what follows may come straight to where it belongs
            sent = 0
            for group in pieces(buffers, size):
                sent += sum(map(len, group))
                yield parts_of(ps_pb2.Request(last=sent == total), group)

        def attempt() -> ps_pb2.Reply:
            data = server.push(frames, metadata, timeout)
            return unpack(data, ps_pb2.Reply)[0]

        if not patient:
            return lambda: self.once(server, attempt)
        return lambda: self.retrying(server, attempt)
