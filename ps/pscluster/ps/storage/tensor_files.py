"""The safetensors format, written as a stream and read by tensor: https://github.com/huggingface/safetensors.

Eight bytes, the header's length, little-endian; the header, a JSON object, name to dtype, shape and place; the bytes of
the tensors. Written by hand since the library takes whole arrays only, and ours are captured copy-on-write while they
go out. Complex numbers, which the format lacks, are pairs of real ones along a last axis. Paths may be URLs (fsspec).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt

from pscluster.core.dtypes import dtype_named
from pscluster.core.errors import CheckpointError, MisuseError, ProtocolError
from pscluster.core.limits import MAX_RANK
from pscluster.core.transport.frames import view

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


@dataclass(frozen=True, slots=True)
class TensorToWrite:
    """A tensor, whose bytes come in order when they are asked for."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    data: Iterable[bytes]

    @property
    def nbytes(self) -> int:
        """Of all elements."""
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """Where a tensor is."""

    offset: int
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """What was written: enough to find any bit that flips."""

    tensors: list[WrittenTensor]
    header_sha256: str
    header_bytes: int
    nbytes: int


def tensor_name(variable: str, array: str) -> str:
    """What an array of a variable is called: "w", "w/adam/m" for "slot/adam/m", "w/adam/average" for "average/adam"."""
    kind, _, rest = array.partition("/")
    return {"value": variable, "slot": f"{variable}/{rest}", "average": f"{variable}/{rest}/average"}[kind]


def join(directory: str, file: str) -> str:
    """The path of a file in a directory. CheckpointError if it would lead elsewhere."""
    if not re.fullmatch(r"[\w.-]+", file) or file.startswith("."):
        raise CheckpointError(f"{file!r} is not the name of a file in a checkpoint")
    return f"{directory.rstrip('/')}/{file}"


def _entry(dtype: np.dtype[Any], shape: Sequence[int]) -> tuple[str, list[int]]:
    if dtype.name in _PAIRS:
        return _PAIRS[dtype.name], [*shape, 2]
    return _NAMES[dtype.name], list(shape)


def header_of(tensors: Sequence[TensorToWrite], metadata: dict[str, str]) -> tuple[bytes, list[int]]:
    """What stands before the tensors, and where each begins behind it. CheckpointError if names are not unique."""
    header: dict[str, Any] = {"__metadata__": metadata}
    starts, at = [], 0
    for tensor in tensors:
        if tensor.name in header:
            raise CheckpointError(f"two tensors would be named {tensor.name!r}: rename a variable or an optimizer")
        dtype, shape = _entry(tensor.dtype, tensor.shape)
        starts.append(at)
        header[tensor.name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, starts


def write(path: str, tensors: Sequence[TensorToWrite], metadata: dict[str, str]) -> WrittenFile:
    """Write a file. CheckpointError, with the reason, if that fails; a part of it may be there then."""
    header, starts = header_of(tensors, metadata)
    written, total = [], len(header)
    try:
        with fsspec.open(path, "wb") as file:
            file.write(header)
            for tensor, start in zip(tensors, starts, strict=True):
                digest = hashlib.sha256()
                for chunk in tensor.data:
                    digest.update(chunk)
                    file.write(chunk)
                written.append(WrittenTensor(len(header) + start, tensor.nbytes, digest.hexdigest()))
                total += tensor.nbytes
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"{path} can't be written: {_reason(error)}") from error
    return WrittenFile(written, hashlib.sha256(header).hexdigest(), len(header), total)


def chunks_of(path: str, offset: int, nbytes: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Bytes of a file. CheckpointError if they are not there."""
    try:
        with fsspec.open(path, "rb") as file:
            file.seek(offset)
            left = nbytes
            while left:
                chunk = file.read(min(left, chunk_bytes))
                if not chunk:
                    raise CheckpointError(f"{path} is too short: {left:,} bytes are missing at its end")
                left -= len(chunk)
                yield chunk
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"{path} can't be read: {_reason(error)}") from error


def verified(
    path: str, what: str, offset: int, nbytes: int, sha256: str, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[bytes]:
    """Bytes of a file; CheckpointError at their end if they are not those that were written."""
    digest = hashlib.sha256()
    for chunk in chunks_of(path, offset, nbytes, chunk_bytes):
        digest.update(chunk)
        yield chunk
    if digest.hexdigest() != sha256:
        raise CheckpointError(f"{path} is damaged: {what} is not what was written")


def read(path: str, tensor: str, dtype: str, shape: Sequence[int], place: WrittenTensor) -> Array:
    """A tensor, verified. CheckpointError if it is not what was written, or can't be."""
    array = _empty(path, tensor, dtype, shape, place.nbytes)
    data, at = view(array), 0
    for chunk in verified(path, tensor, place.offset, place.nbytes, place.sha256):
        data[at : at + len(chunk)] = chunk
        at += len(chunk)
    return array


def _empty(path: str, tensor: str, dtype: str, shape: Sequence[int], nbytes: int) -> Array:
    """Room for a tensor; none is taken if the shape is not one of so many bytes."""
    try:
        found = dtype_named(dtype)
    except (MisuseError, ProtocolError) as error:
        raise CheckpointError(f"{path}: {tensor}: {error}") from None
    if len(shape) > MAX_RANK or math.prod(shape) * found.itemsize != nbytes:
        takes = math.prod(shape[:MAX_RANK]) * found.itemsize
        raise CheckpointError(
            f"{path}: {tensor} of {dtype}{list(shape[:MAX_RANK])} takes {takes:,} bytes, not {nbytes:,}"
        )
    try:
        return np.empty(tuple(shape), found)
    except (MemoryError, ValueError) as error:
        raise CheckpointError(f"{path}: {tensor} of {dtype}{list(shape)} is too large: {error}") from None


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
