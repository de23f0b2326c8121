"""What both sides of the parameter servers' service go by. Imports little: every worker that starts waits for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from pscluster.core.errors import InvalidUpdateError, ProtocolError
from pscluster.core.geometry import Partition
from pscluster.core.limits import MAX_HEADER_BYTES, MAX_RANK, check_name
from pscluster.core.transport.frames import CHUNK_BYTES
from pscluster.v1 import ps_pb2

SERVICE = ps_pb2.DESCRIPTOR.services_by_name["ParameterServer"]

SESSION_BYTES = 4 << 20
"""Payload of the largest request or reply on a session, in one message; what is larger is pulled or pushed.

To begin a stream of its own costs as much as some MiB in one message (10,000 rows of 64 floats: 1.6 times as fast).
"""


MESSAGE_BYTES = CHUNK_BYTES + (64 << 10)
"""Of one message to a server over gRPC, which keeps as much for every call that waits for one. A frame with a full
payload, or with the largest header and none."""

DATA_MESSAGE_BYTES = SESSION_BYTES + MAX_HEADER_BYTES + (64 << 10)
"""The same on the data plane: a session's largest request."""

MAX_ITEMS = 1 << 13
"""What a client puts into one read. Their headers stay far below what a header may have."""

ROWS_IDS_BYTES = 1 << 20
"""Row numbers that a client sends in one read: it divides what is more, as the server answers so many at one moment."""

OURS = "pscluster/"
"""Names of variables that keep something of the library's own begin so: users can't give such names, and see none."""

PINNED = f"{OURS}pinned/"
"""Names of copies of variables begin so, which an evaluation reads while training goes on: they are in no checkpoint,
and a coordinator that attaches removes those that it finds. Behind it stand the evaluation's number and the variable's
name."""

COPY = "copy"
"""The initializer that takes the values of another variable's shards on the same server, and what optimizers keep
beside them. `numbers` says of which variable, and for which optimizers."""

AVERAGE = "average"
"""Name under which the average of a shard's values is read, like a slot."""

OWN_RULE = "custom"
"""What a rule of the user's own is called in an OptimizerSpec."""


def part_name(server: int, servers: int) -> str:
    """Of the file that one of so many servers writes of a checkpoint."""
    return f"part-{server}-of-{servers}.safetensors"


def partition_of(spec: ps_pb2.VariableSpec) -> Partition:
    """The geometry that a spec describes. ProtocolError if it describes none."""
    check_name(spec.name, "a variable's name")
    if len(spec.shape) > MAX_RANK:
        raise ProtocolError(f"variable {spec.name!r} has {len(spec.shape):,} axes, the limit is {MAX_RANK}")
    try:
        partition = Partition(tuple(spec.shape), tuple(tuple(split.ends) for split in spec.splits))
    except ValueError as error:
        raise ProtocolError(f"variable {spec.name!r}: {error}") from None
    if len(spec.owners) != partition.num_shards:
        raise ProtocolError(f"variable {spec.name!r}: {len(spec.owners)} owners for {partition.num_shards} shards")
    return partition


def check_kind(kind: ps_pb2.UpdateKind, dtype: np.dtype[Any], name: str) -> None:
    """InvalidUpdateError if elements of this type can't be updated so."""
    real_float = dtype.kind == "f" or dtype.name == "bfloat16"
    if kind == ps_pb2.ASSIGN:
        can = True
    elif kind == ps_pb2.APPLY_GRADIENT:
        can = real_float
    elif kind == ps_pb2.DIV:
        can = real_float or dtype.kind == "c"
    elif kind in (ps_pb2.MIN, ps_pb2.MAX):
        can = real_float or dtype.kind in "iu"
    else:
        can = real_float or dtype.kind in "ciu"
    if not can:
        what = ps_pb2.UpdateKind.Name(kind)
        raise InvalidUpdateError(f"{what} of {name!r}, which is {dtype.name}: elements of this type can't")
