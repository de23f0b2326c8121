"""Slurm's own commands, each within a deadline, and what they answer."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pscluster.core.cluster.spec import COORDINATOR_VARIABLE, VARIABLE
from pscluster.core.display.sanitize import shown
from pscluster.core.errors import ConfigurationError, PsClusterError
from pscluster.core.role.options import ADVERTISE_VARIABLE, TASK_VARIABLE
from pscluster.core.security.tls import INSECURE_VARIABLE, SERVER_ONLY_VARIABLE, TLS_VARIABLE
from pscluster.core.security.tokens import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE

logger = logging.getLogger(__name__)

STEP_SECONDS = 5.0
"""For commands inside a job: Slurm's SIGKILL follows 30 s after its SIGTERM."""

_FINAL = frozenset(("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"))


class SlurmError(PsClusterError):
    """Slurm refused a command, or did not answer in time."""


@dataclass(frozen=True, slots=True)
class JobState:
    """What Slurm says of a job."""

    name: str
    reason: str
    code: int
    signal_number: int
    requeues: bool = False  # after a preemption, or the failure of a node

    @property
    def is_final(self) -> bool:
        """Return whether the job has ended, and does not run again."""
        return self.name in _FINAL or (self.name in ("PREEMPTED", "NODE_FAIL") and not self.requeues)

    @property
    def exit_code(self) -> int:
        """The exit code for the job: its own, 128 + n after signal n; 1 if it has none, but did not complete."""
        code = 128 + self.signal_number if self.signal_number else self.code
        return code or (0 if self.name == "COMPLETED" else 1)

    @classmethod
    def parse(cls, text: str) -> JobState:
        """Read the output of `scontrol show job`. SlurmError if it does not describe a job."""
        found = dict(re.findall(r"\b(JobState|Reason|ExitCode|Requeue)=(\S+)", text))
        code = re.fullmatch(r"(\d+):(\d+)", found.get("ExitCode", "0:0"))
        if "JobState" not in found or code is None:
            raise SlurmError(f"scontrol answered {shown(text[:200])!r}, which does not describe a job")
        return cls(
            found["JobState"], found.get("Reason", "None"), int(code[1]), int(code[2]), found.get("Requeue") == "1"
        )


def check_installed(command: str = "sbatch") -> None:
    """Raise ConfigurationError if Slurm's commands are not on the PATH."""
    if shutil.which(command) is None:
        raise ConfigurationError(
            f"{command} is not on the PATH: run this on a login node of the Slurm cluster, or install Slurm's commands "
            "(on Debian, apt-get install slurm-client); --dry-run prints the job script without them"
        )


def run_command(command: Sequence[str], timeout: float, env: Mapping[str, str] | None = None) -> str:
    """Return what a command of Slurm's prints. SlurmError with its message if it fails, or takes too long."""
    check_installed(command[0])
    try:
        done = subprocess.run(  # noqa: S603 (Slurm's commands, without a shell)
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, env=env, check=False
        )
    except subprocess.TimeoutExpired:
        raise SlurmError(
            f"{command[0]} did not answer within {timeout:g} s: Slurm's controller is down or unreachable (`scontrol "
            "ping` shows which); try again later, or give it longer with --timeout"
        ) from None
    if done.returncode:
        said = " | ".join(line.removeprefix(f"{command[0]}: error: ") for line in done.stderr.strip().splitlines())
        raise SlurmError(f"{command[0]} refused: {shown(said) or f'exit code {done.returncode}'}")
    return done.stdout


def submit(script: str, timeout: float) -> str:
    """Submit a job script, and return the job's id. Raises as `run_command`."""
    # sbatch sends the environment to Slurm, which stores it; and SBATCH_ variables overrule the script's lines.
    private = {TOKEN_VARIABLE, TOKEN_FILE_VARIABLE, TLS_VARIABLE, SERVER_ONLY_VARIABLE, INSECURE_VARIABLE, VARIABLE}
    private |= {COORDINATOR_VARIABLE, TASK_VARIABLE, ADVERTISE_VARIABLE}
    private |= {f"SBATCH_{name}" for name in ("OUTPUT", "ERROR", "JOB_NAME", "NO_KILL", "OPEN_MODE", "EXPORT", "WAIT")}
    private |= {f"SBATCH_{name}" for name in ("REQUEUE", "NO_REQUEUE", "ARRAY_INX", "DISTRIBUTION", "TEST_ONLY")}
    env = {name: value for name, value in os.environ.items() if name not in private}
    answer = run_command(["sbatch", "--parsable", "--export=ALL", script], timeout, env)
    return answer.strip().partition(";")[0]


def job_state(job: str, timeout: float) -> JobState:
    """Return the state of a job. Raises as `run_command`."""
    return JobState.parse(run_command(["scontrol", "show", "job", job], timeout))


def is_cancelled() -> bool:
    """Return whether this job was cancelled, or ran out of time, rather than being about to run again."""
    try:
        name = job_state(os.environ["SLURM_JOB_ID"], STEP_SECONDS).name
    except (ConfigurationError, SlurmError) as error:
        logger.warning("can't tell whether the job will run again; assuming that it will: %s", error)
        return False
    return name in ("CANCELLED", "TIMEOUT", "DEADLINE")


def signal_step(number: signal.Signals) -> None:
    """Send a signal to all tasks of this job step, which this one ignores; log it if that fails."""
    signal.signal(number, signal.SIG_IGN)
    step = f"{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_STEP_ID', '0')}"
    try:
        run_command(["scancel", f"--signal={number.name.removeprefix('SIG')}", step], STEP_SECONDS)
    except (ConfigurationError, SlurmError) as error:
        logger.warning("can't tell the other tasks that the job is ending: %s; scancel %s ends them", error, step)
