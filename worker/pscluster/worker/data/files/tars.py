"""Tar files of examples, as WebDataset has them: neighbouring files whose names are alike up to the first dot.

Each tar is a block that is read as a stream: it may be larger than memory.
"""

from __future__ import annotations

import gzip
import os
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO, Self, cast

import numpy as np

from pscluster.worker.data.files.opening import GZIP, DataFile, Opener, of_each
from pscluster.worker.data.sources import Blocks, Listed, Numbers

KEY = "__key__"
LARGEST_FILE = 1 << 30
"""The most bytes of a file in a tar, which is read into memory whole."""

_STEP = 1 << 16


class _Member(tarfile.TarInfo):
    """The header of a file in a tar. `tarfile` takes a tar that was cut short for one that ends there."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tarfile_)
        except (tarfile.TruncatedHeaderError, tarfile.EmptyHeaderError):  # type: ignore[attr-defined]
            raise OSError("it has no end, so it was cut short") from None


@dataclass(init=False, eq=False)
class TarFiles(Blocks):
    """The examples of tar files, compressed or not: dicts of bytes by ending, with their name under `__key__`.

    Raises:
        ValueError: a file is not a tar file, or has a file of more than `LARGEST_FILE` bytes.
    """

    files: list[DataFile]

    def __init__(self, files: Sequence[DataFile]) -> None:
        self.files = list(files)
        of_each(self._check, self.files)

    noun = "file"

    def __len__(self) -> int:
        return len(self.files)

    @property
    def nbytes(self) -> Numbers:
        """The sizes of the files."""
        return np.array([file.size for file in self.files], np.int64)

    @property
    def listed(self) -> list[Listed]:
        """The files, with their sizes and numbers of blocks."""
        return [Listed(file.path, file.size, 1) for file in self.files]

    def name_of(self, index: int) -> str:
        """Name a tar."""
        return f"the file {self.files[index].path!r}"

    def load(self, index: int) -> Any:
        """Return an iterator over the examples of a tar."""
        return examples_of(self._members(self.files[index]), self.files[index].path)

    @cached_property
    def _opener(self) -> Opener:
        return Opener()

    def _check(self, file: DataFile) -> None:
        next(self._members(file), None)

    def _members(self, file: DataFile) -> Iterator[tuple[str, str, bytes]]:
        """Yield keys, endings and contents of the files in a tar that are part of an example."""
        with self._opener.open(file) as opened:
            try:
                with _unzipped(opened) as stream, tarfile.open(fileobj=stream, mode="r|*", tarinfo=_Member) as tar:
                    for member in tar:
                        if not member.isfile() or (parts := _split(member.name)) is None:
                            continue
                        if member.size > LARGEST_FILE:
                            raise ValueError(
                                f"{file.path!r} has {member.name!r}, a file of {member.size:,} bytes; the limit is "
                                f"{LARGEST_FILE:,}: divide it among several examples, or give its path instead"
                            )
                        if (content := tar.extractfile(member)) is not None:
                            yield *parts, content.read()
                    while stream.read(_STEP):  # to the end, where gzip has the checksum
                        pass
            except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
                raise ValueError(f"{file.path!r} can't be read as a tar file: {error}") from None


def _unzipped(opened: BinaryIO) -> BinaryIO:
    """Return what a file of gzip has, else the file. `tarfile` does not look at the checksums of gzip."""
    magic = opened.read(len(GZIP))
    opened.seek(0)
    return cast("BinaryIO", gzip.GzipFile(fileobj=opened)) if magic == GZIP else opened


def _split(name: str) -> tuple[str, str] | None:
    """Return the key of the example that a file is part of, and its ending; None for hidden files and notes."""
    folder, _, base = name.rpartition("/")
    stem, dot, ending = base.partition(".")
    return (os.path.join(folder, stem), ending.lower()) if dot and stem else None


def examples_of(members: Iterable[tuple[str, str, bytes]], tar: str) -> Iterator[dict[str, Any]]:
    """Yield the examples that files make: keys, endings, contents. ValueError if one has two with the same ending."""
    example: dict[str, Any] = {}
    for key, ending, content in members:
        if example and example[KEY] != key:
            yield example
            example = {}
        if ending in example:
            raise ValueError(f"{tar!r} has '{key}.{ending}' twice in one example")
        example |= {KEY: key, ending: content}
    if example:
        yield example
