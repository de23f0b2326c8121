"""Which ids get a row in an `EmbeddingTable`, and which rows it drops: the user's choice, and its form in a spec.

What they mean for a shard is decided by `pscluster.ps.server.embedding.table_policy`.
"""

from __future__ import annotations

from dataclasses import dataclass

from pscluster.core import checks
from pscluster.core.errors import ProtocolError
from pscluster.v1 import ps_pb2

MAX_SEEN = 255
MAX_AGE = (1 << 31) - 1
"""The most steps or seconds since a row's last use: they are stored in 32 bits."""


@dataclass(frozen=True, slots=True)
class SeenTimes:
    """Admit an id with its `count`-th gradient; those before are dropped.

    Counts are of a fixed size (1 MiB a shard), so that one of some millions of ids may be admitted a little early. They
    are not saved: a server that restarts, or a shard that moves, counts anew. Those of a table that is cut into other
    shards go along.
    """

    count: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", checks.whole("count", self.count, at_least=1, at_most=MAX_SEEN))

    def message(self) -> ps_pb2.TableAdmission:
        return ps_pb2.TableAdmission(seen=self.count)


@dataclass(frozen=True, slots=True)
class WithProbability:
    """Admit an id with each of its gradients with this probability, which a hash of the seed, id and step decides."""

    probability: float
    seed: int = 0

    def __post_init__(self) -> None:
        probability = checks.real("probability", self.probability, above=0, at_most=1)
        object.__setattr__(self, "probability", probability)
        object.__setattr__(self, "seed", checks.whole("seed", self.seed, at_least=0, at_most=(1 << 63) - 1))

    def message(self) -> ps_pb2.TableAdmission:
        return ps_pb2.TableAdmission(probability=self.probability, seed=self.seed)


@dataclass(frozen=True, slots=True)
class LeastRecentlyUsed:
    """Drop the rows whose last update is the longest ago, as room is needed. Needs a `capacity` or `max_bytes`."""

    def message(self) -> ps_pb2.TableEviction:
        return ps_pb2.TableEviction(kind=ps_pb2.TableEviction.RECENCY)


@dataclass(frozen=True, slots=True)
class LeastFrequentlyUsed:
    """Drop the rows with the fewest updates, as room is needed. Needs a `capacity` or `max_bytes`."""

    def message(self) -> ps_pb2.TableEviction:
        return ps_pb2.TableEviction(kind=ps_pb2.TableEviction.FREQUENCY)


@dataclass(frozen=True, slots=True)
class Unused:
    """Drop rows that have had no update for a number of steps, or seconds. A step is an update of the row's shard."""

    steps: int | None = None
    seconds: int | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) is (self.seconds is None):
            raise ValueError("Unused takes steps or seconds: give one of them")
        for name in ("steps", "seconds"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, checks.whole(name, value, at_least=1, at_most=MAX_AGE))

    def message(self) -> ps_pb2.TableEviction:
        if self.steps is not None:
            return ps_pb2.TableEviction(kind=ps_pb2.TableEviction.STEPS, age=self.steps)
        return ps_pb2.TableEviction(kind=ps_pb2.TableEviction.SECONDS, age=self.seconds)


@dataclass(frozen=True, slots=True)
class SmallNorm:
    """Drop rows whose Euclidean norm is below this, except those that have just been updated."""

    below: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "below", checks.real("below", self.below, above=0))

    def message(self) -> ps_pb2.TableEviction:
        return ps_pb2.TableEviction(kind=ps_pb2.TableEviction.NORM, norm=self.below)


Admission = SeenTimes | WithProbability
Eviction = LeastRecentlyUsed | LeastFrequentlyUsed | Unused | SmallNorm

NEED_LIMIT = ps_pb2.TableEviction.RECENCY, ps_pb2.TableEviction.FREQUENCY
"""The kinds of eviction that take place only in a table that is full."""


def check_policies(spec: ps_pb2.VariableSpec) -> None:
    """Raise ProtocolError for policies that none of the classes above makes."""
    admission, eviction = spec.table.admission, spec.table.eviction
    try:
        if spec.table.HasField("admission"):
            if admission.seen:
                SeenTimes(admission.seen)
            else:
                WithProbability(admission.probability)
        match eviction.kind:
            case ps_pb2.TableEviction.STEPS | ps_pb2.TableEviction.SECONDS:
                Unused(eviction.age)
            case ps_pb2.TableEviction.NORM:
                SmallNorm(eviction.norm)
            case ps_pb2.TableEviction.RECENCY | ps_pb2.TableEviction.FREQUENCY:
                pass
            case _ if spec.table.HasField("eviction"):
                raise ValueError(f"eviction {eviction.kind}")
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"table {spec.name!r} has an invalid policy: {error}") from None
