"""When a worker reads ahead: when reading itself takes long."""

from __future__ import annotations

import contextlib
import itertools
import resource
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.waiting import until

from pscluster.core.context import FunctionContext
from pscluster.core.errors import DatasetError
from pscluster.worker.data.pace import Stopwatch, _times_slept
from pscluster.worker.data.pipelines import Pipeline
from pscluster.worker.data.prefetch import Part, Reader
from pscluster.worker.data.sources import Blocks, source_of

SECONDS = 0.02
HOURS = 10_000


def sleep(example: Any) -> Any:
    """Wait."""
    time.sleep(SECONDS)
    return example


def work(example: Any) -> Any:
    """Compute."""
    until = time.thread_time() + SECONDS
    while time.thread_time() < until:
        pass
    return example


@pytest.mark.parametrize("function", [sleep, work])
def test_reading_that_takes_long(function: Callable[[Any], Any]) -> None:
    """It happens on a separate thread, as soon as that is known."""
    reader = Reader(FunctionContext(function=1, attempt=1, worker_index=0, num_workers=1))
    try:
        part = Part("1/0/0/8", Pipeline(source_of(np.arange(8)), "data", example_functions=(function,)), reader)
        reader.add(part)
        assert reader._thread is None
        assert [int(example) for example in part] == list(range(8))
        part.check_read()
        reader.close(part)
        assert reader.is_slow
        assert reader._thread is not None
    finally:
        reader.end()
        if reader._thread is not None:
            reader._thread.join()


class Slow(Blocks):
    """Blocks of ten numbers, each of which takes long."""

    def __init__(self) -> None:
        self.loaded = 0

    def __len__(self) -> int:
        return 4

    def load(self, index: int) -> Any:
        time.sleep(SECONDS)
        self.loaded += 1
        return {"x": np.arange(index * 10, index * 10 + 10)}

    def name_of(self, index: int) -> str:
        return f"block {index}"


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_one_block_is_read_while_the_last_one_is_used(ahead: int) -> None:
    """And no other one. Its batches are handed over together; the function may write to them."""
    reader = Reader(FunctionContext(function=1, attempt=1, worker_index=0, num_workers=1))
    source = Slow()
    pipeline = Pipeline(source, "data", batch=4, seed=3, ahead=ahead)
    expected = [batch["x"].tolist() for batch in Pipeline(Slow(), "data", batch=4, seed=3).elements(0, 0, 4)]
    try:
        parts = [Part(f"1/0/{first}/{first + 2}", pipeline, reader) for first in (0, 2)]
        for part in parts:
            reader.add(part)
        given: list[list[int]] = []
        for part in parts:
            for batch in part:
                block = len(given) // 3
                if block:  # by then it is known that reading takes long
                    until(lambda: not reader._reading and reader._next_wanted() is None, "all is read")
                    assert source.loaded == min(block + 1 + (ahead > 0), 4)
                given.append(batch["x"].tolist())
                batch["x"][:] = -1
            part.check_read()
            reader.close(part)
        assert given == expected
        assert [len(batch) for batch in given] == [4, 4, 2] * 4
    finally:
        reader.end()
        if reader._thread is not None:
            reader._thread.join()


class Column:
    """A column that calls `seen` when it is copied."""

    def __init__(self, values: Any, seen: Callable[[], object]) -> None:
        self.values, self.seen = values, seen

    def __len__(self) -> int:
        return len(self.values)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        self.seen()
        return np.asarray(self.values, dtype)


class Watched(Blocks):
    """Blocks of ten numbers; each calls `loads(index)` when it is read, and `copies(index)` when it is shuffled."""

    def __init__(self, loads: Callable[[int], object], copies: Callable[[int], object]) -> None:
        self.loads, self.copies = loads, copies

    def __len__(self) -> int:
        return 4

    def load(self, index: int) -> Any:
        self.loads(index)
        return {"x": Column(np.arange(index * 10, index * 10 + 10), lambda: self.copies(index))}

    def name_of(self, index: int) -> str:
        return f"block {index}"


@contextlib.contextmanager
def slow_part(source: Blocks) -> Iterator[Part]:
    """Give a part of all blocks, shuffled, of which it is known that reading takes long."""
    reader = Reader(FunctionContext(function=1, attempt=1, worker_index=0, num_workers=1))
    part = Part("1/0/0/4", Pipeline(source, "data", batch=4, seed=3), reader)
    part.pace.read(HOURS)
    reader.is_slow = True
    try:
        yield part
    finally:
        reader.end()
        if reader._thread is not None:
            reader._thread.join()


def test_a_block_that_is_waited_for_is_shuffled_beside_the_next_one() -> None:
    """By the function's thread, while the reader's thread reads; one that is not waited for by the reader's."""
    loaded: list[int] = []
    shuffled: list[tuple[str, int]] = []
    waits = True

    def load(index: int) -> None:
        loaded.append(index)
        if waits:
            until(lambda: (part.awaited and not part.ready) or not waits, "the function waits")

    def copy(index: int) -> None:
        here = threading.current_thread().name
        if here != "data":
            until(lambda: len(loaded) == min(len(shuffled) + 2, 4), "the next block is read meanwhile")
        shuffled.append((here, index))

    with slow_part(Watched(load, copy)) as part:
        reader = part._reader
        reader.add(part)
        given = []
        for batch in part:
            given.append(batch["x"].tolist())
            if len(given) == 4:  # of the second block: from now on the reader has the time
                waits = False
            if not waits:
                until(lambda: not reader._reading and reader._next_wanted() is None, "the next block is read")
        part.check_read()
    plain = Pipeline(Watched(lambda _: None, lambda _: None), "data", batch=4, seed=3)
    assert given == [batch["x"].tolist() for batch in plain.elements(0, 0, 4)]
    assert [index for _, index in shuffled] == loaded
    threads = [thread for thread, _ in shuffled]
    assert threads[:2] == [threading.current_thread().name] * 2
    assert threads[2:] == ["data"] * 2


def test_a_block_that_cannot_be_shuffled() -> None:
    """Is the error of this block only, whichever thread does it."""
    shuffled: list[int] = []

    def load(_: int) -> None:
        if waited:
            until(lambda: part.awaited, "the function waits")

    def fail(index: int) -> None:
        shuffled.append(index)
        raise MemoryError("no memory for the copy")

    for waited in (True, False):
        shuffled.clear()
        with slow_part(Watched(load, fail)) as part:
            part._reader.add(part)
            if not waited:
                until(lambda: len(shuffled) > 1, "two blocks are read")
            failed = set()
            for _ in range(4):
                with pytest.raises(DatasetError, match=r"can't be read: MemoryError: no memory") as raised:
                    next(part)
                failed.add(str(raised.value)[:23])
            assert failed == {f"dataset 'data': block {index}" for index in range(4)}
            part.check_read()


@pytest.mark.skipif(
    not hasattr(resource, "RUSAGE_THREAD"), reason="elsewhere it is not known whether a thread has slept"
)
def test_what_passes_while_others_have_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time without the processor does not count; a sleep does."""
    clock = itertools.count(0, HOURS)
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: next(clock))
        # Several times: occasionally even this thread sleeps for a moment, for Python's lock.
        assert min(Stopwatch().seconds() for _ in range(100)) < HOURS
        asleep = Stopwatch()
        slept = _times_slept()
        while _times_slept() == slept:  # a sleep that is over before it began, on busy cores, is none
            time.sleep(0.001)
        assert asleep.seconds() >= HOURS
