"""Calls a step function once for each step of a synchronous run, and ends each step together with the other replicas.

What happens if an attempt ends too early (a worker dies, a replica fails, the coordinator stops it):

- A step that was not committed is as if it had never begun: its updates are dropped, and the iterators give its
  elements again.
- The next attempt asks server 0 how many steps are committed, and where the iterators were. It goes on from there, also
  on a worker that has restarted, or runs the replica for another one that is lost, where iterators begin anew: what the
  committed steps have taken is skipped.
- If all steps are committed, and only their results are lost, the last one is computed again for its result, on the
  same elements, with the variables as they are after it; what it updates is dropped. Not by a replica without which it
  was committed.

In a run with backup a step may be committed without this replica. What it took for that step is gone, or is given again
in its next one (`requeue_dropped`).

Results of committed steps that only an earlier attempt had computed are lost: they are missing in what `ALL` collects,
and in the `MEAN`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from pscluster.core.context import MAX_STEPS, FunctionContext
from pscluster.core.errors import MemberUnavailableError, MisuseError, ProtocolError, PsClusterError
from pscluster.core.limits import check_count
from pscluster.ps.client.client import PsClient
from pscluster.ps.client.synchronous.copies import Copies
from pscluster.ps.client.synchronous.joint_steps import MAX_SECONDS, JointSteps, StepAlone
from pscluster.ps.client.synchronous.reduction import agree
from pscluster.ps.client.synchronous.steps import ReplicaSteps
from pscluster.v1 import worker_pb2
from pscluster.worker.collectives.gang import Gang
from pscluster.worker.collectives.replica import ReplicaContext
from pscluster.worker.data.per_worker import EndOfIterator, WorkerIterator
from pscluster.worker.job import Job
from pscluster.worker.steps.results import NumberedResults
from pscluster.worker.synchronous.bounded_steps import run_bounded
from pscluster.worker.synchronous.step_iterators import StepIterators

COSTLY_BYTES = 64 << 20
"""Of large gradients. From here on steps are taken together only if at least two fit between two commits."""

_NO_COLLECTIVES = (
    "with backup above 0 replicas are in different steps, where a collective would have each wait for the others: use "
    "backup=0, or variables for what they share"
)


class WorkerSteps(ReplicaSteps):
    """The steps of this worker, with the iterators that they take elements from."""

    def __init__(self, function: FunctionContext, *args: Any, **member: Any) -> None:
        super().__init__(*args, **member)
        self._function, self._commits = function, 0
        self.iterators = StepIterators()

        self._calls = 0  # of collectives, before the step
        self._began = self._step_seconds = 0.0
        self._before: Mapping[int, int] = {}  # positions before the last step that is taken and not committed

    def take_from(self, iterator: WorkerIterator) -> None:
        """Note that a step takes elements from an iterator."""
        self.iterators.take_from(iterator)

    def begin_step(self, function: FunctionContext, number: int) -> None:
        """Prepare for a step, of this number in the call."""
        function.begin_step(number)
        function.steps = self
        self.iterators.begin()
        self._calls = function.replica.calls
        self._began = time.monotonic()

    def end_call(self, function: FunctionContext) -> None:
        """Note what the step has done, and how long it took, now that its function has returned."""
        self._step_seconds = time.monotonic() - self._began
        calls = function.replica.calls - self._calls
        self.collectives = calls, function.replica.last_call if calls else ""
        if calls:
            self.note_other()

    def _follow(self, committed: int) -> None:
        super()._follow(committed)
        self._commits += 1
        # Not at the first: an attempt after a death commits one step by itself before it takes others together. A step
        # that kills its worker could do so as often as steps were taken together before it.
        if self._commits > 1 and self._function.tell_progress is not None:
            self._function.tell_progress(self._function)

    # Steps that are taken together

    def begin_joint(self, function: FunctionContext, client: PsClient, copies: Copies | None) -> bool:
        """Take the next steps together, if all replicas expect gradients of the same forms; return whether they do.

        Errors as of reads and collectives.
        """
        if copies is not None and copies.large.nbytes > COSTLY_BYTES and self._step_seconds > MAX_SECONDS / 2:
            copies = None  # too few steps would share a commit, which takes longer than the push of a gradient
        if copies is not None and not self._fetch(copies, function, client):
            copies = None
        if not agree(function.replica, 0 if copies is None else copies.digest) or copies is None:
            return False
        self._client = client
        self.joint = JointSteps(function.replica, copies)
        return True

    def take_one(self, function: FunctionContext, *, ended: bool, last: bool) -> bool:
        """Take a step together with others, and commit what is taken if it is time, or if the step is not taken.

        Return whether it is. There is no `joint` afterwards if that was the end of taking steps together.
        """
        joint = self.joint
        assert joint is not None
        taken = self.take(function, ended=ended)
        after = self.iterators.given if taken else self.iterators.before
        if taken:
            self._before = self.iterators.before
            if not joint.due and not last:
                return True
        is_slow = joint.taken == 1 and joint.copies.large.nbytes > COSTLY_BYTES
        self.commit_taken(function, after, self._before)
        self.iterators.confirm(after)
        if not taken or last or is_slow:
            self.joint = None
        else:
            self._fetch(joint.copies, function, self._client)
        if ended:
            self.iterators.rewind()
        return taken

    def commit_before_error(self, function: FunctionContext) -> None:
        """Commit what is taken before a function's error is raised, as if each step had been committed by itself."""
        if self.taken and function.replica.calls == self._calls:
            function.steps = None
            with suppress(PsClusterError):  # then the function's own error says more
                self.take_one(function, ended=True, last=False)

    def _fetch(self, copies: Copies, function: FunctionContext, client: PsClient) -> bool:
        """Fetch the copies, as they are after the last step that is committed."""
        joint, self.joint, function.steps = self.joint, None, self
        try:
            replica = function.replica
            return copies.fetch(client.read, client.optimizer_on, replica.replica_id, replica.num_replicas)
        finally:
            self.joint, function.steps = joint, None
            self.forget_reads()


