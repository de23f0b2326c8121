"""Ids of the rows of tables: int64, or strings. How they are stored, checked and hashed.

A table has ids of one kind, which is fixed when it is made (`TableSpec.id_bytes`). Strings are held, on clients, on
servers and in files, as NumPy arrays of bytes ("S"): each its UTF-8, filled up with NULs, which no id has. So strings
are compared as what they are, and two are one id only if they are equal. A row holds all of its id, however short, so
that whatever copies, saves, logs, moves or restores rows takes the strings along.

A hash of 64 bits says which shard an id's row is in, and what its first values are. Of a string it is that of its
bytes, eight at a time, by the finalizer of SplitMix64 and a chain (Merkle and Damgard): the same everywhere, whatever
the width of the array. Ids of one hash are rows of their own, which begin with the same values. It is no cryptography:
strings can be made up that share a hash, or a shard. They are found no slower for that: searches begin where a hash
with a secret key says, which each process has drawn for itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pscluster.core.checks import type_of
from pscluster.core.dtypes import as_array
from pscluster.core.errors import InvalidUpdateError, MisuseError, ProtocolError
from pscluster.core.numbers.splitmix import Hashes, mixed
from pscluster.v1 import ps_pb2

RowIds = npt.NDArray[Any]
"""Ids of either kind: int64, or bytes."""

Strings = npt.NDArray[np.bytes_]

LEAST_ID_BYTES = 16
"""What a row has for an id that is a string, at least: 8 are an int64."""

MOST_ID_BYTES = 1024

USE_COLUMNS = 2
"""The last columns of a row: 8 bytes that are not 0 if it is in use."""

_SHOWN = 40
"""Characters of a string that a message shows."""

_USE_BYTES = 4 * USE_COLUMNS


def numbers_of(ids: RowIds) -> Hashes:
    """Return what hashes of ids are made of: an int64 itself, of a string a number of 64 bits."""
    return hashes(ids) if are_strings(ids) else ids.view(np.uint64)


def hashes(ids: Strings, key: int = 0) -> Hashes:
    """Return a hash of each string: another one for each key."""
    count, words = len(ids), -(-ids.itemsize // 8)
    columns = np.ascontiguousarray(ids, f"S{8 * words}").view("<u8").reshape(count, words).T
    state = np.full(count, key, np.uint64)
    for column in columns:
        if column.all():
            state = mixed(state ^ column)
        else:  # shorter ones have ended: their hash does not depend on the width
            state = np.where(column != 0, mixed(state ^ column), state)
    return state


def are_strings(ids: RowIds) -> bool:
    return ids.dtype.kind == "S"


def columns_of(id_bytes: int) -> int:
    """Return how many float32 a row has beside its values: for its id, and 8 bytes that are not 0 if it is in use.

    `id_bytes`: of a string; 0: ids are int64.
    """
    return ((id_bytes or 8) + _USE_BYTES) // 4


def dtype_in(width: int, dim: int) -> np.dtype[Any]:
    """Return the type of the ids in rows of this many float32, `dim` of them values. ValueError if there is none."""
    size = (width - dim) * 4 - _USE_BYTES
    if size == 8:
        return np.dtype(np.int64)
    if size % 8 or not LEAST_ID_BYTES <= size <= MOST_ID_BYTES:
        raise ValueError(f"rows of {width} float32 with {dim} values have no ids")
    return np.dtype(f"S{size}")


def has_ids(width: int, dim: int) -> bool:
    """Return whether rows of this width have ids beside that many values."""
    return can_hold(width, width, dim)


def can_hold(width: int, saved: int, dim: int) -> bool:
    """Return whether rows of one width can be those of another: ids that are strings may have had less room."""
    try:
        here, there = dtype_in(width, dim), dtype_in(saved, dim)
    except ValueError:
        return False
    return here.kind == there.kind and there.itemsize <= here.itemsize


def kind_of(width: int, dim: int) -> str:
    """Return for a message what the ids are in rows of this width."""
    try:
        dtype = dtype_in(width, dim)
    except ValueError:
        return "none"
    return f"strings of up to {dtype.itemsize} bytes" if dtype.kind == "S" else "int64"


def id_bytes_for(most: int) -> int:
    """Return what a row has for ids of up to this many bytes."""
    return max(LEAST_ID_BYTES, -(-most // 8) * 8)


# On the wire


def rows_by(ids: RowIds) -> ps_pb2.Rows:
    """Return what says of an item that it is of rows by these ids, or numbers."""
    return ps_pb2.Rows(ids=len(ids), id_bytes=ids.itemsize if are_strings(ids) else 0)


def bytes_by(rows: ps_pb2.Rows) -> int:
    """Return how many bytes an item's ids, or row numbers, take."""
    return rows.ids * (rows.id_bytes or 8)


