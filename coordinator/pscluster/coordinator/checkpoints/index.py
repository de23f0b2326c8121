"""The index of a checkpoint: `index.json`, beside the servers' files.

`weight_map` and `metadata` are as in the index of sharded safetensors, so that its readers find the tensors; the rest
says how they make up variables. The file names its own digest: whatever bit of a checkpoint flips, it is found. A
directory is a checkpoint from the moment its index is there; the index is written last.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import fsspec
import numpy as np

from pscluster.coordinator.checkpoints.folder import INDEX, reason, written, written_aside
from pscluster.core.dtypes import dtype_named
from pscluster.core.errors import CheckpointError, MisuseError, ProtocolError
from pscluster.core.fault_points import reach
from pscluster.core.geometry import Partition
from pscluster.ps.storage.tensor_files import CHUNK_BYTES, join, tensor_name
from pscluster.v1 import ps_pb2

FORMAT = "pscluster-checkpoint"
VERSION = 2
_MAX_BYTES = 512 << 20
_ARRAY = re.compile(r"value|slot/.+/[^/]+|average/.+", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """An array of one shard, and where it is."""

    shard: int
    file: str
    tensor: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SavedNamed:
    """Functions with a key, and which of their updates a shard had had, the same ones of each.

    Attributes:
        nth: of a function's updates of the variable, these.
        keys: of the functions: 8 bytes each, little-endian, in base64.
    """

    nth: tuple[int, ...]
    keys: str

    @staticmethod
    def of(nth: Iterable[int], keys: Iterable[int]) -> SavedNamed:
        """From plain numbers."""
        return SavedNamed(tuple(nth), base64.b64encode(np.fromiter(keys, "<u8").tobytes()).decode())

    @property
    def numbers(self) -> list[int]:
        """The keys. ValueError if they are none."""
        try:
            found: list[int] = np.frombuffer(base64.b64decode(self.keys, validate=True), "<u8").tolist()
        except binascii.Error as error:
            raise ValueError(f"{self.keys!r:.40} are no keys: {error}") from None
        return found


@dataclass(slots=True)
class SavedVariable:
    """A variable: how it was cut, and of each shard the values, slots and averages.

    Attributes:
        arrays: by what it is ("value", "slot/OPTIMIZER/NAME", "average/OPTIMIZER"), the tensors of those shards that
            have it.
        updates: of each shard, how many it had had.
        steps: of each shard, by optimizer, how many gradients it had had.
        named: of each shard, what functions with a key had done to it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    ends: tuple[tuple[int, ...], ...]
    arrays: dict[str, list[SavedTensor]] = field(default_factory=dict)
    updates: list[int] = field(default_factory=list)
    steps: list[dict[str, int]] = field(default_factory=list)
    named: list[list[SavedNamed]] = field(default_factory=list)

    @property
    def partition(self) -> Partition:
        """How it was cut."""
        return Partition(self.shape, self.ends)


@dataclass(frozen=True, slots=True)
class SavedFile:
    """One server's file."""

    bytes: int
    header_bytes: int
    header_sha256: str


