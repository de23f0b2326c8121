"""The files of a dataset: found on the coordinator, opened on the workers.

A file is known by its absolute path, or its URL for fsspec, and by its size. A worker refuses one whose size is another
than on the coordinator, or that was written to since the worker first read it.
"""

from __future__ import annotations

import glob
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar, cast

from pscluster.core.checks import type_of
from pscluster.core.errors import MisuseError
from pscluster.core.functions.policy import chosen_policy

T = TypeVar("T")

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_THREADS = 16  # that look at files at the same time: of remote ones, each takes a round trip or two
_SAMPLES, _SAMPLE_BYTES = 16, 4096
GZIP = b"\x1f\x8b"
"""How files of gzip begin."""

_MAGIC = {  # how files begin that are often taken for others
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"\x93NUMPY": "npy",
    GZIP: "gzip",
    b"(\xb5/\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
}


@dataclass(frozen=True)
class DataFile:
    """A file: its absolute path or URL, and its size in bytes."""

    path: str
    size: int

    @property
    def is_local(self) -> bool:
        return not is_url(self.path)


def is_url(path: str) -> bool:
    """Return whether fsspec opens it: `s3://bucket/x`, `zip://x::archive.zip`."""
    return "://" in path or "::" in path


def find_files(paths: Paths) -> list[DataFile]:
    """Return the files that the paths, patterns and URLs stand for, those of one pattern in the order of their names.

    Raises:
        FileNotFoundError: nothing matches one of them.
        PermissionError: one, or the folder of a pattern, may not be read.
        ValueError: one is a folder or a pipe, or a file is among them twice.
        TypeError: these are not paths.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else paths
    if not isinstance(given, list | tuple):
        raise TypeError(
            f"files are given as a path, a pattern such as 'data/*.csv', or a list, not as {type_of(paths)}"
        )
    if not given:
        raise ValueError("no files are given: give a path, a pattern such as 'data/*.csv', or a list of them")
    found = [file for path in given for file in _matches(path)]
    seen: set[str] = set()
    for file in found:
        if file.path in seen:
            raise ValueError(f"the file {file.path!r} is given twice, so its examples would be visited twice an epoch")
        seen.add(file.path)
    return found


def _matches(path: str | os.PathLike[str]) -> list[DataFile]:
    if not isinstance(path, str | os.PathLike) or not isinstance(text := os.fspath(path), str):
        raise TypeError(f"a file is given as text or a Path, not as {type_of(path)}")
    return _remote(text) if is_url(text) else _local(text)


def _local(text: str) -> list[DataFile]:
    path = os.path.abspath(os.path.expanduser(text))
    if os.path.exists(path) or not glob.has_magic(path):
        return [DataFile(path, _size(path))]
    if matches := [match for match in sorted(glob.glob(path, recursive=True)) if not os.path.isdir(match)]:
        return [DataFile(match, _size(match)) for match in matches]
    folder = path
    while glob.has_magic(folder):
        folder = os.path.dirname(folder)
    try:
        os.scandir(folder).close()
    except PermissionError:  # which glob takes for an empty folder
        raise PermissionError(
            f"no file matches {path!r}: the user of this process may not read the folder {folder!r}"
        ) from None
    except OSError:
        pass  # it is not there
    raise FileNotFoundError(f"no file matches {path!r}")


def _size(path: str) -> int:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path!r}") from None
    if stat.S_ISDIR(status.st_mode):
        raise ValueError(f"{path!r} is a folder: give a pattern for the files in it, such as {path + '/*'!r}")
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path!r} is not a regular file, whose parts can be read in any order")
    return status.st_size


def _remote(url: str) -> list[DataFile]:
    fs, path = _file_system(url)
    if not glob.has_magic(path):
        try:
            return [DataFile(url, _remote_size(fs, path, url))]
        except FileNotFoundError as error:  # what fsspec also makes of a server that does not answer
            cause = error.__cause__
            why = "" if cause is None or isinstance(cause, FileNotFoundError) else f", or it can't be reached: {cause}"
            raise FileNotFoundError(f"there is no file {url!r}{why}") from None
    found = cast("dict[str, dict[str, Any]]", fs.glob(path, detail=True))
    prefix, _, rest = url.partition("::")
    files = [
        DataFile("::".join(filter(None, (fs.unstrip_protocol(name), rest))), int(info["size"]))
        for name, info in sorted(found.items())
        if info.get("type") != "directory"
    ]
    if not files:
        raise FileNotFoundError(f"no file matches {prefix!r}")
    return files


def _file_system(url: str) -> tuple[Any, str]:
    import fsspec  # takes a tenth of a second

    try:
        located: tuple[Any, str] = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ValueError(f"fsspec can't open {url!r}: {error}") from None
    return located


def _remote_size(fs: Any, path: str, url: str) -> int:
    size = fs.info(path).get("size")
    if size is None:
        raise ValueError(f"the size of {url!r} is unknown, so that it can't be read in blocks: copy it elsewhere")
    return int(size)


def of_each(look: Callable[[DataFile], T], files: Iterable[DataFile]) -> list[T]:
    """Return `look(file)` for each, several at the same time; or raise the first one's error."""
    files = list(files)
    if len(files) == 1:
        return [look(files[0])]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="files") as pool:
        return list(pool.map(look, files))


