"""Error feedback: what the encoding of a pushed gradient has lost is added to the next one of the same rows.

As in 1-bit SGD (Seide et al. 2014), EF-SGD (Karimireddy et al. 2019) and, for top-k, Deep Gradient Compression (Lin et
al. 2018). What this client has pushed and what it keeps always add up to the gradients that it was given:

    kept r --a push of g takes it---> encoded q(g + r) is under way, and g + r - q(g + r) is held
                --acknowledged------> the held is added to what is kept
                --failed for good---> r is added to what is kept: as before, unless another push came in between

A push is encoded once, so whatever repeats it sends the same bytes; it is acknowledged or fails once. Pushes on several
threads take what there is and leave what they have lost, in any order.

A variable that is resharded keeps them: each goes with its row, or its element, to the new shards.

Residuals are this process's, of one incarnation, and of one term: a restored checkpoint, which opens another term,
drops them. They take memory up to a limit, beyond which those of the rows that were pushed longest ago are dropped, an
eighth of the limit at a time. The residual of a dense gradient counts as that of one row.
"""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core import checks
from pscluster.core.errors import InvalidUpdateError
from pscluster.core.geometry.rows import split_rows
from pscluster.core.numbers.unique import sorted_unique
from pscluster.core.transport.frames import view
from pscluster.ps.client.placement.cuts import Cut
from pscluster.ps.client.updates.row_places import ById, ByNumber, Ids, Places, RowPlaces
from pscluster.ps.client.updates.shard_update import ShardUpdate
from pscluster.ps.request_metrics import ClientMetrics
from pscluster.ps.row_ids import RowIds, are_strings, shown
from pscluster.ps.tables import shards_of
from pscluster.ps.wire_dtypes import Floats, UnencodableError, decode, encode, largest
from pscluster.v1 import ps_pb2

logger = logging.getLogger(__name__)

LIMIT_VARIABLE = "PSCLUSTER_RESIDUALS_MIB"
DEFAULT_MIB = 256

_ROW_BYTES = 16  # of a row, beside its values and where it is: its number or id, and when it was used
_ONE_ROW: Ids = np.zeros(1, np.int64)


def limit_bytes() -> int:
    """Return the most bytes of residuals in a process, from the environment. ConfigurationError if invalid."""
    return checks.mib_of_environ(LIMIT_VARIABLE, DEFAULT_MIB, 0) << 20


