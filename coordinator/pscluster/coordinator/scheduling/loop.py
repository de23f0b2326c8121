"""The one asyncio loop of a coordinator's process, in a thread of its own.

One for the process and not for each coordinator: several loops with grpc.aio in one process get in each
other's way (grpc/grpc#25364).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from pscluster.coordinator.scheduling.waiting import result_of

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def event_loop() -> asyncio.AbstractEventLoop:
    """The loop, started at first use."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="pscluster-loop", daemon=True).start()
        return _loop


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Call a function that blocks, in a thread of its own.

    Not in an executor's: those take no more calls once the script has ended, before its jobs are closed.
    """
    called: Future[T] = Future()

    def call() -> None:
        if called.set_running_or_notify_cancel():
            try:
                called.set_result(function(*args))
            except BaseException as error:
                called.set_exception(error)

    threading.Thread(target=call, name="pscluster-loop-blocking", daemon=True).start()
    return await asyncio.wrap_future(called)


def run(coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
    """Run a coroutine on the loop and wait for it. Not to be called on the loop's own thread."""
    future = asyncio.run_coroutine_threadsafe(coroutine, event_loop())
    try:
        return result_of(future, timeout)
    except BaseException:
        future.cancel()
        raise
