"""The asyncio loop of a coordinator's process, in its own thread.

One for the process, not for each coordinator: several loops with grpc.aio in one process interfere (grpc/grpc#25364).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from pscluster.coordinator.waiting import result_of

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None

CANCEL_SECONDS = 0.1
"""A task that goes on for this long is cancelled again."""


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop, started at first use."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="pscluster-loop", daemon=True).start()
        return _loop


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Call a blocking function in a new thread.

    Not in an executor: those take no more calls once the script has ended, before its jobs are closed.
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
    """Run a coroutine on the loop and wait for it. Never call this on the loop's thread."""
    future = asyncio.run_coroutine_threadsafe(coroutine, event_loop())
    try:
        return result_of(future, timeout)
    except BaseException:
        future.cancel()
        raise


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until they have ended.

    Once is not enough: grpc.aio forgets a cancellation that coincides with a call's reply.
    """
    pending, cancelled = set(tasks), None
    while pending:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=CANCEL_SECONDS)
        except asyncio.CancelledError as error:  # of this call: raised once the tasks have ended
            cancelled = error
        for task in [task for task in pending if task.done()]:
            pending.remove(task)
            if not task.cancelled():
                task.exception()  # marks it as retrieved
    if cancelled is not None:
        raise cancelled
