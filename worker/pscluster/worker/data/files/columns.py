"""Columns of Arrow as arrays of NumPy: which types there are, and what becomes of nulls.

numbers, bool                     arrays of that type
timestamps, dates, durations      datetime64 and timedelta64; of timestamps with a time zone the time in UTC
strings, binary                   arrays of objects, str or bytes; dictionaries as their values
lists of one size (fixed_size)    arrays with one more axis
other lists                       arrays of objects, each an array
"""

from __future__ import annotations

import difflib
import functools
import importlib
import numbers
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core.errors import MisuseError

Columns = dict[str, npt.NDArray[Any]]


class NotUtf8Error(ValueError):
    """A column of text has a value that is not UTF-8."""


def need_arrow(module: str = "pyarrow") -> Any:
    """Return pyarrow, or a module of it. MisuseError, with a hint, if it is not installed."""
    try:
        return importlib.import_module(module)  # waits for another thread that imports it, as sys.modules does not
    except ImportError as error:
        raise MisuseError(
            f"pyarrow reads these files, and can't be imported here ({error}): pip install 'pscluster[parquet]', "
            "on the workers, too"
        ) from None


def check_names(wanted: Sequence[str], there_are: Sequence[str], where: str) -> None:
    """Raise ValueError if a wanted column is not there."""
    existing = set(there_are)
    for name in wanted:
        if name not in existing:
            close = difflib.get_close_matches(str(name), there_are, 1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            shown = ", ".join(map(repr, there_are[:50])) + (", ..." if len(there_are) > 50 else "")
            raise ValueError(f"{where} has no column {name!r}{hint}: its columns are {shown}")


def check_schema(schema: Any, where: str) -> None:
    """Raise ValueError if a column has no array: it is of a type that NumPy lacks, or its name is not unique."""
    counts = Counter(schema.names)
    for field in schema:
        if counts[field.name] > 1:
            raise ValueError(f"{where} has several columns {field.name!r}: give others in columns=")
        if not _has_array(field.type):
            raise ValueError(
                f"the column {field.name!r} of {where} is of type {field.type}, which has no array of NumPy: leave it "
                "out with columns=, or convert it"
            )


def _has_array(arrow_type: Any) -> bool:
    types = need_arrow("pyarrow.types")
    if types.is_dictionary(arrow_type):
        return _has_array(arrow_type.value_type)
    if types.is_fixed_size_list(arrow_type):
        return _is_plain(arrow_type.value_type)
    if types.is_list(arrow_type) or types.is_large_list(arrow_type):
        return _is_plain(arrow_type.value_type) or _is_text(arrow_type.value_type)
    return _is_plain(arrow_type) or (types.is_temporal(arrow_type) and not _is_time(arrow_type)) or _is_text(arrow_type)


def _is_plain(arrow_type: Any) -> bool:
    types = need_arrow("pyarrow.types")
    return bool(types.is_integer(arrow_type) or types.is_floating(arrow_type) or types.is_boolean(arrow_type))


def _is_time(arrow_type: Any) -> bool:
    types = need_arrow("pyarrow.types")
    return bool(types.is_time(arrow_type) or types.is_interval(arrow_type))


def _is_text(arrow_type: Any) -> bool:
    types = need_arrow("pyarrow.types")
    kinds = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary, types.is_fixed_size_binary)
    return any(kind(arrow_type) for kind in kinds)


def arrays_of(
    table: Any, fills: Mapping[str, Any] | None = None, where: str = "", first_row: int | None = 0
) -> Columns:
    """Return the columns of a table as arrays of its length, by name, which may be read-only views.

    Args:
        table: of pyarrow, whose types `check_schema` has passed.
        fills: values in place of nulls, by column; under "" that of all others.
        where: the table is from, for errors.
        first_row: of the table in the file; None: unknown.

    Raises:
        NotUtf8Error: text is not UTF-8.
        ValueError: a column has nulls and no value in their place, or one that is not of its type.
    """
    plain = _plain_ids()
    return {
        name: column.to_numpy()
        if column.type.id in plain and not column.null_count  # nearly always: in half the time
        else _checked_array(_filled(column, name, fills or {}, where, first_row), name, where)
        for name, column in zip(table.column_names, table.columns, strict=True)
    }


@functools.cache
def _plain_ids() -> frozenset[int]:
    """Return the ids of the types whose columns are arrays of NumPy as they are."""
    arrow = need_arrow()
    kinds = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64")
    return frozenset(getattr(arrow, kind)().id for kind in kinds)


def _filled(column: Any, name: str, fills: Mapping[str, Any], where: str, first_row: int | None) -> Any:
    if not column.null_count:
        nested = need_arrow("pyarrow.types").is_nested(column.type)
        if nested and any(chunk.flatten().null_count for chunk in column.chunks):
            raise ValueError(f"the column {name!r} of {where} has nulls within its lists: write them without")
        return column
    fill = fills.get(name, fills.get(""))
    if fill is None:
        nulls = column.is_null().to_numpy(zero_copy_only=False)
        row = "" if first_row is None else f", the first in row {first_row + int(nulls.argmax()):,}"
        raise ValueError(
            f"the column {name!r} of {where} has nulls ({column.null_count:,} of the {len(column):,} values read{row}"
            f"): give what to read in their place, fill_nulls={{{name!r}: ...}}"
        )
    if isinstance(fill, numbers.Real) and fill % 1 and need_arrow("pyarrow.types").is_integer(column.type):
        raise ValueError(f"fill_nulls has {fill!r} for {name!r}, which is of type {column.type}: give a whole number")
    try:
        return column.fill_null(fill)
    except (need_arrow().ArrowException, TypeError, ValueError) as error:
        raise ValueError(f"fill_nulls has {fill!r} for {name!r}, which is of type {column.type}: {error}") from None


def _checked_array(column: Any, name: str, where: str) -> npt.NDArray[Any]:
    try:
        return _array_of(column)
    except need_arrow().ArrowException:
        try:
            column.validate(full=True)
        except need_arrow().ArrowInvalid:
            raise NotUtf8Error(f"the column {name!r} of {where} has text that is not UTF-8: write it anew") from None
        raise


def _array_of(column: Any) -> npt.NDArray[Any]:
    pa = need_arrow()
    types, arrow_type = pa.types, column.type
    if types.is_dictionary(arrow_type):
        return _array_of(column.cast(arrow_type.value_type))
    if types.is_fixed_size_list(arrow_type):
        flat = pa.chunked_array([chunk.flatten() for chunk in column.chunks], arrow_type.value_type)
        return np.asarray(flat.to_numpy()).reshape(len(column), arrow_type.list_size)
    if types.is_list(arrow_type) or types.is_large_list(arrow_type):
        lists = np.empty(len(column), object)
        at = 0
        for chunk in column.chunks:
            values = _array_of(pa.chunked_array([chunk.values]))
            offsets = chunk.offsets.to_numpy()
            for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
                lists[at] = values[start:stop]
                at += 1
        return lists
    if types.is_timestamp(arrow_type) and arrow_type.tz is not None:
        column = column.cast(pa.timestamp(arrow_type.unit))
    return np.asarray(column.to_numpy())