@dataclass(slots=True)
class Index:
    """Everything about a checkpoint but the tensors' bytes.

    Attributes:
        pause_seconds: for which no function ran.
        partly_applied: how many functions had ended with an error, or been cancelled, since the job began or a
            checkpoint was restored, and may have left a part of their updates in this one.
        partly_applied_last: the last of these: the function's name, and how it ended.
    """

    number: int
    created: str
    pause_seconds: float
    variables: dict[str, SavedVariable] = field(default_factory=dict)
    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, SavedFile] = field(default_factory=dict)
    partly_applied: int = 0
    partly_applied_last: list[str] = field(default_factory=list)

    @property
    def tensors(self) -> list[SavedTensor]:
        """All of them."""
        return [tensor for each in self.variables.values() for array in each.arrays.values() for tensor in array]

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.bytes for tensor in self.tensors)

    def add_variable(self, spec: ps_pb2.VariableSpec) -> None:
        """One that is to be in it; its shards follow with `add_file`."""
        ends = tuple(tuple(split.ends) for split in spec.splits)
        count = len(spec.owners)
        self.variables[spec.name] = SavedVariable(
            spec.name,
            tuple(spec.shape),
            spec.dtype,
            spec.trainable,
            ends,
            {},
            [0] * count,
            [{} for _ in range(count)],
            [[] for _ in range(count)],
        )

    def add_file(
        self, name: str, reply: ps_pb2.CheckpointReply, names: dict[int, str], forgotten: Container[int] = ()
    ) -> None:
        """What a server has written.

        Args:
            name: of the file.
            reply: the server's.
            names: of the variables that belong to the checkpoint, by number.
            forgotten: keys of functions that need not be remembered, since they are not scheduled again.
        """
        self.files[name] = SavedFile(reply.bytes, reply.header_bytes, reply.header_sha256)
        for shard in reply.shards:
            if shard.variable not in names:
                continue  # made after the others were marked
            variable = self.variables[names[shard.variable]]
            variable.updates[shard.shard] = shard.updates
            variable.steps[shard.shard] = dict(shard.steps)
            for same in shard.named:
                if keys := [key for key in same.keys if key not in forgotten]:
                    variable.named[shard.shard].append(SavedNamed.of(same.nth, keys))
            for each in shard.tensors:
                variable.arrays.setdefault(each.array, []).append(
                    SavedTensor(
                        shard.shard,
                        name,
                        each.tensor,
                        each.dtype,
                        tuple(each.shape),
                        each.offset,
                        each.bytes,
                        each.sha256,
                    )
                )

    def to_json(self) -> bytes:
        """The file."""
        body: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "metadata": {"total_size": self.nbytes},
            "weight_map": {tensor.tensor: tensor.file for tensor in self.tensors},
            **asdict(self),
        }
        text = json.dumps(body, indent=1, sort_keys=True)
        return (text[:-2] + f',\n "sha256": "{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n').encode()


def write_index(directory: str, index: Index) -> None:
    """From now on the directory is a checkpoint. CheckpointError if it can't be written."""
    path = join(directory, INDEX)
    with written(path):
        rename = written_aside(path, index.to_json())
        reach("coordinator.index.before")
        rename()
        reach("coordinator.index.after")


def read_index(directory: str) -> Index:
    """The index of a checkpoint. CheckpointError if there is none, or it is not what was written."""
    path = join(directory, INDEX)
    try:
        with fsspec.open(path, "rb") as file:
            data = bytearray()
            while len(data) <= _MAX_BYTES and (chunk := file.read(CHUNK_BYTES)):  # no more room than there are bytes
                data += chunk
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} is no checkpoint: it has no {INDEX}, which is written last, after everything else"
        ) from None
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"{path} can't be read: {reason(error)}") from error
    if len(data) > _MAX_BYTES:
        raise CheckpointError(f"{path} is larger than an index may be, {_MAX_BYTES:,} bytes")
    text, mark, digest = data.decode(errors="replace").rpartition(',\n "sha256": "')
    if not mark or hashlib.sha256(f"{text}\n}}".encode()).hexdigest() != digest[:64] or digest[64:] != '"\n}\n':
        try:
            foreign = json.loads(data).get("format") != FORMAT
        except (ValueError, AttributeError, RecursionError):
            foreign = False
        what = "is of another program" if foreign else "is damaged: it is not what was written"
        raise CheckpointError(f"{path} {what}")
    try:
        body = json.loads(text + "\n}")
        if body.get("format") != FORMAT or body.get("version") != VERSION:
            raise CheckpointError(f"{path} is of version {body.get('version')!r} of the format, not {VERSION}")
        return _parsed(body)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is invalid: {type(error).__name__}: {error}") from error


