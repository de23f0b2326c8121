"""The formats of CSV files and of JSON lines, made from the first lines of the files. Used on the coordinator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pscluster.worker.data.files.columns import check_names, check_schema, need_arrow
from pscluster.worker.data.files.line_files import BOM, HEAD
from pscluster.worker.data.files.line_tables import (
    ODD_QUOTES,
    Csv,
    JsonLines,
    header_of,
    nth_line,
    odd_line,
    read_csv,
    read_json,
    without_row,
)
from pscluster.worker.data.files.lines import lines_of, odd_quotes
from pscluster.worker.data.files.opening import DataFile, Opener, refuse_other_kinds

_SAMPLE = 1 << 20  # bytes from which types are inferred


def _first_lines(
    files: Sequence[DataFile], kind: str, *, headers: bool = False, quoted: bool = False
) -> tuple[DataFile, bytes]:
    """Return the first file with lines that are not blank, after any header, and some of its first lines.

    If all have headers only, it is the first with one. ValueError if all are empty.
    """
    found = None
    for file in filter(lambda file: file.size, files):
        lines = _lines_of(file, kind, quoted, _SAMPLE)
        if headers and not _after_header(lines).strip() and len(lines) < file.size:  # of many columns
            lines = _lines_of(file, kind, quoted, len(lines) + _SAMPLE)
        if (_after_header(lines) if headers else lines).strip():
            return file, lines
        if headers:
            found = found or (file, lines)
    if found is None:
        raise ValueError("the source has no examples: all its files are empty")
    return found


def _lines_of(file: DataFile, kind: str, quoted: bool, stop: int) -> bytes:
    """Return the lines that begin before the byte `stop` of a file."""
    with Opener().open(file) as opened:

        def read(begin: int, end: int) -> bytes:
            opened.seek(begin)
            return bytes(opened.read(end - begin))

        stop = min(file.size, stop)
        odd = odd_quotes([read(0, stop)])[1] if quoted else None
        try:
            return lines_of(read, file.size, 0, stop, None if odd is None else (0, odd))[1]
        except ValueError as error:
            raise ValueError(f"{file.path!r} is not {kind}: {error}") from None


def _after_header(lines: bytes) -> bytes:
    return lines.partition(b"\n")[2]


def make_csv(
    files: Sequence[DataFile],
    columns: Sequence[str] | None,
    *,
    names: Sequence[str] | None,
    types: Mapping[str, Any],
    fills: Mapping[str, Any],
    delimiter: str,
    quoting: bool,
    quoted_breaks: bool,
) -> Csv:
    """Return the format of CSV files, given their first lines. ValueError if these are not CSV."""
    file, data = _first_lines(files, Csv.kind, headers=names is None, quoted=quoted_breaks)
    refuse_other_kinds(file, data[:HEAD], Csv.kind)
    if quoting and not quoted_breaks and (odd := odd_line(data)) is not None:  # before it is cut in the middle of one
        raise ValueError(f"line {odd + 1:,} of {file.path!r} {ODD_QUOTES}")
    found = list(names) if names is not None else header_of(data, delimiter, quoting, file.path)
    made = Csv(b"", dict(fills), found, names is None, delimiter, quoting, quoted_breaks)
    rows = data.removeprefix(BOM)
    if names is None:
        rows = _after_header(rows)
    try:
        inferred = read_csv(made, rows, use_threads=False).schema if rows.strip() else _unknown(found)
    except need_arrow().ArrowInvalid as error:
        why, row = without_row(str(error))
        line = "" if row is None else f"line {nth_line(rows, row) + 1 + (names is None):,} of "
        raise ValueError(f"{line}{file.path!r} can't be parsed: {why}") from None
    schema = _schema(inferred, columns, types, fills, file)
    _try_types(types, schema, lambda of: read_csv(made, b"\n", of))
    return Csv(schema, dict(fills), found, names is None, delimiter, quoting, quoted_breaks)


def make_json(
    files: Sequence[DataFile], columns: Sequence[str] | None, *, types: Mapping[str, Any], fills: Mapping[str, Any]
) -> JsonLines:
    """Return the format of files of JSON lines, given their first ones. ValueError if these are not JSON."""
    file, data = _first_lines(files, JsonLines.kind)
    refuse_other_kinds(file, data[:HEAD], JsonLines.kind)
    JsonLines(b"", {}).check(file, data[:HEAD])
    data = data.removeprefix(BOM)
    try:
        inferred = read_json(data).schema
    except need_arrow().ArrowInvalid as error:
        message, _, row = str(error).rpartition(" in row ")
        line = f"line {nth_line(data, int(row)) + 1:,} of " if row.isdigit() else ""
        raise ValueError(f"{line}{file.path!r} can't be parsed: {message or error}") from None
    schema = _schema(inferred, columns, types, fills, file)
    _try_types(types, schema, lambda of: read_json(b"{}\n", of))
    return JsonLines(schema, dict(fills))


def _unknown(names: Sequence[str]) -> Any:
    arrow = need_arrow()
    return arrow.schema([(name, arrow.null()) for name in names])


def _schema(
    inferred: Any, columns: Sequence[str] | None, types: Mapping[str, Any], fills: Mapping[str, Any], file: DataFile
) -> bytes:
    """Return the schema of the chosen columns: the types that are given, else those of the first lines."""
    arrow, where = need_arrow(), repr(file.path)
    there_are = list(dict.fromkeys([*inferred.names, *types]))  # of JSON lines a later one may have it
    chosen = list(columns if columns is not None else inferred.names)
    check_names(chosen, there_are, where)
    check_names(list(types), chosen, "the selection of types=")
    check_names([name for name in fills if name], chosen, "the selection of fill_nulls=")
    fields, counts = [], Counter(inferred.names)
    for name in chosen:
        if counts[name] > 1:
            raise ValueError(f"{where} has several columns {name!r}: rename all but one, or give others in columns=")
        of = _type(name, types[name]) if name in types else inferred.field(name).type
        if arrow.types.is_binary(of) and name not in types:
            raise ValueError(
                f"the column {name!r} of {where} has text that is not UTF-8: convert the file, or give "
                f"types={{{name!r}: 'binary'}} to read it as bytes"
            )
        if arrow.types.is_null(of):
            raise ValueError(
                f"the column {name!r} has no value in the first lines of {where}, which would tell its type: give it, "
                f"types={{{name!r}: 'float32'}}, or leave the column out with columns="
            )
        fields.append((name, of))
    schema = arrow.schema(fields)
    check_schema(schema, where)
    return bytes(schema.serialize().to_pybytes())


def _try_types(types: Mapping[str, Any], schema: bytes, read: Callable[[Any], Any]) -> None:
    """Raise ValueError if a given type is none that `read`, given a schema, makes of text."""
    arrow, ipc = need_arrow(), need_arrow("pyarrow.ipc")
    fields = ipc.read_schema(arrow.py_buffer(schema))
    for name, given in types.items():
        try:
            read(arrow.schema([fields.field(name)]))
        except arrow.ArrowNotImplementedError as error:
            raise ValueError(f"types has {given!r} for {name!r}, which can't be read from text: {error}") from None


def _type(name: str, given: Any) -> Any:
    arrow = need_arrow()
    if isinstance(given, arrow.DataType):
        return given
    try:
        return arrow.type_for_alias(given) if isinstance(given, str) else arrow.from_numpy_dtype(np.dtype(given))
    except (TypeError, ValueError, arrow.ArrowException):
        raise ValueError(
            f"types has {given!r} for {name!r}, which is not a type: give one of NumPy's, or a name such as 'float32', "
            "'int64', 'string' or 'timestamp[s]'"
        ) from None
