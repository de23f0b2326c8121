"""How variables are cut: what a client's handles go by, which changes when a variable is resharded.

A variable that is resharded has another number on the servers, with other shards, and keeps its name and its
origin: the number that it was created under. All handles of one client with one origin share one `SharedCut`, so they
go on with the new cut at once. Number, cut and owners belong together, so they are replaced together.

A request that is made of the old cut must not be sent after that: it would be refused, since the old number is gone.
So the cut changes when nothing is being made of it. Workers learn of it between functions. In the script, other
threads pass `Gate`, from before they look at the cut until their request is answered.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from pscluster.core.errors import WaitTimeoutError
from pscluster.core.geometry.partition import Partition
from pscluster.ps.spec import partition_of
from pscluster.v1 import ps_pb2


class Cut(NamedTuple):
    """The number under which the servers know a variable, its cut, and each shard's server when it was described."""

    id: int
    partition: Partition
    owners: tuple[int, ...]

    @staticmethod
    def of(spec: ps_pb2.VariableSpec) -> Cut:
        """Return the cut that a spec describes."""
        return Cut(spec.id, partition_of(spec), tuple(spec.owners))


class _Follower(Protocol):
    def cut_changed(self) -> None:
        """Go on with the new cut."""


class SharedCut:
    """The present cut of a variable, shared by its handles."""

    __slots__ = ("__weakref__", "_followers", "now")

    def __init__(self, now: Cut) -> None:
        self.now = now
        self._followers: list[weakref.ref[_Follower]] = []

    def follow(self, handle: _Follower) -> None:
        """Have a handle told of each change, as long as it lives."""
        self._followers = [*(ref for ref in self._followers if ref() is not None), weakref.ref(handle)]

    def change(self, cut: Cut) -> None:
        """Go on with another cut."""
        self.now = cut
        for ref in self._followers:
            if (handle := ref()) is not None:
                handle.cut_changed()


def origin_of(spec: ps_pb2.VariableSpec) -> int:
    """Return the number by which handles name a variable. An evaluation's copy is a variable of its own."""
    return spec.id if spec.evaluation else spec.origin or spec.id


class Gate:
    """Lets requests of any thread pass (`with gate:`), except while one thread holds it closed. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closer: int | None = None
        self._mine = threading.local()  # how many blocks this thread is in

    def __enter__(self) -> None:
        depth = getattr(self._mine, "depth", 0)
        if not depth:
            with self._changed:
                while self._closer not in (None, threading.get_ident()):
                    self._changed.wait()
                self._inside += 1
        self._mine.depth = depth + 1

    def __exit__(self, *_: object) -> None:
        self._mine.depth -= 1
        if not self._mine.depth:
            with self._changed:
                self._inside -= 1
                if not self._inside:
                    self._changed.notify_all()

    @contextlib.contextmanager
    def closed(self, timeout: float) -> Iterator[None]:
        """Let no other thread pass in the block, which begins when none is inside.

        Raises:
            WaitTimeoutError: somebody still is, after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._closer is not None or self._inside:
                if not self._changed.wait(max(deadline - time.monotonic(), 0.0)) and time.monotonic() >= deadline:
                    raise WaitTimeoutError(
                        f"after {timeout:g} s another thread of the script still reads or updates variables"
                    )
            self._closer = threading.get_ident()
        try:
            yield
        finally:
            with self._changed:
                self._closer = None
                self._changed.notify_all()
