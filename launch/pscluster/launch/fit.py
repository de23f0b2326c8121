"""One call of `Trainer.fit`: the run's folder, the cluster, and the answers to its members.

`fit` starts the cluster and schedules the function once for each member. Members ask (`context`) and this process
answers: their questions come into one queue, which the caller's thread empties. `session` decides; here files are
written, and answers sent.

    STARTING (the run's folder is locked, the cluster started) -> RUNNING -> FINISHED
    RUNNING --a member's function raises, or too many deaths---> the others are stopped; FAILED
            --Ctrl-C-----------------------------------------> the others are stopped; INTERRUPTED
            --this process dies------------------------------> what is committed stays; the next fit() goes on after it
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pscluster.coordinator.checkpoints.checkpoint import Checkpoint as Variables
from pscluster.coordinator.local.local_cluster import LocalCluster
from pscluster.coordinator.local.supervised import SupervisedCluster
from pscluster.coordinator.queue.cluster_coordinator import ClusterCoordinator
from pscluster.coordinator.scheduling.calls.questions import Question
from pscluster.coordinator.scheduling.calls.remote_value import RemoteValue, RemoteValueStatus
from pscluster.coordinator.strategy import ParameterServerStrategy
from pscluster.coordinator.synchronous.per_replica import PerReplica
from pscluster.core.errors import CancelledError, CheckpointError, MisuseError, ProtocolError, PsClusterError
from pscluster.core.functions.definitions import capture, partial_of
from pscluster.launch.answers.questions import Asked, report_of
from pscluster.launch.answers.rendezvous import Rendezvous, Serving, place_among
from pscluster.launch.answers.session import Action, Answer, Commit, Session
from pscluster.launch.clusters import Clusters
from pscluster.launch.config import RunConfig, ScalingConfig
from pscluster.launch.errors import TrainingFailedError
from pscluster.launch.members.running import Setup, forms_of, plain_setup, run_here, run_in_process, run_member
from pscluster.launch.reporting import Reporting
from pscluster.launch.result import Result
from pscluster.launch.storage.checkpoint import VARIABLES, Checkpoint
from pscluster.launch.storage.logs import logs_of
from pscluster.launch.storage.run_folder import RunFolder

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
HERE = "127.0.0.1"
"""Where members find each other that are all on this machine."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a trainer was made with; see `Trainer`."""

    train_fn: Callable[..., Any]
    config: Any
    scaling: ScalingConfig
    run: RunConfig
    datasets: Mapping[str, Any]
    backend: str
    variables: Callable[[Any], Any] | None
    split: str
    seed: int
    launcher: Callable[..., SupervisedCluster] | None
    resume_from: Checkpoint | None
    clusters: Clusters


def fit(job: Job) -> Result:
    """Do what `Trainer.fit` does."""
    kind = Fit
    if job.scaling.limits is not None:
        from pscluster.launch.elastic.fit import ElasticFit

        kind = ElasticFit
    with RunFolder(job.run.storage, job.run.name).writing(
        config=job.config,
        workers=job.scaling.workers,
        backend=job.backend,
        checkpoint_config=dataclasses.asdict(job.run.checkpoint),
    ) as folder:
        running = kind(job, folder)
        try:
            values = running.in_this_process() if not job.scaling.workers else running.on_workers()
        except MembersFailed as failed:
            folder.finish("failed", error=failed.summary)
            result = Result.of(folder, error=failed.first)
            raise TrainingFailedError(failed.summary, failed.errors, result) from failed.first
        except BaseException as error:
            folder.finish("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", error=str(error))
            raise
        finally:
            running.close()
        folder.finish("finished", return_values=values)
        return Result.of(folder, return_values=values)


