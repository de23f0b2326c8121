"""torch.distributed's side, over gloo: processes that compute all-reduces together.

gloo_side.py --workers N
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import torch
import torch.distributed as dist
from driver import Handlers, serve


def member(rank: int, size: int, where: str) -> None:
    """Join the group, over a file, and time what is asked for, a line each, until the input ends."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=size)
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        array = torch.ones(request["size"] // 4)
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(request["n"]):
            dist.all_reduce(array)
        print(time.perf_counter() - begin, flush=True)


def start(stack: contextlib.ExitStack) -> tuple[Handlers, dict[str, str]]:
    """Start the members and wait until all have joined."""
    size = int(sys.argv[1].removeprefix("--workers="))
    where = os.path.join(stack.enter_context(tempfile.TemporaryDirectory()), "meet")
    members = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(size), where],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]

    def end() -> None:
        for process in members:
            process.kill()
            process.wait(10)

    stack.callback(end)

    def line_of(process: Any) -> str:
        line: str = process.stdout.readline()
        assert line, "a member has ended"
        return line.strip()

    for process in members:
        assert line_of(process) == "ready"

    def all_reduce(n: int, size: int) -> float:
        for process in members:
            assert process.stdin is not None
            print(json.dumps({"n": n, "size": size}), file=process.stdin, flush=True)
        return max(float(line_of(process)) for process in members)

    return {"all_reduce": all_reduce}, {"torch": torch.__version__}


if __name__ == "__main__":
    if len(sys.argv) == 4:
        member(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    else:
        serve(start)
