"""A variable that is resharded while its job lives: other shards, by ranges or a row order, on any servers. Pure.

What is decided is one fact: server 0 has saved a directory in which the variable's name means the new shards. Until
then it can be undone; from then on it is completed, by this coordinator or the next one.

    MAKE     all servers make the new shards, under another number and a reserved name: they can't be asked for
    TRACK    the old shards note from now on which rows change
    AHEAD    values, slots and averages go from the old shards to the new ones, by blocks of `MOVE_BYTES` through the
             coordinator, which reads one while it writes another; and what has changed meanwhile, until that is little
    CAPTURE  the old shards apply no more updates, and say what they have: counts, keys of functions, the last changes
    COPY     these follow, then counts, and what is remembered
    SEAL     all servers save the new shards, if they have forgotten nothing since MAKE
    DECIDE   server 0 puts the new variable in the old one's place, and saves that                    (the decision)
    ADOPT    the other servers do
    CUT      the handles of this process go on with the new shards; workers are told before their next function

Of an `EmbeddingTable`, rows are copied by their ids, which come and go while functions run: so all are copied in COPY,
and the barrier is before MAKE (see `table_cut`).

From CAPTURE on, all happens at a barrier: functions that have begun end first, queued ones wait, and so do other
threads of the script (`ps.client.placement.cuts.Gate`). So there is no update under way, none that a retried function
would repeat, and no reader. Functions that are retried later begin anew, with the new number; those with a key that
have ended are recognized by what the new shards remember: each new shard the updates that any old one has had.

Where replicas step together, the barrier lies between two calls of `run`. There all servers apply the steps that are
committed, and drop what else is staged of them (`held`); CAPTURE is refused by one that has something of such a step.
Steps are counted by run and server, not by shard, so a server that gets shards goes on with the next one. Copies that
replicas keep from one call to the next are dropped when their worker learns of the cut.

    MAKE -> TRACK -> AHEAD -> CAPTURE -> COPY -> SEAL -> DECIDE -> ADOPT -> CUT
      |       |        |         |        |       |        |
      +-------+--------+---------+--------+-------+--------+--refused--> ABANDON -> UNDONE

DECIDE is repeated until server 0 answers. It refuses only if it lacks the new shards, and then can't ever adopt them.

**A server restarts** at any point. If it has not sealed, it refuses SEAL, and all is undone: an old shard of it may
have lost updates that were copied. If it has, its new shards are saved, whether or not they are in the old ones'
place.

**A worker dies**: it runs nothing; when it is back, it is told.

**The coordinator dies** at any point. The next one finds a variable with an origin in its place on some server, and
has all others adopt it (`unfinished`); or on none, and drops the new shards like copies of an evaluation that has
ended. Old shards that were frozen are released when it takes the servers. No function runs before.

What may be lost: nothing by the cut itself, and nothing that was acknowledged, if the servers save what they
acknowledge. A server whose last generation is damaged falls back on one with the old shards: then the job is refused,
as after a move.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pscluster.core.errors import StaleError
from pscluster.v1 import ps_pb2


class Step(enum.Enum):
    """What is to be done next."""

    MAKE = enum.auto()
    TRACK = enum.auto()
    AHEAD = enum.auto()
    CAPTURE = enum.auto()
    COPY = enum.auto()
    SEAL = enum.auto()
    DECIDE = enum.auto()
    ADOPT = enum.auto()
    ABANDON = enum.auto()
    CUT = enum.auto()
    UNDONE = enum.auto()


_AFTER = {
    Step.MAKE: Step.TRACK,
    Step.TRACK: Step.AHEAD,
    Step.AHEAD: Step.CAPTURE,
    Step.CAPTURE: Step.COPY,
    Step.COPY: Step.SEAL,
    Step.SEAL: Step.DECIDE,
    Step.DECIDE: Step.ADOPT,
    Step.ADOPT: Step.CUT,
    Step.ABANDON: Step.UNDONE,
}

_UNDECIDED = frozenset((Step.MAKE, Step.TRACK, Step.AHEAD, Step.CAPTURE, Step.COPY, Step.SEAL))

ENDS = frozenset((Step.CUT, Step.UNDONE))


@dataclass(slots=True)
class Reshard:
    """How far it is."""

    step: Step = Step.MAKE

    def succeeded(self) -> None:
        """Go on after a step."""
        self.step = _AFTER[self.step]

    def failed(self, *, refused: bool) -> bool:
        """Go on after a step that has failed: was it refused, or is it not known? False: it can only be repeated."""
        if self.step in _UNDECIDED or (self.step is Step.DECIDE and refused):
            self.step = Step.ABANDON
            return True
        return False


def unfinished(directories: Sequence[Iterable[ps_pb2.VariableSpec]]) -> list[tuple[int, ps_pb2.VariableSpec]]:
    """Return what servers must still adopt, given what each holds: by server, the new variable as it is in its place.

    StaleError if a server has only an earlier cut of a variable: it has lost the new one.
    """
    held = [{spec.id: spec for spec in specs} for specs in directories]
    newest: dict[int, ps_pb2.VariableSpec] = {}
    for specs in held:
        for spec in specs.values():
            known = newest.get(spec.origin)
            if spec.origin and not spec.evaluation and (known is None or spec.id > known.id):
                newest[spec.origin] = spec
    wanted = []
    for origin, spec in newest.items():
        for server, specs in enumerate(held):
            if (here := specs.get(spec.id)) is not None:
                if here.evaluation:
                    wanted.append((server, spec))
            elif any(not other.evaluation and origin in (other.id, other.origin) for other in specs.values()):
                raise StaleError(
                    f"ps {server} lacks the shards of {spec.name!r} as it is cut now: it was restarted with what it "
                    "held before: start over with ParameterServerStrategy(..., resume=False), and restore a checkpoint"
                )
    return wanted


def owners_of(sizes: Sequence[int], load: float, loads: Sequence[float]) -> list[int]:
    """Return servers for new shards that share a load by their sizes, given the load of all else on each server.

    Each shard, in order, goes to the server that has least by then; among equals, to the first.
    """
    there, total = list(loads), sum(sizes) or 1
    counts = [0] * len(there)
    owners = []
    for size in sizes:
        server = min(range(len(there)), key=lambda index: (there[index], counts[index], index))
        there[server] += load * size / total
        counts[server] += 1
        owners.append(server)
    return owners


def merged(states: Sequence[ps_pb2.ShardState]) -> ps_pb2.ShardState:
    """Return the state of a variable from those of its shards: of counts the highest, of traffic the sum."""
    state = ps_pb2.ShardState(term=states[0].term)
    arrays = dict[str, None]()
    for of_shard in states:
        state.updates = max(state.updates, of_shard.updates)
        state.traffic += of_shard.traffic
        arrays.update(dict.fromkeys(of_shard.arrays))
        for optimizer, step in of_shard.steps.items():
            state.steps[optimizer] = max(step, state.steps[optimizer])
    state.arrays.extend(arrays)
    return state


def remembered(named: Iterable[Mapping[int, frozenset[int]]]) -> dict[int, set[int]]:
    """Return by key of a function which of its updates any of several shards has had."""
    together: dict[int, set[int]] = {}
    for of_shard in named:
        for key, nths in of_shard.items():
            together.setdefault(key, set()).update(nths)
    return together


def pieces(start: int, stop: int, rows: int) -> Iterator[tuple[int, int]]:
    """Yield the range [start, stop) in pieces of at most that size."""
    for at in range(start, stop, rows):
        yield at, min(at + rows, stop)
