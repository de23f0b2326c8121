"""The index of a checkpoint: `index.json`, beside the servers' files.

`weight_map` and `metadata` are as in the index of sharded safetensors, so that its readers find the tensors; the rest
says how they make up variables. The file holds its own digest, so that any flipped bit of a checkpoint is detected. The
index is written last: it makes a directory a checkpoint.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import fsspec
import numpy as np

from pscluster.coordinator.checkpoints.folder import INDEX, reason, written, written_aside
from pscluster.core.dtypes import dtype_named
from pscluster.core.errors import CheckpointError, MisuseError, ProtocolError
from pscluster.core.fault_points import reach
from pscluster.core.geometry.partition import Partition
from pscluster.core.geometry.row_orders import RANGE, RowOrder
from pscluster.ps.spec import row_order_of
from pscluster.ps.storage.files.tensor_files import CHUNK_BYTES, join, tensor_name
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
    checksum: str


@dataclass(frozen=True, slots=True)
class SavedNamed:
    """Functions with keys of which a shard had applied the same updates."""

    nth: tuple[int, ...]  # which of each function's updates of the variable, from 1
    keys: str  # the functions': 8 bytes each, little-endian, in base64

    @staticmethod
    def of(nth: Iterable[int], keys: Iterable[int]) -> SavedNamed:
        return SavedNamed(tuple(nth), base64.b64encode(np.fromiter(keys, "<u8").tobytes()).decode())

    @property
    def function_keys(self) -> list[int]:
        """Return the keys as numbers. ValueError if they are invalid."""
        try:
            decoded: list[int] = np.frombuffer(base64.b64decode(self.keys, validate=True), "<u8").tolist()
        except binascii.Error as error:
            raise ValueError(f"{self.keys!r:.40} are not keys: {error}") from None
        return decoded


@dataclass(slots=True)
class SavedVariable:
    """A variable: how it was cut, and each shard's values, slots and averages."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    ends: tuple[tuple[int, ...], ...]
    arrays: dict[str, list[SavedTensor]]  # by kind: "value", "slot/OPTIMIZER/NAME", "average/OPTIMIZER"
    updates: list[int]  # how many each shard had applied
    steps: list[dict[str, int]]  # how many gradients each shard had applied, by optimizer
    named: list[list[SavedNamed]]  # which updates under keys each shard had applied
    row_order: RowOrder = RANGE
    dim: int = 0  # of a table: the values of a row; see TableSpec, also for the next two
    initializer: str = ""
    numbers: str = ""

    @property
    def partition(self) -> Partition:
        return Partition(self.shape, self.ends, self.row_order)


@dataclass(frozen=True, slots=True)
class SavedLayer:
    """A preprocessing layer: see `saved_layers`."""

    kind: str
    config: str  # JSON
    arrays: dict[str, SavedTensor]


@dataclass(frozen=True, slots=True)
class SavedFile:
    bytes: int
    header_bytes: int
    header_checksum: str


