"""Shared by the tests of a server's state: stores, clients, all facts to compare, and a disk that fails."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.waiting import TIMEOUT

from pscluster.core.transport.frames import padding, view
from pscluster.ps.optim.rules import RULES
from pscluster.ps.server.requests import creation, reads, update_checks
from pscluster.ps.server.requests.payload import Payload
from pscluster.ps.server.state import shard
from pscluster.ps.server.state.store import Store
from pscluster.ps.server.write_path import write
from pscluster.ps.spec import METADATA
from pscluster.ps.storage.files import spill
from pscluster.ps.storage.job_state import JobIdentity
from pscluster.ps.storage.log.format import FIRST
from pscluster.ps.storage.manager import StateManager
from pscluster.ps.storage.options import Durability, DurabilityOptions
from pscluster.v1 import ps_pb2

Array = npt.NDArray[Any]
Part = tuple[ps_pb2.UpdateItem, tuple[Array, ...]]
Sendable = tuple[ps_pb2.UpdateRequest, Payload, int]
Facts = dict[Any, Any]

JOB = 7
IDENTITY = JobIdentity(77, 78, 1, "of the tests")
CHUNK = 32
"""Bytes of a block where `small_blocks` was called."""

NEVER = 1e6
"""Seconds between generations, so that there are those only that somebody asks for."""


def small_blocks(patch: pytest.MonkeyPatch) -> None:
    """Cut everything into blocks of `CHUNK` bytes."""
    for module in (shard, reads, spill):
        patch.setattr(module, "CHUNK_BYTES", CHUNK)


# Stores


def padded(*arrays: Array) -> Payload:
    """Return a payload with these segments."""
    pieces = [piece for array in arrays for piece in (bytes(view(array)), bytes(padding(array.nbytes)))]
    return Payload([memoryview(b"".join(pieces))])


def declare(held: Store, variable: int, values: Array, *ends: tuple[int, ...], name: str = "") -> None:
    """Create a variable with these values, cut only along its first axis, with all shards here."""
    cuts = ends[0] if ends else values.shape[:1]
    splits = [{"ends": cuts if axis == 0 else [length]} for axis, length in enumerate(values.shape)]
    spec = ps_pb2.VariableSpec(
        id=variable, name=name or f"v{variable}", dtype=values.dtype.name, shape=values.shape, splits=splits
    )
    spec.owners.extend([held.index] * (len(cuts) if values.ndim else 1))
    parts = np.split(values, cuts[:-1]) if values.ndim else [values]
    creation.create(held, ps_pb2.CreateRequest(job=held.job, variable=spec), padded(*map(np.ascontiguousarray, parts)))


def declare_rule(
    held: Store, optimizer: int, rule: str, *, schedule: str = "", ema: float = 0.0, **hyperparameters: float
) -> None:
    """Create an optimizer."""
    numbers, flags = RULES[rule](**hyperparameters).to_spec()
    spec = ps_pb2.OptimizerSpec(
        id=optimizer, name=f"o{optimizer}", rule=rule, numbers=numbers, flags=flags, schedule=schedule, ema_momentum=ema
    )
    creation.create(held, ps_pb2.CreateRequest(job=held.job, optimizer=spec), Payload([]))


def values_of(held: Store, variable: int, shard: int = 0) -> Array:
    """Return a copy of a shard's values."""
    held_shard = {known.spec.id: known for known in held.held()[0]}[variable].shards[shard]
    with held_shard.lock:
        return held_shard.array.copy()


def facts(held: Store, *, ledger: bool = True) -> Facts:
    """Return all that a store holds, for comparison."""
    contents: Facts = {}
    variables, optimizers, awaited = held.held()
    for variable in variables:
        contents["variable", variable.spec.id] = variable.spec.SerializeToString(deterministic=True)
        for index, held_shard in variable.shards.items():
            with held_shard.lock:
                for name, array in held_shard.arrays().items():
                    contents[variable.spec.id, index, name] = array.dtype.name, array.shape, array.tobytes()
                contents[variable.spec.id, index, "counts"] = held_shard.updates, dict(held_shard.steps)
                with held.ledger() as memory:
                    keys = [(origin, sorted(nths)) for origin, nths in memory.keys_of(variable.spec.id, index)]
            contents[variable.spec.id, index, "keys"] = sorted(keys, key=repr)
    for known in optimizers:
        contents["optimizer", known.spec.id] = known.spec.SerializeToString(deterministic=True), known.by_value
    metadata = held.directory.metadata
    with metadata.lock, held.ledger() as memory:
        keys = [(origin, sorted(nths)) for origin, nths in memory.keys_of(*METADATA)]
        contents["metadata"], contents["metadata", "keys"] = (metadata.texts, metadata.updates), sorted(keys, key=repr)
    contents["awaited"], contents["job"], contents["index"] = awaited, held.job, held.index
    if ledger:
        with held.ledger() as memory:
            contents["closed"], contents["finished"] = sorted(memory.closed), list(memory.finished)
            contents["settled"] = {key: client.settled for key, client in memory.clients.items() if client.settled}
    return contents


