"""Servicer of pscluster.v1.Worker: translates between the wire, the job and the runner."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from pscluster.core.errors import MisuseError, ProtocolError, PsClusterError, StaleError, UnavailableError
from pscluster.core.fault_points import reach
from pscluster.core.functions.loading import UnresolvedReference
from pscluster.core.ids import fresh_id, make_identity
from pscluster.core.limits import MAX_COUNT, MAX_PICKLE_BYTES, check_count
from pscluster.core.metrics.trace import Recording
from pscluster.core.role.node import Role
from pscluster.core.role.options import RoleOptions
from pscluster.core.transport.base import server_call
from pscluster.core.transport.frames import Assembler, cut, pack, pieces, unpack
from pscluster.ps.client.client import PsClient
from pscluster.v1 import node_pb2, worker_pb2
from pscluster.worker.collectives import incoming
from pscluster.worker.collectives.connection_pool import ConnectionPool
from pscluster.worker.execution.runner import Runner
from pscluster.worker.function_metrics import WorkerMetrics
from pscluster.worker.job import Job
from pscluster.worker.servers import ServerList

logger = logging.getLogger(__name__)

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["Worker"]

_MAX_UPLOAD_BYTES = 1 << 46
_TURN_SECONDS = 1.0  # how often a stream that waits for its turn checks that it is still wanted

ClientFactory = Callable[[node_pb2.AttachRequest, int], PsClient]
"""Takes (request of the coordinator, incarnation); returns a client that is not connected yet."""


class WorkerRole(Role):
    """Holds the job that the worker works for, and the runner of its stream. `recording` is also of its clients.

    `make_pool` returns connections to other workers, for an attachment; by default without a token or certificates.
    """

    def __init__(
        self,
        servers: ServerList,
        make_client: ClientFactory,
        connect_timeout: float,
        recording: Recording,
        make_pool: Callable[[], ConnectionPool] | None = None,
    ) -> None:
        self.metrics = WorkerMetrics(recording)
        self._servers = servers
        self._make_client = make_client
        self._connect_timeout = connect_timeout
        self._make_pool = make_pool or (lambda: ConnectionPool(make_identity("worker", servers.index), RoleOptions()))
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._job: Job | None = None
        self._runner: Runner | None = None
        self._leaving = False
        self._job_id = self._coordinator_number = 0
        self._recorded_job = 0

    def check_hello(self, request: node_pb2.HelloRequest) -> None:
        """Raise ConfigurationError if the coordinator lists more or fewer parameter servers than this worker."""
        if request.num_ps:
            self._servers.check_count(request.num_ps)

    def admit(self, request: node_pb2.AttachRequest) -> None:
        """Raise StaleError if another coordinator has taken over the job, else as `ServerList.check`."""
        if request.job_id and request.job_id == self._job_id and request.coordinator_number < self._coordinator_number:
            raise StaleError(
                f"coordinator number {self._coordinator_number} of this job has taken it over from number "
                f"{request.coordinator_number}"
            )
        self._servers.check(request)

    def attached(self, request: node_pb2.AttachRequest, event: node_pb2.AttachEvent) -> None:
        """Begin a fresh job under a fresh incarnation: what an earlier attachment left is dropped."""
        self._job_id, self._coordinator_number = request.job_id, request.coordinator_number
        incarnation = event.incarnation = fresh_id()
        job = Job(
            incarnation=incarnation,
            worker_index=self._servers.index,
            num_workers=request.num_workers,
            seed=request.seed,
            client=self._make_client(request, incarnation),
            # The coordinator has reached all servers, so treat an unreachable one as lost, as at any later call.
            connect_timeout=request.ps_timeout or self._connect_timeout,
            metrics=self.metrics,
            pool=self._make_pool(),
        )
        self.metrics.attachments += 1
        self._replace(job)
        if request.job != self._recorded_job:
            self._recorded_job = request.job
            self.metrics.forget_job()

    def job_ended(self) -> None:
        self._replace(None)

    def _replace(self, job: Job | None) -> None:
        with self._lock:
            old, self._job = self._job, job
            runner, self._runner = self._runner, None
        if runner is not None:
            runner.end()
        if old is not None:
            old.close()

    def describe(self, reply: node_pb2.StatusReply) -> None:
        metrics = self.metrics
        reply.functions_done = metrics.done
        reply.functions_running, _ = self.functions()
        reply.function_seconds, reply.waited_seconds = metrics.all_runs().total, metrics.data_seconds
        for number, of in sorted(metrics.replicas.copy().items()):
            reply.replicas.add(number=number, staleness=of.staleness, wait_seconds=of.wait_seconds, dropped=of.dropped)

    def functions(self) -> tuple[int, int]:
        """Return how many functions run now, and how many wait here."""
        runner = self._runner
        return (0, 0) if runner is None else runner.functions()

    def recorded(self) -> Iterator[node_pb2.Recorded]:
        return self.metrics.recording.messages()

    def job(self, incarnation: int) -> Job:
        """Return the job of a request. Raise StaleError if the attachment that it names is over."""
        job = self._job
        if job is None or job.incarnation != incarnation:
            raise StaleError("this attachment to the worker is over")
        return job

    def begin(self, job: Job) -> Runner:
        """Return a new runner for the job's stream."""
        runner = Runner(job, self._turn)
        with self._lock:
            if self._job is not job:
                raise StaleError("this attachment to the worker is over")
            if self._leaving:  # refuse the stream before functions are sent, which would come back
                raise UnavailableError(f"worker {self._servers.index} is stopping")
            if self._runner is not None:
                raise ProtocolError("this attachment already has a stream of functions")
            self._runner = runner
        return runner

    def wait_turn(self) -> bool:
        """Wait until nothing of an earlier stream runs. Return False after `_TURN_SECONDS`."""
        if waited := self._turn.acquire(timeout=_TURN_SECONDS):
            self._turn.release()
        return waited

    def runner(self, incarnation: int) -> Runner | None:
        """Return the runner of an attachment's stream, if there is one. Raise StaleError if the attachment is over."""
        with self._lock:
            self.job(incarnation)
            return self._runner

    def move_servers(self, request: worker_pb2.MoveServersRequest) -> None:
        """Dial servers where they are now. Raise as `ServerList.moved`."""
        job = self.job(request.incarnation)
        count = len(request.ps_addresses) or job.num_servers
        moved = self._servers.moved(request.servers, count)
        if request.ps_addresses:
            job.resize(self._servers.beyond(0, request.ps_addresses), request.store_ids)
        for peer in moved:
            job.move_server(peer)

    def leave(self, grace: float) -> None:
        """Give back functions that have not started; wait for the running one, until its result has been fetched."""
        until = time.monotonic() + grace
        with self._lock:
            self._leaving = True
            job, runner = self._job, self._runner
        if job is None or runner is None:
            return
        runner.leave()
        if not runner.wait_idle(grace):
            logger.warning("a function was still running after %g s; returning it unfinished for another worker", grace)
        elif not job.wait_fetched(until - time.monotonic()):
            logger.warning("the coordinator did not fetch the last results within %g s", grace)
        elif not runner.wait_ended(until - time.monotonic()):
            logger.warning("the coordinator did not end its stream of functions within %g s", grace)


