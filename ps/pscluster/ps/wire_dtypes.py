"""Float32 values in fewer bytes on the wire: bfloat16, float16, or int8 with a scale for each block.

Both half types round to nearest even. int8 is symmetric: the largest absolute value of a block is 127 times its scale,
and each element is rounded to the nearest multiple of the scale (block-wise quantization, as in Dettmers et al. 2022).
The error of an element is at most

    bfloat16    2**-8 of its absolute value; for those below 1.2e-38, 4.6e-41
    float16     2**-11 of its absolute value; for those below 6.1e-5, 3.0e-8
    int8        1/254 of the largest absolute value of its block, up to float32's own rounding; all elements of a block
                whose largest is below 1.5e-36 become 0

Values are rows, (rows, width), in C order; a dense array is a single row. A block is `BLOCK` elements of a row, the
last one of each row may be shorter.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core.errors import ProtocolError
from pscluster.core.transport.frames import Buffer
from pscluster.v1 import ps_pb2

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

BLOCK = 256
"""Elements that share a scale."""

CODES: dict[str, int] = {
    "float32": ps_pb2.WIRE_DTYPE_UNSPECIFIED,
    "bfloat16": ps_pb2.WIRE_BFLOAT16,
    "float16": ps_pb2.WIRE_FLOAT16,
    "int8": ps_pb2.WIRE_INT8,
}
"""The wire types by name; float32 is sent as it is."""

_NAMES = {code: name for name, code in CODES.items()}
_SCALE_BYTES = 4
_SMALLEST_FLOAT16 = np.float32(2**-14).view(np.uint32)  # the bits of the first that is not subnormal
_SMALLEST_SCALE = np.finfo(np.float32).tiny
_LARGEST_SCALE = np.nextafter(np.float32(np.finfo(np.float32).max / 127), np.float32(0))  # 127 of it are finite

# The smallest absolute values that would round to infinity.
_LIMITS: dict[int, Any] = {
    ps_pb2.WIRE_BFLOAT16: np.array(0x7F7F8000, np.uint32).view(np.float32)[()],
    ps_pb2.WIRE_FLOAT16: np.float32(65520),
}


class UnencodableError(ValueError):
    """A value that a wire type can't hold: at this row and column of what was to be encoded."""

    def __init__(self, wire_dtype: int, values: Floats, position: int) -> None:
        self.row, self.column = divmod(position, values.shape[1])
        self.value = float(values[self.row, self.column])
        holds = "only finite numbers" if wire_dtype == ps_pb2.WIRE_INT8 else f"numbers below {_LIMITS[wire_dtype]:g}"
        super().__init__(f"{self.value:g}, which {name_of(wire_dtype)} can't hold: it holds {holds}")


def name_of(wire_dtype: int) -> str:
    """Return the name of a wire type. ProtocolError for a number that is none."""
    if (name := _NAMES.get(wire_dtype)) is None:
        raise ProtocolError(f"unknown wire type {wire_dtype}; known ones: {', '.join(CODES)}")
    return name


