"""How this process serves and dials: set by the command line, else read from the environment."""

from __future__ import annotations

from dataclasses import dataclass

from pscluster.core.role.options import RoleOptions, options_of_environ


@dataclass
class _Settings:
    options: RoleOptions | None = None


_settings = _Settings()


def set_process_options(options: RoleOptions) -> None:
    """For the command line, before the script runs."""
    _settings.options = options


def process_options(role: str = "coordinator") -> RoleOptions:
    """The options given on the command line, or defaults with what the environment says, for that role."""
    return _settings.options or options_of_environ(role=role)
