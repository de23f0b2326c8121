"""When a worker reads ahead: when reading itself takes long."""

from __future__ import annotations

import itertools
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.waiting import until

from pscluster.core.context import FunctionContext
from pscluster.worker.data.pipelines import Pipeline
from pscluster.worker.data.prefetch import Part, Reader, _Stopwatch, _times_slept
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


@pytest.mark.skipif(
    not hasattr(resource, "RUSAGE_THREAD"), reason="elsewhere it is not known whether a thread has slept"
)
def test_what_passes_while_others_have_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time without the processor does not count; a sleep does."""
    clock = itertools.count(0, HOURS)
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: next(clock))
        # Several times: occasionally even this thread sleeps for a moment, for Python's lock.
        assert min(_Stopwatch().seconds() for _ in range(100)) < HOURS
        asleep = _Stopwatch()
        slept = _times_slept()
        while _times_slept() == slept:  # a sleep that is over before it began, on busy cores, is none
            time.sleep(0.001)
        assert asleep.seconds() >= HOURS
