"""Reshards variables of a job: the shell around `reshard`, which says what is done when."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pscluster.coordinator.job.context import HasJob, JobContext
from pscluster.coordinator.job.terms import check_restored
from pscluster.coordinator.moves.balance import PlacedShard
from pscluster.coordinator.moves.mover import HOLD_SECONDS, held
from pscluster.coordinator.moves.plan import ProposedCut
from pscluster.coordinator.moves.reshard import ENDS, Reshard, Step, owners_of, remembered
from pscluster.coordinator.moves.table_cut import TableCopy, check_bytes, counted, partition_of_table
from pscluster.coordinator.moves.variable_cut import VariableCopy
from pscluster.coordinator.variables.encodings import check_shards
from pscluster.coordinator.variables.partitioners import (
    FixedShardsPartitioner,
    HashPartitioner,
    ModuloPartitioner,
    Partitioner,
    partition_for,
)
from pscluster.core.dtypes import dtype_named
from pscluster.core.errors import MisuseError, PsClusterError, UnavailableError, WaitTimeoutError
from pscluster.core.fault_points import reach
from pscluster.core.ids import fresh_id
from pscluster.ps.client.placement.reshard_steps import ReshardSteps
from pscluster.ps.spec import RESERVED, row_order_message
from pscluster.v1 import ps_pb2

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NewCut:
    """A variable that was resharded."""

    variable: str
    before: int  # the number of shards that it had
    num_shards: int  # and has now
    row_order: str  # "modulo" or "hash"; "": its shards are ranges of rows
    nbytes: int  # that were copied, with slots and averages
    seconds: float
    held_seconds: float  # during which no function ran

    def __str__(self) -> str:
        order = f" by {self.row_order}" if self.row_order else ""
        return (
            f"{self.variable}: cut{order} into {self.num_shards} shards instead of {self.before}, {self.nbytes:,} "
            f"bytes in {self.seconds:.3f} s, functions waited for {self.held_seconds:.3f} s"
        )


@dataclass(slots=True)
class _Course:
    """What one of them has by now."""

    old: ps_pb2.VariableSpec
    final: ps_pb2.VariableSpec  # of the variable once it is cut
    made: ps_pb2.VariableSpec  # the same, until then
    order: str  # of its rows, as NewCut says it
    sizes: list[int]  # of the new shards, in elements or, of a table by id, rows
    steps: ReshardSteps
    rows: VariableCopy | TableCopy
    reshard: Reshard = field(default_factory=Reshard)
    state: ps_pb2.ShardState = field(default_factory=ps_pb2.ShardState)  # of the variable
    named: Mapping[int, set[int]] = field(default_factory=dict)
    failure: PsClusterError | None = None


class _Pause:
    """Lets no function run, nor another thread of the script use a variable, from `begin` to the end of the block."""

    def __init__(self, context: JobContext) -> None:
        self._context, self._stack, self.begun = context, contextlib.ExitStack(), 0.0

    def __enter__(self) -> _Pause:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def begin(self) -> None:
        """Wait until functions and other threads have ended, unless it has begun. WaitTimeoutError if they don't."""
        if self.begun:
            return
        context = self._context
        for sender in list(context.senders):
            sender.settle(HOLD_SECONDS)
        with contextlib.ExitStack() as entered:  # left if one can't be: what is made is given up without a pause
            entered.enter_context(context.placing)
            entered.enter_context(held(context))
            entered.enter_context(context.client.gate.closed(HOLD_SECONDS))
            check_restored(context)
            self._stack.push(entered.pop_all())
        self.begun = time.monotonic()


