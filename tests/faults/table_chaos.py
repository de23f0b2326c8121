"""Random operations on embedding tables while servers are killed and shards move, beside a model that predicts them.

The model knows of every id its values, its slot, when it was last updated and whether it has a row: so which rows are
dropped, too. It asks the table only where the product leaves something open: which of several rows that were last used
in the same update go first, and which ids are admitted once a server's counts of those without a row are gone with it.

    disturbances  on a thread: a server or both are killed with SIGKILL, a shard moves; operations go on meanwhile
    checkpoints   written, and at times restored: the model goes back as well
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.ps.strings import colliding

from pscluster.coordinator.api import (
    Checkpoint,
    EmbeddingTable,
    IndexedSlices,
    LocalCluster,
    ParameterServerStrategy,
    initializers,
    optimizers,
    table_policies,
)
from pscluster.core.errors import InvalidUpdateError, PsClusterError, UnavailableError
from pscluster.ps.tables import shards_of

DIM, IDS, SHARDS = 4, 1500, 3
RATE, MOMENTUM = np.float32(0.5), np.float32(0.5)
CAPACITY, AGE, SEEN = 300, 40, 2
TIMEOUT = 120.0
_FREQUENT = 31
"""The most frequent ids are those of this number and its multiples."""

Array = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]


@dataclass
class Rows:
    """What a table has of each id, by its number here. An id without a row has its initial values."""

    value: Array
    slot: Array
    used: Ids  # in updates of the shard
    times: Ids  # that it was updated
    present: npt.NDArray[np.bool_]
    updates: Ids  # by shard


@dataclass
class Twin:
    """A table, and a model of it."""

    table: EmbeddingTable
    ids: npt.NDArray[Any]  # integers or strings
    gradients: bool  # whether it gets gradients, or sums in their place
    limit: list[int] | None = None  # rows of each shard
    age: int | None = None
    admits: bool = False
    asked: int = 0  # how often the model had to

    def __post_init__(self) -> None:
        self.initial = self.table.lookup(self.ids)
        count = len(self.ids)
        self.rows = Rows(
            self.initial.copy(),
            np.zeros_like(self.initial),
            np.zeros(count, np.int64),
            np.zeros(count, np.int64),
            np.zeros(count, np.bool_),
            np.zeros(SHARDS, np.int64),
        )
        self.shard = shards_of(self.table.row_ids(self.ids), SHARDS)
        self.seen: dict[int, tuple[int, int]] = {}  # ids without a row: how often, and after how many losses first

    def lookup(self, of: Ids) -> None:
        found = self.table.lookup(self.ids[of])
        np.testing.assert_array_equal(found, self.rows.value[of], err_msg=f"{self.table.name} {self.ids[of]}")

    def check(self) -> None:
        """Compare all of it."""
        assert len(self.table) == int(self.rows.present.sum()), self.table.name
        self.lookup(np.arange(len(self.ids)))

    def assign(self, of: Ids, values: Array) -> None:
        """Replace rows; ids are given once."""
        self.table.scatter_update(IndexedSlices(values, self.ids[of]))
        self._updated(of, False)
        self.rows.value[of] = values

    def add(self, of: Ids, values: Array) -> None:
        """Add to rows; of equal ids the sum."""
        self.table.scatter_add(IndexedSlices(values, self.ids[of]))
        of, sums = _summed(of, values)
        self._updated(of, False)
        self.rows.value[of] += sums

    def gradient(self, of: Ids, values: Array, optimizer: optimizers.Optimizer, losses: int) -> None:
        """Apply gradients by SGD with momentum; `losses`: how often a server may have forgotten what it has seen."""
        optimizer.apply_gradients([(IndexedSlices(values, self.ids[of]), self.table)])
        of, sums = _summed(of, values)
        if self.admits:
            kept = self._admitted(of, sums, losses)
            of, sums = of[kept], sums[kept]
        self._updated(of, True)
        rows = self.rows
        rows.slot[of] = rows.slot[of] * MOMENTUM - sums * RATE
        rows.value[of] += rows.slot[of]

    def _admitted(self, of: Ids, sums: Array, losses: int) -> npt.NDArray[np.bool_]:
        """Return which of these ids have a row now, and whether that may be."""
        kept = self.rows.present[of].copy()
        new = np.flatnonzero(~kept)
        if not len(new):
            return kept
        self.asked += 1
        found, initial = self.table.lookup(self.ids[of[new]]), self.initial[of[new]]
        made = (found == initial - sums[new] * RATE).all(1)
        np.testing.assert_array_equal(found[~made], initial[~made])
        for number, has_row in zip(of[new].tolist(), made.tolist(), strict=True):
            before, since = self.seen.get(number, (0, losses))
            assert not has_row or before + 1 >= SEEN, f"{self.ids[number]} was admitted early"
            assert has_row or before + 1 < SEEN or since != losses, f"{self.ids[number]} was not admitted"
            self.seen[number] = before + 1, losses if not before else since
        kept[new] = made
        return kept

    def _updated(self, of: Ids, all_shards: bool) -> None:
        """Drop and make the rows that an update of these ids does, given once, and note their use."""
        rows = self.rows
        for shard in range(SHARDS):
            mine = of[self.shard[of] == shard]
            if not len(mine) and not all_shards:
                continue
            rows.updates[shard] += 1
            now = rows.updates[shard]
            others = np.setdiff1d(np.flatnonzero(rows.present & (self.shard == shard)), mine)
            gone = others[:0]
            if self.age is not None:
                gone = others[now - rows.used[others] > self.age]
            elif self.limit is not None and len(mine):
                gone = self._least_used(others, len(others) + len(mine) - self.limit[shard])
            rows.present[gone] = False
            rows.value[gone], rows.slot[gone], rows.times[gone] = self.initial[gone], 0, 0
            rows.present[mine], rows.used[mine] = True, now
            rows.times[mine] += 1

    def _least_used(self, others: Ids, over: int) -> Ids:
        """Return which rows make room: those last used the longest ago, and of them those used the fewest times."""
        if over <= 0:
            return others[:0]
        rank = self.rows.used[others] << 32 | self.rows.times[others]
        limit = np.sort(rank)[over - 1]
        sure, ties = others[rank < limit], others[rank == limit]
        needed = over - len(sure)
        if needed == len(ties):
            return np.concatenate((sure, ties))
        self.asked += 1
        found = self.table.lookup(self.ids[ties])
        dropped = (found == self.initial[ties]).all(1)
        assert dropped.sum() == needed, f"{needed} of {self.ids[ties]} go, but {dropped.sum()} went"
        np.testing.assert_array_equal(found[~dropped], self.rows.value[ties[~dropped]])
        return np.concatenate((sure, ties[dropped]))

    def restore(self, saved: Rows) -> None:
        """Go back to what was saved. A shard's clock goes on, and rows keep their ages, the latest being used now."""
        clocks = self.rows.updates
        self.rows = copy.deepcopy(saved)
        for shard in range(SHARDS):
            mine = self.rows.present & (self.shard == shard)
            self.rows.used[mine] += clocks[shard] - self.rows.used[mine].max(initial=0)
        self.rows.updates = clocks + 1
        self.seen.clear()


