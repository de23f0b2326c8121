"""A plan made live: its moves, and then its cuts; see `ParameterServerStrategy.apply`."""

from __future__ import annotations

from dataclasses import dataclass

from pscluster.coordinator.job.context import HasJob
from pscluster.coordinator.moves.mover import Moved, ShardMover
from pscluster.coordinator.moves.plan import Plan
from pscluster.coordinator.moves.resharder import NewCut, Resharder


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of a plan. `print` shows it."""

    moves: tuple[Moved, ...]
    cuts: tuple[NewCut, ...]
    left: tuple[tuple[str, str], ...]
    """Variables whose proposed cut was not made, and why."""

    def __str__(self) -> str:
        lines = [
            f"{moved.shard}: moved from ps {moved.source} to ps {moved.target}, {moved.nbytes:,} bytes "
            f"in {moved.seconds:.3f} s, its updates waited for {moved.frozen_seconds:.3f} s"
            for moved in self.moves
        ]
        lines += map(str, self.cuts)
        lines += [f"{variable}: not resharded, since {why}" for variable, why in self.left]
        return "\n".join(lines) or "nothing was to be done"


def apply_plan(job: HasJob, plan: Plan, *, synchronous: bool = False) -> Applied:
    """Make the moves of a plan, and then its cuts, one after the other.

    `synchronous`: replicas step together. MisuseError if it does not fit, and whatever a move or a cut raises.
    """
    mover, resharder = ShardMover(job, hold=synchronous), Resharder(job)
    with job.context.moving:
        mover.check(plan)
        why_not = {cut.variable: resharder.why_not(cut) for cut in plan.cuts}
        cuts = [cut for cut in plan.cuts if not why_not[cut.variable]]
        resharded = {cut.variable for cut in cuts}  # whose shards need not move before
        moves = [mover.carry_out(move) for move in plan.moves if move.variable not in resharded]
        made = [resharder.cut(cut, mover.loads(plan.by)[0]) for cut in cuts]
    left = tuple((variable, why) for variable, why in why_not.items() if why)
    return Applied(tuple(moved for moved in moves if moved is not None), tuple(made), left)
