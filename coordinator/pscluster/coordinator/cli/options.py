"""Options of the command line that several commands have. Imports little, as `cli` does."""

from __future__ import annotations

from collections.abc import Callable

import click


def dashboard_options(shown: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Click options of the live page, which is shown by itself or not."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        command = click.option(
            "--dashboard-address",
            envvar="PSCLUSTER_DASHBOARD_ADDRESS",
            metavar="HOST:PORT",
            help="Address of the live page. Default: 127.0.0.1:8477, or a free port. Or $PSCLUSTER_DASHBOARD_ADDRESS.",
        )(command)
        return click.option(
            "--dashboard/--no-dashboard", default=shown, show_default=True, help="Show the job on a live page."
        )(command)

    return decorate