def _summed(of: Ids, values: Array) -> tuple[Ids, Array]:
    unique, inverse = np.unique(of, return_inverse=True)
    sums = np.zeros((len(unique), DIM), np.float32)
    np.add.at(sums, inverse, values)
    return unique, sums


@dataclass
class Counts:
    """What has happened."""

    operations: int = 0  # lookups and updates, of one id each
    calls: int = 0  # of several ids, which may repeat
    kills: int = 0
    moves: int = 0
    saves: int = 0
    restores: int = 0
    dropped: int = 0  # rows


@dataclass
class TableChaos:
    """Random operations on four tables: one that keeps its rows, one that is full, and those that expire and admit.

    The ids of the first two are strings, of which the most frequent have one hash.
    """

    strategy: ParameterServerStrategy
    cluster: LocalCluster
    folder: Path
    seed: int
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        initial = initializers.RandomUniform(-1.0, 1.0, seed=self.seed)
        policies = table_policies
        with self.strategy.scope():
            self._sgd = optimizers.SGD(float(RATE), momentum=float(MOMENTUM))
            keeps, admits, expires, full = (
                EmbeddingTable(DIM, initializer=initial, num_shards=SHARDS, **options)
                for options in (
                    {"ids": str},
                    {"admission": policies.SeenTimes(SEEN)},
                    {"eviction": policies.Unused(steps=AGE)},
                    {"capacity": CAPACITY, "eviction": policies.LeastRecentlyUsed(), "ids": str},
                )
            )
        ids = np.unique(self._rng.integers(-(1 << 63), (1 << 63) - 1, IDS))
        texts = ids.astype(np.str_)
        texts[_FREQUENT * np.arange(1, 5)] = colliding()
        limits = [block.shape[0] for block in full.partition.blocks]
        self.twins = [
            Twin(keeps, texts, gradients=True),
            Twin(admits, ids, gradients=True, admits=True),
            Twin(expires, ids, gradients=True, age=AGE),
            Twin(full, texts, gradients=False, limit=limits),
        ]
        self._losses = 0  # how often a server may have lost its counts of ids without a row
        self._saved: tuple[str, list[Rows]] | None = None

    def run(
        self, operations: int, *, kill_every: int, move_every: int, save_every: int, progress: Callable[[], object]
    ) -> None:
        """Do this many operations, and compare all rows at the end. AssertionError where a table is not the model's.

        Args:
            operations: lookups and updates, of one id each.
            kill_every: calls between two kills, of one server or both.
            move_every: likewise, a shard moves.
            save_every: likewise, a checkpoint is written, and the next time restored.
            progress: called every 1000 calls.
        """
        disturbance: Future[None] | None = None
        with ThreadPoolExecutor(1) as pool:
            for number in itertools.count(1):
                if self.counts.operations >= operations:
                    break
                self._operate()
                if number % kill_every == 0 or number % move_every == 0:
                    if disturbance is not None:
                        disturbance.result()
                    disturb = self._kill if number % kill_every == 0 else self._move
                    disturbance = pool.submit(disturb, int(self._rng.integers(1 << 30)))
                if number % save_every == 0:
                    self._save_or_restore()
                if number % 1000 == 0:
                    progress()
            if disturbance is not None:
                disturbance.result()
        for twin in self.twins:
            twin.check()

    def _operate(self) -> None:
        rng, twin = self._rng, self.twins[int(self._rng.integers(len(self.twins)))]
        size = int(rng.integers(1, 17)) if rng.random() < 0.97 else 200
        of = (rng.zipf(1.2, size) * _FREQUENT) % len(twin.ids)
        values = rng.integers(1, 5, (len(of), DIM)).astype(np.float32)
        before, kind = int(twin.rows.present.sum()), rng.random()
        self.counts.operations += len(of)
        self.counts.calls += 1
        if kind < 0.4:
            twin.lookup(of)
        elif kind < 0.5:
            of = np.unique(of)
            twin.assign(of, values[: len(of)] + 4)
        elif kind < 0.65 or not twin.gradients:
            twin.add(of, values)
        elif kind < 0.98:
            twin.gradient(of, values, self._sgd, self._losses)
        elif kind < 0.99:
            assert len(twin.table) == before
        else:
            try:
                twin.table.scatter_add(IndexedSlices(np.ones((len(of), DIM + 1)), twin.ids[of]))
            except InvalidUpdateError:
                pass
            else:
                raise AssertionError("rows that are too long were taken")
        self.counts.dropped += max(before - int(twin.rows.present.sum()), 0)

    # Disturbances

    def _kill(self, seed: int) -> None:
        servers = [(0,), (1,), (0, 1)][seed % 3]
        self._losses += 1
        pids = {index: self.cluster.kill("ps", index, timeout=TIMEOUT) for index in servers}
        for index, pid in pids.items():
            self.cluster.wait_restarted("ps", index, pid, timeout=TIMEOUT)
        self._losses += 1
        self.counts.kills += len(servers)

    def _move(self, seed: int) -> None:
        twin = self.twins[seed % len(self.twins)]
        shard = twin.table.variables[seed // 7 % SHARDS]
        self._losses += 1
        try:
            self.strategy.move_shard(shard, 1 - shard.owners[0])
            self.counts.moves += 1
        except UnavailableError:
            pass  # a server was away
        self._losses += 1

    def _save_or_restore(self) -> None:
        checkpoint = Checkpoint(self.strategy)
        if self._saved is None:
            path = str(self.folder / f"checkpoint-{self.counts.saves}")
            _repeated(lambda: checkpoint.write(path))
            self._saved = path, [copy.deepcopy(twin.rows) for twin in self.twins]
            self.counts.saves += 1
            return
        path, saved = self._saved
        self._losses += 1
        _repeated(lambda: checkpoint.read(path))
        for twin, rows in zip(self.twins, saved, strict=True):
            twin.restore(rows)
        self._losses += 1
        self._saved = None
        self.counts.restores += 1


def _repeated(call: Callable[[], object], times: Iterable[int] = range(20)) -> None:
    """Call it again while a server that was killed makes it fail."""
    for attempt in itertools.chain(times):
        try:
            call()
            return
        except PsClusterError:
            if attempt == 19:
                raise
