"""The coordinator's event loop: whoever lists a process' threads sees which are the library's."""

from __future__ import annotations

import asyncio
import threading

from pscluster.coordinator.scheduling.loop import run


def test_threads_of_blocking_calls_are_named_for_the_loop() -> None:
    name = run(asyncio.to_thread(lambda: threading.current_thread().name))
    assert name.startswith("pscluster-loop")
