"""A role's process from start to end: its signals, and how it stops.

States: STARTING -> SERVING -> DRAINING -> STOPPED. SIGTERM, Ctrl-C, the end of the job (with --until-done) and the
death of the parent (with --exit-with-parent) all request the same stop: health says NOT_SERVING, the coordinator learns
that the role leaves, the role drains (running functions end or are given back), the server closes, and the exit code is
0. A second signal ends the process at once; the first does not, whatever has asked for the stop before: Compose sends
SIGTERM to workers that are about to end because the job is over.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable

from pscluster.core.role.options import RoleOptions
from pscluster.core.role.process import configure_logging, tune_allocator

logger = logging.getLogger(__name__)


class StopRequest:
    """A request to stop the role; the first reason counts."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.reason = ""

    def ask(self, reason: str) -> None:
        if not self.event.is_set():
            self.reason = reason
            self.event.set()

    def on_signals(self) -> None:
        """Stop on SIGTERM and SIGINT; a second one ends the process at once. Main thread only."""
        received = False

        def handle(signal_number: int, _frame: object) -> None:
            nonlocal received
            if received:
                os._exit(128 + signal_number)
            received = True
            self.ask(signal.Signals(signal_number).name)

        signal.signal(signal.SIGTERM, handle)
        signal.signal(signal.SIGINT, handle)


def on_parents_death(callback: Callable[[], None]) -> None:
    """Call `callback` from a thread once standard input, a pipe that only the parent holds, reaches its end."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        callback()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def run_role(
    role_name: str, index: int | None, options: RoleOptions, serve: Callable[[StopRequest], Callable[[], None]]
) -> None:
    """Run a ps or worker process until its stop. `serve` starts it and returns a function that drains and closes it.

    None for the index of a worker that joins: it learns it later.
    """
    configure_logging(role_name if index is None else f"{role_name}/{index}", options.log_level, options.log_format)
    tune_allocator()
    stop = StopRequest()
    stop.on_signals()
    if options.exit_with_parent:
        on_parents_death(lambda: stop.ask("the parent process is gone"))
    close = serve(stop)
    # Wake up regularly: a signal that the kernel gave to another thread does not wake one that waits on a lock.
    while not stop.event.wait(1.0):
        pass
    logger.info("stopping: %s", stop.reason)
    code = 1
    try:
        close()
        logger.info("stopped")
        code = 0
    except Exception:
        logger.exception("failed to stop cleanly")
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # its reader may have ended
                stream.flush()
        os._exit(code)  # a user's own threads (a data loader's) must not keep a stopped role alive
