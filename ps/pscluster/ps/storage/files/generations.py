"""Generations on disk: a half-written one is never used, and no flipped bit goes unnoticed.

A generation counts from the moment its manifest has its name; all files it refers to are written before. The manifest
has a checksum, and contains those of the arrays, which are in safetensors files. The newest whole generation counts;
the previous one is retained in case the newest turns out damaged. Everything else is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from pscluster.core.errors import CheckpointError, ConfigurationError, PsClusterError
from pscluster.core.fault_points import reach
from pscluster.ps.array_pool import aligned_empty
from pscluster.ps.server.embedding.reserved_rows import reserved, resized
from pscluster.ps.spec import partition_of
from pscluster.ps.storage.files.disk import write_all
from pscluster.ps.storage.files.tensor_files import Array, read, stream
from pscluster.ps.tables import row_limit
from pscluster.v1 import ps_pb2, state_pb2

M = TypeVar("M", bound=Message)

_MAGIC = b"PSSTATE1"
_LOSSES = "losses"
_SPARE = "log.spare"
_HEAD = struct.Struct("<8sIQ")  # magic, CRC-32 and length of the manifest
_READERS = 4
_NAMES = re.compile(r"(state|log)-(\d{6,})\.(manifest|safetensors|bin)(\.new)?")


class DamagedError(PsClusterError):
    """A file of the state is not what was written."""


def _check_owner(path: Path) -> None:
    """Raise ConfigurationError if a directory is another user's: any state may be in it, or links to our files."""
    owner = path.stat().st_uid
    if owner in (0, os.geteuid()):
        return
    with tempfile.TemporaryFile(dir=path) as file:
        if os.fstat(file.fileno()).st_uid == owner:  # we are called so there: on a network file system, for one
            return
    raise ConfigurationError(
        f"the state can't be stored in {path}, which belongs to another user (uid {owner}, this is {os.geteuid()}), "
        "who may have put anything there: remove it, or name a directory of your own with --state-dir or "
        "PSCLUSTER_STATE_DIR"
    )