def encoded_bytes(wire_dtype: int, rows: int, width: int) -> int:
    """Return the bytes of this many rows on the wire. ProtocolError for an unknown type."""
    if wire_dtype == ps_pb2.WIRE_INT8:
        return rows * (width + _SCALE_BYTES * -(-width // BLOCK))
    name_of(wire_dtype)
    return rows * width * (2 if wire_dtype else 4)


def encode(wire_dtype: int, values: Floats) -> Bytes:
    """Return the bytes of rows, (rows, width) and C-contiguous. UnencodableError for a value that it can't hold."""
    if not wire_dtype:
        return values.reshape(-1).view(np.uint8)
    if wire_dtype == ps_pb2.WIRE_INT8:
        return _to_int8(values)
    plain = not values.size or _are_plain(wire_dtype, values)
    if wire_dtype == ps_pb2.WIRE_BFLOAT16:
        half: Any = _to_bfloat16(values, plain)
    else:
        half = _to_float16(values)
    encoded: Bytes = half.reshape(-1).view(np.uint8)
    return encoded


def decode(wire_dtype: int, data: Buffer | Bytes, rows: int, width: int) -> Floats:
    """Return the rows that these bytes encode. The caller has checked their number."""
    values: Floats
    if not wire_dtype:
        values = np.frombuffer(data, "<f4")
    elif wire_dtype == ps_pb2.WIRE_INT8:
        return _from_int8(data, rows, width)
    elif wire_dtype == ps_pb2.WIRE_BFLOAT16:
        bits = np.frombuffer(data, "<u2").astype(np.uint32)
        bits <<= 16
        values = bits.view(np.float32)
    else:
        values = _float16_values().take(np.frombuffer(data, "<u2"))
    return values.reshape(rows, width)


def encode_stream(wire_dtype: int, chunks: Iterable[Buffer]) -> Iterator[Bytes]:
    """Yield the bytes of a single row, which comes as the float32 of these chunks. Raises as `encode`."""
    rest = b""
    for chunk in chunks:
        data = rest + bytes(chunk) if rest else chunk
        whole = len(data) - len(data) % (BLOCK * 4)
        rest = bytes(data[whole:])
        if whole:
            yield encode(wire_dtype, np.frombuffer(data, np.float32, whole // 4).reshape(1, -1))
    if rest:
        yield encode(wire_dtype, np.frombuffer(rest, np.float32).reshape(1, -1))


def check_scales(data: Buffer | Bytes, rows: int, width: int) -> bool:
    """Return whether all scales of these rows in int8 are what a sender can have made: finite, and not below 0."""
    for _, blocks in _blocks(data, rows, width):
        scales = blocks["scale"]
        if not ((scales >= 0) & (scales <= _LARGEST_SCALE)).all():
            return False
    return True


def largest(values: Floats, count: int) -> npt.NDArray[np.int64]:
    """Return the positions of the `count` elements of a flat array with the largest absolute values, ascending.

    NaN counts as larger than all numbers.
    """
    if count >= values.size:
        return np.arange(values.size)
    positions = np.argpartition(np.abs(values), values.size - count)[values.size - count :]
    positions.sort()
    return positions


def _are_plain(wire_dtype: int, values: Floats) -> bool:
    """Return whether all are finite. UnencodableError if a finite one is too large."""
    limit = _LIMITS[wire_dtype]
    if values.max() < limit and values.min() > -limit:  # False if there is a NaN
        return True
    wrong = np.flatnonzero(np.isfinite(values) & (np.abs(values) >= limit))
    if len(wrong):
        raise UnencodableError(wire_dtype, values, int(wrong[0]))
    return False


def _to_float16(values: Floats) -> npt.NDArray[np.uint16]:
    """Return the bits of float16, for infinities and NaN, too.

    NumPy takes 40 times as long for a subnormal number (below 6.1e-5, as gradients often are) as for another one.
    """
    sizes = values.view("<u4") & np.uint32(0x7FFFFFFF)  # as integers: NaN is larger than all numbers
    with np.errstate(all="ignore"):
        if not np.any(sizes < _SMALLEST_FLOAT16):
            return values.astype("<f2").view("<u2")
        bits: npt.NDArray[np.uint16] = np.maximum(sizes, _SMALLEST_FLOAT16).view("<f4").astype("<f2").view("<u2")
    # A subnormal number is its bits times 2**-24, and the first normal one has the bits 2**10. rint rounds to even.
    small = np.minimum(sizes, _SMALLEST_FLOAT16).view("<f4")
    bits += np.rint(small * np.float32(2**24)).astype("<u2")
    bits -= np.uint16(1 << 10)
    bits |= (values.view("<u4") >> 16).astype("<u2") & np.uint16(0x8000)
    return bits


@functools.cache
def _float16_values() -> Floats:
    """Return the values of all float16, by their bits: looking them up is faster than NumPy's conversion."""
    values: Floats = np.arange(1 << 16, dtype="<u2").view("<f2").astype(np.float32)
    return values


def _to_bfloat16(values: Floats, plain: bool) -> npt.NDArray[np.uint16]:
    bits = values.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1  # ties to even
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    if not plain:
        nan = np.isnan(values)
        rounded[nan] = bits[nan] >> 16 | 0x40  # rounding might have made it infinity, or 0
    return rounded.astype("<u2")


def _blocks(data: Buffer | Bytes, rows: int, width: int) -> Iterator[tuple[slice, Any]]:
    """Yield the elements of each row, and their blocks, (rows, n), in two groups: those of full length and the last."""
    whole, rest = divmod(width, BLOCK)
    stride = encoded_bytes(ps_pb2.WIRE_INT8, 1, width)
    for start, count, size in ((0, whole, BLOCK), (whole * BLOCK, 1, rest)):
        if count and size and rows:
            dtype = _block_dtype(size)
            offset = start // BLOCK * (BLOCK + _SCALE_BYTES)
            blocks: Any = np.ndarray((rows, count), dtype, data, offset, (stride, dtype.itemsize))
            yield slice(start, start + count * size), blocks


@functools.lru_cache(maxsize=BLOCK)
def _block_dtype(size: int) -> np.dtype[Any]:
    return np.dtype([("scale", "<f4"), ("code", "i1", (size,))])


def _to_int8(values: Floats) -> Bytes:
    rows, width = values.shape
    out = np.empty(encoded_bytes(ps_pb2.WIRE_INT8, rows, width), np.uint8)
    for elements, blocks in _blocks(out, rows, width):
        part = values[:, elements].reshape(*blocks.shape, -1)
        # As integers, which have the same order, with NaN above all: in a third of the time.
        top = np.abs(part).view(np.int32).max(2).view(np.float32)
        if not math.isfinite(top.max()):  # not the sum, which may overflow; NaN is the maximum
            raise UnencodableError(ps_pb2.WIRE_INT8, values, int(np.flatnonzero(~np.isfinite(values))[0]))
        scales = np.minimum(top / np.float32(127), _LARGEST_SCALE)
        scales[scales < _SMALLEST_SCALE] = 0
        factors = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
        codes = part * factors[..., np.newaxis]
        np.rint(codes, codes)
        blocks["scale"] = scales
        blocks["code"] = codes
    return out


def _from_int8(data: Buffer | Bytes, rows: int, width: int) -> Floats:
    out = np.empty((rows, width), np.float32)
    for elements, blocks in _blocks(data, rows, width):
        part = out[:, elements].reshape(*blocks.shape, -1)
        np.multiply(blocks["code"], blocks["scale"][..., np.newaxis], out=part, dtype=np.float32)
    return out
