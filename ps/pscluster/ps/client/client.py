"""The client of the parameter servers: what a worker or a coordinator reads and updates goes through here.

One request a server, all servers at once. Small requests go over sessions, long-lived streams that are taken
from a pool for one exchange at a time; large reads and updates are streamed in frames on a channel of their
own, so that they do not delay the small ones.

A failed exchange is repeated under the same key, on a fresh connection, until `retry_seconds` have passed:
the server drops what it has applied already. A server that comes back under another incarnation has lost its
variables: that is an error at once, and names it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc
import numpy as np
import numpy.typing as npt
import tenacity

from pscluster.core.context import FunctionContext, current_function
from pscluster.core.dtypes import dtype_named
from pscluster.core.errors import (
    MisuseError,
    PSUnavailableError,
    StaleError,
    UnavailableError,
    from_kind,
    from_rpc,
    is_retryable,
)
from pscluster.core.fault_points import reach
from pscluster.core.functions.definitions import split_off_bulk
from pscluster.core.limits import MAX_ROWS_BYTES
from pscluster.core.metrics.trace import SESSION_HEADER, Asked
from pscluster.core.transport.channels import HELLO_SECONDS, PeerAddress, explain, wait_for_peers
from pscluster.core.transport.frames import (
    ALIGNMENT,
    CHUNK_BYTES,
    Buffer,
    pack,
    padding,
    parts_of,
    pieces,
    unpack,
    view,
)
from pscluster.core.transport.methods import Stub
from pscluster.core.transport.payload_sink import Landing
from pscluster.ps.client.connections import Server, Session, new_session
from pscluster.ps.client.read_cache import Kept, Verdict, kept_bytes
from pscluster.ps.client.read_plans import MAX_PLANS, Array, ReadPlan, WholeVariable
from pscluster.ps.client.watchdog import SilentError
from pscluster.ps.request_metrics import ClientCounts
from pscluster.ps.spec import COPY, MAX_ITEMS, ROWS_IDS_BYTES, SESSION_BYTES, part_name, partition_of
from pscluster.v1 import definition_pb2, node_pb2, ps_pb2

_SLOWEST_BYTES_PER_SECOND = 5 << 20  # a transfer slower than this has hung
_SLOWEST_FUNCTION = 600.0  # seconds for a user's function that makes an initial value, whatever the size


def _patience(nbytes: int) -> float:
    """Seconds for a server to make or to write so many bytes, beside what it takes to send them."""
    return _SLOWEST_FUNCTION + nbytes / _SLOWEST_BYTES_PER_SECOND


@dataclass(slots=True)
class ReadPart:
    """One shard's share of a read: all of it, a range of rows, or rows by number."""

    server: int
    item: ps_pb2.ReadItem
    size: int  # bytes of the answer
    land: memoryview | Callable[[memoryview], None]  # where they go: so many bytes, or who takes them all at once
    ids: npt.NDArray[np.int64] | None = None


@dataclass(slots=True)
class UpdatePart:
    """One shard's share of an update."""

    server: int
    item: ps_pb2.UpdateItem
    values: memoryview
    ids: npt.NDArray[np.int64] | None = None


class Traffic(NamedTuple):
    """Bytes that this process has moved from and to the parameter servers: values and row numbers, no headers."""

    pulled: int
    pushed: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        """What was moved since."""
        return Traffic(self.pulled - earlier.pulled, self.pushed - earlier.pushed)


def _padded(buffers: Iterable[memoryview]) -> list[Buffer]:
    segments: list[Buffer] = []
    for buffer in buffers:
        segments.append(buffer)
        if gap := padding(len(buffer)):
            segments.append(bytes(gap))
    return segments


def _may_pass(error: BaseException) -> bool:
    """Is it worth to try again? Not where a server is known to be lost."""
    return isinstance(error, UnavailableError) and not isinstance(error, PSUnavailableError)


