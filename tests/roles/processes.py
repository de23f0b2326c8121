"""Roles as processes, as a user starts them, for the tests of this folder."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.waiting import TIMEOUT

PSCLUSTER = (str(Path(sys.executable).with_name("pscluster")),)

# A whole job: its result shows that every function ran, and ran once.
JOB = """
import sys
import numpy as np
from pscluster.coordinator import ClusterCoordinator, ParameterServerStrategy, TFConfigClusterResolver, Variable

strategy = ParameterServerStrategy(TFConfigClusterResolver())
with strategy.scope():
    w = Variable(np.zeros(4, np.float32), name="w")
coordinator = ClusterCoordinator(strategy)

def step():
    w.assign_add(np.ones(4, np.float32))

for _ in range(20):
    coordinator.schedule(step)
coordinator.join()
print(f"w is {w.numpy().tolist()} with {sys.argv[1:]}\\n", end="", flush=True)  # one write: others log between two
"""
DONE = re.escape("w is [20.0, 20.0, 20.0, 20.0]")

# Its functions run until the file named by the first argument exists.
HELD = """
import pathlib, sys, time
import numpy as np
from pscluster.coordinator import (
    ClusterCoordinator,
    ParameterServerStrategy,
    TFConfigClusterResolver,
    Variable,
    experimental_get_current_worker_index,
)

gate = sys.argv[1]
strategy = ParameterServerStrategy(TFConfigClusterResolver())
with strategy.scope():
    w = Variable(np.zeros(4, np.float32), name="w")
coordinator = ClusterCoordinator(strategy)

def step():
    print("running on worker", experimental_get_current_worker_index(), flush=True)
    while not pathlib.Path(gate).exists():
        time.sleep(0.01)
    w.assign_add(np.ones(4, np.float32))

for _ in range(20):
    coordinator.schedule(step)
print("joining", flush=True)
coordinator.join()
print(f"w is {w.numpy().tolist()}\\n", end="", flush=True)
"""

# A coordinator that is connected and does nothing until it is told to end.
IDLE = """
import pathlib, sys, time
from pscluster.coordinator import ClusterCoordinator, ParameterServerStrategy, TFConfigClusterResolver, Variable

strategy = ParameterServerStrategy(TFConfigClusterResolver())
coordinator = ClusterCoordinator(strategy)
with strategy.scope():
    w = Variable([1.0] * 10, name="w")
