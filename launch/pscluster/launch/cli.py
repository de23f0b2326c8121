"""The commands `pscluster runs` and `pscluster scale`."""

from __future__ import annotations

import datetime

import click
from rich.table import Table
from rich.text import Text

from pscluster.coordinator.observability.progress_line import choose_console
from pscluster.core.display.sanitize import shown
from pscluster.core.errors import CheckpointError, MisuseError
from pscluster.launch.config import DEFAULT_STORAGE
from pscluster.launch.storage.run_folder import RunFolder
from pscluster.launch.storage.run_folder import runs as runs_of


@click.command("runs")
@click.argument("storage", default=DEFAULT_STORAGE)
def runs(storage: str) -> None:
    """List the runs of a Trainer in STORAGE: a folder or URL."""
    try:
        found = runs_of(storage)
    except CheckpointError as error:
        raise click.ClickException(str(error)) from None
    if not found:
        click.echo(f"there are no runs in {storage}")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("run", "state", "reports", "best", "began", "took"):
        table.add_column(name, justify="right" if name in ("reports", "took") else "left", overflow="fold")
    for folder in found:
        table.add_row(*(Text(shown(cell)) for cell in _row(folder)))
    choose_console().print(table)


@click.command("scale")
@click.argument("run")
@click.argument("workers", type=int)
def scale(run: str, workers: int) -> None:
    """Change the number of workers of a Trainer's run.

    RUN is the folder of an elastic run, and WORKERS how many it is to have while it runs. New ones join between two
    reports; those that are too many leave after their next report.
    """
    storage, _, name = run.rstrip("/").rpartition("/")
    try:
        folder = RunFolder(storage or ".", name).read()
        folder.request_workers(workers)
    except (CheckpointError, MisuseError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"asked {folder.name} for {workers} workers")


def _row(folder: RunFolder) -> list[str]:
    run = folder.run
    keep = run.get("checkpoint_config") or {}
    score, best = str(keep.get("score")), ""
    values = [metrics[score] for metrics in folder.history() if isinstance(metrics.get(score), int | float)]
    if values:
        best = f"{score} {(max if keep.get('order') == 'max' else min)(values):.4g}"
    began = datetime.datetime.fromisoformat(str(run["began"]))
    ended = datetime.datetime.fromisoformat(str(run["ended"])) if "ended" in run else None
    took = "" if ended is None else str(datetime.timedelta(seconds=round((ended - began).total_seconds())))
    return [folder.name, str(run["state"]), str(folder.committed), best, f"{began:%Y-%m-%d %H:%M}", took]