def run_steps(step: worker_pb2.Step, context: FunctionContext, job: Job, call: Callable[[], Any]) -> tuple[int, Any]:
    """Call a function for each step of a message; return how many are committed, and the results that are collected.

    MisuseError if results can't be averaged; what the function raises; errors as of `ReplicaSteps.end`.
    """
    asked, gang, client = step.gang.steps, Gang.of(step.gang), job.client()
    check_count(asked.count, MAX_STEPS - 1, "steps of one function")
    if asked.staleness:
        return run_bounded(step.gang, context, job, call)
    job.know_placements(step.placements)  # contributions are not sent on to where a shard is
    last = asked.first + asked.count
    steps = WorkerSteps(
        context,
        client.exchanges,
        client.updater.header(context),
        run=asked.run,
        step=asked.first,
        epoch=asked.epoch,
        replica=gang.rank,
        replicas=gang.size,
        seconds=gang.seconds,
        backup=asked.backup,
        metrics=job.metrics.of_replica(gang.rank),
    )
    results = NumberedResults(asked.collect)
    if asked.backup:
        replica: ReplicaContext = context.replica
        replica.refuse_collectives(_NO_COLLECTIVES)
    try:
        # Also if this worker has not taken the step before, but has restarted since: its iterators begin anew.
        if asked.open or (asked.first and job.steps_taken.get(gang.rank) != (asked.run, asked.first)):
            _go_on(steps, last, job, gang.rank)
        elif asked.backup:
            steps.open()
        together = last - steps.step > 1 and not asked.backup and not steps.dry
        # They are expected to be like those of this function's last call. If not, the first one is taken by itself.
        # An attempt that fails leaves no copies: what other replicas were sending may still arrive in their memory.
        definition, copies = job.joint_copies.pop(gang.rank, ("", None))
        guessed = together and steps.begin_joint(context, client, copies if definition == step.definition else None)
        while steps.step < last:
            number = steps.step + steps.taken - asked.first
            ended = again = False
            steps.begin_step(context, number)
            try:
                with context.in_turn():
                    result = call()
                context.replica.raise_failure()  # others wait in that collective, or have failed, too
            except EndOfIterator:
                ended = True
            except StepAlone:
                again = True
            except Exception as error:
                # Others return where the data of one has ended, and may be awaited in a collective.
                ended = isinstance(error, (MemberUnavailableError, MisuseError)) and steps.has_ended(context)
                if not ended:
                    steps.commit_before_error(context)
                    raise
            finally:
                context.steps = None
            steps.end_call(context)
            joint = steps.joint
            if joint is not None:
                if steps.take_one(context, ended=ended or again, last=number + 1 == asked.count):
                    results.add(number, result)
                    job.steps_taken[gang.rank] = asked.run, steps.step
                    guessed = False
                    if steps.joint is None and steps.step < last:
                        copies = None
                    continue
                together, guessed = guessed, False
                copies = None
                job.steps_taken[gang.rank] = asked.run, steps.step
                if again:
                    continue
            if ended:
                if not steps.end(context, {}, ended=True):
                    break
                continue  # dropped: the data has ended for a later step
            if not steps.end(context, steps.iterators.given, steps.iterators.before):
                break
            if steps.dropped and asked.requeue_dropped:
                steps.iterators.rewind()
            else:
                steps.iterators.confirm()
            results.add(number, result, dropped=steps.dropped)
            if steps.dry:
                steps.step = last
            job.steps_taken[gang.rank] = asked.run, steps.step
            if together and steps.step < last:
                alike = None if steps.forms is None else Copies(*steps.forms)
                together = steps.begin_joint(context, client, alike)
                if together:
                    definition, copies = step.definition, alike
        steps.settle([index for index in range(1, client.num_servers) if index % gang.size == gang.rank])
        if copies is not None:
            job.joint_copies[gang.rank] = definition, copies
    except BaseException:
        context.drop_step(updated=steps.updated_at_once)
        raise
    finally:
        steps.iterators.rewind()
    return steps.step, results.collected() if asked.backup else results.of_all()


def _go_on(steps: WorkerSteps, last: int, job: Job, rank: int) -> None:
    """Go on after the steps that an earlier attempt has committed."""
    first, state = steps.step, steps.open()
    if not first <= state.committed <= last:
        raise ProtocolError(f"{state.committed} steps are committed, where {first} to {last} were expected")
    took_part = not steps.backup or not state.after or state.before != state.after  # in the last one of them
    steps.go_on(state, dry=state.committed == last and took_part)
    positions: Mapping[int, int] = state.before if steps.dry else state.after
    for key in state.after:
        if (iterator := job.iterator_of(key, rank)) is None:
            continue
        position = positions.get(key, 0)
        # If no step of these is committed, its iterator is there already, or further if a function took elements since,
        # or a step that was dropped.
        if iterator.given < position or (state.committed > first and (steps.dry or not steps.backup)):
            iterator.seek(position)
        if state.committed > first:
            steps.take_from(iterator)
