"""torch.distributed.rpc's side: two workers, each a process, called with rpc_async from a third.

It chooses its own transports: on one machine that is shared memory, which is faster than TCP.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time

os.environ["TP_SOCKET_IFNAME"] = "lo"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import torch
import torch.distributed.rpc as rpc
from driver import Handlers, serve, timed


def nothing() -> None:
    """An empty function."""


def one() -> int:
    """A function with a small result."""
    return 1


def join(rank: int, where: str) -> None:
    """Join the group, over a file, so that only the transport listens, on loopback."""
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{where}", rpc_timeout=60, num_worker_threads=4)
    rpc.init_rpc("driver" if not rank else f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)


def start(stack: contextlib.ExitStack) -> tuple[Handlers, dict[str, str]]:
    """Start the workers and join them."""
    directory = stack.enter_context(tempfile.TemporaryDirectory())
    where = os.path.join(directory, "meet")
    workers = [subprocess.Popen([sys.executable, __file__, str(rank), where]) for rank in (1, 2)]

    def end() -> None:
        for worker in workers:
            worker.kill()
            worker.wait(10)

    stack.callback(end)
    join(0, where)
    stack.callback(lambda: rpc.shutdown(graceful=False))
    names = ["worker1", "worker2"]

    def empty(n: int, result: bool) -> float:
        function = one if result else nothing

        def work() -> None:
            values = torch.futures.wait_all([rpc.rpc_async(names[i % 2], function) for i in range(n)])
            assert not result or sum(values) == n

        return timed(work)

    def latency(n: int) -> list[float]:
        took = []
        for i in range(n):
            begin = time.perf_counter()
            rpc.rpc_async(names[i % 2], one).wait()
            took.append(time.perf_counter() - begin)
        return took

    return {"empty": empty, "latency": latency}, {"torch": torch.__version__}


if __name__ == "__main__":
    if len(sys.argv) == 3:
        join(int(sys.argv[1]), sys.argv[2])
        time.sleep(3600)  # the driver ends it, after an hour at most
    else:
        serve(start)
