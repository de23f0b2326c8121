"""Files of lines as blocks. For how they are cut see `lines`.

What a block's lines become is up to a format: here text, in `line_tables` CSV and JSON lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from pscluster.worker.data.files.lines import LONGEST_LINE, lines_of, odd_quotes
from pscluster.worker.data.files.opening import DataFile, Opener, of_each, refuse_other_kinds
from pscluster.worker.data.sources import Blocks, Listed, Numbers

HEAD = 1 << 16  # bytes of each file that are looked at
_COUNTED = 1 << 30  # bytes in which lines are counted, to give a bad one's number
_STEP = 1 << 20
BOM = b"\xef\xbb\xbf"


class BadLineError(ValueError):
    """A line can't be parsed."""

    def __init__(self, line: int | None, why: str) -> None:
        super().__init__(why)
        self.line = line  # number in the data, from 0; None: unknown
        self.why = why


class LineFormat(Protocol):
    """How lines are parsed."""

    @property
    def kind(self) -> str:
        """What the file should be."""

    @property
    def quoted_breaks(self) -> bool:
        """Whether a line break in quotes does not end a line."""

    def check(self, file: DataFile, head: bytes) -> None:
        """Raise ValueError if a file does not begin as one of this format."""

    def parse(self, data: bytes, *, first: bool, where: str) -> Any:
        """Return a block of examples from lines; `first` if the file begins with them. BadLineError if one is bad."""


@dataclass(init=False, eq=False)
class LineBlocks(Blocks):
    """The lines of files, in blocks of `block_bytes`.

    Raises:
        ValueError: a file is not of the format.
    """

    files: list[DataFile]
    format: Any  # a LineFormat
    block_bytes: int
    odd: list[bytes]  # for each file, see `odd_quotes`; empty if line breaks can't be quoted

    def __init__(self, files: Sequence[DataFile], line_format: LineFormat, block_bytes: int) -> None:
        self.files, self.format, self.block_bytes = list(files), line_format, block_bytes
        of_each(self._check, self.files)
        self.odd = of_each(self._odd_quotes, self.files) if line_format.quoted_breaks else []

    noun = "block"

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def nbytes(self) -> Numbers:
        """The bytes of each block."""
        places = map(self._place, range(len(self)))
        return np.array([stop - start for _, start, stop in places], np.int64)

    @property
    def listed(self) -> list[Listed]:
        """The files, with their sizes and numbers of blocks."""
        counts = np.diff(self._starts).tolist()
        return [Listed(file.path, file.size, count) for file, count in zip(self.files, counts, strict=True)]

    def name_of(self, index: int) -> str:
        """Name the bytes of a block."""
        file, start, stop = self._place(index)
        return f"the block at bytes {start:,} to {stop - 1:,} of {self.files[file].path!r}"

    def load(self, index: int) -> Any:
        """Return the examples of a block's lines. ValueError, with the line's number, if one can't be parsed."""
        file_index, start, stop = self._place(index)
        file = self.files[file_index]
        with self._opener.open(file) as opened:

            def read(begin: int, end: int) -> bytes:
                try:
                    opened.seek(begin)
                    return opened.read(end - begin)
                except ValueError as error:  # of fsspec: the server sends whole files only
                    raise OSError(f"{file.path!r} can't be read in blocks: {error}") from None

            odd = None
            if self.format.quoted_breaks:
                block = start // self.block_bytes
                odd = self.odd[file_index][block], self.odd[file_index][block + 1]
            try:
                begin, data = lines_of(read, file.size, start, stop, odd)
            except ValueError as error:
                raise ValueError(f"{file.path!r} is not {self.format.kind}: {error}") from None
            try:
                return self.format.parse(data, first=not begin, where=repr(file.path))
            except BadLineError as error:
                raise ValueError(f"{_line_of(read, begin, error.line)} of {file.path!r} {error.why}") from None

    def _place(self, index: int) -> tuple[int, int, int]:
        """Return a block's file, and its first byte and the one after its last."""
        file = int(np.searchsorted(self._starts, index, "right")) - 1
        start = (index - int(self._starts[file])) * self.block_bytes
        return file, start, min(start + self.block_bytes, self.files[file].size)

    @cached_property
    def _starts(self) -> Numbers:
        """The number of each file's first block, and of the one after the last."""
        return np.cumsum([0, *(-(-file.size // self.block_bytes) for file in self.files)])

    @cached_property
    def _opener(self) -> Opener:
        return Opener()

    def _check(self, file: DataFile) -> None:
        with self._opener.open(file) as opened:
            head = opened.read(HEAD)
            while b"\n" not in head and len(head) < LONGEST_LINE and (more := opened.read(_STEP)):
                head += more  # the names of many columns
        refuse_other_kinds(file, head, self.format.kind)
        self.format.check(file, head)

    def _odd_quotes(self, file: DataFile) -> bytes:
        with self._opener.open(file) as opened:
            return odd_quotes(iter(lambda: opened.read(self.block_bytes), b""))


def _line_of(read: Any, begin: int, line: int | None) -> str:
    """Return which line of a file it is, counted from 1, given its number among those that begin at a byte."""
    if line is None:
        return f"a line after byte {begin:,}"
    if begin > _COUNTED:
        return f"line {line + 1:,} after byte {begin:,}"
    before = sum(read(at, min(at + _STEP, begin)).count(b"\n") for at in range(0, begin, _STEP))
    return f"line {before + line + 1:,}"


def decoded(data: bytes) -> str:
    """Return lines as text. BadLineError if one is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadLineError(data.count(b"\n", 0, error.start), f"is not UTF-8: {error.reason}") from None


@dataclass(frozen=True)
class Text:
    """Each line is an example, a str without its line break."""

    kind = "a text file"
    quoted_breaks = False

    def check(self, file: DataFile, head: bytes) -> None:
        """Any text will do."""

    def parse(self, data: bytes, *, first: bool, where: str) -> Any:
        """Return an array of str objects."""
        del where
        if first:
            data = data.removeprefix(BOM)
        lines = (text := decoded(data)).split("\n")
        if not lines[-1]:
            lines.pop()
        if "\r" in text:
            lines = [line.removesuffix("\r") for line in lines]
        block = np.empty(len(lines), object)
        block[:] = lines
        return block
