"""Scalars as event files for TensorBoard, in the format of an optional dependency, tensorboardX.

Its SummaryWriter writes in a background thread, and so loses the last events if the process dies. Here they have been
written when `scalars` returns.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import struct
import time
from collections.abc import Mapping
from typing import IO, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from pscluster.core.errors import ConfigurationError, MisuseError


class _StoredWhole(io.BytesIO):
    """A file to append to in a store that can't append: `flush` stores all of it again."""

    def __init__(self, fs: fsspec.AbstractFileSystem, where: str) -> None:
        super().__init__()
        self._fs, self._where = fs, where
        with contextlib.suppress(FileNotFoundError):
            self.write(fs.cat_file(where))

    def flush(self) -> None:
        self._fs.pipe_file(self._where, self.getvalue())


def appended_file(path: str) -> IO[bytes]:
    """Open a file to append to, at a path or a URL of fsspec, and make its folders. ConfigurationError if that fails.

    `flush` stores what was written. Except on a local disk the file should be small.
    """
    try:
        fs, where = fsspec.core.url_to_fs(path)
        fs.makedirs(where.rpartition("/")[0], exist_ok=True)
        return open(where, "ab") if isinstance(fs, LocalFileSystem) else _StoredWhole(fs, where)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigurationError(f"{path} can't be written: {getattr(error, 'strerror', None) or error}") from error


class EventWriter:
    """Writes scalars into a new event file in `log_dir`, a path or a URL of fsspec.

    ConfigurationError if tensorboardX is not installed, or the file can't be written.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        try:
            from tensorboardX.proto.event_pb2 import Event
        except ImportError as error:
            raise ConfigurationError(
                f'event files need tensorboardX ({error}): pip install "pscluster[tensorboard]"'
            ) from error
        # TensorBoard reads the files of a folder in the order of their names. Two writers never share one.
        name = f"events.out.tfevents.{time.time_ns():020}.{os.getpid()}"
        self._file: IO[bytes] | None = appended_file(f"{os.fspath(log_dir).rstrip('/')}/{name}")
        try:
            self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        except OSError:
            with contextlib.suppress(OSError):
                self.close()
            raise

    @staticmethod
    def available() -> bool:
        return importlib.util.find_spec("tensorboardX") is not None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write values by name, as of this step. They are in the file when this returns."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def _write(self, event: Any) -> None:
        from tensorboardX.record_writer import masked_crc32c

        if self._file is None:
            raise MisuseError("this EventWriter is closed: make another one")
        data = event.SerializeToString()
        size = struct.pack("<Q", len(data))
        crcs = (struct.pack("<I", masked_crc32c(block)) for block in (size, data))
        self._file.write(b"".join((size, next(crcs), data, next(crcs))))
        self._file.flush()

    def close(self) -> None:
        """Close the file. OSError if buffered events can't be written; it is closed all the same."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()
