"""What step functions of the fault tests do on a worker. Imports little, since every restarted worker loads it."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tests.waiting import TIMEOUT, write_whole

from pscluster.core.context import experimental_get_current_worker_index


def die(*_: object) -> None:
    """Kill this process, as `kill -9` does. Nothing after it happens. Can stand in for any function."""
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def first_time(folder: str, name: str) -> bool:
    """Whether this is the first question under this name from any process."""
    try:
        os.close(os.open(Path(folder, name), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


def die_once(folder: str, name: str) -> None:
    """Kill this process if none was killed under this name before."""
    if first_time(folder, name):
        die()


def note(folder: str, name: str, text: str = "") -> None:
    """Write a file that others can wait for; it appears complete."""
    write_whole(Path(folder, name), text)


def wait_for(folder: str, name: str) -> str:
    """Wait for a file, and return its content."""
    deadline = time.monotonic() + TIMEOUT
    while not Path(folder, name).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no step left {name}")
        time.sleep(0.005)
    return Path(folder, name).read_text()


class Deadly:
    """A result whose encoding kills the worker the first time: everything is done, and nothing of it is sent."""

    dtype = np.dtype(np.int64)
    shape = (2,)

    def __init__(self, folder: str, index: int) -> None:
        self.folder, self.index = folder, index

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[np.int64]:
        die_once(self.folder, f"result-{self.index}")
        return np.array([self.index, -1])


def where(index: int) -> tuple[int, int, int]:
    """Return the argument, the worker that got it, and its process."""
    return index, experimental_get_current_worker_index(), os.getpid()


def deadly() -> None:
    """A function that ends every process it runs in."""
    os._exit(13)


def exit_hard() -> None:
    """End this process without any cleanup."""
    os._exit(7)


def abort() -> None:
    """End this process as a failed assertion of a C library does."""
    os.abort()


def segfault() -> None:
    """End this process as an invalid pointer does."""
    ctypes.string_at(0)


def allocate(nbytes: int = 1 << 40) -> int:
    """Use memory until there is no more, or this many bytes; then die, as if the kernel had killed the process."""
    taken: list[npt.NDArray[np.uint8]] = []
    while len(taken) << 24 < nbytes:
        taken.append(np.ones(1 << 24, np.uint8))
    die()
    return len(taken)


def starve_once(folder: str, name: str) -> None:
    """Use much memory and die, if no process did so under this name before."""
    if first_time(folder, name):
        allocate(1 << 26)


class Bomb:
    """Ends the process that loads it, this many times."""

    def __init__(self, folder: str, times: int) -> None:
        self.folder, self.times = folder, times

    def __reduce__(self) -> tuple[Callable[..., Bomb], tuple[str, int]]:
        return _loaded, (self.folder, self.times)


def _loaded(folder: str, times: int) -> Bomb:
    for index in range(times):
        die_once(folder, f"bomb-{index}")
    return Bomb(folder, times)
