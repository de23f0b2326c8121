"""Moves shards between the parameter servers of a job: the shell around `decision`, which says what is done when."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pscluster.coordinator.job.context import HasJob, JobContext
from pscluster.coordinator.job.terms import check_restored
from pscluster.coordinator.moves.balance import PlacedShard, PlannedMove
from pscluster.coordinator.moves.copying import keep_rate
from pscluster.coordinator.moves.decision import ENDS, Move, Rounds, Step
from pscluster.coordinator.moves.plan import Measure, Plan, VariableUse, make_plan, measured, why_outdated
from pscluster.core.errors import ConfigurationError, MisuseError, PsClusterError, UnavailableError
from pscluster.core.fault_points import reach
from pscluster.core.ids import fresh_id
from pscluster.core.limits import MAX_COUNT
from pscluster.ps.client.placement.move_steps import MoveSteps, Pages
from pscluster.ps.handles.variables.variable import Shard, Variable
from pscluster.ps.optim.precision import compute_dtype
from pscluster.ps.spec import PAGE_ELEMENTS
from pscluster.ps.tables import row_items, width_of
from pscluster.v1 import ps_pb2

logger = logging.getLogger(__name__)

HOLD_SECONDS = 60.0
"""How long a move waits for the functions of replicas that step together to end, before it is undone."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A shard that has moved."""

    shard: str  # its name, such as "w/part_1"
    source: int  # the index of the server that had it
    target: int
    nbytes: int  # that were copied, with slots, those that changed meanwhile repeatedly
    seconds: float
    frozen_seconds: float  # during which its updates waited


