"""When a worker reads ahead: when reading itself takes long."""

from __future__ import annotations

import itertools
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pscluster.core.context import FunctionContext
from pscluster.worker.data.pipelines import Pipeline
from pscluster.worker.data.prefetch import Part, Reader, _Stopwatch, _times_slept
from pscluster.worker.data.sources import source_of

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
