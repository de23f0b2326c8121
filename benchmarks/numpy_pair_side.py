"""The limit of two processes: hand-written NumPy in each, on half of every batch, and a socket for sums of gradients.

numpy_pair_side.py ... Each sends its gradients to the other one, and applies Adam to the sums in full, as our programs
do; nothing is named, checked, scheduled or retried.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from driver import THREADS, Handlers, serve
from members import asked_members, time_requests

os.environ.update(THREADS)  # before NumPy is loaded

import array_models as models
import numpy as np

_BUFFER_BYTES = 4 << 20  # so that neither waits until the other one reads; net.core.wmem_max has to permit it


def _connected(rank: int, where: Path) -> socket.socket:
    """Return a connection to the other process, which meets this one by a file."""
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            where.with_suffix(".new").write_text(str(listener.getsockname()[1]))
            where.with_suffix(".new").rename(where)
            connection = listener.accept()[0]
    else:
        while not where.exists():
            time.sleep(0.01)
        connection = socket.create_connection(("127.0.0.1", int(where.read_text())))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    return connection


def member(rank: int, where: Path) -> None:
    """Meet the other process, and time what is asked for."""
    connection = _connected(rank, where)
    half = models.BATCH // 2
    mine = slice(rank * half, (rank + 1) * half)
    data = [(x[mine], classes[mine]) for x, classes in models.batches()]
    state = models.initial_state()
    received = np.empty(sum(values[0].size for values in state), np.float32)

    def summed(gradients: list[Any]) -> list[Any]:
        assert connection.sendmsg(gradients) == received.nbytes
        assert connection.recv_into(received, received.nbytes, socket.MSG_WAITALL) == received.nbytes
        start = 0
        for gradient in gradients:
            gradient += received[start : start + gradient.size].reshape(gradient.shape)
            start += gradient.size
        return gradients

    def barrier() -> None:
        connection.sendall(b"!")
        assert connection.recv(1) == b"!"

    def work_of(request: Any) -> Callable[[], object]:
        def work() -> None:
            nonlocal state
            for nth in range(request["n"]):
                state, _ = models.train_step(state, *data[nth % len(data)], summed)

        return work

    time_requests(work_of, barrier)


def start(stack: contextlib.ExitStack) -> tuple[Handlers, dict[str, str]]:
    """Start both processes."""
    ask = asked_members(stack, __file__, 2)
    return {"train": lambda n, at_once: ask(n=n)}, {"numpy": np.__version__}


if __name__ == "__main__":
    if len(sys.argv) == 4:
        member(int(sys.argv[1]), Path(sys.argv[3]))
    else:
        serve(start)
