"""The states in which a machine may be found after a power failure, from a journal of writes and syncs of a process.

`power_loss.c`, preloaded into a server, writes the journal. POSIX guarantees only what was synced. Anything may be
found of the rest: each write, or some of its sectors; each change of a file's size; and as many of the changes of names
as the file system had completed, in order.
"""

from __future__ import annotations

import os
import random
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_HEAD = struct.Struct("<cQQQQQ")
_SECTOR = 512
ACKNOWLEDGED = b"A"
"""Written by the test itself: the path is what was acknowledged, the offset how much of it."""


class Record(NamedTuple):
    """A call; see `power_loss.c`."""

    kind: bytes
    inode: int
    offset: int
    path: str
    second: str
    data: bytes


def build_shim(folder: Path) -> Path:
    """Compile the library to preload."""
    shim = folder / "power_loss.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", shim, source, "-ldl", "-lpthread"], check=True, timeout=120)
    return shim


def acknowledgement(name: str, count: int) -> bytes:
    """Return an acknowledgement's record, to be appended to the journal in one write."""
    return _HEAD.pack(ACKNOWLEDGED, 0, count, len(name), 0, 0) + name.encode()


def read_journal(path: Path) -> list[Record]:
    """Read all records that are whole."""
    data, at, records = path.read_bytes(), 0, []
    while at + _HEAD.size <= len(data):
        kind, inode, offset, *lengths = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        if at + sum(lengths) > len(data):
            break
        parts = []
        for length in lengths:
            parts.append(data[at : at + length])
            at += length
        records.append(Record(kind, inode, offset, parts[0].decode(), parts[1].decode(), parts[2]))
    return records


@dataclass
class _File:
    """An inode: its calls in order, and how many of them were synced."""

    calls: list[Record] = field(default_factory=list)
    synced: int = 0


@dataclass
class _Names:
    """The names in a folder: their changes in order, and how many of them were synced."""

    calls: list[tuple[Record, int]] = field(default_factory=list)  # and which of our files
    synced: int = 0


class Machine:
    """All that was written before the power failed."""

    def __init__(self, records: list[Record]) -> None:
        self._files: list[_File] = []
        self._names: dict[str, _Names] = {}
        now: dict[int, int] = {}  # our file by inode: a number is reused once its file is removed
        for record in records:
            match record.kind:
                case b"C":
                    now[record.inode] = len(self._files)
                    self._files.append(_File())
                    self._named(record, now)
                case b"L" | b"R" | b"U":
                    self._named(record, now)
                case b"W" | b"T":
                    self._files[now[record.inode]].calls.append(record)
                case b"S":
                    file = self._files[now[record.inode]]
                    file.synced = len(file.calls)
                case b"D":
                    names = self._names.setdefault(record.path, _Names())
                    names.synced = len(names.calls)

    def _named(self, record: Record, now: dict[int, int]) -> None:
        names = self._names.setdefault(os.path.dirname(record.path), _Names())
        names.calls.append((record, now.get(record.inode, -1)))

    def restart(self, folder: Path, into: Path, chance: random.Random) -> None:
        """Write a state in which `folder` may be found: all that was synced, and a random part of the rest."""
        names: dict[str, int] = {}
        known = self._names.get(str(folder), _Names())
        for record, file in known.calls[: chance.randint(known.synced, len(known.calls))]:
            name = os.path.basename(record.path)
            match record.kind:
                case b"R":
                    names[os.path.basename(record.second)] = names.pop(name)
                case b"U":
                    names.pop(name, None)
                case _:
                    names[name] = file
        into.mkdir()
        written: dict[int, Path] = {}
        for name, file in names.items():
            if file in written:
                os.link(written[file], into / name)
                continue
            written[file] = into / name
            with (into / name).open("wb", buffering=0) as out:
                for call in _surviving(self._files[file], chance):
                    if call.kind == b"T":
                        out.truncate(call.offset)
                    else:
                        os.pwrite(out.fileno(), call.data, call.offset)


def _surviving(file: _File, chance: random.Random) -> Iterator[Record]:
    yield from file.calls[: file.synced]
    likely = chance.choice((0.0, 0.5, 1.0))
    for call in file.calls[file.synced :]:
        if chance.random() >= likely:
            continue
        if call.kind == b"T" or chance.random() < 0.5:
            yield call
            continue
        for at in range(0, len(call.data), _SECTOR):  # torn: some sectors
            if chance.random() < 0.5:
                yield call._replace(offset=call.offset + at, data=call.data[at : at + _SECTOR])
