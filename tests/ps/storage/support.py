"""What the tests of a server's state share: stores, clients, all that there is to compare, and a disk that fails."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.waiting import PATIENCE

from pscluster.core.transport.frames import padding, view
from pscluster.ps.optim import RULES
from pscluster.ps.server import creation, reads, shard, updates
from pscluster.ps.server.payload import Payload
from pscluster.ps.server.store import Store
from pscluster.ps.server.write_path import write
from pscluster.ps.storage import capture, generations, spill
from pscluster.ps.storage import log as log_module
from pscluster.ps.storage.manager import Keeper, Lineage
from pscluster.ps.storage.options import Durability, DurabilityOptions
from pscluster.v1 import ps_pb2

Array = npt.NDArray[Any]
Part = tuple[ps_pb2.UpdateItem, tuple[Array, ...]]
Sendable = tuple[ps_pb2.UpdateRequest, Payload, int]
Facts = dict[Any, Any]

FIRST = log_module._FIRST
"""Where the first record of a segment of the log begins."""

JOB = 7
LINEAGE = Lineage(77, 78, 1, "of the tests")
CHUNK = 32
"""Bytes of a block where `small_blocks` was called."""

NEVER = 1e6
"""Seconds between generations, so that there are those only that somebody asks for."""


def small_blocks(patch: pytest.MonkeyPatch) -> None:
    """Cut everything into blocks of `CHUNK` bytes."""
    for module in (shard, reads, capture, generations, spill):
        patch.setattr(module, "CHUNK_BYTES", CHUNK)


# Stores


def padded(*arrays: Array) -> Payload:
    """A payload with these segments."""
    pieces = [piece for array in arrays for piece in (bytes(view(array)), bytes(padding(array.nbytes)))]
    return Payload([memoryview(b"".join(pieces))])


def declare(held: Store, number: int, values: Array, *ends: tuple[int, ...], name: str = "") -> None:
    """A variable with these values, cut along its first axis only, all of it here."""
    cuts = ends[0] if ends else values.shape[:1]
    splits = [{"ends": cuts if axis == 0 else [length]} for axis, length in enumerate(values.shape)]
    spec = ps_pb2.VariableSpec(
        id=number, name=name or f"v{number}", dtype=values.dtype.name, shape=values.shape, splits=splits
    )
    spec.owners.extend([held.index] * (len(cuts) if values.ndim else 1))
    parts = np.split(values, cuts[:-1]) if values.ndim else [values]
    creation.create(held, ps_pb2.CreateRequest(job=held.job, variable=spec), padded(*map(np.ascontiguousarray, parts)))


def declare_rule(
    held: Store, number: int, rule: str, *, schedule: str = "", ema: float = 0.0, **hyperparameters: float
) -> None:
    """An optimizer."""
    numbers, flags = RULES[rule](**hyperparameters).to_spec()
    spec = ps_pb2.OptimizerSpec(
        id=number, name=f"o{number}", rule=rule, numbers=numbers, flags=flags, schedule=schedule, ema_momentum=ema
    )
    creation.create(held, ps_pb2.CreateRequest(job=held.job, optimizer=spec), Payload([]))


def values_of(held: Store, variable: int, number: int = 0) -> Array:
    """Of a shard."""
    found = {each.spec.id: each for each in held.held()[0]}[variable].shards[number]
    with found.lock:
        return found.array.copy()


def facts(held: Store, *, ledger: bool = True) -> Facts:
    """All that a store holds, to be compared."""
    found: Facts = {}
    variables, optimizers, awaited = held.held()
    for each in variables:
        found["variable", each.spec.id] = each.spec.SerializeToString(deterministic=True)
        for number, part in each.shards.items():
            with part.lock:
                for name, array in part.arrays().items():
                    found[each.spec.id, number, name] = array.dtype.name, array.shape, array.tobytes()
                found[each.spec.id, number, "counts"] = part.updates, dict(part.steps)
                with held.ledger() as memory:
                    keys = [(origin, sorted(nths)) for origin, nths in memory.keys_of(each.spec.id, number)]
            found[each.spec.id, number, "keys"] = sorted(keys, key=repr)
    for known in optimizers:
        found["optimizer", known.spec.id] = known.spec.SerializeToString(deterministic=True), known.by_value
    found["awaited"], found["job"], found["index"] = awaited, held.job, held.index
    if ledger:
        with held.ledger() as memory:
            found["closed"], found["finished"] = sorted(memory.closed), memory.finished
            found["settled"] = {client: below for client, below in memory.settled.items() if below}
    return found


# Updates


def dense(kind: ps_pb2.UpdateKind, values: Array, variable: int = 1, number: int = 0, optimizer: int = 0) -> Part:
    """Of a whole shard."""
    item = ps_pb2.UpdateItem(
        variable=variable, shard=number, kind=kind, optimizer=optimizer, rows=ps_pb2.Rows(all=True)
    )
    return item, (values,)


def rows(
    kind: ps_pb2.UpdateKind,
    ids: list[int],
    values: Array,
    variable: int = 1,
    number: int = 0,
    optimizer: int = 0,
    leading: int = 0,
) -> Part:
    """Of rows of a shard."""
    item = ps_pb2.UpdateItem(
        variable=variable,
        shard=number,
        kind=kind,
        optimizer=optimizer,
        rows=ps_pb2.Rows(ids=len(ids), leading=leading),
    )
    return item, (np.array(ids, np.int64), values)


def box(
    kind: ps_pb2.UpdateKind, axes: list[tuple[int, int, int]], values: Array, variable: int = 1, number: int = 0
) -> Part:
    """Of start, step and count along each axis; one value is for all of them."""
    slices = ps_pb2.Slices(axes=[{"start": start, "step": step, "count": count} for start, step, count in axes])
    item = ps_pb2.UpdateItem(variable=variable, shard=number, kind=kind, rows=ps_pb2.Rows(slices=slices))
    item.scalar = values.ndim == 0 and bool(axes)
    return item, (values,)


def scalar(kind: ps_pb2.UpdateKind, value: Array, variable: int = 1, number: int = 0) -> Part:
    """One value for all of a shard."""
    item = ps_pb2.UpdateItem(variable=variable, shard=number, kind=kind, rows=ps_pb2.Rows(all=True), scalar=True)
    return item, (value,)


class Client:
    """Sends a server updates, outside of functions unless told otherwise."""

    def __init__(self, keeper: Keeper, held: Store, incarnation: int = 9) -> None:
        self.keeper = keeper
        self.held = held
        self.incarnation = incarnation
        self.sequence = 0

    def made(self, *parts: Part, function: int = 0) -> Sendable:
        """A request, its payload, and how long that is."""
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
        """As the service does."""
        request, payload, total = made
        return write(self.keeper, self.held, request, updates.check_update(self.held, request, total), payload, total)

    def update(self, *parts: Part, function: int = 0) -> ps_pb2.UpdateReply:
        """A new one."""
        return self.send(self.made(*parts, function=function))


# Keepers


@contextlib.contextmanager
def keeper_of(
    folder: Path, kind: Durability = Durability.LOG, every: float = NEVER, *, fsync: bool = False
) -> Iterator[Keeper]:
    """A keeper that has not been started."""
    keeper = Keeper(DurabilityOptions(kind, folder, every, fsync))
    try:
        yield keeper
    finally:
        keeper.close()


@contextlib.contextmanager
def begun(
    folder: Path, kind: Durability = Durability.LOG, every: float = NEVER, *, fsync: bool = False
) -> Iterator[tuple[Keeper, Store]]:
    """A server in an empty directory whose job has just begun."""
    with keeper_of(folder, kind, every, fsync=fsync) as keeper:
        assert keeper.restore() is None
        held = Store(0, JOB)
        keeper.begin(held, LINEAGE)
        yield keeper, held


def killed(folder: Path) -> Path:
    """What a process that dies now leaves behind."""
    copies = [int(path.name.rpartition("-")[2]) for path in folder.parent.glob(f"{folder.name}-copy-*")]
    copy = folder.with_name(f"{folder.name}-copy-{max(copies, default=0) + 1}")
    shutil.copytree(folder, copy, copy_function=_copied)
    return copy


def _copied(source: str, target: str) -> None:
    """From its end, so that nothing is in the copy without what was written before it."""
    with open(source, "rb", buffering=0) as old, open(target, "wb", buffering=0) as new:
        first = os.pread(old.fileno(), FIRST, 0)  # a log's mark is of no moment behind that of its records
        size = os.fstat(old.fileno()).st_size
        new.truncate(size)
        for at in range((size - 1) // 4096 * 4096, -1, -4096):
            if (data := os.pread(old.fileno(), 4096, at)).strip(b"\0"):
                os.pwrite(new.fileno(), data, at)
        if Path(source).name.startswith("log-"):
            os.pwrite(new.fileno(), first, 0)


def restored(folder: Path, kind: Durability = Durability.SNAPSHOT) -> Store | None:
    """What a server that starts in this directory has. Without a log it only cuts off the torn end of the last one."""
    with keeper_of(folder, kind) as keeper:
        found = keeper.restore()
        assert found is None or found.lineage == LINEAGE
        return None if found is None else found.store


def found_in(folder: Path, kind: Durability = Durability.SNAPSHOT) -> Store:
    """The same; there has to be something."""
    held = restored(folder, kind)
    assert held is not None
    return held


def names(folder: Path) -> set[str]:
    """Of the files there."""
    return {path.name for path in folder.iterdir()}


# A disk that fails, or is slow


class Trouble:
    """A call of the operating system that fails while `armed`, for files with this in their names."""

    def __init__(self, patch: pytest.MonkeyPatch, call: str, files_with: str = "", code: int = errno.EIO) -> None:
        self._real, self._files_with, self._code = getattr(os, call), files_with, code
        self.armed = False
        self.raised = 0
        patch.setattr(os, call, self)

    def __call__(self, number: int, *rest: Any) -> Any:
        if self.armed and self._files_with in os.readlink(f"/proc/self/fd/{number}"):
            self.raised += 1
            self.fail()
        return self._real(number, *rest)

    def fail(self) -> None:
        """Raise."""
        raise OSError(self._code, os.strerror(self._code))


class Hold(Trouble):
    """A call that stands still while `armed`, until `go` is set; then it fails if it is to."""

    def __init__(self, patch: pytest.MonkeyPatch, call: str, files_with: str = "") -> None:
        super().__init__(patch, call, files_with)
        self.entered, self.go = threading.Event(), threading.Event()
        self.failing = False

    def fail(self) -> None:
        """Wait."""
        self.entered.set()
        assert self.go.wait(PATIENCE)
        if self.failing:
            super().fail()


@contextlib.contextmanager
def beside(*works: Any) -> Iterator[list[BaseException]]:
    """Run these in threads of their own; gives what they raised. They have ended behind the block."""
    raised = list[BaseException]()

    def run(work: Any) -> None:
        try:
            work()
        except BaseException as error:  # for the test to look at
            raised.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield raised
    finally:
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads)
