"""The durability of a server's state: the user's choices, and their environment variables."""

from __future__ import annotations

import enum
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from pscluster.core.errors import ConfigurationError

SNAPSHOT_SECONDS = 5.0
DURABILITY_VARIABLE = "PSCLUSTER_DURABILITY"
STATE_VARIABLE = "PSCLUSTER_STATE_DIR"


class Durability(enum.Enum):
    """What may be lost if a parameter server's process dies."""

    NONE = "none"  # all that it held
    SNAPSHOT = "snapshot"  # what was acknowledged since the last generation
    LOG = "log"  # nothing that was acknowledged


@dataclass(frozen=True, slots=True)
class DurabilityOptions:
    """How a server persists its state; see the command line's help for each option."""

    kind: Durability = Durability.NONE
    directory: Path | None = None
    every: float = SNAPSHOT_SECONDS
    fsync: bool = False


def durability_named(kind: str | None) -> Durability:
    """Return the named kind, or else the environment's, or else snapshots. ConfigurationError if it is unknown."""
    named = kind or os.environ.get(DURABILITY_VARIABLE) or Durability.SNAPSHOT.value
    try:
        return Durability(named)
    except ValueError:
        kinds = ", ".join(repr(kind.value) for kind in Durability)
        raise ConfigurationError(f"durability is {named!r}; give one of {kinds}") from None


def state_folder(directory: Path, index: int, address: str) -> Path:
    """Return where a server keeps its state in a directory that clusters share: the address tells them apart."""
    return directory / f"ps-{index}-{re.sub(r'[^0-9A-Za-z.-]', '-', address)}"


def joined_state_folder(directory: Path, index: int, job_name: str) -> Path:
    """Return the same for a server that registers, which may be at another address each time: its job and task."""
    if not job_name:
        return directory / f"ps-{index}"
    plain = re.sub(r"[^0-9A-Za-z.-]", "-", job_name)[-100:]
    digest = "" if plain == job_name else f"-{hashlib.sha256(job_name.encode()).hexdigest()[:12]}"
    return directory / f"ps-{index}-of-{plain}{digest}"


def default_directory() -> Path:
    """Return the directory for states without `--state-dir`: the environment's, or the user's own."""
    if named := os.environ.get(STATE_VARIABLE):
        return Path(named)
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "pscluster"
