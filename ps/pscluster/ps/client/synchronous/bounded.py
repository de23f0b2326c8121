"""One replica's part in a run with bounded staleness: says how far it is, and waits for those that are too far behind.

Updates are applied as they come, like those of any function. After each step the replica tells the clock on server 0
(see `server/synchronous/clock.py`) how many it has completed. If all others are far enough the answer comes at once;
if not, it asks again and again, and each question is answered after half a second at most.

Where steps overlap, a step that was taken is complete only once its pushes are acknowledged. At most `overlap` are not
when the replica reports, so it has completed `taken - overlap`, or more. No two replicas wait for each other as long as
`overlap` is at most the staleness: one that has reported waits for those that have completed fewer than
`taken - staleness` steps, so it is not among these itself, and none that it waits for can wait for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from pscluster.core.awake import AwakeTimer
from pscluster.core.context import FunctionContext
from pscluster.core.fault_points import reach
from pscluster.core.transport.frames import parts_of
from pscluster.ps.client.exchanges import Exchanges
from pscluster.ps.request_metrics import ReplicaMetrics
from pscluster.v1 import ps_pb2

_ASK_SECONDS = 1.0
"""Between two questions to server 0, at most, unless it is slow to answer."""


class BoundedSteps:
    """The steps of one replica in one attempt (epoch). For one thread."""

    def __init__(
        self,
        exchanges: Exchanges,
        header: ps_pb2.UpdateRequest,
        *,
        run: int,
        first: int,
        epoch: int,
        replica: int,
        replicas: int,
        staleness: float,
        seconds: float,
        metrics: ReplicaMetrics,
    ) -> None:
        """Begin with step number `first`.

        Args:
            header: the origin of all messages.
            staleness: how many steps this replica may be ahead of the slowest; perhaps infinite.
            seconds: how long the slowest may complete no step before their workers are asked whether they are there.
        """
        self._exchanges = exchanges
        self._header = header
        self._of = ps_pb2.Contribution(
            run=run, first=first, epoch=epoch, replica=replica, replicas=replicas, kind=ps_pb2.Contribution.TICK
        )
        self.run = run
        self._staleness = staleness
        self._metrics = metrics
        self._seconds = seconds if math.isfinite(staleness) else math.inf  # then none is too slow
        self.completed = first
        """How many steps this replica has completed: their pushes are acknowledged."""
        self.taken = first
        """How many its function has returned from."""
        self._slowest = first

    def open(self) -> ps_pb2.StepState:
        """Begin this attempt: return how many steps the replica had completed, and the positions of its iterators."""
        return self._tick(ps_pb2.Contribution(begins=True))

    def report(
        self, before: Mapping[int, int], after: Mapping[int, int], *, ended: bool = False
    ) -> ps_pb2.Contribution:
        """Return what to say: the positions of iterators before and after the last step, and whether the data ended."""
        return ps_pb2.Contribution(before=before, positions=after, ended=ended)

    def may_begin(self, function: FunctionContext, report: ps_pb2.Contribution) -> bool:
        """Report; return once the next step may begin, or False if none will, since the data of a replica has ended.

        In that case all replicas have completed as many steps as that one.

        Raises:
            MemberTimeoutError: the worker of one of the slowest does not answer.
            StaleError: this attempt is over.
        """
        return self._reach(function, report, self.taken - self._staleness)

    def all_complete(self, function: FunctionContext, report: ps_pb2.Contribution) -> bool:
        """Do the same once all replicas have completed as many steps as this one."""
        return self._reach(function, report, self.completed)

    def leave(self) -> None:
        """End this attempt: the replica is ahead of none."""
        self._metrics.staleness = 0

    def _reach(self, function: FunctionContext, report: ps_pb2.Contribution, steps: float) -> bool:
        until = int(max(steps, 0.0)) if self._slowest < steps else 0
        begin, silence = time.monotonic(), AwakeTimer(self._seconds, _ASK_SECONDS)
        reach("client.tick.before")
        state = self._tick(report, until)
        reach("client.tick.after")
        while not state.ended and (state.ending or self._slowest < until):
            function.check()
            slowest = self._slowest
            if silence.is_due():
                done = self._slowest - self._of.first
                function.replica.check_answer(state.missing, f"completed {done} steps of this call, and no more")
            state = self._tick(report, until)
            if self._slowest > slowest:
                silence.restart()
        if until or state.ending:
            took = time.monotonic() - begin
            self._metrics.wait_seconds += took
        return not state.ended

    def _tick(self, report: ps_pb2.Contribution, until: int = 0) -> ps_pb2.StepState:
        """Send server 0 a report; return its answer."""
        request = ps_pb2.Request(update=self._header, last=True)
        of = request.update.contribution
        of.CopyFrom(self._of)
        of.MergeFrom(report)
        of.step, of.until = self.completed, until
        states: list[ps_pb2.StepState] = []
        message = {0: parts_of(request)}
        self._exchanges.exchange("push", message, lambda _, reply, __: states.append(reply.update.state), None)
        self._slowest = max(self._slowest, states[0].committed)
        # At the bound it has completed one step more, and waits.
        self._metrics.staleness = int(min(max(self.taken - self._slowest, 0), self._staleness))
        return states[0]
