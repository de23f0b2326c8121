"""What a replica does in a synchronous step: its updates, copied and kept until the step ends, and what it has read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from pscluster.core.errors import MisuseError
from pscluster.core.transport.frames import padded, view
from pscluster.ps.client.synchronous.joint_steps import Kept, Reads
from pscluster.ps.client.synchronous.reduction import Reduction, is_large
from pscluster.v1 import ps_pb2

if TYPE_CHECKING:
    from pscluster.ps.client.updates.shard_update import ShardUpdate


class StepUpdates:
    """The updates and reads of one step, or the updates of several that are committed together. For one thread."""

    def __init__(self, items: Mapping[int, list[Kept]] | None = None, *, steps: int = 1, reduces: bool = False) -> None:
        """Begin with these updates, by server, of as many steps; with none, a step is to begin.

        `reduces`: large gradients go to the `reduction`, for the replicas to reduce.
        """
        self.items: Mapping[int, list[Kept]] = defaultdict(list) if items is None else items
        self.steps = steps
        self.reduction = Reduction()
        self.reads = Reads()
        self.contributed: list[int] = []
        """Variables, in the order of their gradients: see Contribution.updated."""
        self._reduces = reduces
        self._updated: dict[int, str] = {}  # names of variables
        self._used: list[bytearray] = []  # copies of this step's values
        self._spare: defaultdict[int, list[bytearray]] = defaultdict(list)  # those of the last one, by size

    def add(self, updates: Sequence[ShardUpdate], *, dry: bool) -> None:
        """Keep updates as they are now; if `dry`, only note their variables. MisuseError if they can't be combined."""
        for update in updates:
            if update.item.kind == ps_pb2.ASSIGN:
                raise MisuseError(
                    f"variable {update.name!r} is assigned in a synchronous step, by every replica: assign it in the "
                    "script, between two runs, or add to it"
                )
        for update in updates:
            self._updated[update.item.variable] = update.name
            variable = update.item.variable
            if update.item.kind == ps_pb2.APPLY_GRADIENT and self.contributed[-1:] != [variable]:
                self.contributed.append(variable)
            if dry:
                continue
            if self._reduces and update.dtype is not None and is_large(update.item):
                self.reduction.add(update.server, update.item, update.values, update.dtype)
                continue
            values = self._copy(update.values)
            segments = [values] if update.ids is None else [self._copy(view(update.ids)), values]
            self.items[update.server].append(Kept(update.item, padded(segments), values, update.dtype))

    def add_blocks(self, updates: Sequence[ShardUpdate], variables: Sequence[tuple[int, str]], *, dry: bool) -> None:
        """Keep updates of whole shards, each of which no other replica has; their values must not change any more.

        `variables` are all that the replicas update so, by number and name: the same for each of them.
        """
        self._updated.update(variables)
        self.contributed += [variable for variable, _ in variables]
        for update in updates if not dry else ():
            update.item.offset = 0  # it is the only piece
            self.items[update.server].append(Kept(update.item, padded([update.values]), update.values, update.dtype))

    def _copy(self, values: memoryview) -> memoryview:
        """Return a copy, since the caller may change its arrays; in memory of the last step, which is there already."""
        spare = self._spare.get(len(values))
        copy = spare.pop() if spare else bytearray(len(values))
        self._used.append(copy)
        copy[:] = values
        return memoryview(copy)

    def note_reads(self, variables: Collection[int], *, whole: bool) -> None:
        """Record what is read of the servers, or of the copies if it is `whole`; errors as of `check_reads`."""
        (self.reads.whole if whole else self.reads.in_part).update(variables)
        self.check_reads(variables)

    def check_reads(self, variables: Iterable[int]) -> None:
        """Raise MisuseError if this step has updated a variable: what it would read is still the value before."""
        for variable in variables if self._updated else ():
            if variable in self._updated:
                raise MisuseError(
                    f"variable {self._updated[variable]!r} is read after this synchronous step has updated it: its new "
                    "value is there once all replicas have ended the step. Read it before, in the next step, or in the "
                    "script"
                )

    def clear(self) -> None:
        """Begin the next step."""
        self.contributed.clear()
        self._updated.clear()
        self.items = defaultdict(list)
        self.reduction.clear()
        self.reads.clear()
        self._spare.clear()
        for copy in self._used:
            self._spare[len(copy)].append(copy)
        self._used.clear()
