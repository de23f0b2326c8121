"""How a driver and the runner communicate: a line of JSON asks, a line of JSON answers.

A driver keeps one system's cluster warm, and measures what it is asked to. It runs in the environment of that system,
so this file needs nothing but Python. It stops at the end of its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
"""One thread of arithmetic a process, the same for all sides."""

Handlers = Mapping[str, Callable[..., Any]]


def serve(start: Callable[[contextlib.ExitStack], tuple[Handlers, dict[str, str]]]) -> None:
    """Start, report that with the versions returned by `start`, and answer until the input ends.

    What the system prints goes to standard error; children inherit neither end of the conversation.
    """
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    with contextlib.ExitStack() as stack:

        def answer(work: Callable[[], Any]) -> None:
            try:
                reply = {"answer": work()}
            except Exception:
                reply = {"error": traceback.format_exc()}
            print(json.dumps(reply), file=replies, flush=True)

        handlers: Handlers = {}

        def begin() -> dict[str, str]:
            nonlocal handlers
            handlers, versions = start(stack)
            return versions

        answer(begin)
        for line in requests:
            request = json.loads(line)
            answer(lambda request=request: handlers[request.pop("do")](**request))
    sys.stdout.flush()


def loopback_bytes(process: int | str = "self") -> int:
    """Bytes received over loopback in a process's network; 0 if that is unknown."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/net/dev").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "lo":
                return int(value.split()[0])
    return 0


def timed(work: Callable[[], Any]) -> float:
    """The seconds that it took."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