def check_kind(rows: ps_pb2.Rows, spec: ps_pb2.VariableSpec) -> None:
    """Raise InvalidUpdateError or ProtocolError if an item has ids of another kind than the variable's, or longer."""
    if rows.WhichOneof("kind") != "ids":
        return
    most = spec.table.id_bytes
    if not most and rows.id_bytes:
        raise ProtocolError(f"ids of {spec.name!r} as strings, but they are integers")
    if most and not 0 < rows.id_bytes <= most:
        kind = f"strings of {rows.id_bytes} bytes" if rows.id_bytes else "integers"
        raise InvalidUpdateError(f"table {spec.name!r}: ids are strings of up to {most} bytes, not {kind}")


# As users give them


def string_ids(ids: npt.ArrayLike, name: str, most: int) -> Strings:
    """Return ids as a contiguous array of their UTF-8, of the same shape, as wide as the longest.

    Args:
        ids: `str`, or bytes that are UTF-8: an array, a list, a column of Arrow or pandas, of any shape.
        name: of the table, for the message.
        most: the bytes that an id may have.

    Raises:
        InvalidUpdateError: one is no string (None, NaN and numbers are none), is too long, is not UTF-8 or has a NUL.
    """
    array: npt.NDArray[Any]
    if isinstance(ids, list | tuple | str | bytes):
        try:
            array = np.array(ids, dtype=object)  # as strings, numbers among them would become strings, too
        except ValueError as error:
            raise InvalidUpdateError(f"table {name!r}: ids are not an array: {error}") from None
    else:
        array = as_array(ids, name, "ids", holder="table")
    if not array.size:
        return np.empty(array.shape, "S1")
    if array.dtype.kind == "U":
        narrow = _ascii(array)
        array = array.astype(object) if narrow is None else narrow
    if array.dtype.kind == "S":
        result = _narrow(array)
        check_strings(result, name)
        if result.itemsize > most:
            position = int(np.char.str_len(result.reshape(-1)).argmax())
            raise _too_long(name, result.shape, position, result.reshape(-1)[position], most)
        return result
    if array.dtype.kind not in "OT":
        raise InvalidUpdateError(
            f"table {name!r}: ids are strings, but ids{_place(array.shape, 0)} is {array.reshape(-1)[0]!s:.60}, of "
            f"{array.dtype}"
        )
    encoded = _encoded(array.reshape(-1).tolist(), name, array.shape)
    longest = max(map(len, encoded))
    if longest > most:
        position = next(position for position, one in enumerate(encoded) if len(one) > most)
        raise _too_long(name, array.shape, position, encoded[position], most)
    if b"\0" in b"".join(encoded):
        position = next(position for position, one in enumerate(encoded) if b"\0" in one)
        raise _refused(name, array.shape, position, encoded[position], "has a NUL, which ids can't have")
    return np.array(encoded, f"S{max(longest, 1)}").reshape(array.shape)


def check_strings(ids: Strings, name: str) -> None:
    """Raise InvalidUpdateError if one of these is not UTF-8, or has a NUL that others than NULs follow."""
    flat = np.ascontiguousarray(ids).reshape(-1)
    codes = flat.view(np.uint8).reshape(len(flat), flat.itemsize)
    after_nul = (codes[:, :-1] == 0) & (codes[:, 1:] != 0)
    if after_nul.any():
        position = int(after_nul.any(1).argmax())
        raise _refused(name, ids.shape, position, flat[position], "has a NUL, which ids can't have")
    if codes.size and int(codes.max()) >= 0x80:
        try:  # one after another, unless one begins in the middle of a character
            if not ((codes[:, 0] & 0xC0) == 0x80).any():
                flat.tobytes().decode()
                return
        except UnicodeDecodeError:
            pass
        _encoded(flat.tolist(), name, ids.shape)


