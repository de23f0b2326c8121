"""The identity of a process: version, role, index, and a boot id drawn at every start."""

from __future__ import annotations

import os
import secrets
import socket

from pscluster.core.errors import VersionMismatchError
from pscluster.core.limits import check_name, one_line
from pscluster.v1 import node_pb2

VERSION = "0.1.0"
"""Written here, where the build takes it from: reading an installed package's metadata slows every role's start."""


def fresh_id() -> int:
    """Return a random 63-bit number, never 0, for a process, an incarnation or a job."""
    return secrets.randbits(62) + 1


def make_identity(role: str, index: int) -> node_pb2.Identity:
    """Return the identity of this process in a role."""
    where = f"{socket.gethostname()}, pid {os.getpid()}"
    return node_pb2.Identity(
        version=VERSION, role=role, index=index, boot_id=fresh_id(), name=f"{role} {index} ({where})"
    )


def check_version(theirs: node_pb2.Identity, ours: node_pb2.Identity) -> None:
    """Make a peer's own names fit for a log, and raise VersionMismatchError, with both versions, if it has another one.

    Raise ProtocolError if a name is too long.
    """
    for said in ("name", "role", "version"):
        check_name(getattr(theirs, said), f"a peer's {said}")
        setattr(theirs, said, one_line(getattr(theirs, said)))
    if theirs.version != ours.version:
        raise VersionMismatchError(
            f"{theirs.name or theirs.role or 'the caller'} runs pscluster {theirs.version or '(none given)'}, "
            f"{ours.name} runs {ours.version}: install the same version on every task of the cluster"
        )
