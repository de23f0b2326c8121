"""When the rows of a function's first step are fetched: in the last step of the function before it, not earlier."""

from __future__ import annotations

import functools
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.worker.execution.test_runner import Stream, kinds, make_job, step

from pscluster.coordinator.data.per_worker import PerWorkerIterator
from pscluster.ps.client.overlap.queue import OverlapQueue
from pscluster.worker.data.per_worker import WorkerIterator
from pscluster.worker.execution.preparations import Preparations
from pscluster.worker.steps.overlap import logs_of_overlapped_steps

STEPS, FUNCTIONS = 3, 5


def test_what_is_prepared_waits_for_the_function_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions take three steps each. Also while one has begun, and has not taken its arguments, the next one waits:
    no element is looked up twice, or more than one step before its own."""
    events: list[tuple[str, int]] = []

    def lookups(element: int) -> list[Any]:
        events.append(("lookup", element))
        return []

    def take_step(element: int) -> None:
        time.sleep(0.002)
        events.append(("step", element))

    take = Preparations.take

    def take_late(self: Preparations, *args: Any) -> Any:
        time.sleep(0.02)
        return take(self, *args)

    monkeypatch.setattr(Preparations, "take", take_late)
    with ThreadPoolExecutor() as pool:
        job = make_job(train=functools.partial(logs_of_overlapped_steps, take_step, lookups, 1))
        job.overlap_queue = OverlapQueue(pool.submit)
        job._handles["iterator", "5"] = WorkerIterator("5", itertools.count)
        stream = Stream(job)
        functions = [step(number, "train", PerWorkerIterator(5), STEPS) for number in range(1, FUNCTIONS + 1)]
        stream.send(1, *functions)
        assert kinds(stream.end()) == {(number, "DONE"): 1 for number in range(1, FUNCTIONS + 1)}
    elements = range(STEPS * FUNCTIONS)
    assert [element for kind, element in events if kind == "step"] == list(elements)
    assert [element for kind, element in events if kind == "lookup"] == list(elements)
    for element in elements[2:]:
        assert events.index(("lookup", element)) > events.index(("step", element - 2))
