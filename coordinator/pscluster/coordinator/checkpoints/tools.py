"""What one does with a checkpoint without a cluster: look at it, verify every byte, make whole variables of it."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from typing import Any

import fsspec
import numpy as np
from rich.table import Table
from rich.text import Text

from pscluster.coordinator.checkpoints.folder import reason, there
from pscluster.coordinator.checkpoints.index import (
    Index,
    SavedTensor,
    SavedVariable,
    check_whole,
    dtype_of,
    read_index,
)
from pscluster.coordinator.cli.tables import rendered
from pscluster.core.errors import CheckpointError
from pscluster.core.sanitize import shown
from pscluster.ps.optim import RULES
from pscluster.ps.spec import OURS
from pscluster.ps.storage.tensor_files import CHUNK_BYTES, Array, TensorToWrite, join, tensor_name, verified, write

_FILE_BYTES = 4 << 30  # of a merged file, about
_LEAST_READ_BYTES = 64 << 10
_MOST_NAMED = 20  # by `inspect`, of functions that were applied in part


def inspect(path: str) -> str:
    """A table of what is in it. CheckpointError if its index can't be read."""
    index = read_index(path)
    table = Table("variable", "type", "shape", "shards", "also", "bytes", title=Text(shown(f"{path}: {index.created}")))
    for variable in _of_users(index):
        also = sorted(key for key in variable.arrays if key != "value")
        size = sum(tensor.bytes for tensors in variable.arrays.values() for tensor in tensors)
        shape = "x".join(map(str, variable.shape)) or "scalar"
        shards = str(variable.partition.num_shards)
        row = (variable.name, variable.dtype, shape, shards, ", ".join(also), f"{size:,}")
        table.add_row(*(Text(shown(cell)) for cell in row))
    rules = ", ".join(f"{name} ({each.get('rule', '?')})" for name, each in index.optimizers.items()) or "none"
    lines = [
        rendered(table, 140),
        f"optimizers: {shown(rules)}",
        f"{len(index.files)} files, {index.nbytes:,} bytes; functions paused for {index.pause_seconds:.3f} s",
    ]
    if index.partly_applied:
        lines.append(f"functions that had ended, and may have left a part of their updates: {index.partly_applied:,}")
        lines += [f"  {shown(each)}" for each in index.partly_applied_last[-_MOST_NAMED:]]
    return "\n".join(lines)


def _of_users(index: Index) -> list[SavedVariable]:
    """Its variables, without those that keep something of the library's own, such as the job's progress."""
    return [variable for name, variable in index.variables.items() if not name.startswith(OURS)]


def verify(path: str) -> Index:
    """Read every byte and compare it with what was written. CheckpointError if anything differs or is missing."""
    index = read_index(path)
    check_whole(index, path)
    fs, where = _file_system(path)
    for name, file in index.files.items():
        place = join(path, name)
        try:
            size = fs.size(join(where, name))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{place} is missing: {error}") from None
        if size != file.bytes:
            raise CheckpointError(f"{place} has {size:,} bytes, not {file.bytes:,}")
        for _ in verified(place, "its header", 0, file.header_bytes, file.header_sha256):
            pass
    for tensor in index.tensors:
        for _ in verified(join(path, tensor.file), tensor.tensor, tensor.offset, tensor.bytes, tensor.sha256):
            pass
    return index


def merge(path: str, out: str, *, file_bytes: int = _FILE_BYTES) -> list[str]:
    """Write a checkpoint's variables whole, as sharded safetensors with the usual `model.safetensors.index.json`.

    Slots and averages go along, named `VARIABLE/OPTIMIZER/SLOT`. What shards lack of them, since they had had no
    gradient yet, is as before the first one. Some MiB are in memory, however large variables are.

    Args:
        path: of the checkpoint.
        out: a directory, local or of fsspec, which has no such index yet.
        file_bytes: a file is ended behind the tensor with which it reaches this size.

    Returns:
        The names of the files.

    Raises:
        CheckpointError: the checkpoint is damaged, or nothing can be written there. A part may be there then, without
            the index.
    """
    index = read_index(path)
    check_whole(index, path)
    fs, where = _file_system(out)
    index_name = "model.safetensors.index.json"
    if there(fs, join(where, index_name)):
        raise CheckpointError(f"{out} already has a {index_name}: give another directory")
    wholes: list[list[TensorToWrite]] = [[]]
    for variable in _of_users(index):
        for key in variable.arrays:
            if sum(tensor.nbytes for tensor in wholes[-1]) >= file_bytes:
                wholes.append([])
            wholes[-1].append(_whole(path, index, variable, key))
    with contextlib.suppress(OSError):
        fs.makedirs(where, exist_ok=True)
    names, total = [], 0
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(wholes, 1):
        name = f"model-{number:05d}-of-{len(wholes):05d}.safetensors"
        write(join(out, name), tensors, {"format": "np"})
        names.append(name)
        total += sum(tensor.nbytes for tensor in tensors)
        weight_map |= {tensor.name: name for tensor in tensors}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True)
    try:
        with fsspec.open(join(out, index_name), "wt") as file:
            file.write(text + "\n")
    except OSError as error:
        raise CheckpointError(f"{join(out, index_name)} can't be written: {reason(error)}") from error
    return [*names, index_name]


