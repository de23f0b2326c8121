"""Programs run by several tasks, in threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tests.worker.collectives.memory_links import MemoryLinks, on_each

from pscluster.core.layouts.layout import Layout
from pscluster.core.layouts.mesh import Mesh
from pscluster.worker.collectives import algorithms
from pscluster.worker.collectives.algorithms import Incoming, Meanwhile, Outgoing
from pscluster.worker.programs.interpreter import run
from pscluster.worker.programs.program import ArrayType, Numbers, encode
from pscluster.worker.programs.reading import parse
from pscluster.worker.programs.store import BlockStore


def grid(tasks: int) -> Mesh:
    """A 3x2 mesh of six devices that belong to `tasks` tasks."""
    each = 6 // tasks
    names = [f"/job:worker/task:{task}/device:CPU:{number}" for task in range(tasks) for number in range(each)]
    return Mesh({"x": 3, "y": 2}, names)


def typed(array: Any, specs: Sequence[str | None], mesh: Mesh, partial: Sequence[str] = ()) -> ArrayType:
    """The type of an array in a layout."""
    return ArrayType(array.shape, array.dtype, Layout(specs, mesh), tuple(partial))


class InMemory:
    """An exchange between threads."""

    def __init__(self, links: MemoryLinks) -> None:
        self.task, self._links = links.rank, links

    def swap(
        self,
        outgoing: Mapping[int, Outgoing],
        incoming: Mapping[int, Incoming],
        what: str,
        meanwhile: Meanwhile = lambda: None,
    ) -> None:
        """Exchange as among workers."""
        algorithms.exchange(self._links, outgoing, incoming, meanwhile)


class Tasks:
    """The tasks of a mesh, each with a store."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.stores = [BlockStore() for _ in mesh.tasks]

    def run(
        self,
        arrays: Sequence[ArrayType],
        code: Sequence[Sequence[Any]],
        *,
        inputs: Sequence[int] = (),
        outputs: Mapping[int, int] | None = None,
        loads: Sequence[tuple[Any, ArrayType]] = (),
        forgotten: Sequence[int] = (),
    ) -> list[list[list[Any]]]:
        """Run a program on all of them, and return what each has fetched. `outputs`: numbers by register."""
        named = dict(outputs or {})
        program = parse(encode(self.mesh, arrays, len(inputs), code, list(named)))

        def on_task(links: MemoryLinks) -> list[list[Any]]:
            devices = self.mesh.devices_of(links.rank)
            payloads = [
                {
                    of.layout.shard_of(device): np.ascontiguousarray(array[of.layout.slices(of.shape, device)])
                    for device in devices
                }
                for array, of in loads
            ]
            exchange = InMemory(links)
            numbers = Numbers(inputs, list(named.values()), forgotten)
            return run(program, self.stores[links.rank], exchange, numbers, payloads)

        return on_each(len(self.mesh.tasks), on_task)


def whole(fetched: Sequence[Sequence[Any]], of: ArrayType) -> Any:
    """The array of blocks that their owners, by task, have returned."""
    by_task = [list(blocks) for blocks in fetched]
    out = np.empty(of.shape, of.dtype)
    mesh = of.layout.mesh
    for device in sorted(of.layout.owners):
        out[of.layout.slices(of.shape, device)] = by_task[mesh.task_of[device]].pop(0)
    assert not any(by_task)
    return out
