"""Columns whose values are in the names of the files' folders, `year=2024/shop=a%20b/x.parquet`, as Hive has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import numpy as np

from pscluster.worker.data.files.columns import need_arrow
from pscluster.worker.data.files.opening import DataFile

_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass
class Partitions:
    """The partition columns of some files.

    Attributes:
        names: of the columns, from the outermost folder inwards.
        values: of each file, one for each of them: whole numbers if all files have such, else texts.
    """

    names: list[str]
    values: list[list[Any]]

    def schema_with(self, schema: Any) -> Any:
        """Return the schema of a file with the partition columns after its own."""
        arrow = need_arrow()
        for name, value in zip(self.names, self.values[0], strict=True):
            schema = schema.append(arrow.field(name, arrow.int64() if isinstance(value, int) else arrow.string()))
        return schema

    def expression_of(self, file: int) -> Any:
        """Return what holds for all rows of a file, as an expression of pyarrow; None if there is nothing."""
        compute = need_arrow("pyarrow.compute")
        found = None
        for name, value in zip(self.names, self.values[file], strict=True):
            equal = compute.field(name) == compute.scalar(value)
            found = equal if found is None else found & equal
        return found

    def columns_of(self, file: int, rows: int) -> dict[str, Any]:
        """Return the columns of rows of a file."""
        return {
            name: np.full(rows, value, np.int64 if isinstance(value, int) else object)
            for name, value in zip(self.names, self.values[file], strict=True)
        }


def partitions_of(files: Sequence[DataFile]) -> Partitions:
    """Return the partition columns of files. ValueError if there are none, or a file has others than the first one."""
    found = [_in_path(file) for file in files]
    names = list(found[0])
    if not names:
        raise ValueError(f"hive_partitioning=True, and {files[0].path!r} is in no folder such as 'year=2024'")
    for file, of_file in zip(files, found, strict=True):
        if list(of_file) != names:
            raise ValueError(
                f"{file.path!r} is in folders that name {_listed(of_file)}, and {files[0].path!r} in ones that name "
                f"{_listed(names)}: give files of one partitioning"
            )
        if _NULL in of_file.values():
            raise ValueError(f"{file.path!r} has a null as the value of a partition column: leave it out of the files")
    whole = [all(_is_whole(of_file[name]) for of_file in found) for name in names]
    values = [
        [int(of_file[name]) if number else of_file[name] for name, number in zip(names, whole, strict=True)]
        for of_file in found
    ]
    return Partitions(names, values)


def _in_path(file: DataFile) -> dict[str, str]:
    pairs = (folder.partition("=") for folder in file.path.split("/")[:-1])
    return {unquote(name): unquote(value) for name, equal, value in pairs if equal and name}


def _is_whole(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdecimal() and len(digits) < 19 and str(int(text)) == text


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names)) or "nothing"
