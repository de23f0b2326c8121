"""Sides of several processes that work at the same time: how they are started, asked and timed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any


def asked_members(stack: contextlib.ExitStack, script: str, size: int) -> Callable[..., float]:
    """Start a script's members and wait until all have joined; return what asks all, and takes the longest time."""
    where = os.path.join(stack.enter_context(tempfile.TemporaryDirectory()), "meet")
    members = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(size), where],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]

    def end() -> None:
        for process in members:
            process.kill()
            process.wait(10)

    stack.callback(end)

    def line_of(process: Any) -> str:
        line: str = process.stdout.readline()
        assert line, "a member has ended"
        return line.strip()

    for process in members:
        assert line_of(process) == "ready"

    def ask(**request: Any) -> float:
        for process in members:
            assert process.stdin is not None
            print(json.dumps(request), file=process.stdin, flush=True)
        return max(float(line_of(process)) for process in members)

    return ask


def time_requests(work_of: Callable[[Any], Callable[[], object]], barrier: Callable[[], object]) -> None:
    """Do what is asked for, at once with all others, and print the seconds: a line each, until the input ends."""
    print("ready", flush=True)
    for line in sys.stdin:
        work = work_of(json.loads(line))
        barrier()
        begin = time.perf_counter()
        work()
        print(time.perf_counter() - begin, flush=True)
