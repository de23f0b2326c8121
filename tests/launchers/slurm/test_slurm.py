"""`pscluster slurm` on a real Slurm with two nodes, whose networks are separate: trains, survives, ends, runs again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launchers.slurm.slurm_cluster import missing, slurm_cluster
from tests.waiting import until

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

ROOT = Path(__file__).resolve().parents[3]
DIGITS = str(ROOT / "examples" / "digits.py")
PSCLUSTER = str(Path(sys.executable).with_name("pscluster"))


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    with slurm_cluster() as env:
        yield {**os.environ, **env, "PSCLUSTER_LOG_LEVEL": "INFO"}


def call(slurm: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=100)


class Job:
    """A job that was submitted with two servers and four workers on both nodes."""

    def __init__(self, slurm: dict[str, str], folder: Path, *command: str) -> None:
        options = ("--ps", "2", "--workers", "4", "--nodes", "2", "--state", str(folder))
        done = call(slurm, PSCLUSTER, "slurm", *options, *command)
        found = re.search(r"job (\d+): 7 tasks\nlog: (\S+)", done.stdout)
        assert found, done
        self.slurm, self.id, self.path = slurm, found[1], Path(found[2])

    @property
    def log(self) -> str:
        return self.path.read_text() if self.path.exists() else ""

    def until(self, text: str) -> None:
        until(lambda: text in self.log, f"the log has {text!r}", lambda: self.log[-3000:])

    def until_more_than(self, count: int, pattern: str) -> None:
        until(lambda: len(re.findall(pattern, self.log)) > count, f"one more {pattern!r}", lambda: self.log[-3000:])

    def until_ended(self) -> str:
        def show() -> str:
            return call(self.slurm, "scontrol", "show", "job", self.id).stdout

        until(lambda: "EndTime" in show() and not call(self.slurm, "squeue", "--noheader").stdout, "the job ends", show)
        return show()


def pids(folder: Path, role: str) -> list[int]:
    """The processes of a role in runs of this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command, environ = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
        except OSError:
            continue
        if f"-m\0pscluster.{role}\0".encode() in command and str(folder).encode() in environ:
            found.append(int(path.name))
    return found


def test_digits(slurm: dict[str, str], tmp_path: Path) -> None:
    """The example is as accurate as everywhere; `--wait` shows the log, and exits with the job's code."""
    options = ("--ps", "2", "--workers", "4", "--nodes", "2", "--state", str(tmp_path), "--wait")
    done = call(slurm, PSCLUSTER, "slurm", *options, DIGITS)
    assert done.returncode == 0, done
    accuracy = re.search(r"test accuracy (\S+)", done.stdout)
    assert accuracy, done.stdout
    assert float(accuracy[1]) > 0.96
    assert not list(tmp_path.glob("*/tls/ca.key"))


def test_a_refusal_and_a_script_that_fails(slurm: dict[str, str], tmp_path: Path) -> None:
    """Slurm's own message, and nothing is left; a script's code is that of the command."""
    state = tmp_path / "state"
    done = call(slurm, PSCLUSTER, "slurm", "--partition", "none", "--state", str(state), DIGITS)
    assert done.returncode == 1
    assert "pscluster: sbatch refused: invalid partition specified: none" in done.stderr
    assert not list(state.iterdir())
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(7)")
    done = call(slurm, PSCLUSTER, "slurm", "--state", str(state), "--wait", str(script))
    assert done.returncode == 7, done
    assert "FAILED, exit code 7" in done.stderr


def test_a_worker_and_a_server_are_killed_and_the_job_is_cancelled(slurm: dict[str, str], tmp_path: Path) -> None:
    """Both are restarted in place, and used again; scancel ends the coordinator first, and then everything."""
    job = Job(slurm, tmp_path, DIGITS, "--steps", "1000000")
    job.until("step 100/")
    for role, sentence, tasks in (("worker", r"worker . serving on", 4), ("ps", r"parameter server . serving on", 2)):
        os.kill(pids(tmp_path, role)[0], signal.SIGKILL)
        job.until_more_than(tasks, sentence)
    at = len(job.log)
    until(lambda: "steps/s  4 workers up" in job.log[at:], "the job goes on", lambda: job.log[-3000:])
    call(slurm, "scancel", job.id)
    assert "JobState=CANCELLED" in job.until_ended()
    assert "coordinator WARNING stopped by SIGINT before the script had ended" in job.log
    assert job.log.count("the job is over: the coordinator was stopped") == 6
    assert not [pid for role in ("ps", "worker", "coordinator") for pid in pids(tmp_path, role)]


def test_requeue(slurm: dict[str, str], tmp_path: Path) -> None:
    """The script goes on with what the servers have saved."""
    job = Job(slurm, tmp_path, "--requeue", DIGITS, "--steps", "6000")
    job.until("step 100/6000")
    call(slurm, "scontrol", "requeue", job.id)
    until(lambda: not pids(tmp_path, "ps"), "the servers have saved", lambda: job.log[-3000:])

    def begun() -> bool:
        call(slurm, "scontrol", "update", f"jobid={job.id}", "starttime=now")  # rather than in two minutes
        return "resuming a job with 4 variables" in job.log

    until(begun, "it runs again", lambda: job.log[-3000:])
    assert "JobState=COMPLETED" in job.until_ended()
    assert "step 100/6000" in job.log
    assert "test accuracy 0.9" in job.log
