"""How the rows of a variable get into its new shards: first while they change, then what has changed meanwhile.

The old shards note which of their pages change (`ps.server.moves`). A page is a row of an old shard, or a few that
follow each other; in new shards they may lie anywhere. So what is to be copied is kept by row, and sent by row.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pscluster.coordinator.moves.copying import COPY_RATE, copied, keep_rate
from pscluster.coordinator.moves.decision import Rounds
from pscluster.coordinator.moves.reshard import merged, pieces
from pscluster.core.geometry.partition import Partition
from pscluster.core.transport.frames import view
from pscluster.ps.client.client import PsClient
from pscluster.ps.client.placement.reshard_steps import MAX_ROWS, ReshardSteps
from pscluster.ps.handles.variables.slots import SlotVariable
from pscluster.ps.handles.variables.variable import Variable
from pscluster.ps.spec import AVERAGE, MOVE_BYTES, partition_of
from pscluster.v1 import ps_pb2

Ids = npt.NDArray[np.int64]

_PAGE_ELEMENTS = 64
"""The least of a page: a server notes pages in two bytes each."""

_PAGES = 1 << 22
"""About the most of a shard: a server answers with a bit for each."""


class _Block(NamedTuple):
    """Rows of an array of a new shard, ascending."""

    shard: int
    array: str
    rows: Ids
    values: npt.NDArray[np.generic]


class VariableCopy:
    """Copies the rows of one variable, with slots and averages."""

    def __init__(
        self, client: PsClient, steps: ReshardSteps, old: ps_pb2.VariableSpec, final: ps_pb2.VariableSpec
    ) -> None:
        """Take the variable as it is cut now, and as it will be."""
        self.copied = 0  # bytes so far
        self._traffic = 0.0  # of the old shards, before they were read to be copied
        self._client, self._steps, self._old, self._owners = client, steps, old, list(final.owners)
        self._before, self._after = partition_of(old), partition_of(final)
        self._row_elements = math.prod(old.shape[1:])
        self._names: list[list[str]] = []  # the arrays of each old shard
        self._is_left = np.ones(old.shape[0], np.bool_)  # by row: whether it is to be copied

    def track(self) -> None:
        """Have the old shards note what changes from now on."""
        states = [
            self._steps.track(server, shard, page_elements(self._before.block(shard).shape))
            for shard, server in enumerate(self._old.owners)
        ]
        self._traffic = sum(state.traffic for state in states)
        self._names = [list(state.arrays) for state in states]

    def copy_ahead(self) -> None:
        """Copy all rows while they change, and what has changed meanwhile, until little is left, or no less."""
        names, rounds = self._names, Rounds(self._row_bytes())
        while rounds.goes_on(int(np.count_nonzero(self._is_left))):
            self._copy(COPY_RATE)
            self._steps.next_round()
            self._note([self._steps.changed(server, shard) for shard, server in enumerate(self._old.owners)])
            if self._names != names:  # an optimizer's first gradient has come
                names, rounds = self._names, Rounds(self._row_bytes())
        self._steps.next_round()

    def capture(self, states: Sequence[ps_pb2.ShardState], changed: Sequence[Ids]) -> ps_pb2.ShardState:
        """Take the last states and pages of the old shards, which are frozen; return the state of the variable."""
        self._note([(list(state.arrays), pages) for state, pages in zip(states, changed, strict=True)])
        state = merged(states)
        state.traffic = self._traffic
        return state

    def _note(self, changed: Sequence[tuple[Sequence[str], Ids]]) -> None:
        """Take what each old shard has said: which arrays it has, and which pages have changed.

        Of an array that is new on any of them, all rows are to be copied: where it is not yet, it reads as it begins.
        """
        for shard, (_, pages) in enumerate(changed):
            self._is_left[rows_of_pages(self._before, shard, pages)] = True
        before, self._names = self._arrays, [list(names) for names, _ in changed]
        self._is_left |= not set(self._arrays) <= set(before)

    @property
    def _arrays(self) -> list[str]:
        return list(dict.fromkeys(name for names in self._names for name in names))

    def copy_rest(self) -> None:
        """Copy what is left, as fast as can be."""
        self._copy(math.inf)

    def _sources(self) -> dict[str, Variable]:
        old = Variable.of(self._old, self._client)
        return {name: _beside(old, name) for name in self._arrays}

    def _row_bytes(self) -> int:
        return self._row_elements * sum(source.dtype.itemsize for source in self._sources().values())

    def _copy(self, rate: float) -> None:
        """Copy the rows that are left, at most this many bytes a second."""

        def fill(block: _Block) -> int:
            begin, nbytes = time.monotonic(), block.values.nbytes
            server, (first, last) = self._owners[block.shard], block.rows[[0, -1]].tolist()
            if last - first == len(block.rows) - 1:
                start, itemsize = first * self._row_elements, block.values.itemsize
                self._steps.fill(server, block.shard, block.array, start, view(block.values), itemsize)
            else:
                self._steps.fill_rows(server, block.shard, block.array, block.rows, view(block.values))
            keep_rate(begin, nbytes, rate)
            return nbytes

        self.copied += copied(self._blocks(), fill)
        self._is_left[:] = False

    def _blocks(self) -> Iterator[_Block]:
        sources = self._sources()
        for shard in range(len(self._owners)):
            ids = self._after.row_ids(shard)
            rows = np.flatnonzero(self._is_left[ids])
            for name, source in sources.items():
                most = max(MOVE_BYTES // max(self._row_elements * source.dtype.itemsize, 1), 1)
                if len(rows) < len(ids):  # else they follow each other, and need no numbers
                    most = min(most, MAX_ROWS)
                for first, last in pieces(0, len(rows), most):
                    some = rows[first:last]
                    yield _Block(shard, name, some, source.sparse_read(ids[some]))


def page_elements(shape: Sequence[int]) -> int:
    """Return how many elements a page of a shard of this shape has: those of whole rows."""
    row_elements = max(math.prod(shape[1:]), 1)
    least = max(_PAGE_ELEMENTS, math.prod(shape) // _PAGES)
    return row_elements * -(-least // row_elements)


def rows_of_pages(partition: Partition, shard: int, pages: Ids) -> Ids:
    """Return the ids of the rows of which some element is on one of these pages of a shard."""
    block = partition.block(shard)
    row_elements = math.prod(block.shape[1:])
    if not len(pages) or not block.size:
        return np.empty(0, np.int64)
    is_changed = np.zeros(block.shape[0], np.bool_)
    rows_a_page = page_elements(block.shape) // row_elements
    for nth in range(rows_a_page):
        rows = pages * rows_a_page + nth
        is_changed[rows[rows < len(is_changed)]] = True
    return partition.row_ids(shard)[is_changed]


def _beside(variable: Variable, name: str) -> Variable:
    """Return the handle of an array that is kept for a variable: its values, a slot or an average."""
    kind, _, rest = name.partition("/")
    if kind == "value":
        return variable
    optimizer, _, slot = rest.partition("/")
    return SlotVariable.beside(variable, int(optimizer), optimizer, slot if kind == "slot" else AVERAGE)
