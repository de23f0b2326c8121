"""Large shards that have not changed are not sent again; those that have always are."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.conftest import run_strategy, search

from pscluster.coordinator import FixedShardsPartitioner, LocalCluster, ParameterServerStrategy, Variable
from pscluster.core.errors import ConfigurationError
from pscluster.ps.client.reads.cache import MAX_SHARDS, CacheDecision, Key, ReadCache, cache_bytes
from pscluster.ps.server.state.shard import Shard

KEY, OTHER = (1, 0), (2, 3)
SIZE = 5 << 20


@pytest.fixture(scope="module")
def strategy() -> Iterator[ParameterServerStrategy]:
    """Two servers."""
    yield from run_strategy(2, 1)


def pulled(strategy: ParameterServerStrategy, variable: Variable) -> tuple[float, int]:
    """The value, the same everywhere, and the number of bytes read for it."""
    before = strategy.traffic().pulled
    value = variable.numpy()
    assert value.min() == value.max()
    return float(value.flat[0]), strategy.traffic().pulled - before


@pytest.mark.parametrize("shards", [1, 2])
def test_what_nobody_changes_is_not_sent_again(strategy: ParameterServerStrategy, shards: int) -> None:
    """The third read transfers only versions; every change is seen by the next read."""
    with strategy.scope():
        v = Variable(np.zeros((shards, SIZE // 4), np.float32), partitioner=FixedShardsPartitioner(shards))
    for value in range(5):
        for _ in range(2):
            assert pulled(strategy, v)[1] >= shards * SIZE
        for _ in range(30):  # the cache may have to become more willing first
            seen, moved = pulled(strategy, v)
            assert seen == value
            if moved < 1000:
                break
        assert moved == 8 * shards
        copy = v.numpy()
        copy += 1  # the result of a read belongs to the reader
        assert pulled(strategy, v) == (value, 8 * shards)
        v.assign_add(1)
        assert pulled(strategy, v)[0] == value + 1


def test_reads_beside_updates(strategy: ParameterServerStrategy) -> None:
    """A reader sees its own updates, and other readers see values rise."""
    with strategy.scope():
        v = Variable(np.zeros(SIZE // 4, np.float32))
    over, wrong = threading.Event(), list[str]()

    def watch() -> None:
        last = 0.0
        while not over.is_set():
            value = v.numpy()
            if value.min() != value.max() or value[0] < last:
                wrong.append(f"{value.min()}..{value.max()} after {last}")
            last = float(value[0])

    watchers = [threading.Thread(target=watch) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    for expected in range(1, 21):
        v.assign_add(1)
        for _ in range(expected % 4):
            assert v.numpy()[-1] == expected
    over.set()
    for watcher in watchers:
        watcher.join()
    assert wrong == []


def test_it_can_be_turned_off(strategy: ParameterServerStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment turns it off."""
    monkeypatch.setenv("PSCLUSTER_READ_CACHE_MIB", "0")
    with LocalCluster(1, 1, log_level="ERROR") as cluster, ParameterServerStrategy(cluster) as without:
        with without.scope():
            v = Variable(np.zeros(SIZE // 4, np.float32))
        for _ in range(4):
            assert pulled(without, v)[1] == SIZE


@pytest.mark.parametrize("size", ["much", "-1", "1.5", "\u0663"])
def test_an_invalid_size_is_refused(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the variable and what it takes; an empty one is as none."""
    monkeypatch.setenv("PSCLUSTER_READ_CACHE_MIB", size)
    sentence = f"PSCLUSTER_READ_CACHE_MIB is {size!r}; it must be a whole number of MiB, 0 or more"
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        cache_bytes()
    monkeypatch.setenv("PSCLUSTER_READ_CACHE_MIB", "")
    assert cache_bytes() == 256 << 20


def test_a_copy_needs_one_version_before_and_behind_the_read() -> None:
    """It must also have been seen twice."""
    cache = ReadCache(100)
    assert cache.asks(KEY, 10)
    assert cache.decide(KEY, 7) == (CacheDecision.READ, b"")
    assert cache.decide(KEY, 7) == (CacheDecision.STORE, b"")
    cache.store(KEY, 8, memoryview(b"new"))  # it has changed in the meantime
    assert cache.decide(KEY, 7) == (CacheDecision.STORE, b"")
    cache.store(KEY, 7, memoryview(b"old"))
    assert cache.decide(KEY, 7) == (CacheDecision.COPY, b"old")
    assert cache.decide(KEY, 9) == (CacheDecision.READ, b"")
    assert cache.used == 0


def test_what_changes_all_the_time_is_asked_about_seldom() -> None:
    """Once in sixteen reads, finally."""
    cache, asked = ReadCache(100), 0
    for read in range(1000):
        if cache.asks(KEY, 10):
            asked += 1
            assert cache.decide(KEY, read)[0] is CacheDecision.READ
    assert asked < 80


def test_room() -> None:
    """What has been unused for longest makes room; what is larger than the whole cache is not asked about."""
    cache = ReadCache(10)
    assert not cache.asks(KEY, 11)
    for key in (KEY, OTHER):
        for _ in range(2):
            cache.decide(key, 1)
        cache.store(key, 1, memoryview(bytes(6)))
    assert cache.used == 6
    assert cache.decide(OTHER, 1)[0] is CacheDecision.COPY
    assert cache.decide(KEY, 1)[0] is CacheDecision.STORE


def test_shards_that_are_no_longer_read_are_forgotten() -> None:
    """Each evaluation beside the training reads copies, which are deleted after it."""
    cache = ReadCache(100)
    for number in range(3 * MAX_SHARDS):
        for key in (KEY, (number + 10, 0)):
            assert cache.asks(key, 10)
            if cache.decide(key, 1)[0] is CacheDecision.STORE:
                cache.store(key, 1, memoryview(bytes(10)))
    assert len(cache._shards) == MAX_SHARDS
    assert cache.decide(KEY, 1)[0] is CacheDecision.COPY, "what is read all the time stays"
    assert cache.used == 10


@given(st.lists(st.tuples(st.sampled_from([KEY, OTHER]), st.sampled_from(["change", "read", "read", "race"]))))
def test_a_copy_is_never_old(events: list[tuple[tuple[int, int], str]]) -> None:
    """This holds in any order of reads and changes, even in the middle of a read."""
    cache, now = ReadCache(12), {KEY: 100, OTHER: 200}
    for key, event in events:
        if event == "change":
            now[key] += 1
            continue
        if not cache.asks(key, 8):
            continue
        before = now[key]
        decision, copy = cache.decide(key, before)
        if decision is CacheDecision.COPY:
            assert copy == before.to_bytes(8)
            continue
        value = now[key].to_bytes(8)
        if event == "race":
            now[key] += 1
        if decision is CacheDecision.STORE and now[key] == before:
            cache.store(key, before, memoryview(value))
    assert cache.used <= 12


@dataclass(eq=False)
class Read:
    """A read of a shard, in progress."""

    key: Key
    begun: int  # the number of values before it
    version: int | None = None
    decision: CacheDecision = CacheDecision.READ
    got: bytes | None = None
    asked_again: bool = False
    version_after: int | None = None


class ReadCacheMachine(RuleBasedStateMachine):
    """Several reads of two shards at once, interrupted where a client's use the network, between updates and restarts.

    Each shard is a real one. A read takes the steps that the client takes: ask for the version, read or take the copy,
    ask again. What it gives is a value that the shard had between its beginning and its end.
    """

    keys = st.sampled_from([KEY, KEY, KEY, OTHER])

    def __init__(self) -> None:
        super().__init__()
        self.cache = ReadCache(12)  # room for one copy of the two
        self.shards = {key: Shard(np.zeros(1, np.int64)) for key in (KEY, OTHER)}
        self.values: dict[Key, list[int]] = {KEY: [0], OTHER: [0]}  # all values that the shard has had
        self.reads: list[Read] = []

    @rule(key=keys, amount=st.integers(1, 3))
    def update(self, key: Key, amount: int) -> None:
        """Acknowledge an update: later reads must have it."""
        shard = self.shards[key]
        with shard.lock:
            shard.changes += 1
            shard.before_change()
            shard.array[0] = self.values[key][-1] + amount
            shard.updates += 1
        self.values[key].append(self.values[key][-1] + amount)

    @rule(key=keys, lost=st.integers(0, 2))
    def restart(self, key: Key, lost: int) -> None:
        """Restart the server without the last updates: the same number of other ones may follow."""
        values = self.values[key]
        self.values[key] = [*values, values[max(len(values) - 1 - lost, 0)]]
        self.shards[key] = Shard(np.array([self.values[key][-1]]), self.shards[key].updates - lost)

    @rule(key=keys)
    def begin(self, key: Key) -> None:
        """Begin a read, which asks for the version, or reads immediately."""
        read = Read(key, len(self.values[key]) - 1)
        if self.cache.asks(key, 8):
            read.version = self.shards[key].version
        self.reads.append(read)

    @precondition(lambda self: len(self.reads) < 9)
    @rule(key=keys, times=st.integers(1, 3))
    def read(self, key: Key, times: int) -> None:
        """Do whole reads beside those in progress."""
        for _ in range(times):
            self.begin(key)
            mine = self.reads[-1]
            while mine in self.reads:
                self.go_on(self.reads.index(mine))

    @precondition(lambda self: self.reads)
    @rule(which=st.integers(0, 9))
    def go_on(self, which: int) -> None:
        """Continue a read with its next step."""
        read = self.reads[which % len(self.reads)]
        if read.got is None:
            if read.version is not None:
                read.decision, copy = self.cache.decide(read.key, read.version)
                if read.decision is CacheDecision.COPY:
                    self.end(read, copy)
                    return
            read.got = self.shards[read.key].array.tobytes()
        elif read.decision is CacheDecision.STORE and not read.asked_again:
            read.version_after, read.asked_again = self.shards[read.key].version, True
        else:
            if read.asked_again and read.version_after == read.version:
                assert read.version_after is not None
                self.cache.store(read.key, read.version_after, memoryview(read.got))
            self.end(read, read.got)

    def end(self, read: Read, data: bytes) -> None:
        self.reads.remove(read)
        since = self.values[read.key][read.begun :]
        assert int.from_bytes(data, "little") in since, "a value from before the read, or of no time at all"

    @invariant()
    def room_is_kept(self) -> None:
        """The cache stays within its limit, whatever is dropped and stored again."""
        assert 0 <= self.cache.used <= 12

    def teardown(self) -> None:
        """Left alone, a shard is soon read from its copy, whatever happened before."""
        while self.reads:
            self.go_on(0)
        self.read(KEY, 40)
        assert self.cache.asks(KEY, 8)
        decision, copy = self.cache.decide(KEY, self.shards[KEY].version)
        assert (decision, copy) == (CacheDecision.COPY, self.shards[KEY].array.tobytes())


TestReadCache = ReadCacheMachine.TestCase
TestReadCache.__doc__ = "No read gives what was there before it began, and what does not change is not read again."
TestReadCache.settings = search(200, 40)
