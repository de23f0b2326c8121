"""The command `pscluster slurm`."""

from __future__ import annotations

import datetime
import os
import secrets
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import click

from pscluster.coordinator.cli.run import script_at
from pscluster.core.display.sanitize import shown
from pscluster.core.errors import ConfigurationError
from pscluster.core.security.tokens import create_token_file
from pscluster.launch.slurm.commands import SlurmError, check_installed, job_state, submit
from pscluster.launch.slurm.job_script import EXIT_CODE, LOG, SCRIPT, TOKEN, SlurmOptions, job_script


@click.command("slurm", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--ps", default=1, show_default=True, type=click.IntRange(1, 1000), help="Number of parameter servers.")
@click.option("--workers", default=1, show_default=True, type=click.IntRange(1, 10_000), help="Number of workers.")
@click.option("--nodes", metavar="N[-M]", help="Number of nodes, as for sbatch. Default: as many as the tasks need.")
@click.option("--time", metavar="TIME", help="Time limit, such as 30 (minutes) or 1-12:00:00.")
@click.option("--partition", metavar="NAME", help="Partition of the cluster.")
@click.option("--account", metavar="NAME", help="Account to charge.")
@click.option("--job-name", metavar="NAME", show_default="the script's name", help="Name of the job.")
@click.option(
    "--sbatch-option",
    "sbatch_options",
    multiple=True,
    metavar="KEY=VALUE",
    help="Another option of sbatch; repeatable.",
)
@click.option(
    "--state",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("pscluster-slurm"),
    show_default=True,
    metavar="DIR",
    help="Folder on a file system that all nodes share. The run's own folder is created in it.",
)
@click.option("--requeue", is_flag=True, help="Let Slurm start the job again after a preemption or a node's failure.")
@click.option(
    "--port-base",
    type=click.IntRange(1, 65_535),
    help="First port on each node. Default: it follows from the job's id.",
)
@click.option("--insecure", is_flag=True, help="Use plain text between the nodes, with the token but without TLS.")
@click.option("--dry-run", is_flag=True, help="Print the job script and exit.")
@click.option("--wait", is_flag=True, help="Show the job's log until it ends, and exit with its code.")
@click.option(
    "--timeout",
    default=60.0,
    show_default=True,
    type=click.FloatRange(1, 3600),
    help="Seconds to wait for Slurm to answer.",
)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def slurm(
    script: str, args: tuple[str, ...], state: Path, dry_run: bool, wait: bool, timeout: float, **options: Any
) -> None:
    """Run SCRIPT on a cluster that is a Slurm job.

    SCRIPT is its coordinator.
    """
    path = script_at(script).resolve()
    options["job_name"] = options["job_name"] or path.stem
    chosen = SlurmOptions(**options)
    name = f"{path.stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    run = state.resolve() / name
    text = job_script(chosen, str(run), sys.executable, str(path), args)
    if dry_run:
        click.echo(text, nl=False)
        return
    check_installed()
    job = _submit(run, text, timeout)
    click.echo(f"submitted job {job}: {chosen.tasks} tasks\nlog: {run / LOG}\ncancel: scancel {job}", err=wait)
    if wait:
        sys.exit(follow(job, run, timeout))


def _submit(run: Path, text: str, timeout: float) -> str:
    """Create the run's folder, submit its script, and return the job's id. Leave nothing if it was refused."""
    try:
        run.parent.mkdir(parents=True, exist_ok=True)
        run.mkdir(mode=0o700)
        script = run / SCRIPT
        script.write_text(text)
        script.chmod(0o700)
    except OSError as error:
        raise ConfigurationError(
            f"can't create the run's folder {run}: {error.strerror}; name a folder that you may write to with --state"
        ) from None
    create_token_file(run / TOKEN)
    try:
        return submit(str(script), timeout)
    except SlurmError as error:
        if "did not answer" in str(error):
            raise SlurmError(f"{error}; `squeue --me` shows whether the job was submitted all the same") from None
        shutil.rmtree(run, ignore_errors=True)
        raise SlurmError(
            f"{error}; nothing was submitted: correct what it names (--dry-run prints the job script, `sinfo` the "
            "partitions)"
        ) from None


_FIRST_SECONDS, _MOST_SECONDS = 0.5, 10.0
_LOG_SECONDS = 0.25


def follow(job: str, run: Path, timeout: float) -> int:
    """Print the log of a job until it ends, and return its exit code.

    Ctrl-C ends only this. SlurmError if Slurm does not answer for `timeout` seconds in a row.
    """
    log, said, due, every, answered = run / LOG, "", 0.0, _FIRST_SECONDS, time.monotonic()
    position, ending = 0, False
    try:
        while True:
            position = _copy_log(log, position)
            if not ending and (run / EXIT_CODE).exists():
                ending, every, due = True, _FIRST_SECONDS, 0.0
            if time.monotonic() < due:
                time.sleep(_LOG_SECONDS)
                continue
            try:
                state = job_state(job, timeout)
                answered = time.monotonic()
            except SlurmError:
                if time.monotonic() - answered > timeout:
                    raise
                due = time.monotonic() + every
                continue
            if state.is_final:
                _copy_log(log, position)
                if state.exit_code:
                    click.echo(f"job {job} ended: {state.name}, exit code {state.exit_code}", err=True)
                return state.exit_code
            if state.name == "PENDING" and state.reason not in (said, "None"):
                said = state.reason
                click.echo(f"job {job} is pending: {shown(said)}", err=True)
            every = min(every * 1.5, _MOST_SECONDS)  # a long job must not be a burden for the controller
            due = time.monotonic() + every
    except KeyboardInterrupt:
        click.echo(f"\njob {job} continues; cancel it with scancel {job}", err=True)
        return 130


def _copy_log(log: Path, position: int) -> int:
    """Print what the log has after this position, and return the new position."""
    try:
        with log.open("rb") as file:
            file.seek(position)
            while data := file.read(1 << 16):
                os.write(sys.stdout.fileno(), data)
                position += len(data)
    except FileNotFoundError:
        pass  # the job has not begun
    return position
