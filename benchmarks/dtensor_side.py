"""torch DTensor's side, over gloo: two processes that run one program on distributed tensors, with autograd."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import array_models as models
import torch
import torch.distributed as dist
from driver import Handlers, serve
from gloo_side import join_group
from members import asked_members, time_requests
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh


def steps_of(mesh: Any) -> Callable[[int], None]:
    """Return a function that does this many steps."""
    parameters = [
        torch.nn.Parameter(distribute_tensor(torch.from_numpy(value), mesh, [Replicate()]))
        for value in models.parameters()
    ]
    optimizer = torch.optim.Adam(parameters, lr=models.RATE, eps=models.EPSILON)
    data = [
        tuple(distribute_tensor(torch.from_numpy(array), mesh, [Shard(0)]) for array in batch)
        for batch in models.batches()
    ]

    def run(n: int) -> None:
        kernel_1, bias_1, kernel_2, bias_2 = parameters
        for nth in range(n):
            x, classes = data[nth % len(data)]
            logits = torch.relu(x @ kernel_1 + bias_1) @ kernel_2 + bias_2
            loss = -(torch.log_softmax(logits, 1) * classes).sum() / models.BATCH
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert isinstance(loss, DTensor)
        loss.full_tensor().item()

    return run


def member(rank: int, size: int, where: str) -> None:
    """Join the group, and time what is asked for."""
    join_group(rank, size, where)
    run = steps_of(init_device_mesh("cpu", (size,)))
    time_requests(lambda request: lambda: run(request["n"]), dist.barrier)


def start(stack: contextlib.ExitStack) -> tuple[Handlers, dict[str, str]]:
    """Start the members and wait until all have joined."""
    ask = asked_members(stack, __file__, 2)
    return {"train": lambda n, at_once: ask(n=n)}, {"torch": torch.__version__}


if __name__ == "__main__":
    if len(sys.argv) == 4:
        member(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    else:
        serve(start)
