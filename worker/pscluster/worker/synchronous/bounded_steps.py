"""Calls a step function once for each step of a run with bounded staleness, whose updates are applied as they come.

What happens if an attempt ends too early (a worker dies, a replica fails, the coordinator stops it):

- A replica's completed steps stay. It goes on after them, also on a worker that has restarted: server 0 knows how many
  they are and where the iterators were, and what they have taken is skipped.
- A step that was not complete runs again, on the same elements. Updates that it had made count once, like those of any
  function that runs again.
- If all steps are complete, and only their results are lost, the last one is repeated for its result.

Results of steps that only an earlier attempt had computed are lost.

Where steps overlap (`fit(..., overlap=n)`, see `overlap`), a step is taken when the function returns, and complete when
its pushes are acknowledged:

    TAKING --the function returns--> TAKEN --all pushes acknowledged--> COMPLETE, reported with the next step's end
           --it raises, or a push of an earlier step has failed--> the attempt fails; steps that are not complete run
                                                                   again, and their updates count once

The next step begins when at most n are taken and not complete, and the bound holds; the last one of a call, and one
that finds the data at its end, wait for all. Elements of steps that are not complete, and the one that is taken ahead
for `lookups`, are given again by the next attempt.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from pscluster.core.context import FunctionContext
from pscluster.core.errors import ProtocolError
from pscluster.ps.client.overlap.queue import StepOverlap
from pscluster.ps.client.synchronous.bounded import BoundedSteps
from pscluster.v1 import ps_pb2, worker_pb2
from pscluster.worker.collectives.gang import Gang
from pscluster.worker.collectives.replica import ReplicaContext
from pscluster.worker.data.per_worker import EndOfIterator
from pscluster.worker.job import Job
from pscluster.worker.steps.results import NumberedResults
from pscluster.worker.synchronous.step_iterators import StepIterators

_NO_COLLECTIVES = (
    "replicas with staleness above 0 are in different steps, where a collective would have each wait for the others: "
    "use staleness=0, or variables for what they share"
)


@dataclasses.dataclass(slots=True)
class Bounded:
    """What the library knows of a step that runs under a bound: see `FunctionContext.bounded`."""

    replicas: int
    iterators: StepIterators
    ahead: Any = None
    """What takes elements for overlapping steps, one ahead, made by the first step of the call."""
    has_next: bool = False
    """Whether the call has another step after the present one."""

    def take_from(self, iterator: Any) -> None:
        """Note that the step has taken an element from an iterator."""
        self.iterators.take_from(iterator)


def run_bounded(
    message: worker_pb2.Gang, context: FunctionContext, job: Job, call: Callable[[], Any]
) -> tuple[int, Any]:
    """Call a function for each step; return how many are complete, and the results that are collected, by step.

    What the function raises; errors as of `BoundedSteps.may_begin`.
    """
    asked, gang, client = message.steps, Gang.of(message), job.client()
    if not asked.staleness >= 0:
        raise ProtocolError(f"a staleness of {asked.staleness}")
    steps = BoundedSteps(
        client.exchanges,
        client.updater.header(context),
        run=asked.run,
        first=asked.first,
        epoch=asked.epoch,
        replica=gang.rank,
        replicas=gang.size,
        staleness=asked.staleness,
        seconds=gang.seconds,
        metrics=job.metrics.of_replica(gang.rank),
    )
    iterators, results = StepIterators(), NumberedResults(asked.collect)
    bounded, overlap = Bounded(gang.size, iterators), _overlap_of(context, asked.staleness)
    replica: ReplicaContext = context.replica
    replica.refuse_collectives(_NO_COLLECTIVES)
    last = asked.first + asked.count
    goes_on = True
    try:
        if asked.open or (asked.first and job.steps_taken.get(gang.rank) != (asked.run, asked.first)):
            repeats = _go_on(steps, iterators, last, job, gang.rank)
            goes_on = repeats or steps.may_begin(context, steps.report({}, {}))
        steps.taken = base = steps.completed
        positions: deque[tuple[dict[int, int], dict[int, int]]] = deque()  # before and after steps not yet complete

        def complete(number: int) -> ps_pb2.Contribution:
            """Take note that this many steps are complete; return what to report."""
            before, after = dict[int, int](), dict[int, int]()
            while steps.completed < number:
                before, after = positions.popleft()
                steps.completed += 1
                iterators.confirm(after)
                job.before_last_step[gang.rank] = before
            job.steps_taken[gang.rank] = asked.run, steps.completed
            return steps.report(before, after)

        while goes_on and steps.taken < last:
            context.begin_step(steps.taken - asked.first)
            iterators.begin()
            context.bounded, bounded.has_next = bounded, steps.taken + 1 < last
            try:
                with context.in_turn():
                    result = call()
            except EndOfIterator:
                if overlap is not None:
                    overlap.settle()
                report = complete(steps.taken)
                report.ended = True
                steps.all_complete(context, report)
                break
            finally:
                context.bounded = None
            results.add(steps.taken - asked.first, result)
            positions.append((iterators.before, iterators.given))
            steps.taken += 1
            if steps.taken == last:
                if overlap is not None:
                    overlap.settle()
                goes_on = steps.all_complete(context, complete(steps.taken))
            else:
                if overlap is not None:
                    overlap.begin_step()
                done = steps.taken if overlap is None else base + overlap.steps_acknowledged
                goes_on = steps.may_begin(context, complete(done))
            if context.tell_progress is not None:
                context.tell_progress(context)
        if steps.completed < steps.taken and overlap is not None:
            overlap.settle()  # the data of another replica has ended
            steps.all_complete(context, complete(steps.taken))
    finally:
        iterators.rewind()
        steps.leave()
    return steps.completed, results.collected()


def _overlap_of(context: FunctionContext, staleness: float) -> StepOverlap | None:
    overlap: StepOverlap | None = context.overlap
    if overlap is not None and overlap.steps > staleness:
        raise ProtocolError(f"an overlap of {overlap.steps} steps with a staleness of {staleness:g}")
    return overlap


def _go_on(steps: BoundedSteps, iterators: StepIterators, last: int, job: Job, rank: int) -> bool:
    """Go on after the steps that this replica had completed. Return whether it only repeats the last one of them."""
    state, (run, taken) = steps.open(), job.steps_taken.get(rank, (0, 0))
    known = taken if run == steps.run else 0
    completed = max(steps.completed, state.own, known)
    if completed > last:
        raise ProtocolError(f"a replica has completed {completed} steps, of {last}")
    positions: Mapping[int, int] = state.after
    if repeats := completed == last:
        completed -= 1
        # The clock may not know of the last step: the attempt ended before the report, or the server has restarted.
        positions = state.before if state.own == last else job.before_last_step[rank]
    steps.completed = completed
    iterators.move(job, rank, positions, back=repeats)
    return repeats
