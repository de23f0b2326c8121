"""The safetensors format, written as a stream and read by tensor: https://github.com/huggingface/safetensors.

Eight bytes, the header's length, little-endian; the header, a JSON object from names to dtypes, shapes and offsets; the
bytes of the tensors. We write it ourselves because the library takes only whole arrays, and ours are copied on write
while they are sent. Complex numbers, which the format lacks, are pairs of real ones along a last axis. Paths given as
strings may be URLs (fsspec).

The offset of each tensor and its checksum (XXH3, 128 bits) are stored in the manifest of a generation or the index of a
checkpoint.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128

from pscluster.core.dtypes import dtype_named
from pscluster.core.errors import CheckpointError, MisuseError, ProtocolError
from pscluster.core.limits import MAX_RANK
from pscluster.core.transport.frames import view
from pscluster.v1 import ps_pb2

Array = npt.NDArray[Any]

CHUNK_BYTES = 1 << 20
_ALIGNMENT = 8  # of the header's length

_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
_PAIRS = {"complex64": "F32", "complex128": "F64"}


class Saved(Protocol):
    """A tensor in a file: `ps_pb2.SavedTensor`, or an entry of a checkpoint's index."""

    @property
    def tensor(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def offset(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def checksum(self) -> str: ...


class WrittenFile(NamedTuple):
    """A file's header and size: with its tensors' entries, enough to detect any flipped bit."""

    header_checksum: str
    header_bytes: int
    bytes: int


def tensor_to_write(tensor: str, dtype: np.dtype[Any], shape: Sequence[int], array: str = "") -> ps_pb2.SavedTensor:
    """Return the entry of a tensor before it is written: without offset and checksum."""
    size = math.prod(shape) * dtype.itemsize
    return ps_pb2.SavedTensor(array=array, tensor=tensor, dtype=dtype.name, shape=shape, bytes=size)


def tensor_name(variable: str, array: str) -> str:
    """Return the tensor's name: "w", "w/adam/m" for "slot/adam/m", "w/adam/average" for "average/adam"."""
    kind, _, rest = array.partition("/")
    return {"value": variable, "slot": f"{variable}/{rest}", "average": f"{variable}/{rest}/average"}[kind]


def join(directory: str, file: str) -> str:
    """Return the path of a file in a directory. CheckpointError if it would lead elsewhere."""
    if not re.fullmatch(r"[\w.-]+", file) or file.startswith("."):
        raise CheckpointError(f"{file!r} is not the name of a file in a checkpoint")
    return f"{directory.rstrip('/')}/{file}"


def _header(tensors: Sequence[ps_pb2.SavedTensor], metadata: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """Return the header with its length. CheckpointError if names are not unique."""
    header: dict[str, Any] = {"__metadata__": {"format": "np", **metadata}}
    at = 0
    for tensor in tensors:
        if tensor.tensor in header:
            raise CheckpointError(f"two tensors would be named {tensor.tensor!r}: rename a variable or an optimizer")
        pair = _PAIRS.get(tensor.dtype)
        header[tensor.tensor] = {
            "dtype": pair or _NAMES[tensor.dtype],
            "shape": [*tensor.shape, 2] if pair else list(tensor.shape),
            "data_offsets": [at, at + tensor.bytes],
        }
        at += tensor.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def lay_out(tensors: Sequence[ps_pb2.SavedTensor]) -> bytes:
    """Set the offsets of a file's tensors; return what the file begins with."""
    header = _header(tensors)
    at = len(header)
    for tensor in tensors:
        tensor.offset = at
        at += tensor.bytes
    return header


def stream(
    put: Callable[[bytes], object],
    tensors: Sequence[ps_pb2.SavedTensor],
    data: Iterable[Iterable[bytes]],
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> WrittenFile:
    """Write a file piece by piece, taking each tensor's `data` as it is written; set its offset and checksum."""
    header = _header(tensors, metadata)
    put(header)
    at = len(header)
    for tensor, chunks in zip(tensors, data, strict=True):
        checksum = xxh3_128()
        for chunk in chunks:
            checksum.update(chunk)
            put(chunk)
        tensor.offset, tensor.checksum = at, checksum.hexdigest()
        at += tensor.bytes
    return WrittenFile(xxh3_128(header).hexdigest(), len(header), at)


def write(path: str, tensors: Sequence[ps_pb2.SavedTensor], data: Iterable[Iterable[bytes]]) -> WrittenFile:
    """Call `stream` for a path. CheckpointError, with the reason, if that fails; it may leave an incomplete file."""
    import fsspec  # slow to import, and a server may never see a checkpoint

    try:
        with fsspec.open(path, "wb") as file:
            return stream(file.write, tensors, data)
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"{path} can't be written: {_reason(error)}") from error


def _opened(path: str | Path) -> AbstractContextManager[Any]:
    """Open a file to be read."""
    if isinstance(path, Path):
        return path.open("rb")
    import fsspec

    opened: AbstractContextManager[Any] = fsspec.open(path, "rb")
    return opened


def verified(
    path: str | Path, content: str, offset: int, nbytes: int, checksum: str, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[bytes]:
    """Yield bytes of a file. CheckpointError if they can't be read, or, after the last, if their checksum is wrong."""
    actual, remaining = xxh3_128(), nbytes
    try:
        with _opened(path) as file:
            file.seek(offset)
            while remaining:
                chunk = file.read(min(remaining, chunk_bytes))
                if not chunk:
                    raise CheckpointError(f"{path} is too short: {remaining:,} bytes are missing at its end")
                remaining -= len(chunk)
                actual.update(chunk)
                yield chunk
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"{path} can't be read: {_reason(error)}") from error
    if actual.hexdigest() != checksum:
        raise CheckpointError(f"{path} is damaged: {content} is not what was written")


def read(path: str | Path, saved: Saved, make: Callable[[tuple[int, ...], np.dtype[Any]], Array] = np.empty) -> Array:
    """Read and verify a tensor. CheckpointError if it is not what was written, or its entry makes no sense.

    `make` returns an array to read it into.
    """
    array = _empty(path, saved, make)
    data, at = view(array), 0
    for chunk in verified(path, saved.tensor, saved.offset, saved.bytes, saved.checksum):
        data[at : at + len(chunk)] = chunk
        at += len(chunk)
    return array


def _empty(path: str | Path, saved: Saved, make: Callable[[tuple[int, ...], np.dtype[Any]], Array]) -> Array:
    """Return an empty array for a tensor. CheckpointError, before it takes memory, if shape and bytes disagree."""
    shape = tuple(saved.shape[:MAX_RANK])
    try:
        dtype = dtype_named(saved.dtype)
    except (MisuseError, ProtocolError) as error:
        raise CheckpointError(f"{path}: {saved.tensor}: {error}") from None
    size, described = math.prod(shape) * dtype.itemsize, f"{saved.tensor} of {saved.dtype}{list(shape)}"
    if len(saved.shape) > MAX_RANK or size != saved.bytes:
        raise CheckpointError(f"{path}: {described} takes {size:,} bytes, not {saved.bytes:,}")
    try:
        return make(shape, dtype)
    except (MemoryError, ValueError) as error:
        raise CheckpointError(f"{path}: {described} is too large: {error}") from None


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
