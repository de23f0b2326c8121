"""The coordinator's event loop, and the threads of calls that block."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from pscluster.coordinator.scheduling.connections.loop import in_thread, run


def test_threads_of_blocking_calls_are_named_for_the_loop() -> None:
    """A list of a process's threads shows which are the library's; what a call raises is raised here."""
    name = run(in_thread(lambda: threading.current_thread().name))
    assert name.startswith("pscluster-loop")
    with pytest.raises(ZeroDivisionError):
        run(in_thread(divmod, 1, 0))


def test_blocking_calls_work_until_the_jobs_are_closed() -> None:
    """A worker may be about to be connected when the script ends; that is no failure of the coordinator."""
    program = """if True:
        import atexit
        from pscluster.coordinator.scheduling.connections.loop import in_thread, run
        run(in_thread(len, "before"))
        atexit.register(lambda: print(run(in_thread(len, "at exit"))))
    """
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "7\n", "")
