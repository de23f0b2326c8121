"""The bytes of a row, created and received with the fewest copies, and its arithmetic, for the sides that are limits.

There are no variables, checks, once-only updates, snapshots or coordinator: the comparison shows what ours cost, and
what could be gained. `grpc_side.py` and `socket_side.py` say how the bytes are sent. The allocator settings are the
same.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from driver import Handlers, serve, timed
from model import ROWS

from pscluster.core.role.process import tune_allocator

WIDTH = 64
# The first byte of a small request, for what it requests; a number follows it.
READ, GATHER, UPDATE, ADAGRAD = b"r", b"g", b"u", b"a"

Parts = Sequence[Any]


class Data:
    """What one of this many servers holds: bytes, by number, and its share of the table."""

    def __init__(self, servers: int) -> None:
        self._servers = servers
        self._held: dict[int, memoryview] = {}
        self._local = threading.local()
        self._lock = threading.Lock()

    @functools.cached_property
    def _table(self) -> Any:
        import numpy as np

        return np.zeros((ROWS // self._servers, WIDTH), np.float32)

    @functools.cached_property
    def _sums(self) -> Any:
        import numpy as np

        return np.full_like(self._table, 0.1)

    def held(self, size: int) -> memoryview:
        """This many bytes."""
        import numpy as np

        if size not in self._held:
            self._held[size] = memoryview(np.ones(size, np.uint8))
        return self._held[size]

    def scratch(self, size: int) -> memoryview:
        """This many bytes of this thread's, for what is added once it has all arrived."""
        if len(getattr(self._local, "scratch", b"")) != size:
            self._local.scratch = memoryview(bytearray(size))
        return self._local.scratch

    def add(self, values: memoryview) -> None:
        """Add them as numbers to this many bytes, all at one moment."""
        import numpy as np

        held = np.frombuffer(self.held(len(values)), np.float32)
        with self._lock:
            np.add(held, np.frombuffer(values, np.float32), out=held)

    def answer(self, request: Any) -> Any:
        """Answer a small request."""
        import numpy as np

        kind, (argument,) = bytes(request[:1]), np.frombuffer(request, np.int64, 1, 8)
        if kind == READ:
            return self.held(int(argument))
        ids = np.frombuffer(request, np.int64, argument, 16)
        if kind == GATHER:
            return memoryview(self._table.take(ids, axis=0)).cast("B")
        gradients: Any = np.frombuffer(request, np.float32, offset=16 + ids.nbytes).reshape(-1, WIDTH)
        with self._lock:
            if kind == ADAGRAD:
                sums = self._sums[ids] + gradients * gradients
                self._sums[ids] = sums
                gradients = 0.01 * gradients / np.sqrt(sums + 1e-7)
            self._table[ids] -= gradients
        return b"done"