class Opener:
    """Opens the files of one source in this process."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, ...]] = {}  # by path: what identifies the contents of a local file

    def path(self, file: DataFile) -> str:
        """Return where a local file is, once checked.

        Raises:
            MisuseError: pickles are off, and the file lies outside this worker's folders, or is not a local one.
            OSError: it can't be read.
            ValueError: it is not as it was: see the module's docstring.
        """
        policy = chosen_policy()
        if not file.is_local:
            raise MisuseError(f"{file.path!r} is not a local file")
        path = str(policy.data_file(file.path))
        try:
            status = os.stat(path)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"there is no file {file.path!r} here: the files of a dataset must be at the same place on all "
                "workers, and stay there during the training"
            ) from None
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{file.path!r} is not a regular file")
        _check_size(file, status.st_size)
        now = (status.st_dev, status.st_ino, status.st_mtime_ns)
        if self._seen.setdefault(file.path, now) != now:
            raise ValueError(f"the file {file.path!r} was written to during the training: leave its files as they are")
        return path

    def open(self, file: DataFile) -> BinaryIO:
        """Open a file, local or not. Errors as of `path`."""
        if file.is_local:
            return open(self.path(file), "rb")
        policy = chosen_policy()
        if not policy.pickles:
            raise MisuseError(f"the URL {file.path[:1000]!r} was named for a dataset, and {policy.why}")
        fs, path = _file_system(file.path)
        try:
            _check_size(file, _remote_size(fs, path, file.path))
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no file {file.path!r} any more") from None
        return cast("BinaryIO", fs.open(path, "rb"))


def _check_size(file: DataFile, size: int) -> None:
    if size != file.size:
        raise ValueError(
            f"the file {file.path!r} has {size:,} bytes here, and had {file.size:,} on the coordinator when the "
            "dataset was made: leave files as they are during the training, or create the dataset again"
        )


def digests_of(files: Iterable[DataFile]) -> list[str]:
    """Return for each file a digest of samples of its contents, from its beginning to its end. Errors as of `Opener`.

    It tells other contents of the same size, and is the same wherever the file lies and whenever it was copied.
    """
    return of_each(_digest_of, files)


def _digest_of(file: DataFile) -> str:
    digest = hashlib.blake2b(digest_size=16)
    last = max(0, file.size - _SAMPLE_BYTES)
    with Opener().open(file) as opened:
        for sample in range(_SAMPLES):
            opened.seek(last * sample // (_SAMPLES - 1))
            digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def refuse_other_kinds(file: DataFile, head: bytes, wanted: str) -> None:
    """Raise ValueError if a file that should be text begins as a file of another kind, or has a zero byte."""
    kind = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)
    if kind in ("gzip", "zstd", "bzip2", "xz"):
        raise ValueError(
            f"{file.path!r} is compressed ({kind}), and can't be read in blocks: decompress it, or convert it to "
            "Parquet"
        )
    if kind is not None or b"\0" in head:
        raise ValueError(f"{file.path!r} is not {wanted}: it {'is' if kind else 'seems'} {_described(kind)}")


def _described(kind: str | None) -> str:
    return "binary" if kind is None else f"{'an' if kind == 'Arrow' else 'a'} {kind} file"