coordinator.schedule(lambda: None)
coordinator.join()
print("connected", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
"""

OURS = (
    "TF_CONFIG",
    "PSCLUSTER_TOKEN",
    "PSCLUSTER_TOKEN_FILE",
    "PSCLUSTER_TLS",
    "PSCLUSTER_TLS_SERVER_ONLY",
    "PSCLUSTER_INSECURE",
    "PSCLUSTER_COORDINATOR",
    "PSCLUSTER_MAX_WORKERS",
)
"""Variables that would describe another cluster."""

Cluster = Mapping[str, Sequence[str] | Mapping[str, str]]

_RESERVED = 300
_reserved: deque[socket.socket] = deque()
"""The UDP ports with the numbers of those that were given last, which may not be bound yet: no role uses UDP."""


def free_addresses(count: int) -> list[str]:
    """Loopback addresses at which nothing listens.

    Their ports are below those from which connections are made: among those, a connection to a port at which nothing
    listens yet may connect to itself. No two processes of the tests on this machine are given the same one: what was
    given is bound only a while later.
    """
    addresses: list[str] = []
    while len(addresses) < count:
        port = random.randrange(12_000, 32_000)
        reservation = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                reservation.bind(("127.0.0.1", port))
            except OSError:
                reservation.close()
                continue
        _reserved.append(reservation)
        if len(_reserved) > _RESERVED:
            _reserved.popleft().close()
        addresses.append(f"127.0.0.1:{port}")
    return addresses


def make_cluster(ps: int = 1, workers: int = 1, chief: bool = True) -> dict[str, list[str]]:
    """The `cluster` of a TF_CONFIG, as lists."""
    addresses = free_addresses(ps + workers + chief)
    cluster = {"ps": addresses[:ps], "worker": addresses[ps : ps + workers]}
    if chief:
        cluster["chief"] = addresses[-1:]
    return cluster


def tf_config(cluster: Cluster, role: str, index: int = 0) -> str:
    """TF_CONFIG for one task."""
    return json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})


def environ(config: str | None = None, **more: str) -> dict[str, str]:
    """This process's environment without variables that describe another cluster."""
    clean = {key: value for key, value in os.environ.items() if key not in OURS}
    clean.update(PYTHONUNBUFFERED="1", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", COLUMNS="140", **more)
    return clean if config is None else {**clean, "TF_CONFIG": config}


class Process:
    """A process and the lines it has written to standard output and standard error."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], cwd: Path | None = None, stdin: int = subprocess.DEVNULL
    ) -> None:
        """Start it. With a pipe for `stdin`, the pipe ends when this process does, however it ends."""
        self.command = list(command)
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self._at_end = False
        self._popen = subprocess.Popen(
            self.command,
            env=dict(env),
            cwd=cwd,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.pid = self._popen.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            with self._changed:
                self._lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._at_end = True
            self._changed.notify_all()

    @property
    def output(self) -> str:
        """What it has written so far."""
        with self._changed:
            return "".join(self._lines)

    def wait_for(self, pattern: str, count: int = 1) -> str:
        """Wait until this many lines contain the pattern, and return the last of them. AssertionError if they don't
        come."""
        deadline = time.monotonic() + TIMEOUT
        with self._changed:
            while True:
                matching = [line for line in self._lines if re.search(pattern, line)]
                if len(matching) >= count:
                    return matching[count - 1]
                left = deadline - time.monotonic()
                if self._at_end or left <= 0:
                    why = "it ended" if self._at_end else f"{TIMEOUT:g} s have passed"
                    raise AssertionError(f"no {pattern!r} from {self.command}: {why}\n{''.join(self._lines)}")
                self._changed.wait(left)

    def send(self, signum: signal.Signals) -> None:
        """Send a signal."""
        self._popen.send_signal(signum)

    def close_stdin(self) -> None:
        """End its standard input, a pipe."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()

    def wait(self) -> int:
        """Wait for it to end; return the exit code, or -n for signal n."""
        try:
            code = self._popen.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.command} does not end\n{self.output}") from None
        self._reader.join(TIMEOUT)
        return code

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._popen.poll() is None

    def resident_bytes(self) -> int:
        """The size of its resident memory."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave no process behind, including those it started."""
        if self._popen.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._popen.wait(TIMEOUT)
        self._reader.join(TIMEOUT)
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                pipe.close()


class Roles:
    """Starts the roles of a cluster one by one, and ends them all."""

    def __init__(self, cluster: Cluster, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self.cluster = cluster
        self.folder = folder
        self.env = dict(env or {})
        self.started: list[Process] = []

    def start(self, *arguments: str, role: str, index: int = 0, command: Sequence[str] = PSCLUSTER) -> Process:
        """Start `command` with the arguments, as that task."""
        env = {**environ(tf_config(self.cluster, role, index)), **self.env}
        process = Process([*command, *arguments], env, self.folder)
        self.started.append(process)
        return process

    def ps(self, index: int = 0, *options: str) -> Process:
        """Start `pscluster ps`."""
        return self.start("ps", *options, role="ps", index=index)

    def worker(self, index: int = 0, *options: str) -> Process:
        """Start `pscluster worker`."""
        return self.start("worker", *options, role="worker", index=index)

    def script(self, source: str, name: str = "script.py") -> str:
        """Write a script into the folder, and return its path."""
        path = self.folder / name
        path.write_text(source)
        return str(path)

    def coordinator(self, source: str, *arguments: str, options: Sequence[str] = ()) -> Process:
        """Start `pscluster coordinator` with a script of that source."""
        return self.start("coordinator", *options, self.script(source), *arguments, role="chief")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self.started):
            process.__exit__(kind, error, trace)
        if error is not None:
            for process in self.started:
                print(f"--- {' '.join(process.command)}\n{process.output}")


def run(*arguments: str, config: str | None = None, command: Sequence[str] = PSCLUSTER, **env: str) -> tuple[int, str]:
    """Run a command to its end; return its exit code, standard error and output."""
    with Process([*command, *arguments], environ(config, **env)) as process:
        return process.wait(), process.output


_DRIVER = (
    f"OURS = {OURS!r}"
    + """
import contextlib, io, json, os, sys
from pscluster.coordinator.cli.main import main

done = []
for arguments, variables in json.load(sys.stdin):
    for name in OURS:
        os.environ.pop(name, None)
    os.environ.update(variables)
    sys.argv, written, code = ["pscluster", *arguments], io.StringIO(), 0
    with contextlib.redirect_stderr(written), contextlib.redirect_stdout(written):
        try:
            main()
        except SystemExit as end:
            code = end.code
    done.append((code, written.getvalue()))
print(json.dumps(done))
"""
)


def run_all(cases: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> list[tuple[int, str]]:
    """Like `run`, for commands that end before they start anything: all in one process, which is faster.

    Args:
        cases: arguments and environment variables of each.
    """
    done = subprocess.run(
        [sys.executable, "-c", _DRIVER],
        env=environ(),
        input=json.dumps([(list(arguments), dict(variables)) for arguments, variables in cases]),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    return [(code, output) for code, output in json.loads(done.stdout)]


@contextmanager
def listener(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a TCP server that is not pscluster. Each connection is passed to `answer` and closed."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection, suppress(OSError):
                    answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join(TIMEOUT)