def _whole(path: str, index: Index, variable: SavedVariable, key: str) -> TensorToWrite:
    name = tensor_name(variable.name, key)
    parts = {tensor.shard: tensor for tensor in variable.arrays[key]}
    dtype = dtype_of(next(iter(parts.values())).dtype)
    if key.startswith("average/"):  # where none was saved, the value is the average
        parts = {tensor.shard: tensor for tensor in variable.arrays["value"]} | parts
    fill = _fill(index, key) if key.startswith("slot/") else 0.0
    return TensorToWrite(name, dtype, variable.shape, _in_order(path, variable, parts, dtype, fill))


def _fill(index: Index, key: str) -> float:
    """What a slot holds before the first gradient. Of a rule that is not ours that is not known: 0."""
    optimizer, _, slot = key.removeprefix("slot/").rpartition("/")
    spec = index.optimizers.get(optimizer, {})
    rule = RULES.get(spec.get("rule", ""))
    if rule is None:
        return 0.0
    numbers = {name: float(number) for name, number in spec.get("numbers", {}).items()}
    return rule.from_spec(numbers, spec.get("flags", {})).slots.get(slot, 0.0)


class _Shard:
    """The elements of a saved shard, in order, a few at a time. Verified when the last one has been taken."""

    def __init__(self, path: str, tensor: SavedTensor, chunk_bytes: int) -> None:
        self._dtype = dtype_of(tensor.dtype)
        self._left = tensor.bytes
        self._data = bytearray()
        self._chunks = verified(
            join(path, tensor.file), tensor.tensor, tensor.offset, tensor.bytes, tensor.sha256, chunk_bytes
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


def _in_order(
    path: str, variable: SavedVariable, parts: dict[int, SavedTensor], dtype: np.dtype[Any], fill: float
) -> Iterator[bytes]:
    """The bytes of the whole, some of it at a time; shards that lie side by side are read side by side."""
    shape = variable.shape
    if math.prod(shape) == 0:
        return
    blocks = [(number, block) for number, block in enumerate(variable.partition.blocks) if block.size]
    side_by_side = variable.partition.num_shards // (variable.partition.grid[0] if shape else 1)
    chunk_bytes = max(_LEAST_READ_BYTES, CHUNK_BYTES // side_by_side)
    shards = {number: _Shard(path, tensor, chunk_bytes) for number, tensor in parts.items()}
    if not shape:
        yield shards[0].take(()).astype(dtype, copy=False).tobytes()
        return
    # Rows of the first axis whose rows are small. The axes before it are walked through one index at a time.
    row_bytes = [math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape))]
    axis = next(axis for axis, size in enumerate(row_bytes) if size <= CHUNK_BYTES)
    many = CHUNK_BYTES // row_bytes[axis]
    for before in np.ndindex(shape[:axis]):
        here = [
            each
            for each in blocks
            if all(a <= at < b for at, a, b in zip(before, each[1].start, each[1].stop, strict=False))
        ]
        for start in range(0, shape[axis], many):
            stop = min(start + many, shape[axis])
            rows = np.full((stop - start, *shape[axis + 1 :]), fill, dtype)
            for number, block in here:
                low, high = max(start, block.start[axis]), min(stop, block.stop[axis])
                if low < high and number in shards:
                    place = (slice(low - start, high - start), *block.slices[axis + 1 :])
                    rows[place] = shards[number].take((high - low, *block.shape[axis + 1 :]))
            yield rows.tobytes()


def _file_system(path: str) -> tuple[Any, str]:
    """CheckpointError for a URL that fsspec knows nothing of."""
    try:
        fs, where = fsspec.core.url_to_fs(path)
    except (ValueError, ImportError) as error:
        raise CheckpointError(f"{path} can't be reached: {error}") from error
    return fs, where