class WorkerService:
    """Implements worker.proto, which says what each method promises."""

    def __init__(self, role: WorkerRole) -> None:
        self._role = role

    def steps(
        self, requests: Iterator[worker_pb2.StepsRequest], context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.StepsReply]:
        first = next(requests, None)  # without functions: it only names the attachment
        if first is None:
            return
        runner = self._role.begin(self._role.job(first.incarnation))
        context.add_callback(runner.end)
        # A function of an earlier stream may run for any time: functions sent here before its end would be stuck.
        while not self._role.wait_turn():
            if not context.is_active():
                return
        arguments = requests, server_call(context).sender()
        threading.Thread(target=runner.run, args=arguments, name="functions", daemon=True).start()
        yield worker_pb2.StepsReply()  # the stream is up
        yield from runner.outcomes()

    def upload(self, frames: Iterator[bytes], _context: grpc.ServicerContext) -> worker_pb2.UploadReply:
        assembler = Assembler(_MAX_UPLOAD_BYTES)
        first: worker_pb2.UploadRequest | None = None
        for data in frames:
            frame, payload = unpack(data, worker_pb2.UploadRequest)
            if first is None:
                first = frame
                self._role.job(frame.incarnation)
                _check(frame)
            assembler.add(frame, payload)
        if first is None or not assembler.complete:
            raise ProtocolError("the upload ended before its last frame")
        job, payload = self._role.job(first.incarnation), assembler.joined()
        body = first.WhichOneof("body")
        if body == "definition":
            try:
                job.define(first.definition, payload)
            except UnresolvedReference as reason:
                return worker_pb2.UploadReply(unresolved=str(reason) or "no reason given")
            except PsClusterError:
                raise
            except Exception as error:  # from loading the user's module or pickle
                raise MisuseError(f"{type(error).__name__}: {error}") from error
        elif body == "resource":
            job.build(first.resource)
        elif body == "attachments":
            job.arguments[first.attachments.position] = cut(payload, first.attachments.sizes)
        else:
            raise ProtocolError("an upload without a body")
        reach("worker.define.after")
        return worker_pb2.UploadReply()

    def recall(self, request: worker_pb2.RecallRequest, _context: grpc.ServicerContext) -> worker_pb2.RecallReply:
        if len(request.functions) != len(request.positions):
            raise ProtocolError("a recall needs a position for each function")
        runner = self._role.runner(request.incarnation)
        if runner is not None:
            if request.end_process:
                runner.end_process_of(request.functions)
            runner.recall(list(request.functions), list(request.positions), request.cancel_running)
        reach("worker.recall.after")
        return worker_pb2.RecallReply()

    def answer(self, request: worker_pb2.AnswerRequest, _context: grpc.ServicerContext) -> worker_pb2.AnswerReply:
        if request.WhichOneof("answer") is None:
            raise ProtocolError("an answer without a value or an error")
        runner = self._role.runner(request.incarnation)
        if runner is not None:
            runner.answer(request)
        reach("worker.answer.after")
        return worker_pb2.AnswerReply()

    def download(self, request: worker_pb2.DownloadRequest, _context: grpc.ServicerContext) -> Iterator[bytes]:
        job = self._role.job(request.incarnation)
        if (buffers := job.results.get(request.function)) is None:
            raise StaleError(f"function {request.function} has no result to fetch on this worker")
        total, sent = sum(map(len, buffers)), 0
        head = worker_pb2.DownloadReply(total_bytes=total)
        for group in pieces(buffers):
            sent += sum(map(len, group))
            head.last = sent == total
            yield pack(head, group)
            head = worker_pb2.DownloadReply()
        reach("worker.download.after")
        job.drop_result(request.function)

    def release(self, request: worker_pb2.ReleaseRequest, _context: grpc.ServicerContext) -> worker_pb2.ReleaseReply:
        self._role.job(request.incarnation).release(request.resources, request.definitions, request.variables)
        return worker_pb2.ReleaseReply()

    def report_seen(
        self, request: worker_pb2.ReportSeenRequest, _context: grpc.ServicerContext
    ) -> worker_pb2.ReportSeenReply:
        check_count(len(request.servers), MAX_COUNT, "parameter servers with updates seen")
        self._role.job(request.incarnation).report_seen(request.servers)
        return worker_pb2.ReportSeenReply()

    def move_servers(
        self, request: worker_pb2.MoveServersRequest, _context: grpc.ServicerContext
    ) -> worker_pb2.MoveServersReply:
        self._role.move_servers(request)
        reach("worker.move.after")
        return worker_pb2.MoveServersReply()

    def exchange(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[worker_pb2.ExchangeReply]:
        return incoming.serve(frames, context, lambda incarnation: self._role.job(incarnation).membership.gangs)


def _check(first: worker_pb2.UploadRequest) -> None:
    """Raise ProtocolError if the upload declares more than it may bring."""
    if first.WhichOneof("body") == "attachments":
        check_count(len(first.attachments.sizes), MAX_COUNT, "arrays beside the arguments")
        if sum(first.attachments.sizes) != first.total_bytes:
            raise ProtocolError(
                f"attachments of {sum(first.attachments.sizes)} bytes, but {first.total_bytes} are declared"
            )
    elif first.total_bytes > MAX_PICKLE_BYTES:
        raise ProtocolError(
            f"a function or class of {first.total_bytes:,} bytes; the limit is {MAX_PICKLE_BYTES:,}: load data in it "
            "rather than capture it"
        )
