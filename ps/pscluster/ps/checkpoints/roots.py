"""Where checkpoints may lie, for a server that was told: a request names a directory, and nothing but its caller's
honesty keeps that from being another one. Without roots every directory will do that the server's user may use."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence

from pscluster.core.errors import CheckpointError
from pscluster.ps.checkpoints.tensor_files import join

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
        """The path of a file in a directory. CheckpointError if it would lead elsewhere."""
        path = join(directory, file)
        if self._roots and not any(_inside(directory, root) for root in self._roots):
            raise CheckpointError(
                f"{directory[:200]!r} is outside of {self._shown}, where this server has its checkpoints: name a "
                "directory inside, or start it with another --checkpoint-root"
            )
        return path


def _plain(directory: str) -> str:
    """Without the protocol of local files, links and dots, where it is local; without a slash at its end."""
    for protocol in _LOCAL:
        directory = directory.removeprefix(protocol)
    if "://" in directory or "::" in directory:
        return directory.rstrip("/")
    return os.path.realpath(directory)


def _inside(directory: str, root: str) -> bool:
    if "::" in directory or "\0" in directory:  # one file system through another: where it ends can't be told
        return False
    plain = _plain(directory)
    if "://" in plain:
        path = plain.partition("://")[2]
        if "%" in path or "?" in path or posixpath.normpath(path) != path:
            return False
    return plain == root or plain.startswith(root.rstrip("/") + "/")
