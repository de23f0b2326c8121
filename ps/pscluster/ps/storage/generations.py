"""Generations on disk: written so that a half-written one is never taken for one, read so that no flipped bit passes.

A generation counts from the moment its manifest has its name; what it refers to is written before. Arrays have a CRC-32
for every MiB, the manifest has one. The newest generation that is whole counts; the one before is kept in case it is
not. Everything else is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message

from pscluster.core.dtypes import dtype_named
from pscluster.core.errors import ConfigurationError, MisuseError, ProtocolError, PsClusterError
from pscluster.core.fault_points import reach
from pscluster.core.limits import MAX_RANK
from pscluster.core.transport.frames import CHUNK_BYTES, view
from pscluster.ps.storage.capture import Capture
from pscluster.ps.storage.disk import write_all
from pscluster.v1 import state_pb2

Array = npt.NDArray[Any]
M = TypeVar("M", bound=Message)

_MAGIC = b"PSSTATE1"
_LOSSES = "losses"
_SPARE = "log.spare"
_HEAD = struct.Struct("<8sIQ")  # magic, CRC-32 and length of the manifest
_ALIGNMENT = 64
_READERS = 4
_NAMES = re.compile(r"(state|log)-(\d{6,})\.(manifest|data|bin)(\.new)?")


class DamagedError(PsClusterError):
    """A file of the state is not what was written."""


class StateDirectory:
    """A server's directory. One process at a time; one thread at a time writes.

    Raises:
        ConfigurationError: it can't be made or written, or another process uses it.
    """

    def __init__(self, path: Path, *, fsync: bool = False) -> None:
        self.path = path
        self.fsync = fsync
        try:
            path.mkdir(parents=True, exist_ok=True)
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
                f"another parameter server (pid {other}) already keeps its state in {path}; if it belongs to another "
                "cluster, give each its own --state-dir"
            ) from None
        os.pwrite(self._lock, f"{os.getpid():<19}\n".encode(), 0)

    def close(self) -> None:
        """Let another process have it."""
        os.close(self._lock)

    def _file(self, generation: int, ending: str) -> Path:
        return self.path / f"state-{generation:06d}.{ending}"

    def log_file(self, generation: int) -> Path:
        """The segment of the log that begins with this generation."""
        return self.path / f"log-{generation:06d}.bin"

    def _found(self) -> Iterator[tuple[Path, str, int, str]]:
        for path in self.path.iterdir():
            if match := _NAMES.fullmatch(path.name):
                yield path, match[1], int(match[2]), match[3] + (match[4] or "")

    def generations(self) -> list[int]:
        """That have a manifest, the newest first."""
        found = [number for _, kind, number, ending in self._found() if (kind, ending) == ("state", "manifest")]
        return sorted(found, reverse=True)

    def log_segments(self) -> list[int]:
        """The generations with which segments of the log begin, ascending."""
        return sorted(number for _, kind, number, ending in self._found() if (kind, ending) == ("log", "bin"))

    def clear(self) -> None:
        """Remove all generations and logs."""
        # The manifests first, the oldest last of them: should this be broken off, what is left is whole.
        for path, _, _, _ in sorted(self._found(), key=lambda each: (each[3] != "manifest", -each[2])):
            path.unlink(missing_ok=True)
        for name in (_LOSSES, f"{_LOSSES}.new", _SPARE):
            (self.path / name).unlink(missing_ok=True)

    def remove_unused(self, needed: Iterable[state_pb2.Manifest], logs_from: int) -> None:
        """Remove what these generations do not need, and segments of the log before the one of this number."""
        kept = {self._file(manifest.generation, "manifest").name for manifest in needed}
        kept |= {array.file for manifest in needed for shard in manifest.shards for array in shard.arrays}
        for path, kind, number, ending in list(self._found()):
            if path.name in kept or (kind == "log" and number >= logs_from):
                continue
            if kind == "log" and ending == "bin":
                path.replace(self.path / _SPARE)  # one is enough
            else:
                path.unlink(missing_ok=True)

    def reuse_segment(self, path: Path) -> None:
        """If a segment of the log is needed no more, let it have this name."""
        if self.fsync and (self.path / _SPARE).exists():
            self.sync_names()  # else a power failure may bring its old name back, with what is written now in it
        with contextlib.suppress(FileNotFoundError):
            (self.path / _SPARE).rename(path)

    # Writing

    @contextlib.contextmanager
    def data_file(self, generation: int) -> Iterator[DataFile]:
        """A file for the arrays of a generation; removed if the block raises."""
        path = self._file(generation, "data")
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            yield DataFile(path.name, number)
            if self.fsync:
                os.fsync(number)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(number)

    def commit(self, manifest: state_pb2.Manifest) -> None:
        """Write the manifest: from now on the generation counts."""
        self._write_message(self._file(manifest.generation, "manifest"), manifest)

    def give_up(self, generation: int) -> None:
        """A generation could not be saved: nothing is left of it. The log's segment stays."""
        for ending in ("data", "manifest.new", "manifest"):
            with contextlib.suppress(OSError):
                self._file(generation, ending).unlink()

    def write_losses(self, losses: state_pb2.SavedLosses) -> None:
        """Take the place of what was written before."""
        self._write_message(self.path / _LOSSES, losses)

    def _write_message(self, path: Path, message: Message) -> None:
        body = message.SerializeToString()
        new = path.with_name(path.name + ".new")
        number = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            write_all(number, [_HEAD.pack(_MAGIC, zlib.crc32(body), len(body)), body], 0)
            if self.fsync:
                os.fsync(number)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        finally:
            os.close(number)
        reach("ps.manifest.before")
        new.replace(path)
        if self.fsync:
            self.sync_names()

    def sync_names(self) -> None:
        """Names of files survive a machine's death from now on."""
        number = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(number)
        finally:
            os.close(number)

    # Reading

    def manifest(self, generation: int) -> state_pb2.Manifest:
        """DamagedError if it is not whole."""
        return self._read_message(self._file(generation, "manifest"), state_pb2.Manifest)

    def losses(self) -> state_pb2.SavedLosses | None:
        """What was written last; None if nothing was, or it is damaged."""
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

    def read(self, shard: state_pb2.SavedShard) -> dict[str, Array]:
        """The arrays of a shard, by name. DamagedError if they are not what was written."""
        return {saved.name: self._read_array(saved) for saved in shard.arrays}

    def read_all(self, manifest: state_pb2.Manifest) -> list[dict[str, Array]]:
        """Of all shards, on several threads."""
        with ThreadPoolExecutor(_READERS) as pool:
            return list(pool.map(self.read, manifest.shards))

    def _read_array(self, saved: state_pb2.SavedArray) -> Array:
        if "/" in saved.file or not _NAMES.fullmatch(saved.file):
            raise DamagedError(f"a manifest in {self.path} refers to {saved.file!r}")
        path = self.path / saved.file
        try:
            dtype = dtype_named(saved.dtype)
        except (MisuseError, ProtocolError) as error:
            raise DamagedError(f"{path}: {saved.name}: {error}") from None
        sums = -(-saved.bytes // CHUNK_BYTES)
        if (
            len(saved.shape) > MAX_RANK
            or math.prod(saved.shape) * dtype.itemsize != saved.bytes
            or len(saved.crc32) != sums
        ):
            raise DamagedError(f"{path}: {saved.name} is not of {saved.bytes} bytes and {sums} checksums")
        try:
            array: Array = np.empty(tuple(saved.shape), dtype)
        except (MemoryError, ValueError) as error:
            raise DamagedError(f"{path}: {saved.name} is too large: {error}") from None
        data = view(array)
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(saved.offset)
                for number, crc in enumerate(saved.crc32):
                    chunk = data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
                    got = 0
                    while got < len(chunk) and (more := file.readinto(chunk[got:])):
                        got += more
                    if got < len(chunk) or zlib.crc32(chunk) != crc:
                        at = saved.offset + number * CHUNK_BYTES
                        raise DamagedError(f"{path} is damaged between bytes {at:,} and {at + len(chunk):,}")
        except FileNotFoundError:
            raise DamagedError(f"{path} is missing") from None
        except (ValueError, OverflowError):  # an offset that no file has
            raise DamagedError(f"{path} has no byte {saved.offset:,}") from None
        return array


class DataFile:
    """The arrays of a generation, one behind the other."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self._number = number
        self.size = 0

    def add(self, arrays: Mapping[str, Array], capture: Capture) -> list[state_pb2.SavedArray]:
        """Write the arrays of a shard, as they were captured."""
        saved = {}
        for name, array in arrays.items():
            self.size += -self.size % _ALIGNMENT
            entry = saved[name] = state_pb2.SavedArray(
                name=name, file=self.name, offset=self.size, bytes=array.nbytes, dtype=array.dtype.name
            )
            entry.shape.extend(array.shape)
            entry.crc32.extend([0] * -(-array.nbytes // CHUNK_BYTES))
            self.size += array.nbytes
        for block in capture.blocks():
            entry = saved[block.array]
            entry.crc32[block.offset // CHUNK_BYTES] = zlib.crc32(block.data)
            write_all(self._number, [block.data], entry.offset + block.offset)
        return list(saved.values())
