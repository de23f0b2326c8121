"""What every role answers: hello, status, a coordinator's attachment, the end of a job.

States of a role, decided by `Attachment`, which is pure:

    FREE --attach(job)--> HELD(job) --its stream ends--> FREE       the coordinator died or left
                          HELD(job) --end(job)---------> FREE       the job is over: its state is dropped
                          HELD(job) --attach(job)------> HELD(job)  the same coordinator, on a new connection
                          HELD(job) --attach(other)----> refused, naming the holder, unless it takes over

                          FREE, for `--coordinator-timeout` seconds ---> FREE, and its state is dropped

After a detachment a role keeps the state of the job, in case its coordinator comes back, until another job attaches,
the job is ended, or `--coordinator-timeout` has passed.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import grpc

from pscluster.core.errors import BusyError, ProtocolError, StaleError
from pscluster.core.fault_points import reach
from pscluster.core.ids import check_version
from pscluster.core.limits import MAX_COUNT, MAX_ENDED, check_count, check_name, one_line
from pscluster.core.metrics.registry import resident_bytes
from pscluster.v1 import node_pb2

logger = logging.getLogger(__name__)

_MAX_UNLISTED = 100  # workers reported to a coordinator that does not list them


@dataclass(slots=True)
class Attachment:
    """Which coordinator holds the role. Pure; guarded by its owner's lock."""

    role: str
    job: int = 0
    holder: str = ""
    attachment_id: int = 0  # of the last one
    _open: set[int] = field(default_factory=set)  # attachments of this job whose streams have not ended

    @property
    def held(self) -> bool:
        """Return whether a coordinator holds the role: while any stream of its job is open.

        Of two attempts to attach, the abandoned one may arrive last, and end.
        """
        return bool(self._open)

    def attach(self, job: int, coordinator: str, take_over: bool = False) -> bool:
        """Give the role to a coordinator. Return whether its job is new. BusyError while another job holds the role."""
        if self.held and job != self.job and not take_over:
            raise BusyError(
                f"{self.role} works for {self.holder}; end that job, take it over with take_over=True, or give this "
                "coordinator a cluster of its own"
            )
        fresh = job != self.job
        if fresh:
            self._open.clear()
        self.job, self.holder = job, coordinator
        self.attachment_id += 1
        self._open.add(self.attachment_id)
        return fresh

    def detach(self, attachment_id: int) -> None:
        """Note that the stream of an attachment has ended."""
        self._open.discard(attachment_id)

    def is_left(self, job: int, last: int | None = None) -> bool:
        """Return whether the role has this job's state, but no coordinator, and none since the attachment `last`."""
        return bool(job) and self.job == job and not self.held and last in (None, self.attachment_id)

    def end(self, job: int) -> None:
        """End the job. Raise StaleError if the role serves another one."""
        if self.job and job != self.job:
            raise StaleError(f"{self.role} serves another job")
        self.job, self.holder = 0, ""
        self._open.clear()


class Role:
    """A role's reactions to events. The base class does nothing.

    The methods are called one at a time, under the node's lock unless noted: keep them short.
    """

    restored_job = 0  # id of the job whose state the role has at its start; 0: none

    def check_hello(self, request: node_pb2.HelloRequest) -> None:
        """Check a hello. Raise a refusal if the two processes can't work together. Not under the node's lock."""

    def admit(self, request: node_pb2.AttachRequest) -> None:
        """Check a request to attach. Raise a refusal if the coordinator can't have the role, or the request is invalid.

        The last moment to refuse: nothing has changed yet, and the current coordinator keeps the role.
        """

    def job_began(self, request: node_pb2.AttachRequest) -> None:
        """Begin another job: drop the state of the previous one, unless it has the same job id."""

    def attached(self, request: node_pb2.AttachRequest, event: node_pb2.AttachEvent) -> None:
        """Take a new coordinator, and fill in the role's part of the event that tells it so."""

    def persist(self) -> None:
        """Save what the coordinator is about to be told. May block, and refuse. Not under the node's lock."""

    def job_ended(self) -> None:
        """End the job: drop its state."""

    def fill_hello(self, reply: node_pb2.HelloReply) -> None:
        """Fill in the role's part of a hello. Not under the node's lock."""

    def describe(self, reply: node_pb2.StatusReply) -> None:
        """Fill in the role's part of its status."""

    def recorded(self) -> Iterable[node_pb2.Recorded]:
        """Return records of the last functions and requests. Not under the node's lock."""
        return ()

    def describe_load(self, reply: node_pb2.StatusReply, busiest: int, *, shards: bool = False) -> None:
        """Fill in the `busiest` most used items, perhaps with their shards. Not under the node's lock."""


