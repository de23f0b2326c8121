"""What Python's gRPC can reach: the bytes of a row, made and taken in the fewest copies, and nothing else.

    grpc_side.py [--ps N] [--workers N]

No variables, no locks, no checks, no once-only updates, no coordinator: beside it one sees what ours cost, and what is
left to gain. Large arrays go as frames of 1 MiB over streams, small requests over streams that the calling thread
drives (those of our own sessions, since gRPC's public ones are slower). Same allocator settings.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from driver import Handlers, serve, timed
from model import ROWS

from pscluster.core.channels import CHANNEL_OPTIONS, SERVER_OPTIONS
from pscluster.core.process import tune_allocator

FRAME = 1 << 20
WIDTH = 64
READ, GATHER, UPDATE = b"r", b"g", b"u"  # what the first byte of a small request asks for


def server(servers: int) -> None:
    """Answer until killed: as one of so many, which share the table."""
    import grpc
    import numpy as np

    data: dict[int, Any] = {}

    @functools.cache
    def table() -> Any:
        return np.zeros((ROWS // servers, WIDTH), np.float32)

    def held(size: int) -> memoryview:
        if size not in data:
            data[size] = memoryview(np.ones(size, np.uint8))
        values: memoryview = data[size]
        return values

    def pull(request: bytes, _: grpc.ServicerContext) -> Iterator[bytes]:
        values = held(int(request))
        for start in range(0, len(values), FRAME):
            yield bytes(values[start : start + FRAME])

    def push(frames: Iterator[bytes], _: grpc.ServicerContext) -> bytes:
        values, at = held(int(next(frames))), 0
        for frame in frames:
            values[at : at + len(frame)] = frame
            at += len(frame)
        return b"done"

    def exchange(requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        for request in requests:
            kind, (number,) = request[:1], np.frombuffer(request, np.int64, 1, 8)
            if kind == READ:
                yield bytes(held(int(number)))
                continue
            ids = np.frombuffer(request, np.int64, number, 16)
            if kind == GATHER:
                yield table().take(ids, axis=0).tobytes()
            else:
                table()[ids] -= np.frombuffer(request, np.float32, offset=16 + ids.nbytes).reshape(-1, WIDTH)
                yield b"done"

    handlers = {
        "pull": grpc.unary_stream_rpc_method_handler(pull),
        "push": grpc.stream_unary_rpc_method_handler(push),
        "exchange": grpc.stream_stream_rpc_method_handler(exchange),
    }
    running = grpc.server(ThreadPoolExecutor(8), options=SERVER_OPTIONS)
    running.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", handlers),))
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    print(port, flush=True)
    running.wait_for_termination()


class Client:
    """Of all servers at once, each of which has an equal part of everything."""

    def __init__(self, ports: Sequence[int]) -> None:
        import grpc
        from grpc.experimental import ChannelOptions

        from pscluster.core.streams import DirectStream

        options = [*CHANNEL_OPTIONS, (ChannelOptions.SingleThreadedUnaryStream, 1)]
        self._channels = [grpc.insecure_channel(f"127.0.0.1:{port}", options=options) for port in ports]
        self._threads = ThreadPoolExecutor(len(ports))
        self._data: dict[int, Any] = {}
        self._sessions = [DirectStream(channel, "/bare/exchange", ()) for channel in self._channels]

    def _on_each(self, work: Callable[[Any], None]) -> None:
        if len(self._channels) == 1:
            work(self._channels[0])
        else:
            list(self._threads.map(work, self._channels))

    def pull(self, size: int) -> None:
        """Take the bytes, each server's part into one piece of memory."""
        import numpy as np

        part = size // len(self._channels)

        def take(channel: Any) -> None:
            values, at = memoryview(np.empty(part, np.uint8)), 0
            for frame in channel.unary_stream("/bare/pull")(str(part).encode()):
                values[at : at + len(frame)] = frame
                at += len(frame)

        self._on_each(take)

    def push(self, size: int) -> None:
        """Send so many bytes."""
        import numpy as np

        part = size // len(self._channels)
        if part not in self._data:
            self._data[part] = memoryview(np.ones(part, np.uint8))
        values = self._data[part]

        def frames() -> Iterator[bytes]:
            yield str(part).encode()
            for at in range(0, part, FRAME):
                yield bytes(values[at : at + FRAME])

        self._on_each(lambda channel: channel.stream_unary("/bare/push")(frames()))

    def _exchanges(self, requests: Sequence[tuple[Any, ...]]) -> list[bytes]:
        """A request a server: what is wanted, a number, and arrays."""
        import numpy as np

        for session, (kind, number, *payload) in zip(self._sessions, requests, strict=True):
            session.send(b"".join((kind.ljust(8), np.int64(number).tobytes(), *payload)))
        return [session.receive() for session in self._sessions]

    def read(self, size: int) -> None:
        """So many bytes, in one message a server."""
        self._exchanges([(READ, size // len(self._sessions))] * len(self._sessions))

    def gather(self, ids: int) -> None:
        """Random rows of the table, in the order of the ids."""
        self._rows_of(self._split(ids))

    def gather_update(self, ids: int) -> None:
        """The same, and as many rows sent back and subtracted."""
        shares = self._split(ids)
        changed = self._rows_of(shares) * 2 + 1
        requests = [(UPDATE, len(local), local, changed[place]) for place, local in shares]
        self._exchanges(requests)

    def _split(self, ids: int) -> list[tuple[Any, Any]]:
        """Random ids, and for each server which of them are its, and their numbers there."""
        import numpy as np

        wanted, part = np.random.randint(0, ROWS, ids), ROWS // len(self._sessions)
        shares = []
        for index in range(len(self._sessions)):
            place = np.flatnonzero(wanted // part == index)
            shares.append((place, wanted[place] - index * part))
        return shares

    def _rows_of(self, shares: Sequence[tuple[Any, Any]]) -> Any:
        import numpy as np

        rows = np.empty((sum(len(place) for place, _ in shares), WIDTH), np.float32)
        replies = self._exchanges([(GATHER, len(local), local) for _, local in shares])
        for (place, _), reply in zip(shares, replies, strict=True):
            rows[place] = np.frombuffer(reply, np.float32).reshape(-1, WIDTH)
        return rows


def client(ports: Sequence[int]) -> None:
    """Do what each line says, so many times."""
    mine = Client(ports)
    for line in sys.stdin:
        request = json.loads(line)
        for _ in range(request["n"]):
            getattr(mine, request["do"])(request["size"])
        print("done", flush=True)


def _spawned(stack: contextlib.ExitStack, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.callback(process.wait, 10)
    stack.callback(process.kill)
    return process


def start(stack: contextlib.ExitStack, servers: int, workers: int) -> tuple[Handlers, dict[str, str]]:
    """Start the processes and connect."""
    import grpc

    ports = []
    for process in [_spawned(stack, f"--server={servers}") for _ in range(servers)]:
        assert process.stdout is not None
        ports.append(int(process.stdout.readline()))
    clients = [_spawned(stack, "--client", *map(str, ports)) for _ in range(workers)]
    here = Client(ports)

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
        alone = Client(ports[:1])
        return [timed(lambda: alone.read(1)) for _ in range(n)]

    handlers: dict[str, Callable[..., Any]] = {
        "single": single,
        "latency": latency,
        "pull": lambda mib, n: all_do("pull", n, mib << 20),
        "push": lambda mib, n: all_do("push", n, mib << 20),
        "many": lambda variables, n: all_do("read", n, variables * 4096),
        "gather": lambda ids, n: all_do("gather", n, ids),
        "gather_update": lambda ids, n, optimizer: all_do("gather_update", n, ids),
    }
    return handlers, {"grpcio": grpc.__version__}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ps", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--server", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--client", nargs="+", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    tune_allocator()
    if options.server:
        server(options.server)
    elif options.client:
        client(options.client)
    else:
        serve(lambda stack: start(stack, options.ps, options.workers))


if __name__ == "__main__":
    main()
