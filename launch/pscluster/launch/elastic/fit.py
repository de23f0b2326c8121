"""`Trainer.fit` of an elastic run, whose members come and go with the workers. `session` decides; here it is done.

Each member is a function of its own, which runs once at most: if its worker is lost the function has ended, all servers
refuse its late updates, and another one is scheduled. What may happen here, and what becomes of it:

    a worker is lost-----------------> its function fails with WorkerLostError: the member has left
    a worker is told to stop---------> its member leaves with its next report (`FunctionQueue.is_leaving`)
    a worker dies too often----------> the cluster restarts it no more: the run goes on without it, if enough are left
    its node is gone-----------------> the same as for a worker that is lost, until the cluster has another place for it
    no worker is left----------------> the cluster cancels all functions with that error: the run fails at once
    there are too few for too long---> the run fails
    a function raises----------------> the others are stopped, and the run fails, as in other runs
    this process dies----------------> what is committed stays; the next fit() goes on after the newest checkpoint
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import time
from typing import Any

from pscluster.coordinator.local.monitor import ClusterError
from pscluster.coordinator.local.scaling import ScalableCluster
from pscluster.coordinator.queue.cluster_coordinator import ClusterCoordinator
from pscluster.coordinator.scheduling.calls.questions import Question
from pscluster.coordinator.scheduling.calls.remote_value import RemoteValue, RemoteValueStatus
from pscluster.core.checks import type_of
from pscluster.core.errors import (
    CancelledError,
    ConfigurationError,
    FunctionError,
    PsClusterError,
    PSUnavailableError,
    UnavailableError,
    WorkerLostError,
)
from pscluster.launch.answers.questions import Asked, report_of
from pscluster.launch.answers.rendezvous import place_among
from pscluster.launch.answers.session import Action, Answer
from pscluster.launch.elastic.requests import Requests
from pscluster.launch.elastic.session import Admit, ElasticSession, RankAnswer, SavedRows
from pscluster.launch.fit import POLL_SECONDS, Fit, MembersFailed

logger = logging.getLogger(__name__)


class ElasticFit(Fit):
    """The members of an elastic run while they run."""

    _session: ElasticSession
    _coordinator: ClusterCoordinator

    def _make_session(self) -> ElasticSession:
        assert self._scaling.limits is not None, "only then is this called"
        folder, latest = self._folder, self._folder.latest()
        committed = folder.committed
        saved = SavedRows(
            {} if latest is None else folder.rows(latest.number), folder.rows(committed) if committed else {}
        )
        self._values: dict[int, RemoteValue] = {}  # by number of the member
        self._returned: dict[int, Any] = {}
        return ElasticSession(
            *self._scaling.limits,
            committed=committed,
            seconds=self._run.report_timeout,
            join_seconds=self._scaling.join_timeout,
            saved=saved,
        )

    @property
    def _max_restarts(self) -> int:
        return self._run.failure.limit

    @property
    def _max_attempts(self) -> int:
        return 1

    def _run_members(self, coordinator: ClusterCoordinator, variables: Any) -> list[Any]:
        """Run the function as each member that there is; return what those return that come to its end."""
        session, cluster, self._coordinator = self._session, self._cluster, coordinator
        if not isinstance(cluster, ScalableCluster):
            raise ConfigurationError(
                f"the launcher made {type_of(cluster)}, whose number of workers can't change: give one number of "
                "workers, or another launcher, such as RayCluster"
            )
        member = self._member_function(coordinator, variables)
        assert self._scaling.limits is not None, "it is elastic"
        requests = Requests(self._folder, self._scaling.limits, cluster.scale)
        try:
            with self._job.clusters.using(cluster):
                while self._values or not session.over:
                    for number in session.schedule():
                        answer = functools.partial(self._ask, number)
                        self._values[number] = coordinator.schedule_with(
                            member, (number,), answer=answer, isolated=True
                        )
                    if unwanted := session.withdraw():
                        coordinator.withdraw([self._values[number] for number in unwanted])
                    with contextlib.suppress(queue.Empty):
                        question = self._questions.get(timeout=POLL_SECONDS)
                        self._note_ends()  # first: who asks to begin may come too late
                        self._handle(question)
                    self._note_ends()
                    requests.poll(time.monotonic())
                    self._do(session.expire(time.monotonic()))
                    if why := session.too_few(time.monotonic()):
                        raise MembersFailed({}, UnavailableError(f"{why}{_why_gone(cluster)}"))
        except BaseException as error:
            coordinator.cancel(self._values.values())
            # No member could be scheduled: no worker is left, or a server is lost. Others may have been ended first.
            cause = error.__cause__ if isinstance(error, CancelledError) else error
            if isinstance(cause, ClusterError | PSUnavailableError):
                raise MembersFailed({}, cause) from None
            raise
        if behind := sum(rows.behind for rows in session.rows.values()):
            logger.warning(
                "%s: %d rows that lost members had been given were not given out again, since the function had ended "
                "on all others: loop over shard.epochs(count), and report in the loop",
                self._folder.name,
                behind,
            )
        return [value for _, value in sorted(self._returned.items())]

    def _note_ends(self) -> None:
        """Take note of functions that have ended. Raise `MembersFailed` if one has failed."""
        for number, value in list(self._values.items()):
            if value.status is RemoteValueStatus.NOT_READY:
                continue
            del self._values[number]
            member = self._session.members.get(number)
            if value.status is RemoteValueStatus.READY:
                if member is not None:
                    self._returned[number] = value.fetch()
                self._do(self._session.end(number))
                continue
            error = _error_of(value)
            if value.status is RemoteValueStatus.CANCELLED and isinstance(error.__cause__, PsClusterError):
                raise MembersFailed({}, error.__cause__)  # that of the cluster
            if isinstance(error, FunctionError) and not isinstance(error, WorkerLostError):
                raise MembersFailed({}, error) if member is None else MembersFailed({member.rank: error})
            if member is not None:
                logger.warning("%s: rank %d has left, with its worker", self._folder.name, member.rank)
            self._do(self._session.leave(number))

    # What members ask

    def _decide(self, question: Question | Asked) -> list[Action]:
        asked, number, session = question.value, question.rank, self._session
        self._workers[number] = question.worker
        match asked["do"]:
            case "begin":
                return session.join(number, question)
            case "open":
                return session.open(number, asked["dataset"], int(asked["length"]), question)
            case "take":
                epoch, batch = int(asked["epoch"]), int(asked["batch"])
                return session.take(number, asked["dataset"], epoch, batch, question)
            case "report":
                report = report_of(asked)
                return session.report(number, 1, int(asked["number"]), report, question, time.monotonic())
            case "end":
                session.returned(number, asked["positions"])
                question.reply(None)
                return []
        return super()._decide(question)

    def _answer_to(self, answer: Answer) -> Any:
        if not isinstance(answer, RankAnswer):
            return answer.value
        ranked = {**answer.value, **place_among(answer.question.worker, self._hosts)}
        if not isinstance(answer, Admit):
            return ranked
        logger.info("%s: rank %d of %d begins", self._folder.name, answer.value["rank"], answer.value["size"])
        latest = self._folder.latest()
        return {
            **ranked,
            "committed": self._session.committed,
            "latest": None if latest is None else [latest.number, latest.path],
            "restored": {},
            "furthest": {},
            "updates": [],
        }

    def _committed(self, number: int, path: str | None) -> list[Action]:
        session = self._session
        leaving = {member for member in session.members if self._coordinator.is_leaving(self._workers[member])}
        for member in leaving:
            logger.info("%s: rank %d leaves, with its worker", self._folder.name, session.members[member].rank)
        return session.committed_now(number, path, leaving=leaving)


def _error_of(value: RemoteValue) -> BaseException:
    try:
        value.fetch()
    except Exception as error:
        return error
    raise AssertionError("it has failed")


def _why_gone(cluster: ScalableCluster) -> str:
    """Return what the cluster knows of workers that it has given up."""
    try:
        cluster.check()
    except ClusterError as error:
        return f". {error}"
    return ""
