"""Ray's side: two actors, each a process; their methods called from the driver."""

from __future__ import annotations

import contextlib
import os
import time

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import ray
from driver import THREADS, Handlers, serve, timed


@ray.remote(num_cpus=1)
class Actor:
    """A worker."""

    def nothing(self) -> None:
        """An empty method."""

    def one(self) -> int:
        """A method with a small result."""
        return 1


def start(stack: contextlib.ExitStack) -> tuple[Handlers, dict[str, str]]:
    """Start Ray on this machine, for loopback only, and two actors."""
    ray.init(
        num_cpus=2,
        _node_ip_address="127.0.0.1",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=200 << 20,
        runtime_env={"env_vars": THREADS},
    )
    stack.callback(ray.shutdown)
    actors = [Actor.remote() for _ in range(2)]
    ray.get([actor.one.remote() for actor in actors])

    def empty(n: int, result: bool) -> float:
        def without() -> None:
            # Only the last call of each actor returns a value: calls of one actor run in order.
            quick = [actor.nothing.options(num_returns=0) for actor in actors]
            for i in range(n):
                quick[i % 2].remote()
            ray.get([actor.one.remote() for actor in actors])

        def with_result() -> None:
            assert sum(ray.get([actors[i % 2].one.remote() for i in range(n)])) == n

        return timed(with_result if result else without)

    def latency(n: int) -> list[float]:
        took = []
        for i in range(n):
            begin = time.perf_counter()
            ray.get(actors[i % 2].one.remote())
            took.append(time.perf_counter() - begin)
        return took

    return {"empty": empty, "latency": latency}, {"ray": ray.__version__}


if __name__ == "__main__":
    serve(start)
