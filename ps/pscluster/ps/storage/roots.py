"""Where checkpoints may lie, for a server that was told: a request names a directory, and nothing but its caller's
honesty keeps that from being another one. Without roots every directory will do that the server's user may use."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence

from fsspec.implementations.local import LocalFileSystem

from pscluster.core.errors import CheckpointError
from pscluster.ps.storage.tensor_files import join

_LOCAL = ("file://", "local://")


class Roots:
    """Directories, or URLs of fsspec, inside of which all checkpoints are.

    Args:
        roots: none: anywhere.
    """

    def __init__(self, roots: Sequence[str] = ()) -> None:
        self._shown = ", ".join(roots)
        self._roots = [_plain(root) for root in roots]

    def path_of(self, directory: str, file: str) -> str:
        """The path of a file in a directory, to be opened as it is. CheckpointError if it would lead elsewhere."""
        path = join(directory, file)
        if not self._roots:
            return path
        found = _found(path)
        if found is None or not any(found.startswith(root.rstrip("/") + "/") for root in self._roots):
            raise CheckpointError(
                f"{directory[:200]!r} is outside of {self._shown}, where this server keeps its checkpoints: name a "
                "directory inside it, or start it with another --checkpoint-root"
            )
        return found


def _plain(path: str) -> str:
    """Absolute, without links and dots, where it is local, whatever way it says so; without a slash at its end."""
    if "::" in path or ("://" in path and not path.startswith(_LOCAL)):
        return path.rstrip("/")
    # As fsspec reads it, which knows more ways than one: `file:`, `~`.
    local: str = LocalFileSystem._strip_protocol(path)
    return os.path.realpath(local)


def _found(path: str) -> str | None:
    """What is opened for this path; None if where it leads can't be told."""
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