class _Rows:
    """The residuals of a shard's rows, in any order; `used` says when each was last added to."""

    def __init__(self, name: str, places: RowPlaces, width: int, id_bytes: int = 0) -> None:
        self.name = name  # of the variable
        self.id_bytes = id_bytes  # of ids that are strings
        self.by_id = isinstance(places, ById)
        self.row_bytes = width * 4 + _ROW_BYTES + id_bytes + places.row_bytes
        self.count = 0
        self._places = places
        self._ids: RowIds = np.empty(0, f"S{id_bytes}" if id_bytes else np.int64)
        self._used = np.empty(0, np.int64)
        self._values = np.empty((0, width), np.float32)

    @property
    def used(self) -> npt.NDArray[np.int64]:
        return self._used[: self.count]

    @property
    def ids(self) -> Ids:
        return self._ids[: self.count]

    @property
    def values(self) -> Floats:
        return self._values[: self.count]

    def put(self, ids: Ids, values: Floats, used: npt.NDArray[np.int64]) -> None:
        """Add to the residuals of these distinct rows, as last used then."""
        self.add(ids, values, 0)
        self._used[self._at(ids) - 1] = used

    def take(self, ids: RowIds) -> Floats | None:
        """Return the residuals of these rows, distinct ones, which then are 0; None if no row has any."""
        places = self._at(ids)
        if not places.any():
            return None
        taken = self._values[places - 1]
        if not places.all():
            taken[places == 0] = 0
            places = places[places > 0]
        self._values[places - 1] = 0
        return taken

    def missing(self, ids: RowIds) -> int:
        """Return how many of these rows have no residual yet."""
        return len(ids) - int(np.count_nonzero(self._at(ids)))

    def _at(self, ids: RowIds) -> Places:
        """Return the places of rows, from 1; 0: it has none."""
        return self._places.of(ids, self._ids[: self.count])

    def add(self, ids: RowIds, values: Floats, now: int) -> int:
        """Add to the residuals of these rows; return how many had none."""
        places = self._at(ids)
        new = ids[places == 0]
        if len(new):
            end = self.count + len(new)
            if end > len(self._ids):
                self._grow(max(end, self.count * 3 // 2))
            self._ids[self.count : end] = new
            self._values[self.count : end] = 0
            self._places.enter(self._ids[:end], self.count)
            self.count = end
            places = self._at(ids)
        self._values[places - 1] += values
        self._used[places - 1] = now
        return len(new)

    def _grow(self, size: int) -> None:
        for name in ("_ids", "_used", "_values"):
            old: Any = getattr(self, name)
            new = np.empty((size, *old.shape[1:]), old.dtype)
            new[: self.count] = old[: self.count]
            setattr(self, name, new)

    def drop_until(self, last: int) -> int:
        """Drop what was not used after that; return how many rows."""
        stays = self.used > last
        dropped = self.count - int(np.count_nonzero(stays))
        if dropped:
            before = self._ids[: self.count]
            self._ids, self._used = before[stays], self.used[stays]
            self._values = self._values[: len(stays)][stays]
            self.count = len(self._ids)
            self._places.replace(before, self._ids)
        return dropped


@dataclass(slots=True)
class Push:
    """A push that was encoded, and what it has taken and lost, until it is acknowledged or has failed."""

    rows: _Rows
    ids: RowIds
    taken: Floats | None
    lost: Floats
    term: int


class Residuals:
    """The residuals of one client. Thread-safe; holds no lock over a network call."""

    def __init__(self, limit: int, metrics: ClientMetrics) -> None:
        self.limit = limit
        self._metrics = metrics
        self._lock = threading.Lock()
        self._rows: dict[tuple[int, int, bool], _Rows] = {}  # by variable, shard, and whether for dense gradients
        self._term = 0
        self._now = 0  # rises with each push that ends
        self._used = 0
        self._warned: set[str] = set()
        self._count(0)

    def encode(self, update: ShardUpdate, term: int) -> tuple[ShardUpdate, Push]:
        """Return a gradient as it is to be sent, and what to `acknowledge` or to `fail`.

        InvalidUpdateError, and nothing has changed, if it has a value that its wire type can't hold.
        """
        assert update.encoding is not None
        values: Any = np.frombuffer(update.values, np.float32)
        dense = update.ids is None
        ids: RowIds = _ONE_ROW if update.ids is None else update.ids
        values = values.reshape(len(ids), math.prod(update.encoding.shape[0 if dense else 1 :]))
        rows, taken = self._take(update, ids, values.shape[1], term)
        gradient: Floats = values if taken is None else values + taken
        item, wire_dtype = ps_pb2.UpdateItem(), update.encoding.wire_dtype
        item.CopyFrom(update.item)
        item.wire_dtype = wire_dtype  # type: ignore[assignment]
        positions = None
        try:
            if dense and update.encoding.top_k and gradient.size:
                positions = largest(gradient[0], math.ceil(update.encoding.top_k * gradient.size))
                item.elements = len(positions)
                sent = gradient[:, positions]
            else:
                sent = gradient
            data = encode(wire_dtype, sent)
        except UnencodableError as error:
            column = error.column if positions is None else int(positions[error.column])
            if taken is not None:
                self._end(Push(rows, ids, taken, taken, term), taken)
            raise InvalidUpdateError(_explained(update, error, error.row, column)) from None
        with np.errstate(invalid="ignore"):  # infinity, which is sent as it is, less itself
            if positions is None:
                lost = gradient - decode(wire_dtype, data, *gradient.shape)
            else:
                lost = gradient.copy()
                lost[:, positions] -= decode(wire_dtype, data, *sent.shape)
                data = np.concatenate([positions.astype("<u4").view(np.uint8), data])
        finite = np.isfinite(lost)
        if not finite.all():
            lost[~finite] = 0
        item.value_bytes = len(data)
        encoded = ShardUpdate(
            update.server, item, view(data), update.ids, update.name, update.dtype, update.asynchronous, update.encoding
        )
        return encoded, Push(rows, ids, taken, lost, term)

    def acknowledge(self, push: Push) -> None:
        """Keep what a push has lost."""
        self._end(push, push.lost)

    def fail(self, push: Push) -> None:
        """Put back what a push has taken, which was not acknowledged, and will not be sent again."""
        if push.taken is not None:
            self._end(push, push.taken)

    def reshard(self, old: Cut, new: Cut) -> None:
        """Give what is kept of a variable to its new shards, which have whole rows. No push of it is under way."""
        with self._lock:
            known = {key: rows for key, rows in self._rows.items() if key[0] == old.id}
            for (_, shard, dense), rows in known.items():
                del self._rows[old.id, shard, dense]
                ids, used = rows.ids, rows.used
                if not len(ids):
                    continue
                if rows.by_id:
                    targets = shards_of(ids, new.partition.num_shards)
                    for target in sorted_unique(targets).tolist():
                        some, key = targets == target, (new.id, target, False)
                        there = self._rows_of(key, rows.name, ById(), rows.values.shape[1], rows.id_bytes)
                        there.put(ids[some], rows.values[some], used[some])
                    continue
                block = old.partition.block(shard)
                if dense:
                    whole: Floats = np.zeros(old.partition.shape, np.float32)
                    whole[old.partition.index(shard)] = rows.values.reshape(block.shape)
                    for target in range(new.partition.num_shards):
                        values = whole[new.partition.index(target)].reshape(1, -1)
                        if values.any():
                            key = new.id, target, True
                            self._rows_of(key, rows.name, ByNumber(1), values.shape[1]).put(_ONE_ROW, values, used)
                    continue
                whole = np.zeros((len(ids), *old.partition.shape[1:]), np.float32)
                whole[(slice(None), *old.partition.columns(shard))] = rows.values.reshape(len(ids), *block.shape[1:])
                width = math.prod(whole.shape[1:])
                split = split_rows(new.partition, old.partition.row_ids(shard)[ids])
                for target, (positions, local_ids) in enumerate(split):
                    if len(positions):
                        places = ByNumber(new.partition.block(target).shape[0])
                        there = self._rows_of((new.id, target, False), rows.name, places, width)
                        there.put(local_ids, whole[positions].reshape(len(positions), width), used[positions])
            self._used = sum(rows.count * rows.row_bytes for rows in self._rows.values())
            self._count(0)

    def _rows_of(
        self, key: tuple[int, int, bool], name: str, places: RowPlaces, width: int, id_bytes: int = 0
    ) -> _Rows:
        known = self._rows.get(key)
        if known is None:
            known = self._rows[key] = _Rows(name, places, width, id_bytes)
        return known

    def _take(self, update: ShardUpdate, ids: RowIds, width: int, term: int) -> tuple[_Rows, Floats | None]:
        assert update.encoding is not None
        key = update.item.variable, update.item.shard, update.ids is None
        with self._lock:
            if term > self._term:
                self._rows.clear()
                self._term, self._used = term, 0
                self._count(0)
            if update.ids is None or update.encoding.partition is not None:
                places: RowPlaces = ByNumber(1 if update.ids is None else update.encoding.shape[0])
            else:
                places = ById()
            rows = self._rows_of(key, update.name, places, width, update.encoding.id_bytes)
            return rows, rows.take(ids) if term == self._term else None

    def _end(self, push: Push, values: Floats) -> None:
        rows = push.rows
        with self._lock:
            if push.term != self._term:
                return
            self._now += 1
            if self._used + len(push.ids) * rows.row_bytes > self.limit:  # otherwise there is room for all
                more = rows.missing(push.ids) * rows.row_bytes
                if self._used + more > self.limit:
                    self._make_room(more)
                missing = rows.missing(push.ids)
                if self._used + missing * rows.row_bytes > self.limit:
                    self._count(missing, rows.name)
                    return
            self._used += rows.add(push.ids, values, self._now) * rows.row_bytes
            self._count(0)

    def _make_room(self, needed: int) -> None:
        """Drop what was used longest ago, if so much can be freed. Needs the lock."""
        if needed > self.limit or not self._rows:
            return
        tables = [rows for rows in self._rows.values() if rows.count]
        used = np.concatenate([rows.used for rows in tables])
        sizes = np.concatenate([np.full(rows.count, rows.row_bytes) for rows in tables])
        order = np.argsort(used, kind="stable")
        freed = np.cumsum(sizes[order])
        wanted = self._used + needed - self.limit + self.limit // 8
        last = int(used[order[min(int(np.searchsorted(freed, wanted)), len(order) - 1)]])
        for rows in tables:
            dropped = rows.drop_until(last)
            self._used -= dropped * rows.row_bytes
            if dropped:
                self._count(dropped, rows.name)

    def _count(self, dropped: int, name: str = "") -> None:
        metrics = self._metrics
        metrics.residual_bytes = self._used
        metrics.residual_rows = sum(rows.count for rows in self._rows.values())
        metrics.residual_rows_dropped += dropped
        if dropped and name not in self._warned:
            self._warned.add(name)
            logger.warning(
                "residuals of variable %r are dropped: all of this process's may take %d MiB (%s)",
                name,
                self.limit >> 20,
                LIMIT_VARIABLE,
            )


def _explained(update: ShardUpdate, error: UnencodableError, row: int, column: int) -> str:
    """Return an error's text for users: which element of the variable's gradient."""
    assert update.encoding is not None
    start, shape = update.encoding.start, update.encoding.shape
    if update.ids is not None:
        row_id = update.ids[row]
        place = f"row {shown(row_id) if are_strings(update.ids) else update.encoding.row_id(int(row_id) + start[0])}"
    else:
        index = [int(at) + first for at, first in zip(np.unravel_index(column, shape), start, strict=True)]
        index[:1] = map(update.encoding.row_id, index[:1])
        place = f"element {index}"
    finite = np.isfinite(error.value)
    hint = (
        'clip gradients, or make the variable with wire_dtype="bfloat16"'
        if finite
        else 'give the optimizer nonfinite="skip", or make the variable with wire_dtype="bfloat16"'
    )
    return (
        f"variable {update.name!r}: the gradient of {place}, with what is left of earlier ones, has the value {error}. "
        f"Nothing was sent: {hint}"
    )
