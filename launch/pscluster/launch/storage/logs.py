"""What a run's processes print: in files of its folder, one for each process, and here.

Each process writes its own file, `logs/worker-0.log`, and adds to what there is: whatever dies, the last words of all
others, and its own, are there. A thread shows here what is added, a line at a time, after the name of the process. If
the run's folder is a URL, the files are on this machine until the run ends, and are copied there then.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from pscluster.launch.storage.run_folder import RunFolder

_SECONDS = 0.2
_READ_BYTES = 1 << 20


@contextlib.contextmanager
def logs_of(folder: RunFolder) -> Iterator[str]:
    """Yield the directory for the files of a run's processes, and show here what they write within the block."""
    with contextlib.ExitStack() as stack:
        if (path := folder.logs) is None:
            path = stack.enter_context(tempfile.TemporaryDirectory(prefix="pscluster-logs-"))
            stack.callback(folder.add_logs, path)
        stack.enter_context(_shown(Path(path)))
        yield path


@contextlib.contextmanager
def _shown(path: Path) -> Iterator[None]:
    over = threading.Event()
    follower = Follower(path)

    def follow() -> None:
        while not over.wait(_SECONDS):
            follower.show()

    thread = threading.Thread(target=follow, name="run-logs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        follower.show(to_end=True)


class Follower:
    """Shows what is added to the files of a directory. For one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Begin at the end of the files that are there."""
        self._path = path
        self._at = {file.name: file.stat().st_size for file in path.glob("*.log")}

    def show(self, *, to_end: bool = False) -> None:
        """Write the lines that have been added; with `to_end` also a last one that is not complete."""
        text = "".join(f"{line}\n" for file in sorted(self._path.glob("*.log")) for line in self._added(file, to_end))
        if text:
            with contextlib.suppress(OSError, ValueError):  # there is nobody who reads it
                sys.stdout.write(text)
                sys.stdout.flush()

    def _added(self, file: Path, to_end: bool) -> list[str]:
        with file.open("rb") as opened:
            opened.seek(self._at.get(file.name, 0))
            data = opened.read() if to_end else opened.read(_READ_BYTES)
        # A line that is longer than what is read at a time is shown in pieces.
        whole = len(data) if to_end or len(data) == _READ_BYTES else data.rfind(b"\n") + 1
        self._at[file.name] = self._at.get(file.name, 0) + whole
        lines = data[:whole].decode(errors="replace").removesuffix("\n")
        return [f"{file.stem} | {line}" for line in lines.split("\n")] if whole else []