class Resharder:
    """Cuts variables of one job otherwise, one at a time. Thread-safe."""

    def __init__(self, job: HasJob) -> None:
        self._context = job.context

    def why_not(self, cut: ProposedCut) -> str:
        """Return why a cut can't be made while the job lives; "" if it can."""
        spec = self._context.client.describe_variable(cut.variable)
        known = next((variable for variable in self._context.variables.all if variable.name == cut.variable), None)
        if spec.HasField("table"):
            if cut.proposed == cut.num_shards or cut.proposed < 1:
                return f"it has {cut.num_shards} shards, and is to have {cut.proposed}"
        elif cut.proposed <= cut.num_shards:
            return "it has no more rows to be cut into more shards"
        if known is None:
            return "the script has not made it yet, and it may be a global array's: apply a plan after that"
        if known.laid_out:
            return "its shards are the blocks of a global array: make that with another layout, in a new variable"
        return ""

    def cut(self, cut: ProposedCut, loads: Sequence[PlacedShard]) -> NewCut:
        """Cut a variable as proposed, onto servers by the loads of all shards.

        Raises:
            WaitTimeoutError: functions or other threads of the script have not ended; nothing has changed.
            UnavailableError, PsClusterError: it could not be done, and was undone; the message says why.
            PSUnavailableError: a server is lost, and the job with it.
        """
        context, client, begin = self._context, self._context.client, time.monotonic()
        with context.moving, _Pause(context) as pause:
            check_restored(context)
            client.directory()  # wait for a server that is down here, not while functions are paused
            course = self._course(cut, loads, pause)
            self._run(course, pause)
            end = time.monotonic()
        old, final = course.old, course.final
        held_seconds = end - pause.begun
        made = NewCut(
            old.name,
            len(old.owners),
            len(final.owners),
            course.order,
            course.rows.copied,
            end - begin,
            held_seconds,
        )
        logger.info("%s", made)
        context.event_log.record("coordinator", "note", str(made))
        return made

    def _course(self, cut: ProposedCut, loads: Sequence[PlacedShard], pause: _Pause) -> _Course:
        context, client = self._context, self._context.client
        old = client.describe_variable(cut.variable)
        if len(old.owners) != cut.num_shards:
            raise MisuseError(f"variable {old.name!r} now has {len(old.owners)} shards, not {cut.num_shards}")
        steps = ReshardSteps(client, fresh_id(), old.id)
        if is_table := old.HasField("table"):
            pause.begin()  # which rows are where has to be known, and stay so
            sizes, row_bytes = counted(steps, old, cut.proposed)
            partition = partition_of_table(old, sizes)
        else:
            partition = partition_for(_partitioner_of(cut, old), tuple(old.shape), dtype_named(old.dtype), old.name)
            check_shards(partition, old.push_top_k, old.name)
            sizes, row_bytes = [block.size for block in partition.blocks], 0
        others, load = [0.0] * client.num_servers, 0.0
        for shard in loads:
            if shard.variable == old.name:
                load += shard.load
            elif shard.server < len(others) and not old.table.max_bytes:  # which is for each server alike
                others[shard.server] += shard.load
        number, evaluation = context.variables.numbers(2)
        final, made = ps_pb2.VariableSpec(), ps_pb2.VariableSpec()
        final.CopyFrom(old)
        final.id, final.origin, final.placement = number, old.origin or old.id, 0
        del final.splits[:], final.owners[:]
        final.splits.extend(ps_pb2.AxisSplit(ends=ends) for ends in partition.ends)
        final.owners.extend(owners_of(sizes, load or 1.0, others))
        final.shape[:] = partition.shape
        check_bytes(final, sizes, row_bytes)
        final.ClearField("row_order")
        if (order := row_order_message(partition.order)) is not None:
            final.row_order.CopyFrom(order)
        made.CopyFrom(final)
        made.name, made.evaluation = f"{RESERVED}cut/{number}/{old.name}", evaluation
        rows = TableCopy(steps, old, final) if is_table else VariableCopy(client, steps, old, final)
        return _Course(old, final, made, "hash" if is_table else final.row_order.kind, sizes, steps, rows)

    def _run(self, course: _Course, pause: _Pause) -> None:
        reshard = course.reshard
        while reshard.step not in ENDS:
            try:
                if reshard.step is Step.CAPTURE:
                    pause.begin()
                self._take(course)
            except PsClusterError as error:
                refused = not isinstance(error, UnavailableError)
                course.failure = course.failure or error
                if not reshard.failed(refused=refused):
                    raise
                logger.info("%s can't be resharded: %s", course.old.name, error)
            except BaseException:  # Ctrl-C, or no memory
                if reshard.failed(refused=False):
                    with contextlib.suppress(PsClusterError):
                        course.steps.abandon(course.made)
                raise
            else:
                reshard.succeeded()
        if reshard.step is Step.UNDONE:
            why = course.failure
            if isinstance(why, WaitTimeoutError):  # of the pause
                raise why
            text = f"variable {course.old.name!r} was not resharded: {why}"
            raise UnavailableError(text) if isinstance(why, UnavailableError) else PsClusterError(text)
        self._context.variables.cut_otherwise(course.old, course.final)
        if (dispatcher := self._context.dispatcher) is not None:
            for source in set(course.old.owners):
                for target in set(course.final.owners) - {source}:
                    dispatcher.servers.shard_moved(source, target)
            dispatcher.state.resharded.append(course.final)

    def _take(self, course: _Course) -> None:
        steps = course.steps
        match course.reshard.step:
            case Step.MAKE:
                steps.make(course.made)
            case Step.TRACK:
                course.rows.track()
            case Step.AHEAD:
                course.rows.copy_ahead()
                reach("coordinator.reshard.ahead")
            case Step.CAPTURE:
                captured = [steps.capture(server, shard) for shard, server in enumerate(course.old.owners)]
                states, named, pages = zip(*captured, strict=True)
                course.state = course.rows.capture(states, pages)
                course.named = remembered(named)
            case Step.COPY:
                course.rows.copy_rest()
                self._settle(course)
                reach("coordinator.reshard.copied")
            case Step.SEAL:
                steps.seal()
                reach("coordinator.reshard.sealed")
            case Step.DECIDE:
                steps.adopt([0], course.final)
                reach("coordinator.reshard.decided")
            case Step.ADOPT:
                if others := range(1, self._context.client.num_servers):
                    steps.adopt(others, course.final)
                reach("coordinator.reshard.adopted")
            case Step.ABANDON:
                steps.abandon(course.made)

    @staticmethod
    def _settle(course: _Course) -> None:
        """Give each new shard its part of the counts, and what is remembered."""
        whole = sum(course.sizes) or 1
        for shard, server in enumerate(course.final.owners):
            state = ps_pb2.ShardState()
            state.CopyFrom(course.state)
            state.traffic *= course.sizes[shard] / whole
            course.steps.settle(server, shard, state, course.named)


def _partitioner_of(cut: ProposedCut, spec: ps_pb2.VariableSpec) -> Partitioner:
    """Return the partitioner that makes the cut that is proposed."""
    if spec.row_order.kind == "modulo":
        return ModuloPartitioner(cut.proposed)
    if spec.row_order.kind == "hash" or cut.by_rows:
        return HashPartitioner(cut.proposed, seed=spec.row_order.seed)
    return FixedShardsPartitioner(cut.proposed)
