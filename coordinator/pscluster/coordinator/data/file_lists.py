"""The files of a dataset as saved with its position, to notice that it has others in the next run. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from pscluster.core.errors import CheckpointMismatchError
from pscluster.worker.data.sources import Listed

MOST = 1000  # files that are saved by name; of more only a digest, since positions are written every few seconds
_NAMED = 3


class FileList:
    """The files of a dataset, in their order, by their names below the folder that all are in."""

    def __init__(self, files: Sequence[Listed]) -> None:
        names = [file.name for file in files]
        # As long as the common beginning of the first and last name, in the order of the alphabet.
        first, last = min(names), max(names)
        same = next((at for at, pair in enumerate(zip(first, last, strict=False)) if len(set(pair)) > 1), len(first))
        folder = len(first[:same].rpartition("/")[0]) + ("/" in first[:same])
        self._files = [file._replace(name=file.name[folder:]) for file in files]

    def state(self) -> Any:
        """Return what to save."""
        files = [tuple(file) if file.digest else tuple(file)[:-1] for file in self._files]
        return list(map(list, files)) if len(files) <= MOST else hashlib.sha256(repr(files).encode()).hexdigest()

    def check(self, saved: Any) -> None:
        """Raise CheckpointMismatchError, which names files, if a saved state is of others."""
        if saved == self.state():
            return
        hint = "restore the files as they were, or give the dataset another name to start at its beginning"
        raise CheckpointMismatchError(f"the saved position is of other files: {self._differences(saved)}; {hint}")

    def _differences(self, saved: Any) -> str:
        try:
            before = {
                str(name): Listed(str(name), int(size), int(blocks), *map(str, digest))
                for name, size, blocks, *digest in saved
            }
        except (TypeError, ValueError):  # a digest
            before = {}
        now = {file.name: file for file in self._files}
        if not before or len(self._files) > MOST:
            return f"their names, sizes or order are not those of the {len(self._files):,} files here"
        found = [f"{name[:200]!r} is missing" for name in before if name not in now]
        found += [f"{name!r} is new" for name in now if name not in before]
        for name, file in now.items():
            old = before.get(name, file)
            if old.size != file.size:
                found.append(f"{name!r} has {file.size:,} bytes, and had {old.size:,}")
            elif old.blocks != file.blocks:
                found.append(f"{name!r} is read in {file.blocks:,} blocks, and was in {old.blocks:,}")
            elif old.digest != file.digest:
                found.append(f"{name!r} has other contents than it had")
        more = f", and {len(found) - _NAMED:,} more" if len(found) > _NAMED else ""
        return ", ".join(found[:_NAMED]) + more if found else "they are in another order"
