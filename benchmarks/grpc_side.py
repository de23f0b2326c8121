"""What Python's gRPC can reach: frames of 1 MiB over one stream, made and taken in the fewest copies, and nothing else.

No variables, no locks, no checks, no once-only updates: beside it one sees what ours cost. Same allocator settings.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from driver import Handlers, serve

from pscluster.core.channels import CHANNEL_OPTIONS, SERVER_OPTIONS
from pscluster.core.process import tune_allocator

FRAME = 1 << 20


def server() -> None:
    """Answer until killed."""
    import grpc
    import numpy as np

    data: dict[int, Any] = {}

    def held(mib: int) -> memoryview:
        if mib not in data:
            data[mib] = memoryview(np.ones(mib << 20, np.uint8))
        values: memoryview = data[mib]
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

    handlers = {
        "pull": grpc.unary_stream_rpc_method_handler(pull),
        "push": grpc.stream_unary_rpc_method_handler(push),
    }
    running = grpc.server(ThreadPoolExecutor(4), options=SERVER_OPTIONS)
    running.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", handlers),))
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    print(port, flush=True)
    running.wait_for_termination()


def start(stack: contextlib.ExitStack) -> tuple[Handlers, dict[str, str]]:
    """Start the server's process and connect."""
    import grpc
    import numpy as np
    from grpc.experimental import ChannelOptions

    process = subprocess.Popen([sys.executable, __file__, "--server"], stdout=subprocess.PIPE, text=True)
    stack.callback(process.wait, 10)
    stack.callback(process.kill)
    assert process.stdout is not None
    options = [*CHANNEL_OPTIONS, (ChannelOptions.SingleThreadedUnaryStream, 1)]
    channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{int(process.stdout.readline())}", options=options))
    pull, push = channel.unary_stream("/bare/pull"), channel.stream_unary("/bare/push")
    data: dict[int, Any] = {}

    def frames(mib: int, values: memoryview) -> Iterator[bytes]:
        yield str(mib).encode()
        for at in range(0, len(values), FRAME):
            yield bytes(values[at : at + FRAME])

    def single(mib: int, n: int, push: bool) -> list[float]:
        if mib not in data:
            data[mib] = memoryview(np.ones(mib << 20, np.uint8))
        values, took = data[mib], []
        for _ in range(n):
            begin, at = time.perf_counter(), 0
            if push:
                send(frames(mib, values))
            else:
                for frame in pull(str(mib).encode()):
                    values[at : at + len(frame)] = frame
                    at += len(frame)
            took.append(time.perf_counter() - begin)
        return took

    send = push
    return {"single": single}, {"grpcio": grpc.__version__}


if __name__ == "__main__":
    tune_allocator()
    if "--server" in sys.argv:
        server()
    else:
        serve(start)
