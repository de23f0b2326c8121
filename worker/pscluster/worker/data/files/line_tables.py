"""CSV and JSON lines as columns.

The types of columns are those of the first lines of the first file, or given: the same for all blocks, whatever their
own values look like.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pscluster.worker.data.files.columns import NotUtf8Error, arrays_of, need_arrow
from pscluster.worker.data.files.line_files import BOM, BadLineError, decoded
from pscluster.worker.data.files.opening import DataFile

ODD_QUOTES = (
    "has a quoted value that does not end on it: if values may have line breaks, give quoted_newlines=True; if quotes "
    "mean nothing, quoting=False"
)
_OTHER_TYPES = "; or give other types= for its columns"


@dataclass(frozen=True)
class _Columns:
    """What CSV and JSON lines have in common: columns with types, and values in place of nulls."""

    schema: bytes  # of Arrow, serialized
    fills: dict[str, Any]

    @cached_property
    def _schema(self) -> Any:
        return need_arrow("pyarrow.ipc").read_schema(need_arrow().py_buffer(self.schema))

    def _arrays(self, table: Any, where: str) -> Any:
        return arrays_of(table.select(self._schema.names), self.fills, where, None)


@dataclass(frozen=True)
class Csv(_Columns):
    """Lines of values."""

    names: list[str]  # of all columns of the files
    has_header: bool
    delimiter: str = ","
    quoting: bool = True
    quoted_breaks: bool = False

    kind = "a CSV file"

    def check(self, file: DataFile, head: bytes) -> None:
        """Raise ValueError if its header has other columns."""
        if not self.has_header or not head:
            return
        if (names := header_of(head, self.delimiter, self.quoting, file.path)) != self.names:
            raise ValueError(
                f"the columns of {file.path!r} are {names!r:.300}, and those of the first file {self.names!r:.300}: "
                "give files with the same ones, in the same order"
            )

    def parse(self, data: bytes, *, first: bool, where: str) -> Any:
        """Return the chosen columns as arrays."""
        if first:
            data = data.removeprefix(BOM)
            if self.has_header:
                data = data.partition(b"\n")[2]
        if self.quoting and not self.quoted_breaks and data.count(b'"') & 1:
            raise BadLineError((odd_line(data) or 0) + (first and self.has_header), ODD_QUOTES)
        if not data.strip():
            return []
        try:
            return self._arrays(read_csv(self, data, self._schema), where)
        except need_arrow().ArrowInvalid:
            pass
        try:  # once more, to have the row's number
            read_csv(self, data, self._schema, use_threads=False)
            why, line = "can't be parsed", None
        except need_arrow().ArrowInvalid as error:
            why, row = without_row(str(error))
            why = re.sub(r"CSV column #(\d+)", lambda found: f"column {self.names[int(found[1])]!r}", why, count=1)
            line = None if row is None else row + (first and self.has_header)
            if row is not None and not self.quoted_breaks:
                line = nth_line(data, row) + (first and self.has_header)
        hint = _OTHER_TYPES if "conversion" in why else ""
        raise BadLineError(line, f"can't be parsed: {why}{hint}")


def read_csv(csv_format: Csv, data: bytes, schema: Any = None, *, use_threads: bool = True) -> Any:
    """Return a table of the columns of the schema; without one, of all, whose types are inferred."""
    arrow, reading = need_arrow(), need_arrow("pyarrow.csv")
    return reading.read_csv(
        arrow.BufferReader(data),
        read_options=reading.ReadOptions(
            column_names=csv_format.names, use_threads=use_threads, block_size=max(1, len(data))
        ),
        parse_options=reading.ParseOptions(
            delimiter=csv_format.delimiter,
            quote_char='"' if csv_format.quoting else False,
            newlines_in_values=csv_format.quoted_breaks,
        ),
        convert_options=None
        if schema is None
        else reading.ConvertOptions(column_types=schema, include_columns=schema.names),
    )


def header_of(head: bytes, delimiter: str, quoting: bool, path: str) -> list[str]:
    """Return the names in the first line of a CSV file. ValueError, with its path, if that is no line of names."""
    line = head.removeprefix(BOM).partition(b"\n")[0].removesuffix(b"\r")
    if not line.strip():
        raise ValueError(f"the first line of {path!r} is blank: it must have the names of the columns; or give names=")
    if b"\r" in line:
        raise ValueError(f"{path!r} has a carriage return within its first line: end lines with line feeds")
    if quoting and line.count(b'"') & 1:
        raise ValueError(f"{path!r} has a line break within a name of its header: rename that column")
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"the header of {path!r} is not UTF-8: {error.reason}; convert the file") from None
    return next(
        csv.reader(io.StringIO(text), delimiter=delimiter, quoting=csv.QUOTE_MINIMAL if quoting else csv.QUOTE_NONE), []
    )


def odd_line(data: bytes) -> int | None:
    """Return the first line with an odd number of quotes; None if there is none."""
    return next((index for index, line in enumerate(data.split(b"\n")) if line.count(b'"') & 1), None)


def without_row(message: str) -> tuple[str, int | None]:
    """Return pyarrow's message without the number of the row, and that number, from 0."""
    before, found, after = message.partition("Row #")
    number, _, rest = after.partition(": ")
    if not found or not number.isdigit():
        return message, None
    return before + rest, int(number) - 1