class _Sequences:
    """Numbers this client's requests, and knows below which number all are answered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._open: set[int] = set()

    def take(self) -> tuple[int, int]:
        with self._lock:
            settled = min(self._open, default=self._last + 1)
            self._last += 1
            self._open.add(self._last)
            return self._last, settled

    def done(self, number: int) -> None:
        with self._lock:
            self._open.discard(number)


class PsClient:
    """Reads from and updates all parameter servers of a job, as one incarnation.

    Thread-safe. No lock is held over a network call.
    """

    def __init__(
        self,
        peers: Sequence[PeerAddress],
        identity: node_pb2.Identity,
        *,
        job: int,
        incarnation: int,
        retry_seconds: float = 10.0,
        request_timeout: float = 60.0,
        counts: ClientCounts | None = None,
    ) -> None:
        self.job = job
        self.counts = counts or ClientCounts(len(peers))
        self.incarnation = incarnation
        self.term = 0
        """Of what is updated outside of functions; see UpdateRequest."""
        self._identity = identity
        self._servers = [Server(peer, identity, retry_seconds) for peer in peers]
        self._retry_seconds = retry_seconds
        self._timeout = request_timeout
        self._sequences = _Sequences()
        self._closed = ""  # why
        self.on_lost: Callable[[PSUnavailableError], None] | None = None
        """Is told of each error that says that a server is lost, before that is raised."""
        self._pulled = self._pushed = 0
        self._seen: dict[tuple[int, int], tuple[int, int]] = {}  # by shard: life of its server, and updates then
        self._declared: dict[int, tuple[ps_pb2.OptimizerSpec, list[definition_pb2.Definition | None]]] = {}
        self._plans: dict[tuple[int, ...], ReadPlan] = {}
        self._planning = threading.Lock()
        self._kept = Kept(kept_bytes())
        self._bulk_threads = ThreadPoolExecutor(max(4, len(peers)), thread_name_prefix="ps-bulk")

    @property
    def traffic(self) -> Traffic:
        """What was moved so far, repetitions not counted."""
        return Traffic(self._pulled, self._pushed)

    @property
    def num_servers(self) -> int:
        """How many parameter servers the job has."""
        return len(self._servers)

    def connect(self, timeout: float, stop: threading.Event | None = None) -> None:
        """Shake hands with all servers, however late they start."""
        peers = [server.peer for server in self._servers]
        wait_for_peers(peers, self._identity, timeout=timeout, stop=stop)

    def introductions(self) -> list[node_pb2.HelloReply]:
        """What every server says of what it holds."""
        return [self._retrying(server, server.hello) for server in self._servers]

    def directory(self) -> list[ps_pb2.DescribeReply]:
        """What every server knows: all variables, all optimizers."""
        request = ps_pb2.DescribeRequest(job=self.job, all=True)
        return [self._describe(server, request) for server in self._servers]

    def expect(self, holdings: Sequence[int]) -> None:
        """What each server holds for this job: one that comes back with anything else has lost it."""
        for server, holding in zip(self._servers, holdings, strict=True):
            server.holding = holding

    def close(self, why: str = "its strategy was closed") -> None:
        """Close all connections. What is asked for afterwards is refused, and says why."""
        self._closed = why
        for server in self._servers:
            server.close()
        self._bulk_threads.shutdown(wait=False)

    def _check_open(self) -> None:
        if self._closed:
            raise StaleError(f"this job is over: {self._closed}, and its variables are gone")

    def _begin(self) -> FunctionContext | None:
        """The function that runs here, if one does. Raises where nothing more is to be read or updated."""
        self._check_open()
        function = current_function()
        if function is not None:
            function.check()
        return function

    # Exchanges

    def _retrying(self, server: Server, attempt: Callable[[], Any]) -> Any:
        """Repeat what fails because the server can't be reached, until `retry_seconds` behind the first failure.

        Of one that has not answered: since it was heard of last.
        """
        try:
            return self._once(server, attempt)
        except UnavailableError as error:
            if not _may_pass(error):
                raise
            # Not from the beginning of the attempt: it may have been a long transfer.
            silent = error.seconds if isinstance(error, SilentError) else 0.0
            if silent and silent >= self._retry_seconds:
                raise self._gone(server, error) from None
            return self._retry(server, attempt, time.monotonic() - silent)

    def _once(self, server: Server, attempt: Callable[[], Any]) -> Any:
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
            if server in self._servers:
                self.counts.reconnects[self._servers.index(server)] += 1
            raise failure
        finally:
            # An error and a frame that hold each other hold the callers' frames, too, and the arrays that are being
            # read or sent there: after a retry they would stay until Python looks for such cycles, which it does
            # for what has lived for seconds only once in a long while.
            del failure

    def _retry(self, server: Server, attempt: Callable[[], Any], failing_since: float) -> Any:
        def again() -> Any:
            self._begin()  # it may have been cancelled meanwhile
            # Where nobody serves any more, an attempt may take long to find out.
            left = failing_since + self._retry_seconds - time.monotonic()
            self._check_holding(server, min(HELLO_SECONDS, max(left, 1.0)))
            return self._once(server, attempt)

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
            f"{server.peer} can't be reached, tried for {self._retry_seconds:g} s: {why} ({what})"
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

    def _exchange(
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
                    session = self._servers[index].take_session()
                    begun[index] = session
                    session.send(data, self._timeout)
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
        server, begin = self._servers[index], time.monotonic() if session is None else session.begin
        first: list[Session] = [] if session is None else [session]

        def attempt() -> None:
            if first:
                mine = first.pop()
            else:
                mine = server.take_session()
                mine.send(request, self._timeout)
            try:
                data = mine.receive()
            except BaseException:
                mine.close()
                raise
            asked = mine.name, mine.nth
            server.give_back(mine)
            self._count(what, index, asked, begin, sum(map(len, request)), len(data), function)
            reply, payload = unpack(data, ps_pb2.Reply)
            if reply.HasField("refusal"):
                raise from_kind(reply.refusal.kind, reply.refusal.message)
            finish(index, reply, payload)

        self._retrying(server, attempt)

    def _count(
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
        end, counts = time.monotonic(), self.counts
        if what == "pull":
            counts.pulls[index].add(end - begin)
            counts.pulled_bytes[index] += received
        else:
            counts.pushes[index].add(end - begin)
            counts.pushed_bytes[index] += sent
        if function is not None and function.function:
            name, nth = asked
            counts.recording.asked.append(Asked(function.function, what, index, name, nth, begin, end, sent, received))

    def _on_each(self, work: dict[int, Callable[[], object]]) -> None:
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

    # Reading

    def read(self, parts: Sequence[ReadPart]) -> None:
        """Read every part to where it is to land: one request a server, all servers at once."""
        function = self._begin()
        to_keep: list[tuple[ReadPart, int]] = []
        if self._kept.limit:
            parts, to_keep = self._without_copies(parts)
        by_server: defaultdict[int, list[ReadPart]] = defaultdict(list)
        for part in parts:
            by_server[part.server].append(part)
        small: dict[int, Sequence[Buffer]] = {}
        large: dict[int, Callable[[], object]] = {}
        for index, mine in by_server.items():
            request = ps_pb2.Request(read=ps_pb2.ReadRequest(job=self.job, items=[part.item for part in mine]))
            buffers = _padded(view(part.ids) for part in mine if part.ids is not None)
            answer = sum(part.size + padding(part.size) for part in mine)
            request.last, request.total_bytes = True, sum(map(len, buffers))
            if answer <= SESSION_BYTES and request.total_bytes <= SESSION_BYTES and len(mine) <= MAX_ITEMS:
                small[index] = parts_of(request, buffers)
            else:
                large[index] = self._pull(index, mine, function)

        def finish(index: int, reply: ps_pb2.Reply, payload: memoryview) -> None:
            _land(by_server[index], reply, payload)

        if small:
            self._exchange("pull", small, finish, function)
        if large:
            self._on_each(large)
        pulled = sum(part.size for part in parts)
        pushed = sum(part.ids.nbytes for part in parts if part.ids is not None)
        self._pulled += pulled
        self._pushed += pushed
        if to_keep:
            behind = self._versions([part for part, _ in to_keep])
            for (part, before), after in zip(to_keep, behind, strict=True):
                if before == after:
                    assert isinstance(part.land, memoryview)  # see _without_copies
                    self._kept.keep((part.item.variable, part.item.shard), after, part.land)

    def _without_copies(self, parts: Sequence[ReadPart]) -> tuple[Sequence[ReadPart], list[tuple[ReadPart, int]]]:
        """What is left to read, and what of it to keep if it has the same version behind the read; see `kept`."""
        asked = [
            part
            for part in parts
            if part.size >= SESSION_BYTES
            and isinstance(part.land, memoryview)  # elsewhere there are no bytes in one piece to be kept
            and part.item.rows.all
            and not part.item.slot
            and self._kept.asks((part.item.variable, part.item.shard), part.size)
        ]
        if not asked:
            return parts, []
        to_keep, here = [], set()
        for part, version in zip(asked, self._versions(asked), strict=True):
            verdict, copy = self._kept.verdict((part.item.variable, part.item.shard), version)
            assert isinstance(part.land, memoryview)  # as was asked for
            if verdict is Verdict.KEEP:
                to_keep.append((part, version))
            elif verdict is Verdict.COPY:
                here.add(id(part))
                part.land[:] = copy
        return [part for part in parts if id(part) not in here], to_keep

    def _versions(self, parts: Sequence[ReadPart]) -> list[int]:
        """The versions of shards: one small request a server."""
        versions = np.empty(len(parts), "<u8")
        rows = ps_pb2.Rows(version=True)
        self.read(
            [
                ReadPart(
                    part.server,
                    ps_pb2.ReadItem(variable=part.item.variable, shard=part.item.shard, rows=rows),
                    versions.itemsize,
                    view(versions[number : number + 1]),
                )
                for number, part in enumerate(parts)
            ]
        )
        found: list[int] = versions.tolist()
        return found

    def read_planned(self, variables: Sequence[int], describe: Callable[[], list[WholeVariable]]) -> list[Array] | None:
        """The values of whole variables, in small requests that are prepared once; None if they are too large.

        Args:
            variables: their ids.
            describe: called for what they are, the first time.
        """
        key = tuple(variables)
        plan = self._plans.get(key)
        if plan is None:
            plan = ReadPlan(self.job, describe())
            with self._planning:
                while len(self._plans) >= MAX_PLANS:
                    del self._plans[next(iter(self._plans))]
                self._plans[key] = plan
        if max(plan.sizes.values(), default=0) > SESSION_BYTES:
            return None
        function = self._begin()
        payloads: dict[int, memoryview] = {}

        def finish(index: int, reply: ps_pb2.Reply, payload: memoryview) -> None:
            plan.check(index, reply, payload)
            payloads[index] = payload

        self._exchange("pull", plan.requests, finish, function)
        self._pulled += plan.moved
        return plan.results(payloads)

    def _pull(
        self,
        index: int,
        parts: list[ReadPart],
        function: FunctionContext | None,
    ) -> Callable[[], None]:
        server = self._servers[index]
        timeout = self._timeout + sum(part.size for part in parts) / _SLOWEST_BYTES_PER_SECOND
        # Those that take all of their bytes at once get them from a buffer.
        whole = [part.land if isinstance(part.land, memoryview) else memoryview(bytearray(part.size)) for part in parts]

        def attempt() -> None:
            for pieces_read in _divided(parts, whole):
                landing = Landing(ps_pb2.Reply, [piece.land for piece in pieces_read])
                name, begin = new_session(), time.monotonic()
                read = ps_pb2.ReadRequest(job=self.job, items=[piece.item for piece in pieces_read])
                buffers = _padded(view(piece.ids) for piece in pieces_read if piece.ids is not None)
                request = ps_pb2.Request(read=read, last=True, total_bytes=sum(map(len, buffers)))
                metadata, question = ((SESSION_HEADER, name),), pack(request, buffers)
                server.pull(question, metadata, timeout, landing.take)
                if not landing.complete:
                    raise UnavailableError(f"the reply ended {landing.missing} bytes too early")
                self._count("pull", index, (name, 1), begin, len(question), landing.received, function)
            for part, values in zip(parts, whole, strict=True):
                if not isinstance(part.land, memoryview):
                    part.land(values)

        return lambda: self._retrying(server, attempt)

    # Updating

    def update(self, parts: Sequence[UpdatePart]) -> None:
        """Apply every part once, however often it has to be sent. Returns when all servers have acknowledged."""
        function = self._begin()
        by_server: defaultdict[int, list[UpdatePart]] = defaultdict(list)
        for part in parts:
            by_server[part.server].append(part)
        inside = function is not None and function.function
        number, settled = (0, 0) if inside else self._sequences.take()
        term = function.term if function is not None and inside else self.term  # one, however often it is sent
        small: dict[int, Sequence[Buffer]] = {}
        large: dict[int, Callable[[], object]] = {}
        try:
            for index, mine in by_server.items():
                for part in mine:
                    part.item.life, part.item.seen = self._seen.get((part.item.variable, part.item.shard), (0, 0))
                request = ps_pb2.Request(
                    update=ps_pb2.UpdateRequest(
                        job=self.job,
                        incarnation=self.incarnation,
                        function=function.function if function is not None else 0,
                        key=function.key if function is not None else 0,
                        sequence=number,
                        settled=settled,
                        term=term,
                        items=[part.item for part in mine],
                    )
                )
                segments = [
                    segment
                    for part in mine
                    for segment in ((view(part.ids), part.values) if part.ids is not None else (part.values,))
                ]
                buffers = _padded(segments)
                request.total_bytes = sum(map(len, buffers))
                if request.total_bytes <= SESSION_BYTES:
                    request.last = True
                    small[index] = parts_of(request, buffers)
                else:
                    large[index] = functools.partial(self._push_update, index, request, buffers, mine, function)
            reach("client.update.before")
            if small:
                self._exchange(
                    "push", small, lambda index, reply, _: self._note(by_server[index], reply.update), function
                )
            if large:
                self._on_each(large)
            reach("client.update.after")
            pushed = sum(len(part.values) + (0 if part.ids is None else part.ids.nbytes) for part in parts)
            self._pushed += pushed
        finally:
            if number:
                self._sequences.done(number)

    def _push_update(
        self,
        index: int,
        request: ps_pb2.Request,
        buffers: list[Buffer],
        parts: Sequence[UpdatePart],
        function: FunctionContext | None,
    ) -> None:
        name, begin = new_session(), time.monotonic()
        reply = self._push(index, request, buffers, name=name)()
        self._count("push", index, (name, 1), begin, sum(map(len, buffers)), 0, function)
        self._note(parts, reply.update)

    def _note(self, parts: Sequence[UpdatePart], reply: ps_pb2.UpdateReply) -> None:
        """Remember what was acknowledged, so that a server that comes back with less learns what it has lost."""
        for part, updates in zip(parts, reply.updates, strict=False):
            key = part.item.variable, part.item.shard
            life, most = self._seen.get(key, (0, 0))
            self._seen[key] = reply.life, max(most, updates) if life == reply.life else updates

    def _push(
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
        server = self._servers[index]
        metadata = ((SESSION_HEADER, name),) if name else ()
        total = sum(map(len, buffers))
        request.total_bytes, request.last = total, not total
        timeout += self._timeout + total / _SLOWEST_BYTES_PER_SECOND

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
            return lambda: self._once(server, attempt)
        return lambda: self._retrying(server, attempt)

    def tell_seen(self, servers: Iterable[int] | None = None) -> None:
        """Have the servers compare what they have with what this client was told of: they may have come back since.

        Args:
            servers: by index; None: all.
        """
        seen = [
            ps_pb2.SeenUpdates(variable=variable, shard=shard, life=life, updates=updates)
            for (variable, shard), (life, updates) in list(self._seen.items())
        ]
        if seen:
            # What another one holds changes nothing.
            for index in range(len(self._servers)) if servers is None else servers:
                self._describe(self._servers[index], ps_pb2.DescribeRequest(job=self.job, seen=seen))

    def statuses(self) -> list[node_pb2.StatusReply]:
        """Every server's account of itself."""
        self._check_open()
        found = []
        for server in self._servers:

            def attempt(server: Server = server) -> node_pb2.StatusReply:
                reply: node_pb2.StatusReply = server.ask(server.node.status, node_pb2.StatusRequest(), self._timeout)
                return reply

            found.append(self._retrying(server, attempt))
        return found

    # Checkpoints

    def checkpoint(
        self,
        action: ps_pb2.CheckpointRequest.Action,
        number: int,
        directory: str = "",
        nbytes: int = 0,
    ) -> list[ps_pb2.CheckpointReply]:
        """Every server's answer, all at once. Not repeated: what was marked is gone with a server that died.

        A server that is gone already is waited for, but not to drop what it has forgotten.

        Args:
            nbytes: what is to be written, about, of which the patience depends.
        """
        timeout = _patience(nbytes)
        replies: list[ps_pb2.CheckpointReply] = [ps_pb2.CheckpointReply() for _ in self._servers]

        def ask(index: int) -> None:
            file = part_name(index, self.num_servers)
            request = ps_pb2.CheckpointRequest(job=self.job, action=action, id=number, directory=directory, file=file)
            patient = action != ps_pb2.CheckpointRequest.DROP
            replies[index] = self._ask(index, "checkpoint", request, timeout, patient=patient)

        self._on_each({index: functools.partial(ask, index) for index in range(self.num_servers)})
        return replies

    def restore(self, requests: Mapping[int, ps_pb2.RestoreRequest], nbytes: int = 0) -> None:
        """Send every server its own, all at once; `nbytes` as in `checkpoint`."""
        timeout = _patience(nbytes)
        work: dict[int, Callable[[], object]] = {}
        for index, request in requests.items():
            request.job = self.job
            work[index] = functools.partial(self._ask, index, "restore", request, timeout, patient=not request.drop)
        self._on_each(work)

    def _ask(self, index: int, method: str, request: Any, timeout: float, *, patient: bool) -> Any:
        self._check_open()
        server = self._servers[index]
        if patient:  # on the same channel: it may be waiting to dial again, long after the server is back
            self._describe(server, ps_pb2.DescribeRequest(job=self.job), server.bulk)
        try:
            if method == "restore" and request.ByteSize() > CHUNK_BYTES // 2:  # more than a message has
                push = self._push(
                    index, ps_pb2.Request(restore=True), [request.SerializeToString()], timeout, patient=False
                )
                push()
                return ps_pb2.RestoreReply()
            return server.ask(getattr(server.bulk, method), request, timeout)
        except grpc.RpcError as error:
            raise from_rpc(error, str(server.peer)) from None

    # The directory

    def create_variable(
        self,
        spec: ps_pb2.VariableSpec,
        shards: Sequence[npt.NDArray[Any]] | None,
        initializers: Iterable[tuple[ps_pb2.Initializer, bytes]] = (),
    ) -> None:
        """Declare a variable everywhere, with its shards' initial values (C-contiguous) where they live.

        Without values the servers make them: by the first of the initializers, each with its function's pickle
        or arrays, that a server can follow. If any server refuses, the variable is removed from those that took it, and
        the refusal is raised.
        """
        self._check_open()
        work: dict[int, Callable[[], object]] = {}
        forms = list(initializers)
        for index in range(self.num_servers):
            request = ps_pb2.Request(create=ps_pb2.CreateRequest(job=self.job, variable=spec))
            if shards is not None:
                mine = [view(shard) for shard, owner in zip(shards, spec.owners, strict=True) if owner == index]
                work[index] = self._push(index, request, _padded(mine))
            else:
                work[index] = functools.partial(self._create_there, index, spec, forms)
        try:
            self._on_each(work)
        except BaseException:
            self.delete_variable(spec.name, spec.id)
            raise
        pushed = sum(shard.nbytes for shard in shards or ())
        self._pushed += pushed

    def _create_there(
        self, index: int, spec: ps_pb2.VariableSpec, forms: Sequence[tuple[ps_pb2.Initializer, bytes]]
    ) -> None:
        why, partition = "", partition_of(spec)
        here = sum(partition.block(shard).size for shard, owner in enumerate(spec.owners) if owner == index)
        timeout = _patience(here * dtype_named(spec.dtype).itemsize)
        for initializer, bulk in forms:
            create = ps_pb2.CreateRequest(job=self.job, variable=spec, initializer=initializer)
            buffers: list[Buffer] = [bulk] if bulk else []
            why = self._push(index, ps_pb2.Request(create=create), buffers, timeout)().create.unresolved
            if not why:
                return
        raise MisuseError(f"the function for the initial value of {spec.name!r} can't be loaded on ps {index}: {why}")

    def create_optimizer(self, spec: ps_pb2.OptimizerSpec, forms: Iterable[definition_pb2.Definition] = ()) -> None:
        """Declare an optimizer everywhere, or give it other hyperparameters.

        Of a rule of the user's own: by the first of these forms of its class that a server can follow.
        """
        self._check_open()
        rules: list[definition_pb2.Definition | None] = [*forms] or [None]
        self._declared[spec.id] = spec, rules
        self._on_each(
            {index: functools.partial(self._create_rule, index, spec, rules) for index in range(self.num_servers)}
        )

    def declare_again(self, index: int, optimizers: Sequence[int]) -> Future[None]:
        """Send a server the optimizers with these numbers, as this client has declared them last."""

        def declare() -> None:
            for number in optimizers:
                if number in self._declared:
                    self._create_rule(index, *self._declared[number], patient=False)  # who asks has patience

        return self._bulk_threads.submit(declare)

    def _create_rule(
        self,
        index: int,
        spec: ps_pb2.OptimizerSpec,
        rules: Sequence[definition_pb2.Definition | None],
        *,
        patient: bool = True,
    ) -> None:
        why = ""
        for rule in rules:
            create = ps_pb2.CreateRequest(job=self.job, optimizer=spec, rule=rule)
            bulk = b"" if rule is None else split_off_bulk(create.rule)
            buffers: list[Buffer] = [bulk] if bulk else []
            send = self._push(index, ps_pb2.Request(create=create), buffers, _SLOWEST_FUNCTION, patient=patient)
            why = send().create.unresolved
            if not why:
                return
        raise MisuseError(f"the rule of optimizer {spec.name!r} can't be loaded on ps {index}: {why}")

    def copy_variables(self, copies: Sequence[tuple[int, ps_pb2.VariableSpec]], optimizers: Sequence[int] = ()) -> None:
        """Declare variables everywhere that are copies of others as they are now, by number; no bytes travel.

        Made when this returns, and perhaps not on disk before `check_saved`. Where this raises some may have been made.

        Args:
            copies: what is copied, and the copy's spec: the same but for number and name.
            optimizers: what these keep beside the values is copied, too.
        """
        self._check_open()
        forms = [
            ps_pb2.Initializer(name=COPY, numbers=json.dumps({"variable": source, "optimizers": list(optimizers)}))
            for source, _ in copies
        ]

        def copy(index: int) -> None:
            for (_, spec), form in zip(copies, forms, strict=True):
                self._create_there(index, spec, [(form, b"")])

        self._on_each({index: functools.partial(copy, index) for index in range(self.num_servers)})

    def check_saved(self, names: Sequence[str]) -> None:
        """Return when these variables are as durable as they will be. UnknownVariableError if a server lacks one."""
        request = ps_pb2.DescribeRequest(job=self.job, variables=names, saved=True)
        work: dict[int, Callable[[], object]] = {}
        for index, server in enumerate(self._servers):
            work[index] = functools.partial(self._describe, server, request, timeout=_SLOWEST_FUNCTION)
        self._on_each(work)

    def delete_variable(self, name: str, number: int, *, patient: bool = False) -> None:
        """Remove a variable everywhere: as far as the servers can be reached, or, if patient, waiting for them."""
        self._delete(ps_pb2.DeleteRequest(job=self.job, name=name, id=number), patient=patient)

    def delete_variables(self, prefix: str, *, patient: bool = False) -> bool:
        """Remove all whose names begin so, as `delete_variable`. False if a server was not reached."""
        if self._closed:
            return True  # the job is over, and with it all its variables
        return self._delete(ps_pb2.DeleteRequest(job=self.job, prefix=prefix), patient=patient)

    def _delete(self, request: ps_pb2.DeleteRequest, *, patient: bool) -> bool:
        # A few times: what stays on one server would be in the way of a variable of that name. But not for long where
        # it is a cleanup behind an error that is being raised already.
        few_times = tenacity.Retrying(
            retry=tenacity.retry_if_exception(is_retryable),
            wait=tenacity.wait_random_exponential(multiplier=0.02, max=0.25),
            stop=tenacity.stop_after_attempt(3) | tenacity.stop_after_delay(self._timeout),
            reraise=True,
        )
        everywhere = True
        for server in self._servers:
            delete = functools.partial(server.ask, server.control.delete, request, self._timeout)
            if patient:
                self._retrying(server, delete)
                continue
            try:
                few_times(delete)
            except (grpc.RpcError, UnavailableError):
                everywhere = False
        return everywhere

    def describe_variable(self, name: str) -> ps_pb2.VariableSpec:
        """Look a variable up. Any server knows all of them."""
        return self._describe(self._servers[0], ps_pb2.DescribeRequest(job=self.job, variables=[name])).variables[0]

    def describe_optimizer(self, name: str) -> ps_pb2.OptimizerSpec:
        """Look an optimizer up; its iterations are those of the server that has counted most."""
        request = ps_pb2.DescribeRequest(job=self.job, optimizers=[name])
        specs = [self._describe(server, request).optimizers[0] for server in self._servers]
        return max(specs, key=lambda spec: spec.iterations)

    def _describe(
        self,
        server: Server,
        request: ps_pb2.DescribeRequest,
        stub: Stub | None = None,
        timeout: float | None = None,
    ) -> ps_pb2.DescribeReply:
        self._check_open()
        describe = (stub or server.control).describe

        def attempt() -> ps_pb2.DescribeReply:
            reply: ps_pb2.DescribeReply = server.ask(describe, request, timeout or self._timeout)
            return reply

        result: ps_pb2.DescribeReply = self._retrying(server, attempt)
        return result