def texts_of(ids: Strings) -> npt.NDArray[np.str_]:
    """Return ids as `str`."""
    return np.array([row_id.decode() for row_id in ids.reshape(-1).tolist()], np.str_).reshape(ids.shape)


def shown(row_id: Any) -> str:
    """Return an id for a message."""
    if isinstance(row_id, bytes):
        with contextlib.suppress(UnicodeDecodeError):
            row_id = row_id.decode()
    if not isinstance(row_id, str | bytes):
        return str(row_id)
    return repr(row_id) if len(row_id) <= _SHOWN else f"{row_id[:_SHOWN]!r}..."


Missing = Literal["initial", "error"]
"""What a lookup does with ids that have no row."""


def check_missing(missing: Missing) -> bool:
    """Return whether it is an error if an id has no row. MisuseError if it is neither of the two."""
    if missing not in ("initial", "error"):
        raise MisuseError(f"missing is {missing!r}; it must be 'initial' or 'error'")
    return missing == "error"


def without_rows(table: str, ids: RowIds) -> InvalidUpdateError:
    """Return the error of a strict lookup, given the ids that have no row: at least one."""
    others = f" (nor have {len(ids) - 1:,} of the other ids)" if len(ids) > 1 else ""
    return InvalidUpdateError(
        f"table {table!r}: id {shown(ids[0])} has no row{others}: it has had no update that made one, or its row was "
        "dropped; without missing='error' a lookup returns its initial values"
    )


def _ascii(array: npt.NDArray[Any]) -> Strings | None:
    """Return an array of `str` as bytes if all of it is ASCII: that needs no Python string for each."""
    width = array.itemsize // 4
    codes = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(-1).view(np.uint32)
    if not width or int(codes.max()) >= 0x80:
        return None
    return codes.astype(np.uint8).view(f"S{width}").reshape(array.shape)


def _narrow(array: npt.NDArray[Any]) -> Strings:
    """Return bytes without the columns in which none has any."""
    flat = np.ascontiguousarray(array).reshape(-1)
    width = 1
    if flat.itemsize and len(used := np.flatnonzero(flat.view(np.uint8).reshape(len(flat), -1).any(0))):
        width = int(used[-1]) + 1
    return flat.astype(f"S{width}", copy=False).reshape(array.shape)


def _encoded(flat: Sequence[Any], name: str, shape: tuple[int, ...]) -> list[bytes]:
    if set(map(type, flat)) == {str}:
        try:
            return [text.encode() for text in flat]
        except UnicodeEncodeError:
            pass
    encoded = []
    for position, text in enumerate(flat):
        if not isinstance(text, str | bytes):
            said = "None" if text is None else f"{str(text)[:60]}, {type_of(text)}"
            raise InvalidUpdateError(f"table {name!r}: ids are strings, but ids{_place(shape, position)} is {said}")
        try:
            encoded.append(text.encode() if isinstance(text, str) else text.decode().encode())
        except UnicodeError:
            raise _refused(name, shape, position, text, "is not UTF-8") from None
    return encoded


def _too_long(name: str, shape: tuple[int, ...], position: int, row_id: bytes, most: int) -> InvalidUpdateError:
    why = f"has {len(row_id):,} bytes of UTF-8; the limit of the table, its max_id_bytes, is {most:,}"
    return _refused(name, shape, position, row_id, why)


def _refused(name: str, shape: tuple[int, ...], position: int, row_id: str | bytes, why: str) -> InvalidUpdateError:
    return InvalidUpdateError(f"table {name!r}: ids{_place(shape, position)}, {shown(row_id)}, {why}")


def _place(shape: tuple[int, ...], position: int) -> str:
    """Return the index of an element by its number: of a single id there is none."""
    index = [int(axis) for axis in np.unravel_index(position, shape)] if shape else []
    return f"{index}" if index else ""
