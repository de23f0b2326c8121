"""The processes of a local cluster: each with a thread that waits for its death, reaps it and reports it.

What a role starts dies with it: each role leads a process group, and when the role has died the rest of its group is
killed. Otherwise a data loader that inherited the listening socket could take the connections of the next process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from pscluster.coordinator.local.tasks import Event, Exited, Started, TaskKey


class Processes:
    """The living processes, by task.

    `changed` guards them, and is notified when one starts or has died. Hold it to call `pid`, `pids` or `signal`.
    """

    def __init__(self, changed: threading.Condition, report: Callable[[Event], None]) -> None:
        self._changed = changed
        self._report = report
        self._living: dict[TaskKey, subprocess.Popen[bytes]] = {}
        self._waiters: dict[int, threading.Thread] = {}  # by pid

    def start(
        self,
        task: TaskKey,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: str | os.PathLike[str] | None,
        log: Path | None = None,
    ) -> None:
        """Start a task's process, and report `Started`. Raises as `subprocess.Popen` does, or RuntimeError.

        What it prints is added to the file `log`; None: it goes where this process's output goes.
        """
        with contextlib.ExitStack() as stack:
            output = None if log is None else stack.enter_context(_opened(log))
            process = subprocess.Popen(  # noqa: S603 (our own command line)
                command,
                stdin=subprocess.PIPE,  # nothing is written: its end tells the child that this process has died
                stdout=output,
                stderr=output,
                bufsize=0,
                env=env,
                cwd=cwd,
                # Ctrl-C in the terminal reaches this process only, which then stops its children in order.
                start_new_session=True,
            )
        name = f"local-cluster-{task[0]}-{task[1]}"
        waiter = threading.Thread(target=self._await_death, args=(task, process), name=name, daemon=True)
        with self._changed:  # so that its death is reported after its start
            self._living[task] = process
            try:
                waiter.start()
            except RuntimeError:  # no more threads, or the interpreter is about to exit
                del self._living[task]
                process.kill()
                process.communicate()
                raise
            self._waiters[process.pid] = waiter
            self._report(Started(task, process.pid))
            self._changed.notify_all()

    def _await_death(self, task: TaskKey, process: subprocess.Popen[bytes]) -> None:
        has_status = block_until_dead(process)
        if has_status:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # the processes that it started and did not end
        with self._changed:  # signals are sent under this lock too: never to a pid that has been reaped
            code = process.wait()
            del self._living[task]
            self._changed.notify_all()
        if process.stdin is not None:
            process.stdin.close()
        self._report(Exited(task, process.pid, code if has_status else None))

    def pid(self, task: TaskKey) -> int | None:
        process = self._living.get(task)
        return None if process is None else process.pid

    def pids(self) -> dict[TaskKey, int]:
        return {task: process.pid for task, process in sorted(self._living.items())}

    def signal(self, task: TaskKey, pid: int, signal_number: int) -> None:
        """Send a signal to the task's process, if it still has this pid."""
        if self.pid(task) == pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)

    def join(self, pid: int) -> None:
        """Join the thread that reported this process's exit."""
        self._waiters.pop(pid).join()

    def kill_all(self) -> None:
        """Kill every process, and return when all are reaped. For the thread that starts them."""
        with self._changed:
            for task, pid in self.pids().items():
                self.signal(task, pid, signal.SIGKILL)
        for waiter in self._waiters.values():
            waiter.join()


def _opened(log: Path) -> BinaryIO:
    """Open a log for what is added, which begins on a line of its own, whatever a process left that died."""
    file = log.open("ab+")
    if file.tell():
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            file.write(b"\n")
            file.flush()
    return file


def block_until_dead(process: subprocess.Popen[bytes]) -> bool:
    """Return when the process is dead, but not reaped. False if its exit status is lost."""
    if not hasattr(os, "waitid"):
        process.wait()  # the best that some systems offer: for a moment the pid is free but still recorded
        return True
    try:
        # WNOWAIT leaves a zombie, which holds the pid: until it is reaped no signal can reach an unrelated process.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return False  # reaped by other code that waits for any child, or SIGCHLD is ignored
    return True