@dataclass(slots=True)
class Index:
    """Everything about a checkpoint but the tensors' bytes."""

    number: int
    created: str
    pause_seconds: float  # during which no function ran
    variables: dict[str, SavedVariable] = field(default_factory=dict)
    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, SavedFile] = field(default_factory=dict)
    # Functions that had failed or been cancelled, since the job began or was restored, and may have left some of their
    # updates in this checkpoint: their number, and the names and ends of the last ones.
    partly_applied: int = 0
    partly_applied_last: list[str] = field(default_factory=list)
    job_metadata: dict[str, str] = field(default_factory=dict)  # progress, positions of datasets, `fit`: JSON each
    layers: dict[str, SavedLayer] = field(default_factory=dict)

    @property
    def tensors(self) -> list[SavedTensor]:
        arrays = (array for variable in self.variables.values() for array in variable.arrays.values())
        return list(itertools.chain.from_iterable(arrays))

    @property
    def nbytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors)

    def add_variable(self, spec: ps_pb2.VariableSpec) -> None:
        """Add a variable, whose shards follow with `add_file`."""
        ends = tuple(tuple(split.ends) for split in spec.splits)
        variable = SavedVariable(spec.name, tuple(spec.shape), spec.dtype, spec.trainable, ends, {}, [], [], [])
        variable.row_order = row_order_of(spec.row_order)
        variable.dim = spec.table.dim
        variable.initializer, variable.numbers = spec.table.initializer, spec.table.numbers
        variable.updates = [0] * len(spec.owners)
        variable.steps = [{} for _ in spec.owners]
        variable.named = [[] for _ in spec.owners]
        self.variables[spec.name] = variable

    def add_file(
        self, name: str, reply: ps_pb2.CheckpointReply, names: Mapping[int, str], forgotten: Container[int] = ()
    ) -> None:
        """Add the file that a server has written.

        `names`: of the checkpoint's variables, by id. `forgotten`: keys of functions to leave out.
        """
        self.files[name] = SavedFile(reply.bytes, reply.header_bytes, reply.header_checksum)
        for shard in reply.shards:
            if shard.variable not in names:
                continue  # created after the mark
            variable = self.variables[names[shard.variable]]
            variable.updates[shard.shard] = shard.updates
            variable.steps[shard.shard] = dict(shard.steps)
            for same in shard.named:
                if keys := [key for key in same.keys if key not in forgotten]:
                    variable.named[shard.shard].append(SavedNamed.of(same.nth, keys))
            for saved in shard.tensors:
                location = saved.offset, saved.bytes, saved.checksum
                tensor = SavedTensor(shard.shard, name, saved.tensor, saved.dtype, tuple(saved.shape), *location)
                variable.arrays.setdefault(saved.array, []).append(tensor)

    def to_json(self) -> bytes:
        body: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "metadata": {"total_size": self.nbytes},
            "weight_map": {tensor.tensor: tensor.file for tensor in self.tensors},
            **asdict(self),
        }
        for variable in body["variables"].values():
            if variable["row_order"] == asdict(RANGE):
                del variable["row_order"]  # as before there were others: older programs refuse only those
            if not variable["dim"]:
                del variable["initializer"], variable["numbers"]
        if not self.layers:
            del body["layers"]  # as before there were any
        text = json.dumps(body, indent=1, sort_keys=True)
        return (text[:-2] + f',\n "sha256": "{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n').encode()


def write_index(directory: str, index: Index) -> None:
    """Write the index, which makes the directory a checkpoint. CheckpointError if it can't be written."""
    path = join(directory, INDEX)
    with written(path):
        rename = written_aside(path, index.to_json())
        reach("coordinator.index.before")
        rename()
        reach("coordinator.index.after")