@dataclass
class _Streams:
    leaving: bool = False
    open: set[threading.Event] = field(default_factory=set)

    def wake(self) -> None:
        for stream in self.open:
            stream.set()


@dataclass
class _Workers:
    """The workers that the role's coordinator lists, and others that have said hello."""

    listed: frozenset[int] = frozenset()  # empty: unspecified
    unlisted: dict[int, node_pb2.Identity] = field(default_factory=dict)

    def is_new(self, asker: node_pb2.Identity) -> bool:
        """Record an unlisted worker. Return whether it is new, and the coordinator must learn of it."""
        if asker.index in self.unlisted or len(self.unlisted) == _MAX_UNLISTED:
            return False
        self.unlisted[asker.index] = asker
        return True


class NodeService:
    """Servicer of pscluster.v1.Node."""

    def __init__(
        self,
        identity: node_pb2.Identity,
        role: Role,
        on_job_end: Callable[[], None],
        coordinator_timeout: float = math.inf,
    ) -> None:
        self.identity = identity
        self._role = role
        self._on_job_end = on_job_end
        self._coordinator_timeout = coordinator_timeout
        self._lock = threading.Lock()
        self._attachment = Attachment(identity.name, role.restored_job)
        self._streams = _Streams()
        self._workers = _Workers()
        self._started = time.monotonic()
        self.metrics_address = ""
        self.data_port, self.address = 0, ""
        if role.restored_job:
            self._wait_for_coordinator(role.restored_job, 0)

    def hello(self, request: node_pb2.HelloRequest, _context: grpc.ServicerContext) -> node_pb2.HelloReply:
        check_version(request.identity, self.identity)
        self._role.check_hello(request)
        reply = node_pb2.HelloReply(identity=self.identity, data_port=self.data_port, address=self.address)
        self._role.fill_hello(reply)
        with self._lock:
            if self._attachment.held:
                reply.holder = self._attachment.holder
                self._report_unlisted(request.identity, reply)
        return reply

    def _report_unlisted(self, asker: node_pb2.Identity, reply: node_pb2.HelloReply) -> None:
        """Tell a worker that the coordinator does not list it, and tell the coordinator. Requires the lock."""
        workers = self._workers
        if asker.role == "worker" and workers.listed and asker.index not in workers.listed:
            reply.workers.extend(sorted(workers.listed))
            if workers.is_new(asker):
                self._streams.wake()

    def not_ready(self) -> str:
        """Return why the role does not work for a coordinator now; "" if it does."""
        with self._lock:
            if self._streams.leaving:
                return "it is stopping"
            return "" if self._attachment.held else "it waits for a coordinator"

    def status(self, request: node_pb2.StatusRequest, _context: grpc.ServicerContext) -> node_pb2.StatusReply:
        reply = node_pb2.StatusReply(identity=self.identity, uptime_seconds=time.monotonic() - self._started)
        reply.metrics_address = self.metrics_address
        reply.memory_bytes = resident_bytes()
        with self._lock:
            reply.coordinator = self._attachment.holder if self._attachment.held else ""
            reply.state = "serving" if self._attachment.held else "waiting for a coordinator"
            if self._streams.leaving:
                reply.state = "stopping"
            self._role.describe(reply)
        if request.recorded:
            reply.recorded.extend(self._role.recorded())
        if request.busiest:
            self._role.describe_load(reply, request.busiest, shards=request.shards)
        reply.clock = time.monotonic()
        return reply

    def attach(self, request: node_pb2.AttachRequest, context: grpc.ServicerContext) -> Iterator[node_pb2.AttachEvent]:
        """Hold the role for a coordinator until either side ends the stream."""
        check_version(request.coordinator, self.identity)
        _check(request)
        over = threading.Event()
        with self._lock:
            self._role.admit(request)
            if self._attachment.attach(request.job, request.coordinator.name, request.take_over):
                self._role.job_began(request)
                self._streams.wake()  # streams of a coordinator whose job is taken over
            attachment_id = self._attachment.attachment_id
            self._workers = _Workers(frozenset(request.workers))
            reported = 0  # number of unlisted workers reported so far
            event = node_pb2.AttachEvent(kind=node_pb2.AttachEvent.ATTACHED, identity=self.identity)
            event.data_port, event.address = self.data_port, self.address
            try:
                self._role.attached(request, event)
            except BaseException:
                self._attachment.detach(attachment_id)  # a coordinator that was refused must not hold the role
                raise
            self._streams.open.add(over)
            reach("node.attach.before")
            leaving = self._streams.leaving
        # Called at once if the stream has ended already.
        if not context.add_callback(over.set):
            over.set()
        logger.info("working for %s", request.coordinator.name)
        try:
            self._role.persist()
            yield event
            reach("node.attach.after")
            unlisted: list[node_pb2.Identity] = []
            while context.is_active():
                if leaving:
                    yield node_pb2.AttachEvent(kind=node_pb2.AttachEvent.LEAVING)
                for worker in unlisted:
                    yield node_pb2.AttachEvent(kind=node_pb2.AttachEvent.UNLISTED, identity=worker)
                over.wait()
                with self._lock:
                    leaving = self._streams.leaving
                    mine = self._attachment.job == request.job
                    unlisted = list(self._workers.unlisted.values())[reported:] if mine else []
                    reported += len(unlisted)
                    over.clear()
                if not leaving and not unlisted:
                    break
        finally:
            with self._lock:
                self._streams.open.discard(over)
                self._attachment.detach(attachment_id)
                lost = self._attachment.is_left(request.job) and not self._streams.leaving
                last = self._attachment.attachment_id
            if lost:
                logger.info("%s is gone; keeping its state in case it comes back", request.coordinator.name)
                self._wait_for_coordinator(request.job, last)

    def _wait_for_coordinator(self, job: int, last: int) -> None:
        if self._coordinator_timeout < threading.TIMEOUT_MAX:
            timer = threading.Timer(self._coordinator_timeout, self._give_up, (job, last))
            timer.daemon = True
            timer.start()

    def _give_up(self, job: int, last: int) -> None:
        """Drop the job, unless its coordinator has come back since the attachment `last`, or has ended it."""
        with self._lock:
            if not self._attachment.is_left(job, last) or self._streams.leaving:
                return
            self._attachment.end(job)
            self._role.job_ended()
        logger.warning("no coordinator came back within %g s: dropped the job's state", self._coordinator_timeout)
        self._on_job_end()

    def end_job(self, request: node_pb2.EndJobRequest, _context: grpc.ServicerContext) -> node_pb2.EndJobReply:
        """End the job, since the coordinator's script has ended."""
        reach("node.end.before")
        with self._lock:
            self._attachment.end(request.job)
            self._role.job_ended()
        reach("node.end.after")
        logger.info("the job is over: %s", one_line(request.reason) or "no reason given")
        self._on_job_end()
        return node_pb2.EndJobReply()

    def leave(self) -> None:
        """Tell the attached coordinator that this role will stop."""
        with self._lock:
            self._streams.leaving = True
            self._streams.wake()


def _check(request: node_pb2.AttachRequest) -> None:
    check_name(request.job_name, "a job's name")
    check_count(len(request.workers), MAX_COUNT, "workers")
    check_count(len(request.ps_addresses), MAX_COUNT, "parameter servers")
    check_count(len(request.moved_servers), MAX_COUNT, "parameter servers that have moved")
    check_count(len(request.placed), MAX_COUNT, "variables that have moved")
    check_count(len(request.frozen) + len(request.arriving), MAX_COUNT, "shards that move")
    check_count(len(request.finished_starts), MAX_ENDED, "intervals of functions")
    if len(request.finished_starts) != len(request.finished_stops):
        raise ProtocolError("intervals of functions need a stop for each start")
    if not 0 <= request.ps_timeout < threading.TIMEOUT_MAX:
        raise ProtocolError(f"ps_timeout is {request.ps_timeout} s; give one from 0 to {threading.TIMEOUT_MAX:g} s")