class _Piece(NamedTuple):
    """An item of one read, its row numbers, and where its values go."""

    item: ps_pb2.ReadItem
    ids: npt.NDArray[np.int64] | None
    land: memoryview


def _divided(parts: Sequence[ReadPart], whole: Sequence[memoryview]) -> Iterator[list[_Piece]]:
    """The parts, in as many reads as it takes for none to ask for more than a server answers at once."""
    group, ids_bytes = list[_Piece](), 0
    for part, values in zip(parts, whole, strict=True):
        for piece in _pieces_of(part, values):
            size = 0 if piece.ids is None else piece.ids.nbytes + ALIGNMENT
            if group and (len(group) == MAX_ITEMS or ids_bytes + size > ROWS_IDS_BYTES):
                yield group
                group, ids_bytes = [], 0
            group.append(piece)
            ids_bytes += size
    if group:
        yield group


def _pieces_of(part: ReadPart, values: memoryview) -> Iterator[_Piece]:
    if part.ids is None or not len(part.ids):
        yield _Piece(part.item, part.ids, values)
        return
    row = part.size // len(part.ids)
    most = max(min((ROWS_IDS_BYTES - ALIGNMENT) // part.ids.itemsize, MAX_ROWS_BYTES // max(row, 1)), 1)
    for at in range(0, len(part.ids), most):
        ids, item = part.ids[at : at + most], ps_pb2.ReadItem()
        item.CopyFrom(part.item)
        item.rows.ids = len(ids)
        yield _Piece(item, ids, values[at * row : (at + len(ids)) * row])


def _land(parts: Sequence[ReadPart], reply: ps_pb2.Reply, payload: memoryview) -> None:
    """Put the bytes of a reply of one message where they belong."""
    at = 0
    for part in parts:
        values = payload[at : at + part.size]
        if len(values) != part.size:
            break
        if isinstance(part.land, memoryview):
            part.land[:] = values
        else:
            part.land(values)
        at += part.size + padding(part.size)
    if at != len(payload) or not reply.last:
        raise UnavailableError(f"the reply of {len(payload)} bytes is not what was asked for")