def read_index(directory: str) -> Index:
    """Read the index of a checkpoint. CheckpointError if there is none, or it is damaged."""
    path = join(directory, INDEX)
    try:
        with fsspec.open(path, "rb") as file:
            data = bytearray()
            while len(data) <= _MAX_BYTES and (chunk := file.read(CHUNK_BYTES)):  # memory follows the file's size
                data += chunk
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} is not a checkpoint: it has no {INDEX}, which is written last, after everything else"
        ) from None
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"{path} can't be read: {reason(error)}") from error
    if len(data) > _MAX_BYTES:
        raise CheckpointError(f"{path} is larger than an index may be, {_MAX_BYTES:,} bytes")
    text, separator, digest = data.decode(errors="replace").rpartition(',\n "sha256": "')
    if not separator or hashlib.sha256(f"{text}\n}}".encode()).hexdigest() != digest[:64] or digest[64:] != '"\n}\n':
        try:
            foreign = json.loads(data).get("format") != FORMAT
        except (ValueError, AttributeError, RecursionError):
            foreign = False
        problem = "was written by another program" if foreign else "is damaged: it is not what was written"
        raise CheckpointError(f"{path} {problem}")
    try:
        body = json.loads(text + "\n}")
        if body.get("format") != FORMAT or body.get("version") != VERSION:
            version = body.get("version")
            raise CheckpointError(f"{path} has format version {version!r}; this program reads version {VERSION}")
        body.setdefault("layers", {})
        index: Index = _reader(Index)({item.name: body[item.name] for item in fields(Index)})
        for variable in index.variables.values():
            _check_saved(variable)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is invalid: {type(error).__name__}: {error}") from error
    return index


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Return a function that makes a value of this type from JSON, or raises TypeError, LookupError or ValueError."""
    origin, of = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        readers = {name: _reader(hint) for name, hint in get_type_hints(kind).items()}
        return lambda data: kind(**{name: readers[name](value) for name, value in data.items()})
    if origin is Literal:
        return lambda data: _scalar(str, data)  # the class checks it
    if origin is dict:
        key, value = map(_reader, of)
        return lambda data: {key(name): value(entry) for name, entry in data.items()}
    if origin is not None:  # a list, or a tuple
        item = _reader(of[0])
        return lambda data: origin(map(item, _scalar(list, data)))
    return functools.partial(_scalar, kind)


def _scalar(kind: Any, value: Any) -> Any:
    if kind is not Any and type(value) is not kind and not (kind is float and type(value) is int):
        raise TypeError(f"{value!r:.40} is not of type {kind.__name__}")
    if kind is int and value < 0:
        raise ValueError(f"{value} is less than 0")
    return value


def _check_saved(variable: SavedVariable) -> None:
    """Raise ValueError if the entry of a variable contradicts itself."""
    shards = variable.partition.num_shards  # ValueError if the ends don't fit the shape
    if not len(variable.updates) == len(variable.steps) == len(variable.named) == shards:
        raise ValueError(f"{len(variable.updates)} counts of updates for {shards} shards of {variable.name!r:.80}")
    for same in itertools.chain.from_iterable(variable.named):
        if not same.function_keys or not all(0 < nth < 1 << 32 for nth in same.nth):
            raise ValueError(f"updates of {variable.name!r:.80} by functions with invalid keys")
    for key in variable.arrays:
        if not _ARRAY.fullmatch(key):
            raise ValueError(f"{variable.name!r:.80} has an array {key!r:.80}: there are values, slots and averages")


def check_whole(index: Index, directory: str) -> None:
    """Raise CheckpointError if the shards do not make up the variables, or two tensors share a name."""
    names = Counter(tensor_name(variable.name, key) for variable in index.variables.values() for key in variable.arrays)
    for name, count in names.items():
        if count > 1:
            raise CheckpointError(f"{directory}: {count} arrays are named {name!r}: rename a variable or an optimizer")
    for variable in index.variables.values():
        partition = variable.partition
        shards = sorted(tensor.shard for tensor in variable.arrays.get("value", ()))
        if shards != list(range(partition.num_shards)):
            raise CheckpointError(
                f"{directory} lacks shards of {variable.name!r}: it has {shards} of {partition.num_shards}"
            )
        for key, tensors in variable.arrays.items():
            for tensor in tensors:
                shape = partition.block(tensor.shard).shape
                if variable.dim:  # of a table are the rows in use; ids are with the values alone
                    shape = (*tensor.shape[:1], shape[1] if key == "value" else variable.dim)
                try:
                    size = math.prod(shape) * dtype_of(tensor.dtype).itemsize
                except CheckpointError as error:
                    raise CheckpointError(f"{directory}: {key} of {variable.name!r}: {error}") from None
                if tensor.shape != shape or tensor.bytes != size:
                    raise CheckpointError(
                        f"{directory}: {key} of {variable.name!r}, shard {tensor.shard}, does not fit"
                    )


def dtype_of(name: str) -> np.dtype[Any]:
    """Return a type by its name. CheckpointError if it is unknown."""
    try:
        return dtype_named(name)
    except (MisuseError, ProtocolError) as error:
        raise CheckpointError(str(error)) from None