@dataclass(slots=True)
class _Course:
    """What one move has by now."""

    shard: Shard
    source: int
    target: int
    spec: ps_pb2.VariableSpec  # of the variable, before
    steps: MoveSteps
    move: Move
    arrays: Sequence[str] = ()  # of the shard, by name
    pages: Pages = field(default_factory=lambda: np.empty(0, np.int64))  # which are to be copied
    copied: int = 0  # bytes
    state: ps_pb2.ShardState = field(default_factory=ps_pb2.ShardState)  # once it is frozen
    frozen_at: float = 0.0
    served_at: float = 0.0
    failure: PsClusterError | None = None

    @property
    def itemsizes(self) -> dict[str, int]:
        """Return how many bytes an element of each array takes, or an item of a table's rows."""
        if items := row_items(self.spec):
            return {name: width_of(self.spec, name) * 4 // items for name in self.arrays}
        dtype = self.shard.dtype
        return {name: (dtype if name == "value" else compute_dtype(dtype)).itemsize for name in self.arrays}

    def spec_with(self, placement: int) -> ps_pb2.VariableSpec:
        """Return the spec of this placement: the next one is that of the move, the one after it the one before."""
        spec = ps_pb2.VariableSpec()
        spec.CopyFrom(self.spec)
        spec.placement = placement
        if placement == self.spec.placement + 1:
            spec.owners[self.shard.index] = self.target
        return spec


@contextlib.contextmanager
def held(context: JobContext) -> Iterator[None]:
    """Let no function run within the block, which begins when all servers have applied all synchronous steps.

    They have nothing staged of other steps, then, unless another thread of the script is about to take some.

    WaitTimeoutError if a function runs too long.
    """
    with contextlib.ExitStack() as cut:
        if (dispatcher := context.dispatcher) is not None:
            cut.enter_context(dispatcher.waits.barrier(HOLD_SECONDS))
            context.settle_steps(anew=True)
        yield


class ShardMover:
    """Moves shards of one job, one at a time. Thread-safe. `hold`: no function runs from the freeze on."""

    def __init__(self, job: HasJob, *, hold: bool = False) -> None:
        self._context, self._hold = job.context, hold
        self._variables: dict[str, Variable] = {}

    def move(self, shard: Shard, target: int) -> Moved | None:
        """Move a shard to the server with this index while training runs; None if it is there already.

        Raises:
            ConfigurationError: there is no such server.
            MisuseError: the shard was deleted, or the job's replicas step together.
            UnavailableError, PsClusterError: it could not be moved, and is where it was; the message says why.
            PSUnavailableError: a server is lost, and the job with it.
        """
        context, client = self._context, self._context.client
        if not 0 <= target < client.num_servers:
            raise ConfigurationError(
                f"there is no ps {target} to move {shard.name!r} to: there are {client.num_servers}"
            )
        with context.moving:
            check_restored(context)
            (source,) = shard.owners
            if source == target:
                return None
            spec = client.describe_variable(shard.variable.name, source)
            if spec.id != shard.variable.id or spec.owners[shard.index] != source:
                raise MisuseError(f"{shard.name!r} can't be moved: it was deleted, or is an evaluation's")
            course = _Course(
                shard,
                source,
                target,
                spec,
                MoveSteps(
                    client,
                    fresh_id(),
                    spec.id,
                    shard.index,
                    source,
                    target,
                    shard.block.size,
                    row_elements=row_items(spec),
                ),
                Move(spec.placement),
            )
            return self._run(course)

    def plan(self, by: Measure) -> Plan:
        """Return what would balance all servers; see `ParameterServerStrategy.plan`."""
        shards, uses = self.loads(by)
        return make_plan(shards, uses, self._context.client.num_servers, by)

    def check(self, plan: Plan) -> None:
        """Raise MisuseError if a plan no longer fits."""
        places = {(shard.variable, shard.shard): shard.server for shard in self.shards()}
        if (why := why_outdated(plan, places, self._context.client.num_servers)) is not None:
            raise MisuseError(f"the plan no longer fits: {why}; nothing was moved: make a new one")

    def loads(self, by: Measure) -> tuple[list[PlacedShard], dict[str, VariableUse]]:
        """Return all shards, with the load of each, and how variables are used."""
        known, uses = measured(self._context.client.statuses(MAX_COUNT, shards=True), by)
        loads = {(shard.variable, shard.shard): shard.load for shard in known}

        def load_of(shard: PlacedShard) -> float:  # tables that grow hold less than they have room for
            return loads.get((shard.variable, shard.shard), shard.load if by == "bytes" else 0.0)

        return [replace(shard, load=load_of(shard)) for shard in self.shards()], uses

    def shards(self) -> list[PlacedShard]:
        """Return all shards of the job by the bytes that they have room for, also of variables not made again yet."""
        client, shards = self._context.client, list[PlacedShard]()
        for spec in client.directory()[0].variables:
            if spec.evaluation:
                continue
            variable = self._variables[spec.name] = Variable.of(spec, client)
            for shard in map(functools.partial(Shard, variable), range(variable.num_shards)):
                shards.append(PlacedShard(spec.name, shard.index, shard.owners[0], float(shard.nbytes)))
        return shards

    def carry_out(self, move: PlannedMove) -> Moved | None:
        """Move a shard of those that `shards` has returned; None if its variable was deleted meanwhile."""
        try:
            return self.move(Shard(self._variables[move.variable], move.shard), move.target)
        except MisuseError as error:
            logger.info("not moved: %s", error)
            return None

    def _run(self, course: _Course) -> Moved | None:
        begin, move = time.monotonic(), course.move
        with contextlib.ExitStack() as cut:
            while move.step not in ENDS:
                try:
                    if move.step is Step.FREEZE:
                        cut.enter_context(self._context.placing)
                        if self._hold:
                            cut.enter_context(held(self._context))
                    self._announce(course)
                    committed = self._take(course)
                except PsClusterError as error:
                    course.failure = course.failure or error
                    if not move.failed():
                        raise
                    logger.info("%s can't be moved to ps %d: %s", course.shard.name, course.target, error)
                else:
                    move.succeeded(committed=committed)
            self._announce(course)
        if move.step is Step.UNDONE:
            assert course.failure is not None
            raise _undone(course)
        seconds = time.monotonic() - begin
        moved = Moved(
            course.shard.name,
            course.source,
            course.target,
            course.copied,
            seconds,
            course.served_at - course.frozen_at,
        )
        logger.info(
            "%s has moved from ps %d to ps %d: %s bytes in %.3f s, its updates waited for %.3f s",
            moved.shard,
            moved.source,
            moved.target,
            f"{moved.nbytes:,}",
            moved.seconds,
            moved.frozen_seconds,
        )
        self._context.event_log.record(f"ps {moved.target}", "note", f"has {moved.shard}, from ps {moved.source}")
        return moved

    def _announce(self, course: _Course) -> None:
        """Have a server that restarts now be told how things stand."""
        move, spec = course.move, course.spec
        source, target = (
            ps_pb2.HeldShard(variable=spec.id, shard=course.shard.index, server=server)
            for server in (course.source, course.target)
        )
        self._context.announce(
            [course.spec_with(move.announced)],
            frozen=source if move.frozen else None,
            arriving=target if move.arriving else None,
        )

    def _take(self, course: _Course) -> bool:
        """Take the move's next step; return the answer to WITHDRAW."""
        steps, move = course.steps, course.move
        moved, back = course.spec_with(move.placement + 1), course.spec_with(move.placement + 2)
        match move.step:
            case Step.TRACK:
                course.arrays, course.pages = steps.track()
            case Step.COPY:
                self._copy(course)
            case Step.FREEZE:
                reach("coordinator.freeze.before")
                course.frozen_at = time.monotonic()
                course.state, pages = steps.freeze()
                pages = np.union1d(course.pages, pages)
                course.arrays = course.state.arrays
                course.copied += sum(steps.copy(course.itemsizes, pages))
                steps.stage(course.state)
            case Step.COMMIT:
                reach("coordinator.commit_move.before")
                steps.commit(course.state, moved)
                reach("coordinator.commit_move.after")
            case Step.WITHDRAW:
                return steps.withdraw(moved)
            case Step.PUT_BACK:
                steps.place(course.source, back, saved=True)
            case Step.RELEASE:
                steps.release()
            case Step.DISCARD:
                steps.discard(moved)
            case Step.DROP:
                steps.place(course.source, moved)
                reach("coordinator.serve.before")
            case Step.SERVE:
                steps.serve(moved)
                course.served_at = time.monotonic()
                reach("coordinator.serve.after")
            case Step.TELL:
                self._tell(course, course.spec_with(move.announced))
        return False

    def _copy(self, course: _Course) -> None:
        """Copy the shard while it changes, until little is left, or no less."""
        rounds = Rounds(PAGE_ELEMENTS * sum(course.itemsizes.values()))
        while rounds.goes_on(len(course.pages)):
            begin = time.monotonic()
            for nbytes in course.steps.copy(course.itemsizes, course.pages):
                course.copied += nbytes
                keep_rate(begin, nbytes)
                begin = time.monotonic()
            arrays, course.pages = course.steps.changed()
            if arrays != course.arrays:  # an optimizer's first gradient has come
                course.arrays = arrays
                rounds = Rounds(PAGE_ELEMENTS * sum(course.itemsizes.values()))

    def _tell(self, course: _Course, spec: ps_pb2.VariableSpec) -> None:
        """Have all servers, and this process, know where the variable's shards are."""
        context = self._context
        for server in range(context.client.num_servers):
            course.steps.place(server, spec)
        context.client.placements.learn([spec])
        if course.move.announced == course.move.placement + 1:
            context.variables.shard_moved(course.shard.nbytes, course.source, course.target)
            if context.dispatcher is not None:
                context.dispatcher.servers.shard_moved(course.source, course.target)
                context.dispatcher.state.placements += 1


def _undone(course: _Course) -> PsClusterError:
    """Return the error of a move that was undone."""
    why = course.failure
    text = f"{course.shard.name!r} stays on ps {course.source}, and was not moved to ps {course.target}: {why}"
    return UnavailableError(text) if isinstance(why, UnavailableError) else PsClusterError(text)
