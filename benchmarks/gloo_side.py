"""torch.distributed's side, over gloo: processes that compute all-reduces together, or train (DDP).

gloo_side.py --workers N
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import torch
import torch.distributed as dist
from driver import Handlers, serve
from members import asked_members, time_requests
from step_models import SIZES, batch


def member(rank: int, size: int, where: str) -> None:
    """Join the group, and time what is asked for."""
    join_group(rank, size, where)
    trainers: dict[str, Any] = {}

    def work_of(request: Any) -> Callable[[], object]:
        if "model" in request:
            once = trainers.setdefault(request["model"], None) or trainer(request["model"], rank)
            trainers[request["model"]] = once
        else:
            array = torch.ones(request["size"] // 4)
            once = functools.partial(dist.all_reduce, array)
        return lambda: [once() for _ in range(request["n"])]

    time_requests(work_of, dist.barrier)


def join_group(rank: int, size: int, where: str) -> None:
    """Join the group, over a file."""
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # torch imports the library's `profile`, not ours
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=size)


def trainer(model: str, rank: int) -> Callable[[], object]:
    """Return a step of DistributedDataParallel."""
    first, hidden, last = SIZES[model]
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(first, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, last))
    replica = torch.nn.parallel.DistributedDataParallel(network)
    if model == "digits":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(replica.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.SGD(replica.parameters(), lr=1e-3)
    x, y = map(torch.from_numpy, batch(model, rank))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(replica(x), y).backward()
        optimizer.step()

    return step


def start(stack: contextlib.ExitStack) -> tuple[Handlers, dict[str, str]]:
    """Start the members and wait until all have joined."""
    ask = asked_members(stack, __file__, int(sys.argv[1].removeprefix("--workers=")))

    def steps(n: int, model: str, at_once: int) -> float:
        del at_once
        return ask(n=n, model=model)

    return {"all_reduce": ask, "steps": steps}, {"torch": torch.__version__}


if __name__ == "__main__":
    if len(sys.argv) == 4:
        member(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    else:
        serve(start)