class MembersFailed(Exception):  # noqa: N818  (it becomes a TrainingFailedError)
    """Why a run has failed: errors of members, by rank, or `cause`."""

    def __init__(self, errors: Mapping[int, BaseException], cause: PsClusterError | None = None) -> None:
        super().__init__()
        self.errors = errors
        if cause is not None:
            self.first: BaseException = cause
            self.summary = str(cause)
            return
        rank, self.first = next(iter(errors.items()))
        self.summary = f"the training function failed on rank {rank}: {self.first}"


class Fit:
    """The members of a run while they run."""

    def __init__(self, job: Job, folder: RunFolder) -> None:
        self._job, self._folder = job, folder
        self._scaling, self._run = job.scaling, job.run
        size = max(self._scaling.at_start(is_here=job.launcher is None), 1)
        # A chief runs TensorFlow's ParameterServerStrategy; its workers and servers take no part in the run.
        tf_ps = self._scaling.ps if job.backend == "tensorflow" and self._scaling.workers else None
        self._size, self._servers = (size, 0) if tf_ps is None else (1, size + tf_ps)
        self._together = job.backend != "numpy" or self._run.failure.restart == "group"
        self._session = self._make_session()
        self._questions: queue.SimpleQueue[Question] = queue.SimpleQueue()
        self._rendezvous = Rendezvous(self._processes, self._run.report_timeout)
        self._serving = Serving(self._size)
        self._workers: dict[int, int] = {}  # by rank: where it ran last
        self._updates: dict[int, Mapping[int, int]] = {}  # by rank: those before the newest checkpoint, if it is of now
        self._cluster: SupervisedCluster | None = None
        self._variables: Variables | None = None
        self._reporting = Reporting(folder, self._run.checkpoint)
        self._setup = Setup(
            name=folder.name,
            path=folder.path,
            size=self._size,
            backend=job.backend,
            tf_ps=tf_ps or 0,
            tf_workers=size if tf_ps else 0,
            split=job.split,
            seed=job.seed,
            resume_from=None if job.resume_from is None else job.resume_from.path,
        )

    @property
    def _processes(self) -> int:
        """How many workers the run has: one for each member, and for each that serves them."""
        return self._size + self._servers

    def _make_session(self) -> Session:
        committed, seconds = self._folder.committed, self._run.report_timeout
        return Session(self._size, committed=committed, together=self._together, seconds=seconds)

    # Without workers

    def in_this_process(self) -> list[Any]:
        """Run the function here, as the only member."""
        job = self._job

        def ask(question: dict[str, Any]) -> Any:
            asked = Asked(question)
            self._handle(asked)
            return asked.result()

        try:
            value = run_member(job.train_fn, job.config, self._setup, job.datasets, 0, ask)
        except Exception as error:
            raise MembersFailed({0: error}) from None
        return [value]

    # On workers

    def on_workers(self) -> list[Any]:
        """Start a cluster, and run the function on each of its workers."""
        job = self._job
        with (
            logs_of(self._folder) as log_dir,
            self._made_cluster(log_dir) as self._cluster,
            ParameterServerStrategy(self._cluster) as strategy,
        ):
            variables = None
            if job.variables is not None:
                with strategy.scope():
                    variables = job.variables(job.config)
                self._restore_variables(strategy)
            coordinator = ClusterCoordinator(strategy, max_attempts=self._max_attempts)
            return self._run_members(coordinator, variables)

    @property
    def _max_restarts(self) -> int:
        """How often a worker that dies is restarted."""
        return 10

    @property
    def _max_attempts(self) -> int:
        """How many workers may die with a member's function before the run fails."""
        return self._run.failure.limit + 1

    def _run_members(self, coordinator: ClusterCoordinator, variables: Any) -> list[Any]:
        """Run the function as each member; return what they return."""
        values = self._schedule(coordinator, variables)
        try:
            self._answer_until_ended(values)
        except BaseException:
            coordinator.cancel(values)
            raise
        return [value.fetch() for value in values[: self._size]]

    def _made_cluster(self, log_dir: str) -> SupervisedCluster:
        scaling, size, ps = self._scaling, self._processes, self._scaling.ps or 1
        if self._servers:
            ps = 1  # those of TensorFlow are workers here
        more: dict[str, Any] = {} if scaling.durability is None else {"durability": scaling.durability}
        if self._job.launcher is not None:
            return self._job.launcher(ps=ps, workers=size, env=scaling.env, log_level="ERROR", **more)
        threads = max((os.cpu_count() or 1) // size, 1)
        env = {**({} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads)}), **(scaling.env or {})}
        restarts = self._max_restarts
        return LocalCluster(ps, size, env=env, log_level="ERROR", log_dir=log_dir, max_restarts=restarts, **more)

    @property
    def _hosts(self) -> list[str]:
        """The hosts of the workers; none if all are on this machine."""
        return self._cluster.worker_hosts() if self._cluster is not None else []

    def _location(self, rank: int, worker: int) -> dict[str, int]:
        """Return where a member is, beside the others; nothing if all are on this machine."""
        if group := self._rendezvous.hosts:
            return place_among(rank, group)
        return place_among(worker, self._hosts)

    def _restore_variables(self, strategy: ParameterServerStrategy) -> None:
        """Give variables the values that they had at the newest checkpoint which has them.

        That of the run itself, if there is one, else that of the one that it resumes from.
        """
        self._variables = variables = Variables(strategy, pause=False)
        path, resumed = self._folder.variables(), self._job.resume_from
        if path is None and resumed is not None and resumed.has_variables:
            path = f"{resumed.path}/{VARIABLES}"
        if path is not None:
            variables.read(path, progress=False)
            logger.info("the variables are those of %s", path)

    def _save_variables(self, path: str) -> None:
        """Save all variables. Members that have reported wait, and no others run."""
        if self._variables is None:
            raise CheckpointError("there are no variables on parameter servers to save")
        self._variables.write(path)

    def _member_function(self, coordinator: ClusterCoordinator, variables: Any) -> Callable[..., Any]:
        """Return what to schedule for each member, with its rank, or number, as its argument."""
        job, setup = self._job, plain_setup(self._setup)
        if job.backend == "numpy":
            captured = coordinator.captured(job.train_fn)
            name = captured.function.name
            return partial_of(name, run_here, captured, job.config, setup, job.datasets, variables)
        function = capture(job.train_fn)
        name = function.name
        return partial_of(name, run_in_process, name, forms_of(function), job.config, setup, job.datasets)

    def _schedule(self, coordinator: ClusterCoordinator, variables: Any) -> list[RemoteValue]:
        member = self._member_function(coordinator, variables)
        if self._together:
            ranks, failures = PerReplica(range(self._processes)), self._run.failure.limit
            return coordinator.schedule_gang(
                member, (ranks,), None, None, self._processes, None, failures, None, answer=self._questions.put
            )
        return [
            coordinator.schedule_with(member, (rank,), answer=functools.partial(self._ask, rank), isolated=True)
            for rank in range(self._size)
        ]

    def _ask(self, rank: int, question: Question) -> None:
        """Take a question of a member that runs alone."""
        question.rank = rank
        self._questions.put(question)

    def _answer_until_ended(self, values: Sequence[RemoteValue]) -> None:
        """Answer members until the functions of all have ended. Raise `MembersFailed` if one has failed."""
        running = dict(enumerate(values))
        while running:
            with contextlib.suppress(queue.Empty):
                self._handle(self._questions.get(timeout=POLL_SECONDS))
            for rank, value in list(running.items()):
                if value.status is RemoteValueStatus.NOT_READY:
                    continue
                del running[rank]
                if value.status is not RemoteValueStatus.READY:
                    raise MembersFailed(self._errors(values))
            self._do([*self._session.expire(time.monotonic()), *self._rendezvous.expire(time.monotonic())])

    def _errors(self, values: Sequence[RemoteValue]) -> dict[int, BaseException]:
        """Return the errors of those that have failed, those that others made fail last."""
        errors: dict[int, BaseException] = {}
        for rank, value in enumerate(values):
            if value.status in (RemoteValueStatus.NOT_READY, RemoteValueStatus.READY):
                continue
            try:
                value.fetch()
            except Exception as error:
                errors[rank] = error
        first = next(iter(errors.values()))
        if len(errors) > 1 and all(error is first for error in errors.values()):  # that of one, for all
            there = getattr(first, "worker", None)
            errors = {rank: first for rank in errors if self._workers.get(rank) == there} or errors
        return dict(sorted(errors.items(), key=lambda item: isinstance(item[1], CancelledError)))

    # What members ask

    def _handle(self, question: Question | Asked) -> None:
        try:
            actions = self._decide(question)
        except PsClusterError as error:
            question.fail(error)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            question.fail(ProtocolError(f"a question of rank {question.rank} is invalid: {error!r}"))
        else:
            self._do(actions)

    def _decide(self, question: Question | Asked) -> list[Action]:
        asked, rank, attempt, now = question.value, question.rank, question.attempt, time.monotonic()
        self._workers[rank] = question.worker
        match asked["do"]:
            case "address":
                hosts = self._hosts
                host = hosts[question.worker] if question.worker < len(hosts) else HERE
                return [*self._rendezvous.ask(rank, attempt, host, int(asked["port"]), question, now)]
            case "serve":
                return [*self._serving.serve(attempt, question)]
            case "begin":
                if not self._setup.serves(rank):
                    self._session.begin(rank, attempt)
                question.reply(self._standing(rank, attempt) | self._location(rank, question.worker))
                return []
            case "end":
                if self._setup.serves(rank):
                    return [Answer(question)]
                ended = self._serving.returned(rank, attempt) if self._servers else []
                return [Answer(question), *self._session.end(rank, attempt), *ended]
            case _ if self._setup.serves(rank):
                raise MisuseError(
                    "only the chief of a ParameterServerStrategy reports, and has data: begin the function with "
                    '`if resolver.task_type in ("worker", "ps"): tf.distribute.Server(...).join()`'
                )
            case "report":
                return self._session.report(rank, attempt, int(asked["number"]), report_of(asked), question, now)
            case "barrier" | "broadcast":
                number, nth = asked["place"]
                sent = {"sent": asked.get("value"), "nbytes": asked["nbytes"]} if "nbytes" in asked else {}
                return self._session.meet(rank, attempt, (number, nth), question, now, **sent)
            case other:
                raise ProtocolError(f"a question about {other!r:.40}")

    def _standing(self, rank: int, attempt: int) -> dict[str, Any]:
        """Return where a member is to begin."""
        folder, latest = self._folder, self._folder.latest()
        return {
            "attempt": attempt,
            "committed": self._session.committed,
            "latest": None if latest is None else [latest.number, latest.path],
            "restored": {} if latest is None else folder.positions(latest.number, rank),
            "furthest": folder.positions(self._session.committed, rank) if self._session.committed else {},
            "updates": [*map(list, self._updates.get(rank, {}).items())],
        }

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Answer(question, _, error):
                    question.reply(self._answer_to(action)) if error is None else question.fail(error)
                case Commit():
                    self._do(self._commit(action))

    def _answer_to(self, answer: Answer) -> Any:
        return answer.value

    def _commit(self, commit: Commit) -> list[Action]:
        number, reports = commit.number, commit.reports
        try:
            path = self._reporting.commit(commit, self._save_variables)
        except PsClusterError as error:
            return self._session.committed_now(number, None, error)
        if path is not None:
            self._updates = {rank: report.updates for rank, report in reports.items()}
        return self._committed(number, path)

    def _committed(self, number: int, path: str | None) -> list[Action]:
        return self._session.committed_now(number, path)

    def close(self) -> None:
        """Close what is open."""
        self._reporting.close()
