"""A process of a pool: `python -m pscluster.worker.data.processes.child SOCKET SLOT...`, all numbers of descriptors.

It calls a dataset's function for the examples that its worker writes to the slots. It ends when the connection or its
standard input does: the worker is gone, or wants it no more.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pscluster.core.functions.definitions import resolve_alone
from pscluster.core.functions.policy import SerializationPolicy, choose
from pscluster.core.role.process import tune_allocator
from pscluster.worker.data.blocks import stacked, unstacked
from pscluster.worker.data.processes.messages import Connection, Kind
from pscluster.worker.data.processes.slots import Slot
from pscluster.worker.failures import failure_of


def _end_with_worker() -> None:
    """End this process when standard input ends, also in the middle of a call."""
    alive = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)

    def watch() -> NoReturn:
        with contextlib.suppress(OSError):
            while os.read(alive, 1):
                pass
        os._exit(1)

    threading.Thread(target=watch, name="worker", daemon=True).start()


def _loaded(setup: dict[str, Any]) -> Callable[[Any], Any]:
    """Return the function. Raise UnresolvedReference if it can't be loaded here."""
    sys.path[:] = setup["path"]
    policy = setup["policy"]
    for name in ("folders", "data"):
        policy[name] = tuple(map(Path, policy[name]))
    choose(SerializationPolicy(**policy))
    return resolve_alone(setup["forms"])


def _run(function: Callable[[Any], Any], slot: Slot, setup: dict[str, Any]) -> Kind:
    """Do the task in a slot, and leave its result or error there."""
    done = 0
    try:
        block = slot.read()
        if setup["each"]:
            results = []
            for example in unstacked(block):
                results.append(function(example))
                done += 1
                slot.progress = done
            result = stacked(results) if setup["stack"] else results
        else:
            result = function(block)
        slot.write(result, f"what {setup['name']} returned")
    except BaseException as error:  # also sys.exit() in the function
        slot.write({"failure": failure_of(error).SerializeToString(), "example": done})
        return Kind.RAISED
    return Kind.DONE


def _messages(connection: Connection) -> Iterator[tuple[Kind, int]]:
    while (messages := connection.receive()) is not None:
        yield from messages


def serve(connection: Connection, slots: Sequence[Slot]) -> None:
    """Do what the worker says until the connection ends."""
    messages = _messages(connection)
    _, first = next(messages)
    setup = slots[first].read()
    try:
        function = _loaded(setup)
    except BaseException as error:
        slots[first].write({"failure": failure_of(error).SerializeToString(), "example": 0})
        connection.send(Kind.UNLOADABLE, first)
        return
    connection.send(Kind.READY, first)
    for kind, slot in messages:
        connection.send(_run(function, slots[slot], setup) if kind is Kind.TASK else Kind.DONE, slot)


def main() -> None:
    """Serve the worker that has started this process."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C in a terminal also reaches the worker, which ends this process
    tune_allocator()
    _end_with_worker()
    descriptors = [int(argument) for argument in sys.argv[1:]]
    del sys.argv[1:]
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    connection = Connection(socket.socket(fileno=descriptors[0]))
    with contextlib.suppress(OSError, StopIteration):  # the worker is gone
        serve(connection, [Slot(descriptor) for descriptor in descriptors[1:]])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # frameworks' threads may never end


if __name__ == "__main__":
    main()
