"""One replica's part in the steps of a synchronous run: what it contributes, and the answers of server 0.

Updates that a step makes are kept until it ends (`step_updates`). Then, for each step:

    reduce   large dense gradients, by all replicas among themselves: each goes on with a block of them. Before that,
             each tells server 0 what it updates; so a replica that does not take part is told so there, and those that
             then miss it ask there why
    stage    the contributions for the other servers, to all of them at once; they are acknowledged once they are staged
    commit   those for server 0, and that all is staged. Small ones are answered once the step is committed, or after
             half a second; large ones at once, with the replicas that are missing
    wait     until the step is committed, in questions that are answered after half a second at most

In a run with backup a step counts with the first replicas only. So a replica that has computed one first asks whether
it is among them, unless it has nothing for other servers: then it asks by its COMMIT. If not, its updates are dropped.

The next read, on any server, then names the step that it follows; so a server that has only staged the step applies it
first. What is repeated after a lost connection changes nothing.

A step can also be repeated for its result only (`dry`): its updates are dropped.

Short steps can be taken without the servers, and several of them committed as if they were one: see `joint_steps`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pscluster.core.awake import AwakeTimer
from pscluster.core.context import FunctionContext
from pscluster.core.errors import MemberUnavailableError, MisuseError, ProtocolError
from pscluster.core.fault_points import reach
from pscluster.core.transport.frames import Buffer, padded, parts_of
from pscluster.ps.client.exchanges import Exchanges
from pscluster.ps.client.reads.plans import WholeVariable
from pscluster.ps.client.synchronous.gradient_forms import Array, Forms
from pscluster.ps.client.synchronous.joint_steps import JointSteps, Kept, StepAlone, fits
from pscluster.ps.client.synchronous.step_updates import StepUpdates
from pscluster.ps.request_metrics import ReplicaMetrics
from pscluster.ps.spec import with_step
from pscluster.v1 import ps_pb2

if TYPE_CHECKING:
    from pscluster.ps.client.updates.shard_update import ShardUpdate

_Kind = ps_pb2.Contribution

_ASK_SECONDS = 1.0
"""Between two questions to server 0, at most, unless it is slow to answer."""

_WAITING_BYTES = 64 << 10
"""Of a COMMIT that waits for those of the other replicas, which saves a round trip."""


class ReplicaSteps:
    """The steps of one replica in one attempt (epoch). For one thread."""

    def __init__(
        self,
        exchanges: Exchanges,
        header: ps_pb2.UpdateRequest,
        *,
        run: int,
        step: int,
        epoch: int,
        replica: int,
        replicas: int,
        seconds: float,
        backup: int = 0,
        metrics: ReplicaMetrics | None = None,
    ) -> None:
        """Begin with step number `step`.

        Args:
            header: the origin of all updates.
            seconds: how long the other replicas may be silent before their workers are asked whether they are there.
            backup: without how many of them a step is done.
        """
        self._exchanges = exchanges
        self._header = header
        self._run, self.step, self._epoch = run, step, epoch
        self._replica, self._replicas, self._seconds = replica, replicas, seconds
        self.backup = backup
        self._metrics = metrics or ReplicaMetrics()
        self.dry = False
        self.dropped = False
        """Whether the last step that was ended is committed without this replica."""
        self.updated_at_once = False
        """Whether a step may have updated an asynchronous variable."""
        self.collectives = 0, ""
        """How many the last step has called, and which was the last, and where."""
        self._updates = StepUpdates(reduces=replicas > 1 and not backup)  # all must take part in each step
        self.joint: JointSteps | None = None
        """The steps that are taken together, from when they are."""
        self.forms: tuple[Forms, Forms] | None = None
        """What `fits` has returned of the last step that was ended by itself."""
        self._committed_in = epoch
        """The epoch in which the last step was committed."""
        self.after = with_step(run, step, epoch)
        """Goes before each read."""

    # In a step

    def add(self, updates: Sequence[ShardUpdate]) -> None:
        """Keep updates until the step ends, as they are now. MisuseError if they can't be combined."""
        self._updates.add(updates, dry=self.dry)

    def add_blocks(self, updates: Sequence[ShardUpdate], variables: Sequence[tuple[int, str]]) -> None:
        """Keep updates of whole shards, each of which no other replica has; their values must not change any more.

        `variables` are all that the replicas update so, by number and name: the same for each of them.
        """
        self.note_other()
        self._updates.add_blocks(updates, variables, dry=self.dry)

    def note_reads(self, variables: Collection[int], *, whole: bool) -> None:
        """Take note of what is read of the servers, or of the copies if it is `whole`.

        MisuseError if this step has updated a variable: what it would read is still the value before.
        """
        if self.joint is not None and any(map(self.joint.knows, variables)):
            self.need_servers()
        self._updates.note_reads(variables, whole=whole)

    def need_servers(self) -> None:
        """Take note that the step asks for what only the servers have. StepAlone if they do not have it yet."""
        self.note_other()
        if self.taken:
            raise StepAlone

    def note_other(self) -> None:
        """Take note that the step does what steps that are taken together must not do."""
        self._updates.reads.other = True

    def copies_of(self, variables: Sequence[int], describe: Callable[[], list[WholeVariable]]) -> dict[int, Array]:
        """Return the values of those of these variables that the replica has copies of, by number."""
        if self.joint is None:
            return {}
        copies = self.joint.copies
        own = [variable for variable in variables if variable in copies.variables]
        self._updates.note_reads(own, whole=True)
        if not copies.knows(own):
            copies.describe(variables, describe())
        return {variable: copies.read(variable) for variable in own}

    # Between steps

    def open(self) -> ps_pb2.StepState:
        """Begin this epoch on server 0: return how many steps are committed, and the positions of the iterators."""
        return self._ask(_Kind.OPEN)

    def end(
        self,
        function: FunctionContext,
        positions: Mapping[int, int],
        before: Mapping[int, int] | None = None,
        *,
        ended: bool = False,
    ) -> bool:
        """End a step: return once it is committed. False if it never will be, since the data has `ended`.

        `positions` are those of the iterators after it, and `before` it, which only a run with backup needs: for the
        others it is where the step before has ended.

        It may be committed without this replica: see `dropped`. Then others may be, too, and `step` goes on after them.

        Raises:
            MisuseError: the replicas have not made the same updates.
            MemberTimeoutError: the worker of another one, which has not ended the step, does not answer.
            MemberUnavailableError: server 0 has restarted, and the attempt has to begin again, with backup.
            StaleError: this attempt is over.
        """
        self.dropped = False
        if self.dry:
            self._updates.clear()
            return True
        if ended:
            self._updates.clear()
        own = self._updates
        self.forms = None if ended or self.backup else fits(own.items, own.reduction.forms, own.reads)
        calls, last_call = self.collectives
        commit = _Kind(
            ended=ended,
            updated=own.contributed,
            reduced=own.reduction.digest,
            positions=positions,
            before=before if self.backup else None,
            calls=calls,
            last_call=last_call,
        )
        with self._waiting():
            goes_on = self._commit(function, commit)
        self._updates.clear()
        return goes_on

    def has_ended(self, function: FunctionContext) -> bool:
        """Return whether the data of a replica has ended for this step, as far as server 0 knows."""
        return self.joint is None and not self.dry and self._ask(_Kind.WAIT, None, function).ended

    @property
    def taken(self) -> int:
        """How many steps are taken together, and not committed."""
        return 0 if self.joint is None else self.joint.taken

    def forget_reads(self) -> None:
        """Forget what was read since the last step has ended."""
        self._updates.reads.clear()

    def take(self, function: FunctionContext, *, ended: bool) -> bool:
        """End a step as one of several, if it is like those of all replicas; return whether it is.

        If not, it has yet to be ended by itself, or called again, after those that are taken were committed.

        Args:
            ended: it is not, since its function has ended too early.

        Raises:
            MisuseError, MemberUnavailableError: as of collectives.
        """
        assert self.joint is not None
        own = self._updates
        try:
            with self._waiting():
                taken = self.joint.take(None if ended or own.reads.other else own.items, own.reduction)
        except (MemberUnavailableError, MisuseError):
            function.check()
            raise
        reach("client.step.reduced")
        if taken or ended:
            own.clear()
        return taken

    def commit_taken(self, function: FunctionContext, positions: Mapping[int, int], before: Mapping[int, int]) -> None:
        """Commit the steps that are taken, and go on after them; the step that has been called stays as it is.

        Errors as of `end`. `positions` are those of the iterators after the last one, and `before` it.
        """
        joint, own = self.joint, self._updates
        if joint is None or not joint.taken:
            return
        self._updates = StepUpdates(joint.contribution(), steps=joint.taken)
        commit = _Kind(updated=joint.variables, reduced=joint.digest, positions=positions, before=before)
        try:
            with self._waiting():
                if not self._commit(function, commit):
                    raise ProtocolError("the data of a replica has ended before steps that it has taken")
        finally:
            self._updates = own
        joint.clear()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            took = time.monotonic() - begin
            self._metrics.wait_seconds += took

    def _commit(self, function: FunctionContext, commit: ps_pb2.Contribution) -> bool:
        silence = AwakeTimer(self._seconds, _ASK_SECONDS)
        sent = False
        if self.backup:
            state, sent = self._find_place(function, commit, silence)
            if state.ended or state.place == ps_pb2.StepState.LATE:
                self.dropped = not state.ended
                if self.dropped:
                    self._metrics.dropped += 1
                    self._follow(state.committed)
                return self.dropped
        elif self._updates.reduction and not self._reduce(commit, function):
            return False
        if not sent:
            self._stage(function)
            reach("client.step.staged")
            state = self._ask(_Kind.COMMIT, commit, function)
        while not state.ended and state.committed <= self.step:
            self._check(function, state, silence)
            ahead = function.replica.calls_ahead()
            kind, updates = (_Kind.COMMIT, commit) if state.unknown else (_Kind.WAIT, None)
            state = self._ask(kind, updates, function)
            # Those that have yet to end this step were in it when they called.
            for replica in ahead.keys() & set(state.missing):
                raise ahead[replica]
        if not state.ended:
            self._follow(self.step + self._updates.steps)
        return not state.ended

    def _find_place(
        self, function: FunctionContext, commit: ps_pb2.Contribution, silence: AwakeTimer
    ) -> tuple[ps_pb2.StepState, bool]:
        """Ask whether the step counts with this replica until that is known and, if it does not, it is committed.

        Return the answer, and whether the replica's COMMIT is sent.
        """
        state_of, sent = ps_pb2.StepState, not self._updates.items.keys() - {0}
        state = self._ask(_Kind.COMMIT, commit, function) if sent else self._ask(_Kind.READY)
        while not (state.ended or state.place == state_of.ADMITTED or state.committed > self.step):
            self._check(function, state, silence)
            state, sent = self._ask(_Kind.READY), False
        return state, sent

    def _check(self, function: FunctionContext, state: ps_pb2.StepState, silence: AwakeTimer) -> None:
        """Raise an error if there is no use in waiting on."""
        function.check()
        if state.unknown and self.backup:
            raise MemberUnavailableError("ps 0 has restarted, and does not know who takes part in this step: try again")
        if silence.is_due():
            # All must have opened the attempt; then some may be late, also for good.
            spare = 0 if state.place == ps_pb2.StepState.EARLY else self.backup
            function.replica.check_answer(state.missing, f"not ended step {self.step}", spare)

    def _follow(self, committed: int) -> None:
        """Go on after steps, the last of which was committed in this epoch."""
        self.step, self._committed_in = committed, self._epoch
        self.after = with_step(self._run, committed, self._epoch)

    def go_on(self, state: ps_pb2.StepState, *, dry: bool = False) -> None:
        """Go on after the steps that are committed, and tell all servers. If `dry`, repeat the last one of them."""
        self.dry = dry
        self.step, self._committed_in = state.committed - dry, state.epoch
        self.after = with_step(self._run, state.committed, state.epoch)
        self.settle(range(1, len(self._exchanges.servers)))

    def settle(self, servers: Sequence[int]) -> None:
        """Have these servers apply all steps that are committed."""
        if not servers:
            return
        requests = {
            index: (self.after, *parts_of(ps_pb2.Request(read=ps_pb2.ReadRequest(job=self._header.job), last=True)))
            for index in servers
        }
        self._exchanges.exchange("pull", requests, lambda *_: None, None)

    def begin_on(self, servers: Sequence[int]) -> None:
        """Have these servers apply all steps that are committed, and drop what else is staged of earlier epochs."""
        requests = {index: self._request(_Kind.OPEN, None) for index in servers}
        self._exchanges.send_updates(requests, lambda *_: None, None)

    def _reduce(self, commit: ps_pb2.Contribution, function: FunctionContext) -> bool:
        """Reduce large gradients with the other replicas. False if the data of one of them has ended."""
        told = _Kind(updated=commit.updated, reduced=commit.reduced, calls=commit.calls, last_call=commit.last_call)
        if self._ask(_Kind.REDUCE, told, function).ended:
            return False
        try:
            for server, piece, values in self._updates.reduction.reduced(function.replica):
                self._updates.items[server].append(Kept(piece, padded([values]), values))
        except (MemberUnavailableError, MisuseError):
            function.check()
            if self._ask(_Kind.REDUCE, told, function).ended:  # raises what others have been told
                return False
            raise
        reach("client.step.reduced")
        return True

    def _stage(self, function: FunctionContext) -> None:
        requests = {index: self._request(_Kind.STAGE, index) for index in self._updates.items.keys() - {0}}
        self._exchanges.send_updates(requests, lambda *_: None, function)

    def _ask(
        self,
        kind: ps_pb2.Contribution.Kind,
        fields: ps_pb2.Contribution | None = None,
        function: FunctionContext | None = None,
    ) -> ps_pb2.StepState:
        """Send server 0 a contribution, with this step's updates if it is a COMMIT; return its answer."""
        request, buffers = self._request(kind, 0 if kind == _Kind.COMMIT else None)
        if fields is not None:
            request.update.contribution.MergeFrom(fields)
        # Large ones hold memory that other replicas may need for theirs.
        request.update.contribution.wait = kind == _Kind.COMMIT and sum(map(len, buffers)) <= _WAITING_BYTES
        states: list[ps_pb2.StepState] = []
        self._exchanges.send_updates({0: (request, buffers)}, lambda _, reply: states.append(reply.state), function)
        return states[0]

    def _request(self, kind: ps_pb2.Contribution.Kind, server: int | None) -> tuple[ps_pb2.Request, list[Buffer]]:
        """Return a contribution, with the updates of a server or without."""
        items = self._updates.items.get(server, []) if server is not None else []
        request = ps_pb2.Request()
        request.update.CopyFrom(self._header)
        of = request.update.contribution
        of.run, of.step, of.epoch, of.kind = self._run, self.step, self._epoch, kind
        of.replica, of.replicas, of.after, of.backup = self._replica, self._replicas, self._committed_in, self.backup
        if self._updates.steps > 1:
            of.together = self._updates.steps
        request.update.items.extend(kept.item for kept in items)
        return request, [buffer for kept in items for buffer in kept.buffers]