@dataclass(frozen=True)
class JsonLines(_Columns):
    """Lines with an object each."""

    kind = "a file of JSON lines"
    quoted_breaks = False

    def check(self, file: DataFile, head: bytes) -> None:
        """Raise ValueError if it does not begin with an object."""
        if (begin := head.removeprefix(BOM).lstrip()) and not begin.startswith(b"{"):
            hint = ": write one object a line, not a list of them" if begin.startswith(b"[") else ""
            raise ValueError(
                f"{file.path!r} is not {self.kind}: it begins with {begin[:20].decode(errors='replace')!r}{hint}"
            )

    def parse(self, data: bytes, *, first: bool, where: str) -> Any:
        """Return the chosen columns as arrays. What an object lacks is null."""
        if first:
            data = data.removeprefix(BOM)
        if not data.strip():
            return []
        try:
            return self._arrays(read_json(data, self._schema), where)
        except NotUtf8Error:
            decoded(data)
            raise
        except need_arrow().ArrowInvalid as error:
            raise self._bad_line(data, str(error)) from None

    def _bad_line(self, data: bytes, message: str) -> BadLineError:
        """Return which line can't be parsed, and why: pyarrow names the line or the column, or neither."""

        def can_be_read(lines: list[bytes], schema: Any = self._schema) -> bool:
            try:
                read_json(b"\n".join(lines), schema)
            except need_arrow().ArrowInvalid:
                return False
            return True

        why, _, row = message.rpartition(" in row ")
        if row.isdigit():
            return BadLineError(nth_line(data, int(row)), f"can't be parsed: {why}{_hint(why)}")
        line = _bad_one(data.split(b"\n"), can_be_read)
        if line is not None:
            of, fields = data.split(b"\n")[line], self._schema
            wrong = [field.name for field in fields if not can_be_read([of], need_arrow().schema([field]))]
            message = f"column {wrong[0]!r}: {message}" if wrong else message
        return BadLineError(line, f"can't be parsed: {message}{_hint(message)}")


def read_json(data: bytes, schema: Any = None) -> Any:
    """Return a table of the columns of the schema; without one, of all, whose types are inferred."""
    arrow, reading = need_arrow(), need_arrow("pyarrow.json")
    return reading.read_json(
        arrow.BufferReader(data),
        read_options=reading.ReadOptions(block_size=len(data) + 1),
        parse_options=reading.ParseOptions()
        if schema is None
        else reading.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
    )


def _hint(why: str) -> str:
    return _OTHER_TYPES if "convert" in why or "changed from" in why else ""


def _bad_one(lines: list[bytes], can_be_read: Callable[[list[bytes]], bool]) -> int | None:
    """Return the index of the first of the lines that can't be read, by halving; None if each by itself can."""
    start, stop = 0, len(lines)
    while stop - start > 1:
        middle = (start + stop) // 2
        first_half = b"".join(lines[start:middle]).strip()
        start, stop = (start, middle) if first_half and not can_be_read(lines[start:middle]) else (middle, stop)
    return start if lines[start].strip() and not can_be_read([lines[start]]) else None


def nth_line(data: bytes, number: int) -> int:
    """Return which line of the data is its n-th that is not blank, both from 0."""
    lines = (index for index, line in enumerate(data.split(b"\n")) if line.strip())
    return next((index for nth, index in enumerate(lines) if nth == number), number)
