"""Links in memory, for tests of the algorithms: a send waits until its receiver has posted, as strictly as can be."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from pscluster.core.transport.frames import Buffer

TIMEOUT = 40.0


class Network:
    """Everything that the members have posted."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.posted: defaultdict[tuple[int, int], deque[_Receipt]] = defaultdict(deque)
        self.sent: defaultdict[int, int] = defaultdict(int)  # bytes, by member
        self.errors: list[BaseException] = []

    def wait_for(self, condition: Callable[[], object], wrong: str) -> None:
        """Wait for a condition under the lock, for as long as no member has failed."""
        assert self.changed.wait_for(lambda: self.errors or condition(), TIMEOUT), wrong
        assert not self.errors, "another member has failed"

    def fail(self, error: BaseException) -> None:
        """Note that a member has failed."""
        with self.changed:
            self.errors.append(error)
            self.changed.notify_all()


class _Receipt:
    def __init__(self, network: Network, memory: memoryview) -> None:
        self._network, self.memory, self.done = network, memory, False

    def wait(self) -> None:
        """Wait for the message."""
        with self._network.changed:
            self._network.wait_for(lambda: self.done, "a message that never came")


class MemoryLinks:
    """One member's links."""

    def __init__(self, network: Network, rank: int, size: int) -> None:
        self._network, self.rank, self.size = network, rank, size

    def send(self, to: int, *buffers: Buffer) -> None:
        """Copy a message into what the receiver has posted, once it has."""
        data, network = b"".join(buffers), self._network
        with network.changed:
            posted = network.posted[self.rank, to]
            network.wait_for(lambda: posted, "no member receives: they are in a deadlock")
            receipt = posted.popleft()
            receipt.memory[:] = data  # of another size: ValueError
            receipt.done = True
            network.sent[self.rank] += len(data)
            network.changed.notify_all()

    def post(self, source: int, memory: memoryview) -> _Receipt:
        """Post a receive."""
        receipt = _Receipt(self._network, memory)
        with self._network.changed:
            self._network.posted[source, self.rank].append(receipt)
            self._network.changed.notify_all()
        return receipt


def on_each(size: int, fn: Callable[[MemoryLinks], Any]) -> list[Any]:
    """Run a function as each of the members at once; return the results by rank, when nothing is left over."""
    network, results = Network(), [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = fn(MemoryLinks(network, rank, size))
        except BaseException as error:
            network.fail(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT)
    if network.errors:
        raise network.errors[0]
    assert not any(network.posted.values()), "receives that nothing has filled"
    return results