# Updates


def dense(kind: ps_pb2.UpdateKind, values: Array, variable: int = 1, shard: int = 0, optimizer: int = 0) -> Part:
    """Update a whole shard."""
    item = ps_pb2.UpdateItem(variable=variable, shard=shard, kind=kind, optimizer=optimizer, rows=ps_pb2.Rows(all=True))
    return item, (values,)


def rows(
    kind: ps_pb2.UpdateKind,
    ids: list[int],
    values: Array,
    variable: int = 1,
    shard: int = 0,
    optimizer: int = 0,
    leading: int = 0,
) -> Part:
    """Update rows of a shard."""
    item = ps_pb2.UpdateItem(
        variable=variable,
        shard=shard,
        kind=kind,
        optimizer=optimizer,
        rows=ps_pb2.Rows(ids=len(ids), leading=leading),
    )
    return item, (np.array(ids, np.int64), values)


def box(
    kind: ps_pb2.UpdateKind, axes: list[tuple[int, int, int]], values: Array, variable: int = 1, shard: int = 0
) -> Part:
    """Update a box, given as start, step and count of each axis; a scalar is for all of it."""
    slices = ps_pb2.Slices(axes=[{"start": start, "step": step, "count": count} for start, step, count in axes])
    item = ps_pb2.UpdateItem(variable=variable, shard=shard, kind=kind, rows=ps_pb2.Rows(slices=slices))
    item.scalar = values.ndim == 0 and bool(axes)
    return item, (values,)


def scalar(kind: ps_pb2.UpdateKind, value: Array, variable: int = 1, shard: int = 0) -> Part:
    """Update all of a shard with one value."""
    item = ps_pb2.UpdateItem(variable=variable, shard=shard, kind=kind, rows=ps_pb2.Rows(all=True), scalar=True)
    return item, (value,)


def put(name: str, text: str) -> Part:
    """Of the job's metadata."""
    variable, shard = METADATA
    item = ps_pb2.UpdateItem(variable=variable, shard=shard, kind=ps_pb2.PUT, name=name, text=text)
    return item, (np.empty(0, np.uint8),)


class Client:
    """Sends a server updates, outside of functions unless told otherwise."""

    def __init__(self, manager: StateManager, held: Store, incarnation: int = 9) -> None:
        self.manager = manager
        self.held = held
        self.incarnation = incarnation
        self.sequence = 0

    def made(self, *parts: Part, function: int = 0) -> Sendable:
        """Return a request, its payload, and the payload's size."""
        self.sequence += 1
        request = ps_pb2.UpdateRequest(job=self.held.job, incarnation=self.incarnation, function=function)
        if not function:
            request.sequence, request.settled = self.sequence, max(self.sequence - 2, 0)
        arrays = list[Array]()
        for nth, (item, segments) in enumerate(parts):
            item.nth, item.value_bytes = nth + 1, segments[-1].nbytes
            request.items.append(item)
            arrays += segments
        return request, padded(*arrays), sum(array.nbytes + padding(array.nbytes) for array in arrays)

    def send(self, made: Sendable) -> ps_pb2.UpdateReply:
        """Apply a request as the service does."""
        request, payload, total = made
        return write(
            self.manager, self.held, request, update_checks.check_update(self.held, request, total), payload, total
        )

    def update(self, *parts: Part, function: int = 0) -> ps_pb2.UpdateReply:
        """Make and apply an update."""
        return self.send(self.made(*parts, function=function))


# State managers


@contextlib.contextmanager
def manager_of(
    folder: Path, kind: Durability = Durability.LOG, every: float = NEVER, *, fsync: bool = False
) -> Iterator[StateManager]:
    """Give a manager that has not been started, and close it."""
    manager = StateManager(DurabilityOptions(kind, folder, every, fsync))
    try:
        yield manager
    finally:
        manager.close()