class Client(ABC):
    """A client of all servers together, each of which has an equal part of everything."""

    def __init__(self, servers: int) -> None:
        self._servers = servers
        self._threads = ThreadPoolExecutor(servers)
        self._data: dict[tuple[int, int], Any] = {}

    @abstractmethod
    def pull(self, size: int) -> None:
        """Receive the bytes, each server's part into one piece of memory."""

    @abstractmethod
    def push(self, size: int) -> None:
        """Send this many bytes, which are stored in place as they arrive."""

    @abstractmethod
    def add(self, size: int) -> None:
        """Send this many bytes, which are added once they have all arrived."""

    @abstractmethod
    def exchange(self, requests: Sequence[Parts]) -> list[Any]:
        """Send a small request to each server, in parts, and return its answer."""

    def on_each(self, work: Callable[[int], None]) -> None:
        """Run it for each server, by its index, all in parallel."""
        if self._servers == 1:
            work(0)
        else:
            list(self._threads.map(work, range(self._servers)))

    def warm(self, size: int, server: int) -> Any:
        """Bytes that are kept for reuse, separately for each server."""
        import numpy as np

        if (size, server) not in self._data:
            self._data[size, server] = memoryview(np.ones(size, np.uint8))
        return self._data[size, server]

    def _exchanges(self, requests: Sequence[tuple[Any, ...]]) -> list[Any]:
        import numpy as np

        return self.exchange([(kind.ljust(8), np.int64(n).tobytes(), *payload) for kind, n, *payload in requests])

    def read(self, size: int) -> None:
        """Read this many bytes, in one message from each server."""
        self._exchanges([(READ, size // self._servers)] * self._servers)

    def gather(self, ids: int) -> None:
        """Read random rows of the table, in the order of the ids."""
        self._rows_of(self._split(ids))

    def gather_update(self, ids: int, opcode: bytes = UPDATE) -> None:
        """Do the same, and send as many rows back, which are subtracted."""
        shares = self._split(ids)
        changed = self._rows_of(shares) * 2 + 1
        self._exchanges([(opcode, len(local), local, changed[positions]) for positions, local in shares])

    def gather_adagrad(self, ids: int) -> None:
        """Do the same, but first divide them by the roots of the sums of their squares, which are kept."""
        self.gather_update(ids, ADAGRAD)

    def _split(self, ids: int) -> list[tuple[Any, Any]]:
        """Random ids, and for each server which of them it has, with their numbers there."""
        import numpy as np

        wanted, rows_each = np.random.randint(0, ROWS, ids), ROWS // self._servers
        shares = []
        for index in range(self._servers):
            positions = np.flatnonzero(wanted // rows_each == index)
            shares.append((positions, wanted[positions] - index * rows_each))
        return shares

    def _rows_of(self, shares: Sequence[tuple[Any, Any]]) -> Any:
        import numpy as np

        rows = np.empty((sum(len(positions) for positions, _ in shares), WIDTH), np.float32)
        replies = self._exchanges([(GATHER, len(local), local) for _, local in shares])
        for (positions, _), reply in zip(shares, replies, strict=True):
            rows[positions] = np.frombuffer(reply, np.float32).reshape(-1, WIDTH)
        return rows


Connect = Callable[[Sequence[int]], Client]


def _client(mine: Client) -> None:
    """Do what each line says, this many times."""
    for line in sys.stdin:
        request = json.loads(line)
        for _ in range(request["n"]):
            getattr(mine, request["do"])(request["size"])
        print("done", flush=True)


def _spawned(stack: contextlib.ExitStack, script: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, script, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.callback(process.wait, 10)
    stack.callback(process.kill)
    return process


def _start(stack: contextlib.ExitStack, script: str, connect: Connect, servers: int, workers: int) -> Handlers:
    ports = []
    for process in [_spawned(stack, script, f"--server={servers}") for _ in range(servers)]:
        assert process.stdout is not None
        ports.append(int(process.stdout.readline()))
    clients = [_spawned(stack, script, "--client", *map(str, ports)) for _ in range(workers)]
    here = connect(ports)

    def all_do(do: str, n: int, size: int) -> float:
        def work() -> None:
            for process in clients:
                assert process.stdin is not None
                process.stdin.write(json.dumps({"do": do, "n": -(-n // workers), "size": size}) + "\n")
                process.stdin.flush()
            for process in clients:
                assert process.stdout is not None
                assert process.stdout.readline() == "done\n"

        return timed(work)

    def single(mib: int, n: int, push: bool) -> list[float]:
        work = here.push if push else here.pull
        return [timed(lambda: work(mib << 20)) for _ in range(n)]

    def latency(n: int) -> list[float]:
        alone = connect(ports[:1])
        return [timed(lambda: alone.read(1)) for _ in range(n)]

    return {
        "single": single,
        "latency": latency,
        "pull": lambda mib, n: all_do("pull", n, mib << 20),
        "push": lambda mib, n: all_do("add", n, mib << 20),
        "many": lambda variables, n: all_do("read", n, variables * 4096),
        "gather": lambda ids, n: all_do("gather", n, ids),
        "gather_update": lambda ids, n, optimizer: all_do(
            "gather_adagrad" if optimizer == "Adagrad" else "gather_update", n, ids
        ),
    }


def main(script: str, server: Callable[[Data], None], connect: Connect, versions: Callable[[], dict[str, str]]) -> None:
    """Run a side's script: as the side itself, or as one of its servers or clients."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ps", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--server", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--client", nargs="+", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    tune_allocator()
    if options.server:
        server(Data(options.server))
    elif options.client:
        _client(connect(options.client))
    else:
        serve(lambda stack: (_start(stack, script, connect, options.ps, options.workers), versions()))
