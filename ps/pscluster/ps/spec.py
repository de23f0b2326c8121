"""What clients and parameter servers agree on. It imports little, since it delays the start of every worker."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from pscluster.core.errors import InvalidUpdateError, ProtocolError, StaleError
from pscluster.core.geometry.partition import Partition
from pscluster.core.geometry.row_orders import RANGE, JoinedOrder, RowOrder
from pscluster.core.limits import MAX_RANK, check_name
from pscluster.v1 import ps_pb2

SERVICE = ps_pb2.DESCRIPTOR.services_by_name["ParameterServer"]

SESSION_BYTES = 4 << 20
"""Payload of the largest request or reply on a session, in one message; larger ones are pulled or pushed.

Opening a stream costs as much as some MiB in one message (10,000 rows of 64 floats: 1.6 times as fast in a message).
"""

BESIDE_PAYLOAD_BYTES = 64 << 10
"""Of a message to a server, beside a full frame's payload. The largest message is a frame with a full payload, or with
the largest header and none; servers reserve memory for one for every call that waits."""

MAX_ITEMS = 1 << 13
"""The most items in one read. Their headers stay far below the limit of a header."""

MAX_SHARDS = 10_000
"""The most shards that a variable is made with: each adds work on a server, and to every whole read and update."""

ROWS_IDS_BYTES = 1 << 20
"""Row numbers in one read: the server answers that many as of one moment, so clients divide longer reads."""

MAX_TOGETHER = 1 << 10
"""The most synchronous steps that are committed together."""

PAGE_ELEMENTS = 1024
"""Elements of a page of a shard, of the values and equally of each slot and average, when it moves to another server: a
few rows of a table, so that updates of scattered rows change little that must be copied again."""

MAX_PAGES = 1 << 28
"""Of a shard: a server notes each in two bytes, and answers with a bit for each."""

MOVE_BYTES = 8 << 20
"""The most bytes of pages in one request."""

METADATA = 0, 1
"""Variable and shard in whose place the job's metadata stands in updates, on server 0."""

SYNCHRONOUS = "synchronous"
"""The name, in a job's metadata, of the record of the last synchronous step that was committed."""

RESERVED = "pscluster/"
"""Users can't give names that begin so. Those of an evaluation's copies do."""

COPY = "copy"
"""The initializer that copies another variable's shards on the same server, with their slots. `numbers` names the
variable and the optimizers."""

AVERAGE = "average"
"""The name by which the average of a shard's values is read, like a slot."""

OWN_RULE = "custom"
"""The name of custom rules in an OptimizerSpec."""


NOT_IN_STEP = (
    "has wire_dtype or push_top_k, and is updated in synchronous steps, in which the gradients of all replicas are "
    'combined exactly: make it with consistency="async", or the strategy with staleness above 0'
)
"""Why a variable can't be encoded."""

RESTORE = "Restore a checkpoint, and start servers with --durability log to lose no step"
"""What to do about synchronous steps that a server has lost."""


def steps_lost(server: int, applied: int, committed: int) -> StaleError:
    """Return the error of a server that has not applied all synchronous steps that are committed."""
    return StaleError(
        f"ps {server} has {applied} of the {committed} synchronous steps that are committed: it has restarted with an "
        f"older state. {RESTORE}"
    )


_AFTER = struct.Struct("<3sQBQBQ2sx")
_AFTER_TAGS = b"\x42\x1e\x09", 0x11, 0x19, b"\x6a\x01"
"""Of Request.after and of its fields, in their order: run, step, epoch, padding."""


def with_step(run: int, step: int, epoch: int) -> bytes:
    """Return what to put before a request that is answered as after this many steps of a run.

    It keeps the request's alignment, and the rest of the bytes the same from step to step.
    """
    head, step_tag, epoch_tag, pad = _AFTER_TAGS
    return _AFTER.pack(head, run, step_tag, step, epoch_tag, epoch, pad)


def split_step(data: bytes) -> tuple[ps_pb2.StepCount | None, bytes]:
    """Return what `with_step` has put before a request, and the request; None if there is nothing."""
    if not data.startswith(_AFTER_TAGS[0]) or len(data) < _AFTER.size:
        return None, data
    head, run, step_tag, step, epoch_tag, epoch, pad = _AFTER.unpack_from(data)
    if (head, step_tag, epoch_tag, pad) != _AFTER_TAGS:
        return None, data  # another client's, in another order
    return ps_pb2.StepCount(run=run, step=step, epoch=epoch), data[_AFTER.size :]


def part_name(server: int, servers: int) -> str:
    """Return the name of a server's file in a checkpoint; `servers` is their number."""
    return f"part-{server}-of-{servers}.safetensors"


def partition_of(spec: ps_pb2.VariableSpec) -> Partition:
    """Return the geometry that a spec describes. ProtocolError if it is invalid."""
    check_name(spec.name, "a variable's name")
    if len(spec.shape) > MAX_RANK:
        raise ProtocolError(f"variable {spec.name!r} has {len(spec.shape):,} axes; the limit is {MAX_RANK}")
    try:
        order = row_order_of(spec.row_order)
        partition = Partition(tuple(spec.shape), tuple(tuple(split.ends) for split in spec.splits), order)
    except ValueError as error:
        raise ProtocolError(f"variable {spec.name!r}: {error}") from None
    if len(spec.owners) != partition.num_shards:
        raise ProtocolError(f"variable {spec.name!r}: {len(spec.owners)} owners for {partition.num_shards} shards")
    return partition


def row_order_of(message: ps_pb2.RowOrder) -> RowOrder:
    """Return an order of rows. ValueError if it is unknown."""
    return RowOrder(message.kind, message.seed) if message.kind else RANGE  # type: ignore[arg-type]  # it is checked


def row_order_message(order: RowOrder | JoinedOrder) -> ps_pb2.RowOrder | None:
    """Return an order of rows as a message; None for that of their numbers."""
    return None if order == RANGE else ps_pb2.RowOrder(kind=order.kind, seed=order.seed)


def check_kind(kind: ps_pb2.UpdateKind, dtype: np.dtype[Any], name: str) -> None:
    """Raise InvalidUpdateError if elements of this type can't be updated this way."""
    # NumPy makes a type's name anew each time, which takes longer than all else here.
    of = "f" if dtype.kind == "V" and dtype.name == "bfloat16" else dtype.kind
    if kind != ps_pb2.ASSIGN and of not in _UPDATED.get(kind, "fciu"):
        raise InvalidUpdateError(
            f"variable {name!r} is {dtype.name}, and elements of that type can't be updated by "
            f"{ps_pb2.UpdateKind.Name(kind)}: use assign"
        )


_UPDATED = {
    ps_pb2.APPLY_GRADIENT: "f",
    ps_pb2.APPLY_CHANGE: "f",
    ps_pb2.DIV: "fc",
    ps_pb2.MIN: "fiu",
    ps_pb2.MAX: "fiu",
}
"""The kinds of elements that an update takes, if not all numbers."""
