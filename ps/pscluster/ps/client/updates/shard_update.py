"""One shard's share of an update, as it is requested and as it is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pscluster.core.geometry.partition import Partition
from pscluster.ps.row_ids import RowIds
from pscluster.v1 import ps_pb2


@dataclass(frozen=True, slots=True)
class Encoding:
    """How to send a gradient of float32: in what type, and which share of a dense one's elements."""

    wire_dtype: int
    top_k: float  # 0: all
    start: tuple[int, ...]  # of the shard, in the variable
    shape: tuple[int, ...]  # of the shard
    partition: Partition | None  # of the variable; None: rows are known by ids of any kind
    id_bytes: int = 0  # of ids that are strings; 0: they are integers

    def row_id(self, place: int) -> int:
        """Return which row is in this place of the first axis."""
        if self.partition is None:
            return place
        return int(self.partition.order.row_ids(place, place + 1, self.partition.ends[0])[0])


@dataclass(slots=True)
class ShardUpdate:
    """One shard's share of an update."""

    server: int
    item: ps_pb2.UpdateItem
    values: memoryview
    ids: RowIds | None = None
    name: str = ""  # of the variable
    dtype: np.dtype[Any] | None = None  # of the shard
    asynchronous: bool = False  # applied at once, also in a synchronous step
    encoding: Encoding | None = None  # None: it is sent as it is
    owned: bool = False  # nothing else has its arrays, so that they need no copy to be sent later

    def own(self) -> None:
        """Have arrays of its own from now on."""
        if not self.owned:
            self.values = memoryview(bytes(self.values))
            if self.ids is not None:
                self.ids = self.ids.copy()
            self.owned = True
