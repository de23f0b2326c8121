"""The process that a worker starts for a training function: `python -m pscluster.launch.members.child FD`.

It is told what to run over the connection with that number, asks its questions there, and says at the end what the
function returned or raised. If the connection ends, the worker is gone, and so is this process.
"""

from __future__ import annotations

import itertools
import multiprocessing.connection
import os
import sys
import threading
from typing import Any

from pscluster.core.functions.definitions import resolve_alone
from pscluster.core.values import encode
from pscluster.launch.members.running import Setup, run_member, unpacked
from pscluster.v1 import worker_pb2
from pscluster.worker.failures import failure_of, rebuild_error


class _Worker:
    """The worker, at the other end of the connection."""

    def __init__(self, connection: multiprocessing.connection.Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, list[Any]] = {}
        self._changed = threading.Condition()

    def send(self, **message: Any) -> None:
        data = encode(message, path="what the function returned").SerializeToString()
        with self._sending:
            self._connection.send_bytes(data)

    def receive(self) -> dict[str, Any]:
        return unpacked(self._connection.recv_bytes())

    def listen(self) -> None:
        """Take answers until the connection ends; then end this process."""
        try:
            while True:
                message = self.receive()
                with self._changed:
                    self._waiting[message["number"]] = [message]
                    self._changed.notify_all()
        except (EOFError, OSError):
            os._exit(1)

    def ask(self, question: dict[str, Any]) -> Any:
        number = next(self._numbers)
        self.send(number=number, question=question)
        with self._changed:
            self._changed.wait_for(lambda: number in self._waiting)
            (message,) = self._waiting.pop(number)
        if "failure" in message:
            failure = worker_pb2.Failure.FromString(message["failure"])
            raise rebuild_error(failure)
        return message["value"]


def main() -> None:
    """Run the function that the worker names; return its outcome to it."""
    worker = _Worker(multiprocessing.connection.Connection(int(sys.argv[1])))
    del sys.argv[1:]  # for a function that runs a script
    start = worker.receive()
    threading.Thread(target=worker.listen, name="answers", daemon=True).start()
    try:
        train_fn = resolve_alone(start["forms"])
        setup = Setup(**start["setup"])
        rank, datasets = start["rank"], start["datasets"]
        value = run_member(train_fn, start["config"], setup, datasets, rank, worker.ask, tells=True)
        worker.send(value=value)
    except BaseException as error:  # also sys.exit(1) in the function
        worker.send(failure=failure_of(error).SerializeToString())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # frameworks' threads may never end


if __name__ == "__main__":
    main()
