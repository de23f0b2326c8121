"""Memory that a worker and a process of its pool share: each writes there, in turn, what the other one reads.

A slot holds a number, the progress, and a value: its encoding, and then its large arrays.

It has no name, and is gone with the last process that has it open. It grows to the largest value, and stays so.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np

from pscluster.core.functions.definitions import record_resolver
from pscluster.core.values import decode, encode
from pscluster.v1 import value_pb2
from pscluster.worker.data.blocks import map_leaves

_HEAD = struct.Struct("<QQQ")  # progress, the length of the encoding, the number of arrays that follow
_NUMBER = struct.Struct("<Q")
_ALIGNMENT = 64
_INLINE_BYTES = 4096
_PAGE = mmap.PAGESIZE


@dataclass
class Objects:
    """An array of Python objects, such as texts, on its way."""

    items: list[Any]
    shape: tuple[int, ...]


def _sendable(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray) and leaf.dtype == object:
        return Objects(leaf.reshape(-1).tolist(), leaf.shape)
    return leaf


def _restored(leaf: Any) -> Any:
    if not isinstance(leaf, Objects):
        return leaf
    array = np.empty(len(leaf.items), object)
    array[:] = leaf.items
    return array.reshape(leaf.shape)


def _of_each(fn: Any, value: Any) -> Any:
    """Return a block, or the list of its examples, with `fn(leaf)` for each leaf."""
    return [map_leaves(fn, item) for item in value] if type(value) is list else map_leaves(fn, value)


def _no_definition(_digest: str) -> Any:
    raise AssertionError("records are sent by the names of their classes")


class Slot:
    """A piece of shared memory, which this object owns. One process at a time may use it, but for the progress."""

    def __init__(self, descriptor: int | None = None) -> None:
        """Take that of another process, by its descriptor here, or make one."""
        if descriptor is None:
            descriptor = _made()
            os.ftruncate(descriptor, _PAGE)
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, 0)

    @property
    def progress(self) -> int:
        """A number that one process writes, and the other one may read at any time."""
        return int(_NUMBER.unpack_from(self._map)[0])

    @progress.setter
    def progress(self, number: int) -> None:
        _NUMBER.pack_into(self._map, 0, number)

    def write(self, value: Any, path: str = "value") -> None:
        """Write a value, and set the progress to 0. TypeError if something in it can't be sent."""
        attachments: list[memoryview] = []
        sent = _of_each(_sendable, value)
        data = encode(sent, path=path, attachments=attachments, inline_limit=_INLINE_BYTES).SerializeToString()
        at = _HEAD.size + _NUMBER.size * len(attachments)
        places = [at, at + len(data)]
        for attachment in attachments:
            start = -(-places[-1] // _ALIGNMENT) * _ALIGNMENT
            places += [start, start + attachment.nbytes]
        self._grow(places[-1])
        _HEAD.pack_into(self._map, 0, 0, len(data), len(attachments))
        struct.pack_into(f"<{len(attachments)}Q", self._map, _HEAD.size, *(item.nbytes for item in attachments))
        for index, item in enumerate([memoryview(data), *attachments]):
            self._map[places[2 * index] : places[2 * index + 1]] = item

    def read(self, *, lend: bool = False) -> Any:
        """Return the value. `lend`: its large arrays are in this memory, and change when the slot is written to."""
        self._grow(os.fstat(self.descriptor).st_size)  # the other one may have made it larger
        _, length, count = _HEAD.unpack_from(self._map)
        sizes = struct.unpack_from(f"<{count}Q", self._map, _HEAD.size)
        at = _HEAD.size + _NUMBER.size * count
        view = memoryview(self._map)
        value = value_pb2.Value.FromString(bytes(view[at : at + length]))
        at += length
        attachments = []
        for size in sizes:
            start = -(-at // _ALIGNMENT) * _ALIGNMENT
            at = start + size
            attachments.append(view[start:at] if lend else view[start:at].toreadonly())
        decoded = decode(value, attachments=attachments, resolve_record=record_resolver(_no_definition))
        return _of_each(_restored, decoded)

    def _grow(self, size: int) -> None:
        """Have at least `size` bytes. Views of what was there stay valid."""
        if size <= len(self._map):
            return
        if size > os.fstat(self.descriptor).st_size:
            os.ftruncate(self.descriptor, -(-size // _PAGE) * _PAGE)
        self._map = mmap.mmap(self.descriptor, 0)

    def close(self) -> None:
        """Close its file. The memory stays while something views it."""
        os.close(self.descriptor)


def _made() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("pscluster-map")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
