"""The move of one shard from one parameter server, the source, to another, the target, while training runs. Pure.

What is decided is one fact: the target has the shard in a generation that it has saved, under a spec of the variable
whose `placement` is one higher. Until then the move can be undone; from then on it is completed, by this coordinator or
the next one.

    TRACK    the source notes from now on which pages of the shard change
    COPY     all pages go to the target, then those that have changed meanwhile, again and again: see `Rounds`
    FREEZE   the source applies no more updates to the shard, and goes on answering reads. The last pages go to the
             target, with slots, counts, and the updates that are remembered to be applied once
    COMMIT   the target enters the shard, without serving it, and saves it                           (the decision):
             of what came with COPY and FREEZE, only what names it is left to be written
    DROP     the source drops the shard: a client that asks is told to look elsewhere, and asks the source where
    SERVE    the target serves it
    TELL     the other servers learn of the new spec, so that all have the same

So reads wait only from DROP to SERVE, for the coordinator's round trip: no reader of the source can miss what another
has written at the target. Updates of this one shard wait from FREEZE to SERVE: while the last pages travel and the
target saves. Functions are not stopped, and no barrier is needed: clients follow the shard
(`ps.client.placement.placements`), and repeat what was refused under the same keys, which have moved with it. Only in a
strategy whose replicas step together is the job held between two functions, from FREEZE to SERVE: contributions to
steps are staged on the servers that had the shards when the function began. If that cannot be had within a time, the
move is undone.

    TRACK -> COPY -> FREEZE -> COMMIT -> DROP -> SERVE -> TELL -> moved
      |       |        |         \\--no answer--> WITHDRAW --it had been saved--> DROP -> ...
      +-------+--------+                              \\--it was not--> PUT_BACK -> RELEASE -> TELL -> undone
              |
              +--> RELEASE -> DISCARD -> undone

WITHDRAW has the target say whether it has committed, and refuse to do so afterwards. It may have tried, and failed: a
generation that it was writing then may yet turn out whole, and have the shard. So PUT_BACK saves at the source a
placement that is higher still, with which the shard stays there.

**A server restarts** at any point. It has forgotten what it noted, what was frozen, staged, or not served yet. Before
it serves anything its coordinator tells it (`frozen`, `arriving`, `announced`): what the shell tells it changes
before the step is taken that makes it true, except that a shard is no longer arriving only after the source is known
to have dropped it. A source that has lost TRACKED, or a target that has lost what was staged, refuses the next step.

**The coordinator dies** at any point. Servers end what it had begun when the next one takes them over, and refuse what
it still sends. Of each variable the next coordinator takes the spec with the highest placement on any server
(`latest`), has that server save it, and tells all: so a move that was decided is completed, and one that was not has
not been. No function runs before.

**The target's generation with the shard is damaged**: the one before has no such shard, and can't be used; nor does
a target fall back on it, which removes it once the shard is saved. That is as if its only generation were damaged.

What may be lost: nothing by the move itself. A source that dies before the decision loses what its durability permits,
unless the shard was frozen: then the target has all that was acknowledged. The losses that a shard had before are still
counted where they were.

Moves exclude each other; and from FREEZE to TELL, checkpoints that are being marked, evaluations that are being begun,
and restores (`JobContext.placing`).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass

from pscluster.v1 import ps_pb2

SMALL_BYTES = 4 << 20
"""With so little left to copy, the shard is frozen: it takes milliseconds."""

MAX_ROUNDS = 8

SHRINKS = 0.7
"""A round is worth while if it leaves at most this much of what the one before it had to copy."""


class Step(enum.Enum):
    """What is to be done next."""

    TRACK = enum.auto()
    COPY = enum.auto()
    FREEZE = enum.auto()
    COMMIT = enum.auto()
    WITHDRAW = enum.auto()
    PUT_BACK = enum.auto()
    RELEASE = enum.auto()
    DISCARD = enum.auto()
    DROP = enum.auto()
    SERVE = enum.auto()
    TELL = enum.auto()
    MOVED = enum.auto()
    UNDONE = enum.auto()


_AFTER = {
    Step.TRACK: Step.COPY,
    Step.COPY: Step.FREEZE,
    Step.FREEZE: Step.COMMIT,
    Step.COMMIT: Step.DROP,
    Step.PUT_BACK: Step.RELEASE,
    Step.DISCARD: Step.UNDONE,
    Step.DROP: Step.SERVE,
    Step.SERVE: Step.TELL,
}

_ELSE = {
    Step.TRACK: Step.RELEASE,
    Step.COPY: Step.RELEASE,
    Step.FREEZE: Step.RELEASE,
    Step.COMMIT: Step.WITHDRAW,
    Step.DISCARD: Step.UNDONE,  # what is staged there is dropped with the coordinator
}
"""After a step that has failed. The others are repeated until they have succeeded, or the job is over."""

ENDS = frozenset((Step.MOVED, Step.UNDONE))


@dataclass(slots=True)
class Move:
    """How far one move is. `placement` is that of the variable before it."""

    placement: int
    step: Step = Step.TRACK
    _committed: bool = False
    _may_be_committed: bool = False

    def succeeded(self, *, committed: bool = False) -> None:
        """Go on after a step. `committed` is the answer to WITHDRAW."""
        match self.step:
            case Step.WITHDRAW:
                self._committed = committed
                self.step = Step.DROP if committed else Step.PUT_BACK
            case Step.RELEASE:
                self.step = Step.TELL if self._may_be_committed else Step.DISCARD
            case Step.TELL:
                self.step = Step.MOVED if self._committed else Step.UNDONE
            case Step.FREEZE:
                self._may_be_committed = True
                self.step = Step.COMMIT
            case Step.COMMIT:
                self._committed = True
                self.step = Step.DROP
            case step:
                self.step = _AFTER[step]

    def failed(self) -> bool:
        """Go on after a step that has failed; False: there is nothing to do but to repeat it."""
        self.step, before = _ELSE.get(self.step, self.step), self.step
        return self.step != before

    # What a server that restarts while the step is being taken must know

    @property
    def frozen(self) -> bool:
        """Whether the source must not apply updates."""
        return self.step in (Step.FREEZE, Step.COMMIT, Step.WITHDRAW, Step.PUT_BACK)

    @property
    def arriving(self) -> bool:
        """Whether the target must not serve the shard."""
        return self.step in (Step.COMMIT, Step.WITHDRAW, Step.DROP)

    @property
    def announced(self) -> int:
        """The placement that counts by now."""
        if self._committed:
            return self.placement + 1
        undone = self.step in (Step.PUT_BACK, Step.RELEASE, Step.TELL, Step.UNDONE)
        return self.placement + 2 if undone and self._may_be_committed else self.placement


@dataclass(slots=True)
class Rounds:
    """Decides how long a shard is copied while it changes. `page_bytes` are those of a page with all slots."""

    page_bytes: int
    _rounds: int = 0
    _before: float = math.inf

    def goes_on(self, pages: int) -> bool:
        """Return whether to copy these pages while updates continue; False: freeze the shard first."""
        shrunk = pages <= SHRINKS * self._before
        self._rounds, self._before = self._rounds + 1, pages
        return pages * self.page_bytes > SMALL_BYTES and shrunk and self._rounds <= MAX_ROUNDS


def latest(specs: Iterable[ps_pb2.VariableSpec]) -> dict[int, ps_pb2.VariableSpec]:
    """Return the spec of each variable that counts, by id: the one with the highest placement."""
    by_id: dict[int, ps_pb2.VariableSpec] = {}
    for spec in specs:
        if spec.id not in by_id or spec.placement > by_id[spec.id].placement:
            by_id[spec.id] = spec
    return by_id