def _parsed(body: dict[str, Any]) -> Index:
    index = Index(body["number"], body["created"], body["pause_seconds"], optimizers=body["optimizers"])
    index.files = {name: SavedFile(**each) for name, each in body["files"].items()}
    index.partly_applied, index.partly_applied_last = body["partly_applied"], body["partly_applied_last"]
    _check_types(index, partly_applied=int, partly_applied_last=list)
    if not all(isinstance(each, str) for each in index.partly_applied_last):
        raise TypeError("a function that was applied in part has no name")
    if not isinstance(index.pause_seconds, int | float):
        raise TypeError(f"pause_seconds is {index.pause_seconds!r:.40}")
    for file in index.files.values():
        _check_types(file, bytes=int, header_bytes=int, header_sha256=str)
    if not all(isinstance(each, dict) for each in index.optimizers.values()):
        raise TypeError("an optimizer that is no object")
    for name, each in body["variables"].items():
        arrays = {
            key: [SavedTensor(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in tensors]
            for key, tensors in each["arrays"].items()
        }
        index.variables[name] = SavedVariable(
            name,
            tuple(each["shape"]),
            each["dtype"],
            each["trainable"],
            tuple(tuple(axis) for axis in each["ends"]),
            arrays,
            each["updates"],
            each["steps"],
            [[SavedNamed(tuple(same["nth"]), same["keys"]) for same in shard] for shard in each["named"]],
        )
        shards = index.variables[name].partition.num_shards  # ValueError if the ends don't fit the shape
        _check_saved(index.variables[name], shards)
    return index


def _check_types(record: object, **types: type) -> None:
    """TypeError if a field is not of that type; ValueError for a number below 0."""
    for field_name, kind in types.items():
        value: Any = getattr(record, field_name)
        if type(value) is not kind:
            raise TypeError(f"{field_name} is {value!r:.40}, not of type {kind.__name__}")
        if isinstance(value, int) and value < 0:
            raise ValueError(f"{field_name} is {value}")


def _check_saved(variable: SavedVariable, shards: int) -> None:
    """TypeError or ValueError if what is said of a variable is not what is said of variables."""
    _check_types(variable, dtype=str, trainable=bool, updates=list, steps=list)
    if not len(variable.updates) == len(variable.steps) == len(variable.named) == shards:
        raise ValueError(f"{len(variable.updates)} counts of updates for {shards} shards of {variable.name!r:.80}")
    for same in (same for named in variable.named for same in named):
        _check_types(same, keys=str)
        if not same.numbers or not all(type(nth) is int and 0 < nth < 1 << 32 for nth in same.nth):
            raise ValueError(f"updates of {variable.name!r:.80} by functions with keys that make no sense")
    steps = [count for each in variable.steps for count in each.values()]
    if not all(type(count) is int and count >= 0 for count in [*variable.updates, *steps]):
        raise TypeError(f"a count of {variable.name!r:.80} that is no number from 0 on")
    for key in variable.arrays:
        if not _ARRAY.fullmatch(key):
            raise ValueError(f"{variable.name!r:.80} has an array {key!r:.80}: there are values, slots and averages")
    for tensor in (tensor for tensors in variable.arrays.values() for tensor in tensors):
        _check_types(tensor, shard=int, file=str, tensor=str, dtype=str, offset=int, bytes=int, sha256=str)
        if not all(type(length) is int for length in tensor.shape):
            raise TypeError(f"the shape of {tensor.tensor!r:.80} is {tensor.shape!r:.80}")


def check_whole(index: Index, directory: str) -> None:
    """CheckpointError if the shards do not make up the variables, or two tensors have one name."""
    names = Counter(tensor_name(each.name, key) for each in index.variables.values() for key in each.arrays)
    for name, count in names.items():
        if count > 1:
            raise CheckpointError(f"{directory}: {count} arrays are named {name!r}: rename a variable or an optimizer")
    for variable in index.variables.values():
        partition = variable.partition
        here = sorted(tensor.shard for tensor in variable.arrays.get("value", ()))
        if here != list(range(partition.num_shards)):
            raise CheckpointError(
                f"{directory} lacks shards of {variable.name!r}: it has {here} of {partition.num_shards}"
            )
        for key, tensors in variable.arrays.items():
            for tensor in tensors:
                shape = partition.block(tensor.shard).shape
                try:
                    size = math.prod(shape) * dtype_of(tensor.dtype).itemsize
                except CheckpointError as error:
                    raise CheckpointError(f"{directory}: {key} of {variable.name!r}: {error}") from None
                if tensor.shape != shape or tensor.bytes != size:
                    raise CheckpointError(
                        f"{directory}: {key} of {variable.name!r}, shard {tensor.shard}, does not fit"
                    )


def dtype_of(name: str) -> np.dtype[Any]:
    """CheckpointError for a type that is not known here."""
    try:
        return dtype_named(name)
    except (MisuseError, ProtocolError) as error:
        raise CheckpointError(str(error)) from None
