"""The files of a dataset as saved with its position, to notice that it has others in the next run. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from pscluster.core.errors import CheckpointMisfitError

Listed = tuple[str, int, int]
"""A file: its name, its size in bytes, and the number of blocks in which it is read."""

MOST = 1000  # files that are saved by name; of more only a digest, since positions are written every few seconds
_NAMED = 3


class FileList:
    """The files of a dataset, in their order, by their names below the folder that all are in."""

    def __init__(self, files: Sequence[Listed]) -> None:
        names = [name for name, _, _ in files]
        # As long as the common beginning of the first and last name, in the order of the alphabet.
        first, last = min(names), max(names)
        same = next((at for at, pair in enumerate(zip(first, last, strict=False)) if len(set(pair)) > 1), len(first))
        folder = len(first[:same].rpartition("/")[0]) + ("/" in first[:same])
        self._files = [(name[folder:], size, blocks) for name, size, blocks in files]

    def state(self) -> Any:
        """Return what to save."""
        if len(self._files) <= MOST:
            return [list(file) for file in self._files]
        return hashlib.sha256(repr(self._files).encode()).hexdigest()

    def check(self, saved: Any) -> None:
        """Raise CheckpointMisfitError, which names files, if a saved state is of others."""
        if saved == self.state():
            return
        mend = "restore the files as they were, or give the dataset another name to start at its beginning"
        raise CheckpointMisfitError(f"the saved position is of other files: {self._differences(saved)}; {mend}")

    def _differences(self, saved: Any) -> str:
        try:
            before: dict[str, tuple[int, int]] = {str(name): (int(size), int(blocks)) for name, size, blocks in saved}
        except (TypeError, ValueError):  # a digest
            before = {}
        now: dict[str, tuple[int, int]] = {name: (size, blocks) for name, size, blocks in self._files}
        if not before or len(self._files) > MOST:
            return f"their names, sizes or order are not those of the {len(self._files):,} files here"
        found = [f"{name[:200]!r} is missing" for name in before if name not in now]
        found += [f"{name!r} is new" for name in now if name not in before]
        for name, (size, blocks) in now.items():
            old_size, old_blocks = before.get(name, (size, blocks))
            if old_size != size:
                found.append(f"{name!r} has {size:,} bytes, and had {old_size:,}")
            elif old_blocks != blocks:
                found.append(f"{name!r} is read in {blocks:,} blocks, and was in {old_blocks:,}")
        more = f", and {len(found) - _NAMED:,} more" if len(found) > _NAMED else ""
        return ", ".join(found[:_NAMED]) + more if found else "they are in another order"
