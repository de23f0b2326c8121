"""The options of this process: set by the command line, or read from the environment."""

from __future__ import annotations

from pscluster.core.role.options import RoleOptions, options_of_environ

_given: RoleOptions | None = None


def set_process_options(options: RoleOptions) -> None:
    """Set the command line's options, before the script runs."""
    global _given
    _given = options


def process_options(role: str = "coordinator") -> RoleOptions:
    """Return the command line's options, or defaults and what the environment says for that role."""
    return _given or options_of_environ(role=role)
