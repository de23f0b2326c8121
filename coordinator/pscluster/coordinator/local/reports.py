"""Reports of the launcher of a local cluster about its processes, for the live page of the job that runs on it.

The launcher knows how a process ended; the coordinator knows only that the connection broke. `LocalCluster` holds its
reports; `pscluster run`, whose process is not the script's, writes them to a pipe that the script's process inherits.
They are only for display: reports that are not read, or are too many, are dropped.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

LAUNCHER_VARIABLE = "PSCLUSTER_LAUNCHER_FD"
"""The descriptor of the pipe's reading end, and the pipe's inode: DESCRIPTOR:INODE."""

MAX_REPORTS = 100
_MAX_TEXT = 500
_READ_BYTES = 64 << 10

Report: TypeAlias = tuple[str, str]
"""A task, such as "worker 1", and what its launcher reports about it, the predicate of a sentence."""


class Reports:
    """The latest reports, until they are taken. Any thread may add one."""

    def __init__(self, on_report: Callable[[Report], None] | None = None) -> None:
        self._waiting: deque[Report] = deque(maxlen=MAX_REPORTS)
        self._on_report = on_report

    def add(self, task: str, text: str) -> None:
        report = task, text.removeprefix(task).strip()[:_MAX_TEXT]
        self._waiting.append(report)
        if self._on_report is not None:
            self._on_report(report)

    def take(self) -> list[Report]:
        """Return the reports added since the last call, in order."""
        return [self._waiting.popleft() for _ in range(len(self._waiting))]


class ReportPipe:
    """Carries the reports of `pscluster run` to the script's process. The writing side."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.for_script, self._out = os.pipe()
        self.variable = f"{self.for_script}:{os.fstat(self.for_script).st_ino}"
        os.set_blocking(self._out, False)

    def send(self, report: Report) -> None:
        """Write a report; drop it if the pipe is full, or closed."""
        line = json.dumps(report).encode() + b"\n"
        with self._lock:
            if self._out >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._out, line)  # within PIPE_BUF, so whole or not at all

    def close(self) -> None:
        """Close both ends; later reports are dropped."""
        with self._lock:
            os.close(self.for_script)
            os.close(self._out)
            self._out = -1


class InheritedReports:
    """The reading side of the pipe that the environment names, if any. For one thread."""

    def __init__(self) -> None:
        self._pipe = _inherited()
        self._rest = b""

    def take(self) -> list[Report]:
        """Return the reports received since the last call, in order."""
        if self._pipe is None:
            return []
        try:
            read = os.read(self._pipe, _READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            read = b""
        if not read:  # the launcher has exited
            with contextlib.suppress(OSError):
                os.close(self._pipe)
            self._pipe = None
            return []
        *lines, self._rest = (self._rest + read).split(b"\n")
        return [(task, text) for task, text in map(json.loads, lines)]


def _inherited() -> int | None:
    """Take over the pipe, once: children of this process inherit neither it nor its name."""
    name, _, inode = os.environ.pop(LAUNCHER_VARIABLE, "").partition(":")
    try:
        pipe = int(name)
        status = os.fstat(pipe)
        if not stat.S_ISFIFO(status.st_mode) or status.st_ino != int(inode):  # another file under the same number
            return None
        os.set_inheritable(pipe, False)
        os.set_blocking(pipe, False)
    except (OSError, ValueError, OverflowError):
        return None
    return pipe
