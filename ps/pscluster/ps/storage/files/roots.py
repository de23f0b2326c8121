"""Restrict where a server writes and reads checkpoints.

Requests name the directory, so without roots a caller can choose any that the server's user may access.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence

from pscluster.core.errors import CheckpointError
from pscluster.ps.storage.files.tensor_files import join

_LOCAL = ("file://", "local://")


class Roots:
    """Directories, or fsspec URLs, that contain all checkpoints. Without any, all are allowed."""

    def __init__(self, roots: Sequence[str] = ()) -> None:
        self._shown = ", ".join(roots)
        self._roots = [_plain(root) for root in roots]

    def path_of(self, directory: str, file: str) -> str:
        """Return the path of a file in a directory, to be opened as is. CheckpointError if it is outside the roots."""
        path = join(directory, file)
        if not self._roots:
            return path
        resolved = _resolved(path)
        if resolved is None or not any(resolved.startswith(root.rstrip("/") + "/") for root in self._roots):
            raise CheckpointError(
                f"{directory[:200]!r} is outside of {self._shown}, where this server keeps its checkpoints: name a "
                "directory inside it, or start it with another --checkpoint-root"
            )
        return resolved


def _plain(path: str) -> str:
    """Return a local path, in any notation, as absolute and without links and dots. No trailing slash."""
    if "::" in path or ("://" in path and not path.startswith(_LOCAL)):
        return path.rstrip("/")
    from fsspec.implementations.local import LocalFileSystem  # slow to import, and seldom needed

    # Read it as fsspec does, which has several notations: `file:`, `~`.
    local: str = LocalFileSystem._strip_protocol(path)
    return os.path.realpath(local)


def _resolved(path: str) -> str | None:
    """Return the path that is opened for this one; None if it can't be determined."""
    if "\0" in path:
        return None
    plain = _plain(path)
    if "::" in plain:  # one file system through another
        return None
    if "://" in plain:
        rest = plain.partition("://")[2]
        if "%" in rest or "?" in rest or posixpath.normpath(rest) != rest:
            return None
    return plain
