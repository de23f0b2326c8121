"""Pushes that return at once, sent by the threads of steps and of the pool: random ones, also of two threads."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest
from tests.waiting import TIMEOUT

from pscluster.core.context import FunctionContext
from pscluster.core.phases import Phases
from pscluster.ps.client.overlap.own_thread import OWN_BYTES
from pscluster.ps.client.overlap.queue import OverlapQueue, StepOverlap


class Job:
    """Runs functions of several steps, whose pushes note what is sent and acknowledged."""

    def __init__(self, seed: int, pool: ThreadPoolExecutor) -> None:
        self.rng = random.Random(seed)
        self.queue = OverlapQueue(pool.submit, most_bytes=4 * OWN_BYTES)
        self.begun: list[tuple[int, int]] = []
        self.acknowledged: list[tuple[int, int]] = []
        self.made: dict[int, int] = {}
        self.ended: SimpleQueue[tuple[int, BaseException | None]] = SimpleQueue()

    def push(self, function: int, nth: int, error: Exception | None) -> Phases[None]:
        """Send a push: in two phases, as the client does."""
        assert len(self.begun) == len(self.acknowledged), "one at a time"
        self.begun.append((function, nth))
        yield True
        time.sleep(0)
        if error is not None:
            self.begun.pop()
            raise error
        self.acknowledged.append((function, nth))

    def run(self, function: int, fails_at: int) -> None:
        """Run a function; its push of that number fails."""
        context = FunctionContext(function=function, attempt=1, worker_index=0, num_workers=1)
        overlap, number, turn = StepOverlap(self.queue, context, 1), 0, threading.Lock()

        def push() -> None:
            nonlocal number
            with turn:  # so that those of two threads are in the order of their numbers
                nth, number = number, number + 1
                error = ValueError(nth) if nth == fails_at else None
                nbytes = self.rng.choice((10, 10, OWN_BYTES + 1, 5 * OWN_BYTES))
                overlap.push(lambda: self.push(function, nth, error), nbytes)

        with contextlib.suppress(ValueError):  # as ended with, see below
            for step in range(5):
                if step:
                    overlap.begin_step()
                other = threading.Thread(target=push)
                if beside := self.rng.random() < 0.3 and fails_at > 1000:
                    other.start()
                for _ in range(self.rng.choice((0, 1, 1, 1, 3))):
                    push()
                if self.rng.random() < 0.2:
                    overlap.settle_step()
                    assert not overlap._owner.of_step or beside
                if beside:
                    other.join(TIMEOUT)
                    assert not other.is_alive()
            if self.rng.random() < 0.3:
                overlap.settle()
                assert not overlap._owner.outstanding
        self.made[function] = number
        overlap.returned(lambda error: self.ended.put((function, error)))


@pytest.mark.parametrize("seed", range(20))
def test_pushes_are_sent_in_order_and_end_their_functions(seed: int) -> None:
    """Whichever threads send them: one at a time, in order, all but those after one that has failed; nothing hangs."""
    with ThreadPoolExecutor(2) as pool:
        job = Job(seed, pool)
        failing = {function: job.rng.randrange(4) for function in range(1, 21) if job.rng.random() < 0.3}
        for function in range(1, 21):
            job.run(function, failing.get(function, 1 << 20))
        ended = dict(job.ended.get(timeout=TIMEOUT) for _ in range(20))
    assert job.ended.empty()
    assert job.acknowledged == sorted(job.acknowledged)
    for function, error in ended.items():
        own = [nth for of, nth in job.acknowledged if of == function]
        assert own == list(range(len(own)))
        if error is None:
            assert len(own) == job.made[function]
        else:
            assert error.args == (failing[function],) == (len(own),)