@contextlib.contextmanager
def begun(
    folder: Path, kind: Durability = Durability.LOG, every: float = NEVER, *, fsync: bool = False
) -> Iterator[tuple[StateManager, Store]]:
    """Give a server in an empty directory whose job has just begun."""
    with manager_of(folder, kind, every, fsync=fsync) as manager:
        assert manager.restore() is None
        held = Store(0, JOB)
        manager.begin(held, IDENTITY)
        yield manager, held


def killed(folder: Path) -> Path:
    """Copy what a process that dies now leaves behind."""
    while True:
        copies = [int(path.name.rpartition("-")[2]) for path in folder.parent.glob(f"{folder.name}-copy-*")]
        copy = folder.with_name(f"{folder.name}-copy-{max(copies, default=0) + 1}")
        try:
            shutil.copytree(folder, copy, copy_function=_copied)
        except shutil.Error:  # a file came and went while it was copied
            continue
        return copy


def _copied(source: str, target: str) -> None:
    """Copy from the end, so that the copy has nothing without what was written before it."""
    with open(source, "rb", buffering=0) as old, open(target, "wb", buffering=0) as new:
        first = os.pread(old.fileno(), FIRST, 0)  # the mark of a log may be older than its records, never newer
        size = os.fstat(old.fileno()).st_size
        new.truncate(size)
        for at in range((size - 1) // 4096 * 4096, -1, -4096):
            if (data := os.pread(old.fileno(), 4096, at)).strip(b"\0"):
                os.pwrite(new.fileno(), data, at)
        if Path(source).name.startswith("log-"):
            os.pwrite(new.fileno(), first, 0)


def restored(folder: Path, kind: Durability = Durability.SNAPSHOT) -> Store | None:
    """Return the store that a server restores here. Without a log it truncates only a torn end of the last segment."""
    with manager_of(folder, kind) as manager:
        recovered = manager.restore()
        assert recovered is None or recovered.identity == IDENTITY
        return None if recovered is None else recovered.store


def found_in(folder: Path, kind: Durability = Durability.SNAPSHOT) -> Store:
    """Return the restored store; there must be one."""
    held = restored(folder, kind)
    assert held is not None
    return held


def names(folder: Path) -> set[str]:
    """Return the names of the files there."""
    return {path.name for path in folder.iterdir()}


# A disk that fails, or is slow


class Trouble:
    """A call of the operating system that fails while `armed`, for files with this in their names."""

    def __init__(self, patch: pytest.MonkeyPatch, call: str, files_with: str = "", code: int = errno.EIO) -> None:
        self._real, self._files_with, self._code = getattr(os, call), files_with, code
        self.armed = False
        self.raised = 0
        patch.setattr(os, call, self)

    def __call__(self, descriptor: int, *rest: Any) -> Any:
        if self.armed and self._files_with in os.readlink(f"/proc/self/fd/{descriptor}"):
            self.raised += 1
            self.fail()
        return self._real(descriptor, *rest)

    def fail(self) -> None:
        """Raise the error."""
        raise OSError(self._code, os.strerror(self._code))


class Hold(Trouble):
    """A call that blocks while `armed`, after the first `passes`, until `go` is set; then it may fail."""

    def __init__(self, patch: pytest.MonkeyPatch, call: str, files_with: str = "", passes: int = 0) -> None:
        super().__init__(patch, call, files_with)
        self.passes = passes
        self.entered, self.go = threading.Event(), threading.Event()
        self.failing = False

    def fail(self) -> None:
        """Block until `go` is set."""
        if self.raised <= self.passes:
            return
        self.entered.set()
        assert self.go.wait(TIMEOUT)
        if self.failing:
            super().fail()

    @contextlib.contextmanager
    def during(self, work: Callable[[], object]) -> Iterator[None]:
        """Run the block while `work` is blocked here in another thread; then let it end, without an error."""
        self.armed = True
        with beside(work) as raised:
            assert self.entered.wait(TIMEOUT)
            yield
            self.go.set()
        assert raised == []


@contextlib.contextmanager
def beside(*works: Any) -> Iterator[list[BaseException]]:
    """Run these in threads for the block; gives what they raised. They have ended after it."""
    raised = list[BaseException]()

    def run(work: Any) -> None:
        try:
            work()
        except BaseException as error:  # for the test to check
            raised.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield raised
    finally:
        for thread in threads:
            thread.join(TIMEOUT)
        assert not any(thread.is_alive() for thread in threads)
