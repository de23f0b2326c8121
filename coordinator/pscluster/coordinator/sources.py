"""Sources of distributed datasets that are files: for `ClusterCoordinator.distribute_dataset`.

    data = coordinator.distribute_dataset(sources.parquet("data/*.parquet")).shuffle(seed=1).batch(64)

Files are given as a path, a pattern (`*`, `?`, `[...]`, and `**` for folders), a URL that fsspec opens, or a list of
these. They are at the same place on all workers, which read them; here only what describes them is read. They must not
change while the dataset is in use.

Parquet, CSV, JSON lines and text are read in blocks: a function takes whole blocks, and no batch spans two. The other
kinds are read by row. Columns become arrays by name: see `pscluster.worker.data.files.columns` for their types.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pscluster.core import checks
from pscluster.core.checks import type_of
from pscluster.worker.data.blocks import map_leaves
from pscluster.worker.data.files.inference import make_csv, make_json
from pscluster.worker.data.files.line_files import LineBlocks, Text
from pscluster.worker.data.files.opening import Paths, find_files
from pscluster.worker.data.files.parquet import ParquetBlocks
from pscluster.worker.data.files.partitions import partitions_of
from pscluster.worker.data.files.ranges import ArrowFiles, HuggingFaceRows, NpyFiles, Together
from pscluster.worker.data.files.tars import TarFiles
from pscluster.worker.data.sources import Blocks, Ranges

BLOCK_ROWS = 16_384
BLOCK_BYTES = 8 << 20

__all__ = ["arrow", "csv", "hugging_face", "json_lines", "npy", "parquet", "text", "webdataset"]


def parquet(
    paths: Paths,
    *,
    columns: Sequence[str] | None = None,
    filters: Any = None,
    fill_nulls: Any = None,
    block_rows: int = BLOCK_ROWS,
    hive_partitioning: bool = False,
) -> Blocks:
    """Read Parquet files by row group. Here their footers are read.

    Args:
        paths: see the module's docstring.
        columns: the names of the columns to read; default: all.
        filters: which rows are examples: as of `pyarrow.parquet.read_table`, such as `[("age", ">", 3)]`, or an
            expression of `pyarrow.compute`. Row groups without matching rows, by their statistics, are not read.
        fill_nulls: what to read in place of nulls, for all columns or in a dict by column; without it they are errors.
        block_rows: how many rows a block has: as many row groups as hold that many. A larger row group makes up to
            four blocks; each worker that reads one of them must decode it whole, so write files with row groups of
            about this size.
        hive_partitioning: the names of folders such as `year=2024` are columns, too: whole numbers if all files have
            such, else texts. Files whose folders do not match the filters are not read.

    Raises:
        FileNotFoundError: no file matches.
        ValueError: a file is not a Parquet file or lacks a column; types differ, or have no array; or the filters do
            not fit.
        MisuseError: pyarrow is not installed (`pip install 'pscluster[parquet]'`).
    """
    rows = checks.whole("block_rows", block_rows, at_least=1)
    files = find_files(paths)
    partitions = partitions_of(files) if checks.flag("hive_partitioning", hive_partitioning) else None
    return ParquetBlocks(files, _names("columns", columns), filters, _fills(fill_nulls), rows, partitions)


def csv(
    paths: Paths,
    *,
    columns: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    types: Mapping[str, Any] | None = None,
    fill_nulls: Any = None,
    delimiter: str = ",",
    quoting: bool = True,
    quoted_newlines: bool = False,
    block_bytes: int = BLOCK_BYTES,
) -> Blocks:
    """Read CSV files in blocks of lines. Here the first lines of each are read.

    Args:
        paths: see the module's docstring.
        columns: the names of the columns to read; default: all.
        names: those of all columns, for files without a header. By default the first line of each file has them.
        types: of columns, by name, as NumPy's types or names such as "float32" and "timestamp[s]"; default: those of
            the values in the first megabyte of the first file.
        fill_nulls: what to read in place of empty values, for all columns or in a dict by column; without it they are
            errors, except in columns of strings, where they are empty strings.
        delimiter: one character.
        quoting: whether values may be in quotes (`"`).
        quoted_newlines: whether quoted values may have line breaks; the files are then read once here, whole.
        block_bytes: how many bytes of a file a block has.

    Raises:
        FileNotFoundError: no file matches.
        ValueError: a file is compressed, or no CSV file; its columns are not those of the first one; a column is
            missing; or a type is not known.
        MisuseError: pyarrow is not installed (`pip install 'pscluster[parquet]'`).
    """
    size = checks.whole("block_bytes", block_bytes, at_least=1)
    if not isinstance(delimiter, str) or len(delimiter.encode()) != 1 or delimiter in '"\r\n':
        raise ValueError(f"delimiter is {delimiter!r}; it must be one ASCII character, and no quote or line break")
    quoting, quoted = checks.flag("quoting", quoting), checks.flag("quoted_newlines", quoted_newlines)
    if quoted and not quoting:
        raise ValueError("quoted_newlines=True with quoting=False: without quotes all line breaks end a line")
    files = find_files(paths)
    line_format = make_csv(
        files,
        _names("columns", columns),
        names=_names("names", names),
        types=_types(types),
        fills=_fills(fill_nulls),
        delimiter=delimiter,
        quoting=quoting,
        quoted_breaks=quoted,
    )
    return LineBlocks(files, line_format, size)


def json_lines(
    paths: Paths,
    *,
    columns: Sequence[str] | None = None,
    types: Mapping[str, Any] | None = None,
    fill_nulls: Any = None,
    block_bytes: int = BLOCK_BYTES,
) -> Blocks:
    """Read files with a JSON object per line, in blocks of lines. Here the first lines of each are read.

    Args:
        paths: see the module's docstring.
        columns: the names of the fields to read; default: those in the first megabyte of the first file.
        types: as of `csv`.
        fill_nulls: what to read in place of nulls and of missing fields, for all columns or in a dict by column;
            without it they are errors.
        block_bytes: how many bytes of a file a block has.

    Raises:
        FileNotFoundError: no file matches.
        ValueError: a file is compressed, or not one of JSON lines; a column is missing; or a type is not known.
        MisuseError: pyarrow is not installed (`pip install 'pscluster[parquet]'`).
    """
    size = checks.whole("block_bytes", block_bytes, at_least=1)
    files = find_files(paths)
    line_format = make_json(files, _names("columns", columns), types=_types(types), fills=_fills(fill_nulls))
    return LineBlocks(files, line_format, size)


def text(paths: Paths, *, block_bytes: int = BLOCK_BYTES) -> Blocks:
    """Read text files in blocks of lines: each line is an example, a str without its line break; UTF-8.

    Args:
        paths: see the module's docstring.
        block_bytes: how many bytes of a file a block has.

    Raises:
        FileNotFoundError: no file matches.
        ValueError: a file is compressed, or not text.
    """
    return LineBlocks(find_files(paths), Text(), checks.whole("block_bytes", block_bytes, at_least=1))


def npy(paths: Any) -> Ranges:
    """Read the rows of arrays in npy files, which the workers map into memory. Here their headers are read.

    Args:
        paths: local files, see the module's docstring; several are one array, one after another. Or a dict or tuple of
            such: `npy({"x": "x-*.npy", "y": "y-*.npy"})`.

    Raises:
        FileNotFoundError: no file matches.
        ValueError: a file is not a local npy file; rows differ in shape or type; or numbers of rows differ.
    """
    if not isinstance(paths, dict | tuple):
        return Ranges(NpyFiles(find_files(paths)))
    structure = map_leaves(lambda leaf: NpyFiles(find_files(leaf)), paths)
    named = structure.items() if isinstance(structure, dict) else enumerate(structure)
    if not structure or not all(isinstance(array, NpyFiles) for _, array in named):
        raise ValueError("the files of several arrays are given in a dict or tuple, one path, pattern or list for each")
    named = structure.items() if isinstance(structure, dict) else enumerate(structure)
    return Ranges(Together(structure, {str(name): len(array) for name, array in named}))


def arrow(paths: Paths, *, columns: Sequence[str] | None = None, fill_nulls: Any = None) -> Ranges:
    """Read the rows of Arrow IPC (Feather) files and streams, which the workers map into memory.

    Args:
        paths: local files, see the module's docstring.
        columns: the names of the columns to read; default: all.
        fill_nulls: what to read in place of nulls, for all columns or in a dict by column; without it they are errors.

    Raises:
        FileNotFoundError: no file matches.
        ValueError: a file is not a local Arrow file or lacks a column; or types differ, or have no array.
        MisuseError: pyarrow is not installed (`pip install 'pscluster[parquet]'`).
    """
    return Ranges(ArrowFiles(find_files(paths), _names("columns", columns), _fills(fill_nulls)))


def hugging_face(dataset: Any, *, columns: Sequence[str] | None = None, fill_nulls: Any = None) -> Ranges:
    """Read the rows of a dataset of Hugging Face, in batches of its columns.

    The workers get the dataset as a pickle, which names its files if it has any: these must be at the same place there.
    `distribute_dataset(dataset)` reads the rows one by one instead, with the dataset's own format, and decodes images.

    Args:
        dataset: a `datasets.Dataset`.
        columns: the names of the columns to read; default: all.
        fill_nulls: what to read in place of nulls, for all columns or in a dict by column; without it they are errors.

    Raises:
        TypeError: it is another object, such as a dict of datasets, or one without a length.
        ValueError: a column is missing, or has no array.
    """
    return Ranges(HuggingFaceRows(dataset, _names("columns", columns), _fills(fill_nulls)))


def webdataset(paths: Paths) -> Blocks:
    """Read tar files as WebDataset writes them: each as a stream, by one function. Here the first bytes are read.

    An example is a dict of bytes by the endings of its files' names, such as `{"__key__": "000017", "cls": b"3", "jpg":
    b"..."}`: decode it with `.map`. In shuffled epochs the tars are shuffled, and in each the examples, `split` at a
    time.

    Args:
        paths: see the module's docstring; the tars may be compressed.

    Raises:
        FileNotFoundError: no file matches.
        ValueError: a file is not a tar.
    """
    return TarFiles(find_files(paths))


def _names(argument: str, names: Sequence[str] | None) -> list[str] | None:
    if names is None:
        return None
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{argument} is {names!r:.100}; give a list of names")
    if not names:
        raise ValueError(f"{argument} is empty: give at least one name, or leave it out")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"{argument} has {twice[0]!r} twice")
    return list(names)


def _types(types: Mapping[str, Any] | None) -> dict[str, Any]:
    if types is not None and not isinstance(types, Mapping):
        raise TypeError(f"types is {type_of(types)}; give a dict of types by column")
    return dict(types or {})


def _fills(fill_nulls: Any) -> dict[str, Any]:
    """Return the fills by column; under "" that of all others."""
    if fill_nulls is None:
        return {}
    return dict(fill_nulls) if isinstance(fill_nulls, Mapping) else {"": fill_nulls}
