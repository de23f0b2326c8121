"""Takes what replicas with bounded staleness say of their progress, and holds those that are too far ahead.

What a message means is decided in `clock`. This is the shell: one condition guards all clocks, and a message is held
for at most `WAIT_SECONDS`, so that no thread is held for a replica that never comes.
"""

from __future__ import annotations

import threading
import time

from pscluster.ps.server.synchronous.clock import Clocks
from pscluster.v1 import ps_pb2

WAIT_SECONDS = 0.5
"""How long a question about a synchronous run is held, at most."""


class Ticks:
    """Handles the TICKs of all runs, on server 0. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._clocks = Clocks()

    def take(self, message: ps_pb2.Contribution, job: int) -> ps_pb2.StepState:
        """Take note of a replica's progress; return once all have completed `message.until` steps, or after a while."""
        deadline = time.monotonic() + WAIT_SECONDS
        with self._changed:
            clock = self._clocks.of(message.run, job)
            before = clock.slowest, clock.end
            known = clock.begin(message.epoch, message.replica, message.replicas, message.first)
            if not message.begins:
                known.reach(message.step, message.before, message.positions)
                if message.ended:
                    clock.end_at(message.step)
            if (clock.slowest, clock.end) != before or message.begins:
                self._changed.notify_all()
            while (left := deadline - time.monotonic()) > 0:
                until = clock.end if clock.end is not None and clock.ending(message.step) else message.until
                if clock.slowest >= until:
                    break
                self._changed.wait(left)
                clock.begin(
                    message.epoch, message.replica, message.replicas, message.first
                )  # refuses an attempt that is over
            ending = clock.ending(message.step)
            ended = ending and clock.slowest >= (clock.end or 0)
            state = ps_pb2.StepState(committed=clock.slowest, missing=clock.behind, ending=ending, ended=ended)
            if message.begins:
                state.own = known.steps
                state.before.update(known.before)
                state.after.update(known.after)
            return state
