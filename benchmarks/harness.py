"""Sides: processes that measure, asked in turn. Everything they start ends with them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from driver import THREADS, loopback_bytes

HERE = Path(__file__).resolve().parent
REPO = HERE.parent
PEERS = REPO / ".venv-peers" / "bin" / "python"
FRAMEWORKS = REPO / ".venv-frameworks" / "bin" / "python"


class SideError(Exception):
    """A side could not be started, failed, or did not answer in time."""


class Side:
    """One system's driver. Use it as a context manager; `start` may be slow, `ready` waits for it."""

    def __init__(self, name: str, script: str, *arguments: str, python: Path | None = None, isolated: bool) -> None:
        self.name = name
        self.versions: dict[str, str] = {}
        self._command = [os.fspath(python or sys.executable), os.fspath(HERE / script), *arguments]
        if isolated:
            self._command = [sys.executable, os.fspath(HERE / "isolate.py"), *self._command]
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the side

    def start(self) -> Self:
        """Start the driver, without waiting for it."""
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
            env={**os.environ, **THREADS},
        )
        threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True).start()
        return self

    def _listen(self, lines: Any) -> None:
        for line in lines:
            self._answers.put(line)
        self._answers.put("")

    def ready(self, timeout: float = 120.0) -> Self:
        """Wait until its cluster is up."""
        self.versions = self._answer(timeout)
        return self

    def ask(self, do: str, timeout: float = 120.0, **arguments: Any) -> Any:
        """Have something measured. SideError if that fails or takes longer than `timeout` seconds."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise SideError(f"{self.name} has ended: {error}") from None
        return self._answer(timeout)

    def _answer(self, timeout: float) -> Any:
        try:
            line = self._answers.get(timeout=timeout)
        except queue.Empty:
            raise SideError(f"{self.name} gave no answer in {timeout:g} s") from None
        if not line:
            self._log.seek(0)
            raise SideError(f"{self.name} ended: {self._log.read()[-2000:]}")
        reply = json.loads(line)
        if "error" in reply:
            raise SideError(f"{self.name}: {reply['error'][-3000:]}")
        return reply["answer"]

    def loopback_bytes(self) -> int:
        """Bytes received over loopback in this side's network; 0 if that is unknown."""
        assert self._process is not None
        return loopback_bytes(self._process.pid)

    def cpu_seconds(self) -> float:
        """The CPU time of all processes of this side so far."""
        assert self._process is not None
        parents, used = {}, {}
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = entry.read_text().rpartition(")")[2].split()
                pid = int(entry.parent.name)
                parents[pid], used[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
        total = 0
        for pid, ticks in used.items():
            ancestor = pid
            while ancestor in parents and ancestor != self._process.pid:
                ancestor = parents[ancestor]
            total += ticks if ancestor == self._process.pid else 0
        return total / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End it and everything it started."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._log.close()
        self._process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


def adopt_orphans() -> None:
    """Make grandchildren that outlive their parents our children, so that we can end them."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def end_orphans(grace: float = 3.0) -> list[str]:
    """Wait briefly for our remaining children, then kill them; return the names of those killed.

    To be called when all sides are closed.
    """
    killed = []
    begin = time.monotonic()
    while (children := _children()) and time.monotonic() < begin + grace + 10:
        for pid, name in children:
            if time.monotonic() > begin + grace:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(name)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.05)
    return sorted(set(killed))


def _children() -> list[tuple[int, str]]:
    """Our children's ids and command lines."""
    processes = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                    words = (entry / "cmdline").read_text().split("\0")
                    processes.append((int(entry.name), " ".join(Path(word).name for word in words[:4])))
    return processes


def machine() -> str:
    """The machine's cores, memory and system."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    model = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = f" ({line.partition(':')[2].strip()})"
                break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    kernel = ".".join(platform.release().split("-")[0].split(".")[:3])
    system = f"{platform.system()} {kernel}, Python {platform.python_version()}"
    return f"{cores} cores{model}, {memory:.0f} GiB of memory, {system}"


def commit() -> str:
    """The commit that is measured, and whether files differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", os.fspath(REPO), *arguments], capture_output=True, text=True)
        return done.stdout.strip()

    sources = ("adapters", "coordinator", "core", "launch", "proto", "ps", "spmd", "worker")
    changed = git("status", "--porcelain", "--", *sources)
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + (" with changes" if changed else "")


def can_isolate() -> bool:
    """Whether a side can have a separate network."""
    return subprocess.run([sys.executable, HERE / "isolate.py"]).returncode == 0


def peers_that_are_there(python: Path, modules: Sequence[str]) -> set[str]:
    """Those of these that are installed in the peers' environment."""
    if not python.exists():
        return set()
    code = "import importlib.util, sys; print(*[m for m in sys.argv[1:] if importlib.util.find_spec(m)])"
    done = subprocess.run([python, "-c", code, *modules], capture_output=True, text=True, timeout=60)
    return set(done.stdout.split())
