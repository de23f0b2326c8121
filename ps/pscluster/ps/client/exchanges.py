"""Requests to the servers and their replies: one per server, all servers at once, retried while a server is down.

Small requests go over sessions, long-lived streams that are taken from a pool for one exchange at a time; large
ones are streamed in frames on a separate channel, so that they do not delay the small ones. A failed exchange is
retried under the same key, on a new connection, until `retry_seconds` have passed.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from typing import Any, NamedTuple, TypeVar

import grpc
import tenacity

from pscluster.core.context import FunctionContext, current_function, in_background
from pscluster.core.errors import PSUnavailableError, ShardMovedError, StaleError, UnavailableError, from_kind, from_rpc
from pscluster.core.fault_points import reach
from pscluster.core.metrics.trace import BACKGROUND, SESSION_HEADER, Asked
from pscluster.core.phases import Phases, run
from pscluster.core.transport.channels import HELLO_SECONDS, PeerAddress, explain
from pscluster.core.transport.frames import Buffer, parts_of, pieces, unpack
from pscluster.core.transport.retry import may_pass, until
from pscluster.core.transport.watchdog import SilentError
from pscluster.ps.client.connections import Server, Session, new_session
from pscluster.ps.request_metrics import ClientMetrics
from pscluster.ps.row_ids import bytes_by
from pscluster.ps.spec import SESSION_BYTES
from pscluster.v1 import node_pb2, ps_pb2

_T = TypeVar("_T")

SLOWEST_BYTES_PER_SECOND = 5 << 20  # a slower transfer is taken to hang


class Traffic(NamedTuple):
    """Bytes transferred between this process and the parameter servers: values and row numbers, not headers."""

    pulled: int
    pushed: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(self.pulled - earlier.pulled, self.pushed - earlier.pushed)


class Exchanges:
    """Carries a client's requests to its servers. Thread-safe; no lock is held over a network call."""

    def __init__(
        self,
        peers: Sequence[PeerAddress],
        identity: node_pb2.Identity,
        metrics: ClientMetrics,
        retry_seconds: float,
        request_timeout: float,
    ) -> None:
        self.servers = [Server(peer, identity, retry_seconds) for peer in peers]
        self.timeout = request_timeout
        self.on_lost: Callable[[PSUnavailableError], None] | None = None
        """Called with each error that reports a lost server, before it is raised. If set, such errors are final."""
        self.pulled = self.pushed = 0
        self._metrics = metrics
        self._retry_seconds, self._identity = retry_seconds, identity
        self.closed = ""  # why the job is over
        self._bulk_threads = ThreadPoolExecutor(max(4, len(peers)), thread_name_prefix="ps-bulk")

    @property
    def traffic(self) -> Traffic:
        """The traffic so far, without retries."""
        return Traffic(self.pulled, self.pushed)

    def close(self, why: str) -> None:
        self.closed = why
        for server in self.servers:
            server.close()
        self._bulk_threads.shutdown(wait=False)

    def add_server(self, peer: PeerAddress, store_id: int) -> None:
        """Take another server, with the next index, which holds this store for the job."""
        server = Server(peer, self._identity, self._retry_seconds)
        server.store_id = store_id
        self._metrics.grow(len(self.servers) + 1)
        self.servers.append(server)

    def remove_server(self) -> None:
        """Forget the server with the highest index, which has nothing any more. What waits for it looks elsewhere."""
        self.servers.pop().leave()

    def server(self, index: int) -> Server:
        """Return a server. ShardMovedError if it was removed, with all its shards elsewhere."""
        servers = self.servers
        return servers[index] if index < len(servers) else self._removed(index)

    def _removed(self, index: int) -> Server:
        error = ShardMovedError(f"ps {index} was removed from the job")
        error.server = 0
        raise error

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Run this on a thread of the pool."""
        return self._bulk_threads.submit(work)

    def check_open(self) -> None:
        """Raise StaleError if the job is over."""
        if self.closed:
            raise StaleError(f"this job is over: {self.closed}, and its variables are gone")

    def begin(self) -> FunctionContext | None:
        """Return the function that runs on this thread, if any. StaleError or the like if it must not continue."""
        self.check_open()
        function = current_function()
        if function is not None:
            function.check()
        return function

    def retrying(self, server: Server, attempt: Callable[[], Any], *, retry: bool = True) -> Any:
        """Retry what fails because the server is unreachable, until `retry_seconds` after the first failure.

        If the server went silent, they count from its last sign of life. Without `retry`, try only once.
        """
        try:
            return self._retrying(server, attempt, retry=retry)
        except ShardMovedError as error:
            error.server = self.servers.index(server) if server in self.servers else 0
            raise

    def _retrying(self, server: Server, attempt: Callable[[], Any], *, retry: bool) -> Any:
        try:
            return self._once(server, attempt)
        except UnavailableError as error:
            if not (retry and may_pass(error)):
                raise
            # Not since the start of the attempt, which may have been a long transfer.
            silent = error.seconds if isinstance(error, SilentError) else 0.0
            if silent and silent >= self._retry_seconds:
                raise self._gone(server, error) from None
            return self._retry(server, attempt, time.monotonic() - silent)

    def _once(self, server: Server, attempt: Callable[[], Any]) -> Any:
        server.check()  # it may have been given up on any thread
        try:
            return attempt()
        except grpc.RpcError as error:
            failure = from_rpc(error, str(server.peer))
            error.__traceback__ = None  # gRPC's frames, which hold the error
        except (UnavailableError, StaleError) as error:
            failure = error
        except ValueError:  # what gRPC raises for a channel that was closed meanwhile
            self.check_open()
            raise
        try:
            self.check_open()
            server.check()
            if isinstance(failure, StaleError):
                self._check_store_id(server)  # a restarted server knows nothing of the job
            if not may_pass(failure):
                raise failure
            if why := server.peer.why_gone():
                lost = PSUnavailableError(f"{server.peer} is lost, and with it its shards of all variables: {why}")
                self._report_lost(server, lost)
                raise lost
            function = current_function()
            if function is not None:
                function.check()
            server.drop_sessions()
            if server in self.servers:
                self._metrics.reconnects[self.servers.index(server)] += 1
            raise failure
        finally:
            # An error and a frame that hold each other also hold the callers' frames, with the arrays being read or
            # sent: after a retry these would stay until the garbage collector finds the cycle, which for objects
            # that have lived for seconds takes long.
            del failure

    def _retry(self, server: Server, attempt: Callable[[], Any], failing_since: float) -> Any:
        def again() -> Any:
            self.begin()  # the function may have been cancelled meanwhile
            server.check()
            # An attempt may take long to find out that the server is down.
            remaining = failing_since + self._retry_seconds - time.monotonic()
            self._check_store_id(server, min(HELLO_SECONDS, max(remaining, 1.0)))
            return self._once(server, attempt)

        try:
            deadline = failing_since + self._retry_seconds
            return tenacity.Retrying(**until(over=lambda: server.lost or time.monotonic() >= deadline))(again)
        except tenacity.RetryError as error:
            server.check()
            raise self._gone(server, error.last_attempt.exception()) from None

    def _gone(self, server: Server, last: BaseException | None) -> PSUnavailableError:
        why = explain(server.peer.address, server.peer.tls, server.peer.tls_name)
        failure = str(last).removeprefix(f"{server.peer} can't be reached: ")
        error = PSUnavailableError(
            f"{server.peer} is still unreachable after {self._retry_seconds:g} s of retries: {why} ({failure})"
        )
        self._report_lost(server, error)
        return error

    def _check_store_id(self, server: Server, timeout: float = HELLO_SECONDS) -> None:
        try:
            server.check_store_id(timeout)
        except PSUnavailableError as error:
            server.check()  # if it was removed meanwhile, it has let go of the job rather than lost it
            self._report_lost(server, error)
            raise

    def _report_lost(self, server: Server, error: PSUnavailableError) -> None:
        if self.on_lost is not None and not self.closed:
            server.give_up(error)
            self.on_lost(error)

    def send_updates(
        self,
        requests: Mapping[int, tuple[ps_pb2.Request, Sequence[Buffer]]],
        finish: Callable[[int, ps_pb2.UpdateReply], None],
        function: FunctionContext | None,
    ) -> None:
        """Send each server its updates, and their payload; return when all have acknowledged.

        Small requests go over sessions, large ones in frames; `finish` gets each server's reply, of large ones on a
        thread of the pool.
        """
        run(self.sending_updates(requests, finish, function))

    def sending_updates(
        self,
        requests: Mapping[int, tuple[ps_pb2.Request, Sequence[Buffer]]],
        finish: Callable[[int, ps_pb2.UpdateReply], None],
        function: FunctionContext | None,
        nbytes: int | None = None,
    ) -> Phases[None]:
        """Do what `send_updates` does. If all requests are small, they are under way once it has begun.

        `nbytes`: of all values and row numbers, if that is known: to ask each item takes a while.
        """
        small: dict[int, Sequence[Buffer]] = {}
        large: list[Callable[[], None]] = []
        for index, (request, buffers) in requests.items():
            request.total_bytes = sum(map(len, buffers))
            if request.total_bytes <= SESSION_BYTES:
                request.last = True
                small[index] = parts_of(request, buffers)
            else:
                large.append(functools.partial(self._push_updates, index, request, buffers, finish, function))

        def take(index: int, reply: ps_pb2.Reply, _: memoryview) -> None:
            finish(index, reply.update)

        yield from self.exchanging("push", small, take, function, large)
        if nbytes is None:
            items = (item for request, _ in requests.values() for item in request.update.items)
            nbytes = sum(item.value_bytes + bytes_by(item.rows) for item in items)
        self.pushed += nbytes

    def _push_updates(
        self,
        index: int,
        request: ps_pb2.Request,
        buffers: Sequence[Buffer],
        finish: Callable[[int, ps_pb2.UpdateReply], None],
        function: FunctionContext | None,
    ) -> None:
        name, begin = new_session(), time.monotonic()
        reply = self.push(index, request, buffers, name=name)
        self.count("push", index, (name, 1), begin, request.total_bytes, 0, function)
        finish(index, reply.update)

    def exchange(
        self,
        kind: str,
        requests: Mapping[int, Sequence[Buffer]],
        finish: Callable[[int, ps_pb2.Reply, memoryview], None],
        function: FunctionContext | None,
    ) -> None:
        """Send small requests to all servers; then receive each server's reply in turn, and give it to `finish`."""
        self._receive_all(kind, requests, self._send_all(requests), finish, function)

    def exchanging(
        self,
        kind: str,
        requests: Mapping[int, Sequence[Buffer]],
        finish: Callable[[int, ps_pb2.Reply, memoryview], None],
        function: FunctionContext | None,
        large: Sequence[Callable[[], None]] = (),
    ) -> Phases[None]:
        """Do what `exchange` does, and this bulk work after it. Without any, all is under way once it has begun."""
        if large:
            yield False
            if requests:
                self.exchange(kind, requests, finish, function)
            self.on_each(large)
            return
        begun = self._send_all(requests)
        for session in begun.values():
            session.rest()
        try:
            yield True
        except BaseException:
            for session in begun.values():
                session.close()
            raise
        for session in begun.values():
            session.resume(self.timeout)
        self._receive_all(kind, requests, begun, finish, function)

    def _send_all(self, requests: Mapping[int, Sequence[Buffer]]) -> dict[int, Session]:
        """Send small requests to all servers. Return the sessions of those that could be sent."""
        begun: dict[int, Session] = {}
        try:
            for index, data in requests.items():
                with contextlib.suppress(grpc.RpcError, UnavailableError):  # retried below
                    server = self.server(index)
                    server.check()
                    session = begun[index] = server.take_session()
                    session.send(data, self.timeout)
        except BaseException:
            for session in begun.values():
                session.close()  # an unread reply must not meet the next request
            raise
        reach("client.exchange.after")
        return begun

    def _receive_all(
        self,
        kind: str,
        requests: Mapping[int, Sequence[Buffer]],
        begun: dict[int, Session],
        finish: Callable[[int, ps_pb2.Reply, memoryview], None],
        function: FunctionContext | None,
    ) -> None:
        """Receive each server's reply in turn. Requests that could not be sent are sent now."""
        failure: BaseException | None = None
        for index, data in requests.items():
            try:
                self._finish_exchange(kind, index, begun.pop(index, None), data, finish, function)
            except BaseException as error:  # the other servers' replies must still be received
                failure = failure or error
        if failure is not None:
            raise failure

    def _finish_exchange(
        self,
        kind: str,
        index: int,
        session: Session | None,
        request: Sequence[Buffer],
        finish: Callable[[int, ps_pb2.Reply, memoryview], None],
        function: FunctionContext | None,
    ) -> None:
        server, begin = self.server(index), time.monotonic() if session is None else session.begin
        first: list[Session] = [] if session is None else [session]

        def attempt() -> None:
            if first:
                session = first.pop()
            else:
                session = server.take_session()
                session.send(request, self.timeout)
            try:
                data = session.receive()
            except BaseException:
                session.close()
                raise
            asked, rested = (session.name, session.nth), session.rested
            server.give_back(session)
            self.count(kind, index, asked, begin, sum(map(len, request)), len(data), function, rested)
            reply, payload = unpack(data, ps_pb2.Reply)
            if reply.HasField("refusal"):
                raise from_kind(reply.refusal.kind, reply.refusal.message)
            finish(index, reply, payload)

        try:
            self.retrying(server, attempt)
        finally:
            if first:
                first.pop().close()  # never used: the server is lost

    def count(
        self,
        kind: str,
        index: int,
        asked: tuple[str, int],
        begin: float,
        sent: int,
        received: int,
        function: FunctionContext | None,
        rested: float = 0.0,
    ) -> None:
        """Count an answered request.

        Args:
            asked: its session's name and its position there.
            sent: bytes, as are those `received`.
            rested: seconds since it was sent in which no thread has waited for the reply.
        """
        end, metrics = time.monotonic(), self._metrics
        if kind == "pull":
            metrics.pulls[index].add(end - begin - rested)
            metrics.pulled_bytes[index] += received
        else:
            metrics.pushes[index].add(end - begin - rested)
            metrics.pushed_bytes[index] += sent
        if function is not None and function.function:
            name, nth = asked
            what = f"{kind}{BACKGROUND}" if in_background() else kind
            metrics.recording.asked.append(Asked(function.function, what, index, name, nth, begin, end, sent, received))

    def on_each(self, work: Iterable[Callable[[], _T]]) -> list[_T]:
        """Run the bulk work of several servers at once. When all has ended, raise the first error, if any."""
        own, *others = work  # this thread does its share
        # As this function: of several that run, or push, at the same time, a thread would find the wrong one.
        futures = [self._bulk_threads.submit(copy_context().run, job) for job in others]
        try:
            first = own()
        except KeyboardInterrupt:
            raise
        except BaseException:
            wait(futures)  # a function that has ended leaves no request under way
            raise
        wait(futures)
        return [first, *(future.result() for future in futures)]

    def push(
        self,
        index: int,
        request: ps_pb2.Request,
        buffers: Sequence[Buffer],
        timeout: float = 0.0,
        *,
        retry: bool = True,
        name: str = "",
    ) -> ps_pb2.Reply:
        """Send a request in frames. The server may take `timeout` seconds more than the transfer; `name` is for traces.

        Without `retry`, do not wait for a server that is down.
        """
        server = self.server(index)
        metadata = ((SESSION_HEADER, name),) if name else ()
        total = sum(map(len, buffers))
        request.total_bytes, request.last = total, not total
        timeout += self.timeout + total / SLOWEST_BYTES_PER_SECOND

        def frames(size: int) -> Iterator[Sequence[Buffer]]:
            yield parts_of(request)  # alone: the payload that follows can be received in place
            sent = 0
            for group in pieces(buffers, size):
                sent += sum(map(len, group))
                yield parts_of(ps_pb2.Request(last=sent == total), group)

        data = self.retrying(server, lambda: server.push(frames, metadata, timeout), retry=retry)
        return unpack(data, ps_pb2.Reply)[0]
