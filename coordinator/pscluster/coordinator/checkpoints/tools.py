"""Tools for a checkpoint, which need no cluster: inspect it, verify every byte, merge its shards into variables."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import fsspec
import numpy as np
from rich.table import Table
from rich.text import Text

from pscluster.coordinator.checkpoints.folder import exists, written
from pscluster.coordinator.checkpoints.index import Index, SavedTensor, SavedVariable, check_whole, dtype_of, read_index
from pscluster.coordinator.cli.tables import rendered
from pscluster.core.display.sanitize import shown
from pscluster.core.errors import CheckpointError
from pscluster.core.geometry.row_orders import RANGE
from pscluster.ps.optim.rules import RULES
from pscluster.ps.storage.files.tensor_files import (
    CHUNK_BYTES,
    Array,
    join,
    tensor_name,
    tensor_to_write,
    verified,
    write,
)
from pscluster.v1 import ps_pb2

_FILE_BYTES = 4 << 30  # of a merged file, about
_LEAST_READ_BYTES = 64 << 10
_MOST_NAMED = 20  # partly applied functions, by `inspect`


def inspect(path: str) -> str:
    """Return a table of a checkpoint's content. CheckpointError if its index can't be read."""
    index = read_index(path)
    table = Table("variable", "type", "shape", "shards", "also", "bytes", title=Text(shown(f"{path}: {index.created}")))
    for variable in index.variables.values():
        also = sorted(key for key in variable.arrays if key != "value")
        size = sum(tensor.bytes for tensors in variable.arrays.values() for tensor in tensors)
        shape = "x".join(map(str, variable.shape)) or "scalar"
        if variable.dim:
            shape = f"{sum(tensor.shape[0] for tensor in variable.arrays['value']):,} rows of {variable.dim}"
        shards = str(variable.partition.num_shards)
        if variable.row_order != RANGE:
            shards += f" by {variable.row_order.kind}"
        row = (variable.name, variable.dtype, shape, shards, ", ".join(also), f"{size:,}")
        table.add_row(*(Text(shown(cell)) for cell in row))
    rules = ", ".join(f"{name} ({spec.get('rule', '?')})" for name, spec in index.optimizers.items()) or "none"
    lines = [
        rendered(table, 140),
        f"optimizers: {shown(rules)}",
        *([f"layers: {shown(', '.join(index.layers))}"] if index.layers else []),
        f"{len(index.files)} files, {index.nbytes:,} bytes; functions paused for {index.pause_seconds:.3f} s",
    ]
    if index.partly_applied:
        count = f"{index.partly_applied:,}"
        lines.append(f"functions that failed or were cancelled, and may have left some of their updates: {count}")
        lines += [f"  {shown(function)}" for function in index.partly_applied_last[-_MOST_NAMED:]]
    return "\n".join(lines)


def verify(path: str) -> Index:
    """Verify the checksum of every byte; return the index. CheckpointError if anything differs or is missing."""
    index = read_index(path)
    check_whole(index, path)
    fs, where = fsspec.core.url_to_fs(path)
    for name, file in index.files.items():
        file_path = join(path, name)
        try:
            size = fs.size(join(where, name))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file_path} is missing: {error}") from None
        if size != file.bytes:
            raise CheckpointError(f"{file_path} has {size:,} bytes, not {file.bytes:,}")
        for _ in verified(file_path, "its header", 0, file.header_bytes, file.header_checksum):
            pass
    layers = (tensor for layer in index.layers.values() for tensor in layer.arrays.values())
    for tensor in itertools.chain(index.tensors, layers):
        for _ in verified(join(path, tensor.file), tensor.tensor, tensor.offset, tensor.bytes, tensor.checksum):
            pass
    return index


def merge(path: str, out: str, *, file_bytes: int = _FILE_BYTES) -> list[str]:
    """Write a checkpoint's variables whole, as sharded safetensors with the usual `model.safetensors.index.json`.

    Slots and averages are included, named `VARIABLE/OPTIMIZER/SLOT`. Shards that had no gradient yet have none: theirs
    are filled with the initial values. Some MiB are in memory at a time, however large the variables are. A file ends
    after the tensor with which it reaches `file_bytes`. Returns the names of the files. CheckpointError if the
    checkpoint is damaged, or `out` can't be written; some files may be there then, without the index.
    """
    index = read_index(path)
    check_whole(index, path)
    index_name = "model.safetensors.index.json"
    if exists(out, index_name):
        raise CheckpointError(f"{out} already has a {index_name}: give another directory")
    wholes: list[list[tuple[ps_pb2.SavedTensor, Iterator[bytes]]]] = [[]]
    for variable in index.variables.values():
        for key in variable.arrays:
            if sum(tensor.bytes for tensor, _ in wholes[-1]) >= file_bytes:
                wholes.append([])
            wholes[-1].append(_whole(path, index, variable, key))
    fs, where = fsspec.core.url_to_fs(out)
    with contextlib.suppress(OSError):
        fs.makedirs(where, exist_ok=True)
    names, total = [], 0
    weight_map: dict[str, str] = {}
    for file_number, whole in enumerate(wholes, 1):
        tensors = [tensor for tensor, _ in whole]
        name = f"model-{file_number:05d}-of-{len(wholes):05d}.safetensors"
        write(join(out, name), tensors, [data for _, data in whole])
        names.append(name)
        total += sum(tensor.bytes for tensor in tensors)
        weight_map |= {tensor.tensor: name for tensor in tensors}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True)
    with written(join(out, index_name)), fsspec.open(join(out, index_name), "wt") as file:
        file.write(text + "\n")
    return [*names, index_name]


def _whole(path: str, index: Index, variable: SavedVariable, key: str) -> tuple[ps_pb2.SavedTensor, Iterator[bytes]]:
    name = tensor_name(variable.name, key)
    tensors = {tensor.shard: tensor for tensor in variable.arrays[key]}
    dtype = dtype_of(next(iter(tensors.values())).dtype)
    if key.startswith("average/"):  # a shard without one has its value as the average
        tensors = {tensor.shard: tensor for tensor in variable.arrays["value"]} | tensors
    fill = _fill(index, key) if key.startswith("slot/") else 0.0
    if variable.dim:
        width = variable.shape[1] if key == "value" else variable.dim
        return _rows_of_table(path, variable, name, tensors, dtype, fill, width)
    ordered = _in_order if variable.row_order == RANGE else _by_row_ids
    return tensor_to_write(name, dtype, variable.shape), ordered(path, variable, tensors, dtype, fill)


def _rows_of_table(
    path: str,
    variable: SavedVariable,
    name: str,
    tensors: dict[int, SavedTensor],
    dtype: np.dtype[Any],
    fill: float,
    width: int,
) -> tuple[ps_pb2.SavedTensor, Iterator[bytes]]:
    """Return the rows of a table, one shard after the other, and what is beside them in the same order."""
    shards = sorted(variable.arrays["value"], key=lambda tensor: tensor.shard)
    rows = sum(tensor.shape[0] for tensor in shards)
    some = max(1, CHUNK_BYTES // (variable.shape[1] * dtype.itemsize))

    def pieces() -> Iterator[bytes]:
        for values in shards:
            tensor = tensors.get(values.shard)
            saved = None if tensor is None else _Shard(path, tensor, CHUNK_BYTES)
            for start in range(0, values.shape[0], some):
                count = min(some, values.shape[0] - start)
                if saved is None or tensor is None:
                    yield np.full((count, width), fill, dtype).tobytes()
                else:  # values stand for an average, without their ids
                    yield saved.take((count, tensor.shape[1]))[:, :width].tobytes()

    return tensor_to_write(name, dtype, (rows, width)), pieces()


def _fill(index: Index, key: str) -> float:
    """Return what a slot holds before the first gradient; 0 for rules of users, of which that is unknown."""
    optimizer, _, slot = key.removeprefix("slot/").rpartition("/")
    spec = index.optimizers.get(optimizer, {})
    rule = RULES.get(spec.get("rule", ""))
    if rule is None:
        return 0.0
    numbers = {name: float(value) for name, value in spec.get("numbers", {}).items()}
    return rule.from_spec(numbers, spec.get("flags", {})).slots.get(slot, 0.0)


class _Shard:
    """The elements of a saved shard, in order, a few at a time. Verified once the last one has been taken."""

    def __init__(self, path: str, tensor: SavedTensor, chunk_bytes: int) -> None:
        self._dtype = dtype_of(tensor.dtype)
        self._left = tensor.bytes
        self._data = bytearray()
        self._chunks = verified(
            join(path, tensor.file), tensor.tensor, tensor.offset, tensor.bytes, tensor.checksum, chunk_bytes
        )

    def take(self, shape: tuple[int, ...]) -> Array:
        size = math.prod(shape) * self._dtype.itemsize
        while len(self._data) < size:
            self._data += next(self._chunks)
        taken: Array = np.frombuffer(bytes(self._data[:size]), self._dtype).reshape(shape)
        del self._data[:size]
        self._left -= size
        if not self._left:
            next(self._chunks, None)  # compares the digests
        return taken


def _by_row_ids(
    path: str, variable: SavedVariable, tensors: dict[int, SavedTensor], dtype: np.dtype[Any], fill: float
) -> Iterator[bytes]:
    """Yield the whole variable's bytes, some at a time; rows get into the order of their ids in a temporary file."""
    partition, shape = variable.partition, variable.shape
    if math.prod(shape) == 0:
        return
    row = math.prod(shape[1:]) * dtype.itemsize
    rows = max(1, CHUNK_BYTES // row)
    with tempfile.TemporaryFile() as file:
        try:
            os.posix_fallocate(file.fileno(), 0, shape[0] * row)  # else a full disk would kill this process
        except OSError as error:
            raise CheckpointError(
                f"the rows of {variable.name!r}, {shape[0] * row:,} bytes, are put in order in "
                f"{tempfile.gettempdir()}, which fails: {error}. Set TMPDIR to a directory with more space"
            ) from None
        whole: Array = np.memmap(file, dtype, "w+", shape=shape)
        for shard, block in enumerate(partition.blocks):
            saved = _Shard(path, tensors[shard], max(_LEAST_READ_BYTES, CHUNK_BYTES)) if shard in tensors else None
            for start in range(block.start[0], block.stop[0], rows):
                stop = min(start + rows, block.stop[0])
                ids = variable.row_order.row_ids(start, stop, partition.ends[0])
                whole[ids] = fill if saved is None else saved.take((stop - start, *shape[1:]))
        for start in range(0, shape[0], rows):
            yield whole[start : start + rows].tobytes()


def _in_order(
    path: str, variable: SavedVariable, tensors: dict[int, SavedTensor], dtype: np.dtype[Any], fill: float
) -> Iterator[bytes]:
    """Yield the whole variable's bytes, some at a time; reads of adjacent shards alternate."""
    shape = variable.shape
    if math.prod(shape) == 0:
        return
    blocks = [(shard, block) for shard, block in enumerate(variable.partition.blocks) if block.size]
    side_by_side = variable.partition.num_shards // (variable.partition.grid[0] if shape else 1)
    chunk_bytes = max(_LEAST_READ_BYTES, CHUNK_BYTES // side_by_side)
    shards = {shard: _Shard(path, tensor, chunk_bytes) for shard, tensor in tensors.items()}
    if not shape:
        yield shards[0].take(()).astype(dtype, copy=False).tobytes()
        return
    # Read rows of the first axis whose rows are small, one index of the axes before it at a time.
    row_bytes = [math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape))]
    axis = next(axis for axis, size in enumerate(row_bytes) if size <= CHUNK_BYTES)
    chunk_rows = CHUNK_BYTES // row_bytes[axis]
    for before in np.ndindex(shape[:axis]):
        touched = [
            (shard, block)
            for shard, block in blocks
            if all(low <= index < high for index, low, high in zip(before, block.start, block.stop, strict=False))
        ]
        for start in range(0, shape[axis], chunk_rows):
            stop = min(start + chunk_rows, shape[axis])
            rows = np.full((stop - start, *shape[axis + 1 :]), fill, dtype)
            for shard, block in touched:
                low, high = max(start, block.start[axis]), min(stop, block.stop[axis])
                if low < high and shard in shards:
                    destination = (slice(low - start, high - start), *block.slices[axis + 1 :])
                    rows[destination] = shards[shard].take((high - low, *block.shape[axis + 1 :]))
            yield rows.tobytes()
