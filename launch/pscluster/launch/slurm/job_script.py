"""The job script of `pscluster slurm`. Pure: it is what `--dry-run` prints.

The script prepares the run's folder, starts one task per role with one `srun`, and ends with the coordinator's code.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from pscluster.core.errors import ConfigurationError

LOG = "job.log"
SCRIPT = "job.sh"
TOKEN = "token"  # noqa: S105  (a file's name)  # nosec B105
TLS = "tls"
STATE = "state"
EXIT_CODE = "exit-code"
CLUSTER = "tf_config.json"

_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_OURS = {
    "job-name": "--job-name",
    "nodes": "--nodes",
    "time": "--time",
    "partition": "--partition",
    "account": "--account",
    "requeue": "--requeue",
    "no-requeue": "--requeue",
    "wait": "--wait",
    "ntasks": "--ps and --workers",
    "output": "--state",
    "error": "--state",
}
"""Options of sbatch that have a flag of ours, which is named instead."""

_UNFIT = {
    "array": "a run is one job",
    "distribution": "the cluster's addresses rely on block distribution",
    "export": "the roles need the environment that the script sets",
    "input": "no role reads standard input",
    "kill-on-invalid-dep": "it is for jobs that depend on others",
    "ntasks-per-core": "the script sets the number of tasks",
    "open-mode": "the log of a job that runs again is continued",
    "parsable": "it is given already",
    "test-only": "use --dry-run",
    "wrap": "the script is a file",
}


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """What to submit. Raises ConfigurationError if a value can't be a line of a job script."""

    ps: int
    workers: int
    job_name: str
    nodes: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    requeue: bool = False
    port_base: int | None = None
    insecure: bool = False
    sbatch_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for flag in ("job_name", "nodes", "time", "partition", "account"):
            _check_line(f"--{flag.replace('_', '-')}", getattr(self, flag) or "")
        for option in self.sbatch_options:
            name, equals, _ = option.partition("=")
            _check_line("--sbatch-option", option)
            if not _OPTION.fullmatch(name):
                raise ConfigurationError(
                    f"--sbatch-option is {option!r}, but it must be a long option of sbatch without its dashes; give, "
                    "for example, mem-per-cpu=2G"
                )
            if flag_of_ours := _OURS.get(name):
                raise ConfigurationError(f"--sbatch-option {option!r}: use {flag_of_ours} for that")
            if name in _UNFIT:
                raise ConfigurationError(f"--sbatch-option {option!r} can't be used: {_UNFIT[name]}; leave it out")
            if name == "signal" and "USR2" in option:
                raise ConfigurationError(f"--sbatch-option {option!r}: roles stop at SIGUSR2; give another signal")
            if equals and not option.partition("=")[2]:
                raise ConfigurationError(f"--sbatch-option {option!r} has no value; give one, or leave out the =")

    @property
    def tasks(self) -> int:
        """The tasks of the job: the coordinator, the servers and the workers."""
        return 1 + self.ps + self.workers

    @property
    def jobs(self) -> dict[str, int]:
        """The number of tasks by job, in the order of the ranks: the coordinator runs on the first node."""
        return {"chief": 1, "ps": self.ps, "worker": self.workers}


def _check_line(flag: str, value: str) -> None:
    if not value.isprintable() or '"' in value or "\\" in value:
        raise ConfigurationError(
            f"{flag} is {value!r}, but a line of a job script has no quotes, backslashes or control characters; leave "
            "them out"
        )


def directives(options: SlurmOptions, run: str) -> list[str]:
    """Return the options of sbatch, each with its value."""
    given = {name: getattr(options, name) for name in ("nodes", "time", "partition", "account")}
    return [
        f'job-name="{options.job_name}"',
        f"ntasks={options.tasks}",
        *(f'{name}="{value}"' for name, value in given.items() if value),
        f'output="{run.replace("%", "%%")}/{LOG}"',
        "open-mode=append",
        "no-kill",
        "requeue" if options.requeue else "no-requeue",
        *(_quoted(option) for option in options.sbatch_options),
    ]


def _quoted(option: str) -> str:
    name, equals, value = option.partition("=")
    return f'{name}="{value}"' if equals else name


def job_script(options: SlurmOptions, run: str, python: str, script: str, args: Sequence[str]) -> str:
    """Return the job script for a run whose folder is `run`. ConfigurationError if sbatch can't take that path."""
    _check_line("--state", run)
    task = [
        *("--ps", str(options.ps), "--workers", str(options.workers)),
        *(("--port-base", str(options.port_base)) if options.port_base is not None else ()),
        *(("--requeue",) if options.requeue else ()),
    ]
    security = "export PSCLUSTER_INSECURE=1" if options.insecure else f'export PSCLUSTER_TLS="$run/{TLS}"'
    lines = "\n".join(f"#SBATCH --{directive}" for directive in directives(options, run))
    return f"""#!/bin/bash
# Written by `pscluster slurm`: {options.ps} parameter servers, {options.workers} workers and a coordinator.
{lines}

run={shlex.quote(run)}
python={shlex.quote(python)}
export PSCLUSTER_TOKEN_FILE="$run/{TOKEN}"
{security}

"$python" -m pscluster.launch.slurm.prepare {"--insecure " if options.insecure else ""}"$run" || exit
trap : TERM  # scancel signals this shell, too: it waits for the step, and ends with the coordinator's code
srun --ntasks={options.tasks} --distribution=block --no-kill --kill-on-bad-exit=0 --wait=0 --mpi=none --input=none \\
  ${{SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}} \\
  "$python" -m pscluster.launch.slurm.task {shlex.join(task)} "$run" {shlex.join([script, *args])}
code=$?
[ -f "$run/{EXIT_CODE}" ] && code=$(cat "$run/{EXIT_CODE}")
exit "$code"
"""
