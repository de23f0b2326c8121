"""Dask's side: two workers, each a process of one thread; functions submitted by a client."""

from __future__ import annotations

import contextlib
import time

import distributed
from driver import Handlers, serve, timed


def nothing() -> None:
    """An empty function."""


def one() -> int:
    """A function with a small result."""
    return 1


def client_of_workers(stack: contextlib.ExitStack) -> distributed.Client:
    """Start a scheduler and two workers, for loopback only; return their client."""
    cluster = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None, silence_logs=50
    )
    stack.callback(cluster.close)
    return stack.enter_context(distributed.Client(cluster))


def start(stack: contextlib.ExitStack) -> tuple[Handlers, dict[str, str]]:
    """Start the workers."""
    client = client_of_workers(stack)

    def empty(n: int, result: bool) -> float:
        def work() -> None:
            futures = [client.submit(one if result else nothing, pure=False) for _ in range(n)]
            if result:
                assert sum(client.gather(futures)) == n
            else:
                distributed.wait(futures)

        return timed(work)

    def latency(n: int) -> list[float]:
        took = []
        for _ in range(n):
            begin = time.perf_counter()
            client.submit(one, pure=False).result()
            took.append(time.perf_counter() - begin)
        return took

    return {"empty": empty, "latency": latency}, {"distributed": distributed.__version__}


if __name__ == "__main__":
    serve(start)
