"""Scalars as event files, which TensorBoard shows: an optional dependency, tensorboardX, knows the format.

Its writer for records is used, not its SummaryWriter: that one hands events to a thread of its own, and what was handed
over last is lost with the process. Here they are written when `scalars` returns.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import fsspec
from fsspec.implementations.local import LocalFileSystem

from pscluster.core.errors import ConfigurationError, MisuseError

_PREFIX = "pscluster"  # of our paths within tensorboardX, which finds by it who opens them


class AppendedFile:
    """A file that is added to, at a path or a URL of fsspec. Folders on the way are made.

    What was written is there when `flush` returns. Few stores can append: elsewhere than on a local disk the whole file
    is stored anew then, so it should be a small one.

    Raises:
        ConfigurationError: nothing can be written there.
    """

    def __init__(self, path: str) -> None:
        try:
            self._fs, self._where = fsspec.core.url_to_fs(path)
            self._fs.makedirs(self._where.rpartition("/")[0], exist_ok=True)
            self._file, self._whole = None, bytearray()
            if isinstance(self._fs, LocalFileSystem):
                self._file = open(self._where, "ab")  # noqa: SIM115  (closed by `close`)
            else:
                with contextlib.suppress(FileNotFoundError):
                    self._whole += self._fs.cat_file(self._where)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigurationError(f"{path} can't be written: {getattr(error, 'strerror', None) or error}") from error

    def write(self, data: bytes) -> None:
        """Add this."""
        if self._file is not None:
            self._file.write(data)
        else:
            self._whole += data

    def flush(self) -> None:
        """From now on others see it, and it outlives this process."""
        if self._file is not None:
            self._file.flush()
        else:
            self._fs.pipe_file(self._where, bytes(self._whole))

    def close(self) -> None:
        """Behind the last `flush`."""
        if self._file is not None:
            self._file.close()


class _Factory:
    """How tensorboardX opens a file whose path begins with our prefix: through fsspec."""

    file: AppendedFile

    def open(self, path: str) -> AppendedFile:
        self.file = AppendedFile(path.removeprefix(f"{_PREFIX}:"))
        return self.file

    def directory_check(self, path: str) -> None:
        """The file makes its folder."""


class EventWriter:
    """Writes scalars into an event file of its own in `log_dir`, a path or a URL of fsspec.

    Raises:
        ConfigurationError: tensorboardX is not installed, or nothing can be written there.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.record_writer import register_writer_factory
        except ImportError as error:
            raise ConfigurationError(
                f'event files need tensorboardX ({error}): pip install "pscluster[tensorboard]"'
            ) from error
        factory = _Factory()
        register_writer_factory(_PREFIX, factory)
        # Its names have seconds: two writers in one second, of one process or of two, would share a file. TensorBoard
        # reads the files of a folder in the order of their names.
        own = f".{time.time_ns():020}.{os.getpid()}"
        self._writer: Any = EventsWriter(f"{_PREFIX}:{os.fspath(log_dir).rstrip('/')}/events", own)
        self._file = factory.file
        try:
            self._writer.flush()  # from the start on it is an event file
        except OSError:
            with contextlib.suppress(OSError):
                self.close()
            raise

    @staticmethod
    def available() -> bool:
        """Whether tensorboardX is installed."""
        return importlib.util.find_spec("tensorboardX") is not None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write these, by name, as of this step. When it returns they are in the file."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        if self._writer is None:
            raise MisuseError("this EventWriter is closed: make another one")
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.write_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        """No more follow. OSError if what could not be written before can't be now; it is closed then, too."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            try:
                writer.close()
            finally:
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