class StateDirectory:
    """A server's directory, for one process, and one writing thread, at a time. ConfigurationError if it can't be."""

    def __init__(self, path: Path, *, fsync: bool = False) -> None:
        self.path = path
        self.fsync = fsync
        try:
            path.mkdir(parents=True, exist_ok=True)
            _check_owner(path)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigurationError(
                f"the state can't be stored in {path} ({error.strerror}): name a writable directory with "
                "--state-dir or PSCLUSTER_STATE_DIR, or use --durability none"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            other = os.pread(self._lock, 20, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise ConfigurationError(
                f"another parameter server (pid {other}) already stores its state in {path}; if it belongs to another "
                "cluster, give each its own --state-dir"
            ) from None
        os.pwrite(self._lock, f"{os.getpid():<19}\n".encode(), 0)

    def close(self) -> None:
        """Release the directory for other processes."""
        os.close(self._lock)

    def _file(self, generation: int, ending: str) -> Path:
        return self.path / f"state-{generation:06d}.{ending}"

    def log_file(self, generation: int) -> Path:
        """Return the path of the log segment that begins with this generation."""
        return self.path / f"log-{generation:06d}.bin"

    def array_file(self, generation: int) -> Path:
        """Return the path of the arrays that are first saved in this generation."""
        return self._file(generation, "safetensors")

    def _files(self) -> Iterator[tuple[Path, str, int, str]]:
        """Yield each file's path, kind, generation and ending."""
        for path in self.path.iterdir():
            if match := _NAMES.fullmatch(path.name):
                yield path, match[1], int(match[2]), match[3] + (match[4] or "")

    def _generations_of(self, kind: str, ending: str) -> list[int]:
        return sorted(file[2] for file in self._files() if (file[1], file[3]) == (kind, ending))

    def generations(self) -> list[int]:
        """Return the generations that have a manifest, newest first."""
        return self._generations_of("state", "manifest")[::-1]

    def log_segments(self) -> list[int]:
        """Return the generations that begin segments of the log, ascending."""
        return self._generations_of("log", "bin")

    def clear(self) -> None:
        # Manifests first, newest to oldest: if this is interrupted, the generations that remain are whole.
        for path, _, _, _ in sorted(self._files(), key=lambda file: (file[3] != "manifest", -file[2])):
            path.unlink(missing_ok=True)
        for name in (_LOSSES, f"{_LOSSES}.new", _SPARE):
            (self.path / name).unlink(missing_ok=True)

    def remove_unused(
        self,
        needed: Iterable[state_pb2.Manifest],
        logs_from: int,
        others: Callable[[], Iterable[str]] = lambda: (),
    ) -> None:
        """Remove all but the files of these generations, log segments from generation `logs_from` on, and `others`.

        What others need is asked after the files were listed: one that is begun meanwhile is not among these.
        """
        files = list(self._files())
        in_use = set(others())
        in_use |= {self._file(manifest.generation, "manifest").name for manifest in needed}
        in_use |= {array.file for manifest in needed for shard in manifest.shards for array in shard.arrays}
        for path, kind, generation, ending in files:
            if path.name in in_use or (kind == "log" and generation >= logs_from):
                continue
            if kind == "log" and ending == "bin":
                path.replace(self.path / _SPARE)  # one spare is enough
            else:
                path.unlink(missing_ok=True)

    def reuse_segment(self, path: Path) -> None:
        """Rename an unused segment of the log, if there is one, to this name."""
        if self.fsync and (self.path / _SPARE).exists():
            self.sync_names()  # else a power failure could restore its old name, with new contents
        with contextlib.suppress(FileNotFoundError):
            (self.path / _SPARE).rename(path)

    def remove_spare(self) -> None:
        """Remove the unused segment of the log, if there is one."""
        (self.path / _SPARE).unlink(missing_ok=True)

    def free_bytes(self) -> int:
        """Return how many bytes of the disk are free."""
        disk = os.statvfs(self.path)
        return disk.f_bavail * disk.f_frsize

    # Writing

    def write_arrays(
        self, generation: int, arrays: Sequence[ps_pb2.SavedTensor], data: Iterable[Iterable[bytes]]
    ) -> int:
        """Write a generation's arrays, as `tensor_files.stream` does; return the bytes. On errors, none are left."""
        path, size = self.array_file(generation), 0
        with self._new_file(path) as descriptor:

            def put(chunk: bytes) -> None:
                nonlocal size
                size = write_all(descriptor, [chunk], size)

            stream(put, arrays, data)
        for array in arrays:
            array.file = path.name
        return size

    @contextlib.contextmanager
    def _new_file(self, path: Path) -> Iterator[int]:
        """Give a descriptor to write a file with; sync it if so configured, or remove it if the block raises."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            yield descriptor
            if self.fsync:
                os.fsync(descriptor)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def commit(self, manifest: state_pb2.Manifest) -> None:
        """Write the manifest, with which the generation counts."""
        self._write_message(self._file(manifest.generation, "manifest"), manifest)

    def give_up(self, generation: int) -> None:
        """Remove a generation that could not be saved, but not the log's segment."""
        for ending in ("safetensors", "manifest.new", "manifest"):
            with contextlib.suppress(OSError):
                self._file(generation, ending).unlink()

    def write_losses(self, losses: state_pb2.SavedLosses) -> None:
        self._write_message(self.path / _LOSSES, losses)

    def _write_message(self, path: Path, message: Message) -> None:
        body = message.SerializeToString()
        new = path.with_name(path.name + ".new")
        with self._new_file(new) as descriptor:
            write_all(descriptor, [_HEAD.pack(_MAGIC, zlib.crc32(body), len(body)), body], 0)
        reach("ps.manifest.before")
        new.replace(path)
        if self.fsync:
            self.sync_names()

    def sync_names(self) -> None:
        """Sync the directory, so that the names of its files survive a crash of the machine."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    # Reading

    def manifest(self, generation: int) -> state_pb2.Manifest:
        """Read a manifest. DamagedError if it is not whole."""
        return self._read_message(self._file(generation, "manifest"), state_pb2.Manifest)

    def losses(self) -> state_pb2.SavedLosses | None:
        """Read the record of losses; None if there is none, or it is damaged."""
        try:
            return self._read_message(self.path / _LOSSES, state_pb2.SavedLosses)
        except (OSError, DamagedError):
            return None

    @staticmethod
    def _read_message(path: Path, kind: type[M]) -> M:
        data = path.read_bytes()
        try:
            magic, crc, size = _HEAD.unpack_from(data)
            body = data[_HEAD.size :]
            if magic == _MAGIC and len(body) == size and zlib.crc32(body) == crc:
                return kind.FromString(body)
        except (struct.error, DecodeError):
            pass
        raise DamagedError(f"{path} is damaged, or of another version")

    def read(self, shard: state_pb2.SavedShard, limit: int = 0) -> dict[str, Array]:
        """Read a shard's arrays, by name. DamagedError if they are damaged, OSError if they may be whole.

        `limit`: how many rows those of a table can grow to.
        """
        return {saved.array: self._read_array(saved, limit) for saved in shard.arrays}

    def read_all(self, manifest: state_pb2.Manifest) -> list[dict[str, Array]]:
        """Read the arrays of all shards, on several threads."""
        of_tables = {spec.id: spec for spec in manifest.variables if spec.HasField("table")}

        def limit(shard: state_pb2.SavedShard) -> int:
            spec = of_tables.get(shard.variable)
            return 0 if spec is None else row_limit(spec, partition_of(spec), shard.shard)

        with ThreadPoolExecutor(_READERS) as pool:
            return list(pool.map(self.read, manifest.shards, map(limit, manifest.shards)))

    def _read_array(self, saved: ps_pb2.SavedTensor, limit: int) -> Array:
        if "/" in saved.file or not _NAMES.fullmatch(saved.file):
            raise DamagedError(f"a manifest in {self.path} refers to {saved.file!r}")
        make = functools.partial(_growing, limit) if limit else functools.partial(aligned_empty, lasting=True)
        try:
            return read(self.path / saved.file, saved, make)
        except CheckpointError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
                raise cause from None
            raise DamagedError(str(error)) from None


def _growing(limit: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an array to read a table's rows into, which can grow."""
    if len(shape) != 2:
        raise ValueError(f"rows of shape {shape}")
    return resized(reserved(limit, shape[1], dtype), shape[0], limit)
