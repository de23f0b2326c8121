"""The launcher for Slurm without Slurm: the job script, what a task runs, and one sentence for each mistake."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path

import pytest
from tests.roles.processes import run

from pscluster.core.cluster.spec import ClusterSpec
from pscluster.core.cluster.tf_config import Task
from pscluster.core.errors import ConfigurationError
from pscluster.launch.slurm.commands import JobState, SlurmError
from pscluster.launch.slurm.job_script import SlurmOptions, job_script
from pscluster.launch.slurm.task import adopt_state, check_port, role_command, task_environ

CLUSTER = ClusterSpec({"chief": ["n1:20000"], "ps": ["n1:20001"], "worker": ["n2:20000"]})


def test_the_job_script() -> None:
    """It asks for one task per role, quotes what the user gave, and is valid bash."""
    options = SlurmOptions(2, 3, "a b", nodes="2", time="1:00:00", requeue=True, sbatch_options=("mem=2G", "exclusive"))
    text = job_script(options, "/runs/it's 5%", "/usr/bin/python3", "/job/train.py", ["--name", "$HOME; it's"])
    lines = text.splitlines()
    asked = ('job-name="a b"', "ntasks=6", 'nodes="2"', 'time="1:00:00"', "no-kill", "requeue", 'mem="2G"', "exclusive")
    assert {f"#SBATCH --{option}" for option in asked} <= set(lines)
    assert '#SBATCH --output="/runs/it\'s 5%%/job.log"' in lines
    assert "/job/train.py --name '$HOME; it'\"'\"'s'" in text
    assert "PSCLUSTER_TLS=" in text
    assert "PSCLUSTER_INSECURE" not in text
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    plain = job_script(SlurmOptions(1, 1, "x", insecure=True), "/runs/x", "python", "train.py", [])
    assert "export PSCLUSTER_INSECURE=1" in plain
    assert "#SBATCH --no-requeue" in plain


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--mem=2G", "must be a long option of sbatch without its dashes"),
        ("nodes=2", "use --nodes for that"),
        ("array=1-3", "can't be used: a run is one job; leave it out"),
        ("mem=", "has no value; give one, or leave out the ="),
        ("signal=USR2@60", "roles stop at SIGUSR2; give another signal"),
        ("comment=a\n#SBATCH --x", "no quotes, backslashes or control characters; leave them out"),
    ],
)
def test_options_that_are_refused(option: str, message: str) -> None:
    """Before anything is written."""
    with pytest.raises(ConfigurationError, match=message):
        SlurmOptions(1, 1, "x", sbatch_options=(option,))


@pytest.mark.parametrize(
    ("text", "final", "code"),
    [
        ("JobId=7 JobState=RUNNING Reason=None ExitCode=0:0", False, 1),
        ("JobId=7 JobState=COMPLETED Reason=None ExitCode=0:0", True, 0),
        ("JobId=7 JobState=FAILED Reason=NonZeroExitCode ExitCode=7:0", True, 7),
        ("JobId=7 JobState=CANCELLED Reason=None ExitCode=0:15", True, 143),
        ("JobId=7 JobState=PREEMPTED Reason=None Requeue=1 ExitCode=0:0", False, 1),
        ("JobId=7 JobState=PREEMPTED Reason=None Requeue=0 ExitCode=0:0", True, 1),
        ("JobId=7 JobState=TIMEOUT Reason=TimeLimit ExitCode=0:0", True, 1),
    ],
)
def test_what_slurm_says_of_a_job(text: str, final: bool, code: int) -> None:
    """Its end, and the exit code that `--wait` ends with."""
    state = JobState.parse(text)
    assert (state.is_final, state.exit_code) == (final, code)
    with pytest.raises(SlurmError, match="does not describe a job"):
        JobState.parse("slurm is down")


def test_a_server_finds_its_state_on_another_node(tmp_path: Path) -> None:
    """The newest folder of that server gets the name of its new address; those of others stay."""
    (tmp_path / "state" / "ps-0-n7-20001").mkdir(parents=True)
    (tmp_path / "state" / "ps-10-n7-20002").mkdir()
    command = role_command(Task("ps", 0), CLUSTER, tmp_path, "train.py", [])
    assert command[-2:] == ["--state-dir", str(tmp_path / "state")]
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["ps-0-n1-20001", "ps-10-n7-20002"]
    adopt_state(tmp_path / "state", 0, "n1:20001")
    assert role_command(Task("chief", 0), CLUSTER, tmp_path, "train.py", ["-x"])[-2:] == ["train.py", "-x"]


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task says which port it is, why it is this one, and how to choose others."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        cluster = ClusterSpec({"worker": [f"n1:{other.getsockname()[1]}"]})
        with pytest.raises(ConfigurationError, match=r"of n1, which SLURM_JOB_ID 7 gives to worker 0, .* --port-base"):
            check_port(Task("worker", 0), cluster)


def commands(folder: Path, sbatch: str) -> dict[str, str]:
    """A PATH with this sbatch and nothing else."""
    folder.mkdir()
    if sbatch:
        (folder / "sbatch").write_text(f"#!/bin/sh\n{sbatch}\n")
        (folder / "sbatch").chmod(0o755)
    return {"PATH": str(folder)}


@pytest.mark.parametrize(
    ("sbatch", "code", "message"),
    [
        ("", 2, "sbatch is not on the PATH: run this on a login node"),
        (
            "echo 'sbatch: error: invalid partition' >&2; exit 1",
            1,
            "sbatch refused: invalid partition; nothing was submitted: correct what",
        ),
        ("exec /bin/sleep 60", 1, "sbatch did not answer within 1 s: .* `squeue --me` shows whether"),
    ],
)
def test_a_slurm_that_is_absent_or_refuses(
    sbatch: str, code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says so; only a run that may have been submitted keeps its folder."""
    script = tmp_path / "train.py"
    script.write_text("")
    for name, value in commands(tmp_path / "bin", sbatch).items():
        monkeypatch.setenv(name, value)
    state = tmp_path / "state"
    found, output = run("slurm", "--timeout", "1", "--state", str(state), str(script))
    assert found == code, output
    assert re.search(message, output)
    assert bool(list(state.glob("*"))) == ("sleep" in sbatch)


def test_submitting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder and its script are the user's alone, the token is in a file, and Slurm never sees a secret."""
    script, seen = tmp_path / "train.py", tmp_path / "seen"
    script.write_text("")
    env = commands(tmp_path / "bin", f"/usr/bin/env > {seen}; echo '7;cluster'")
    monkeypatch.setenv("PATH", env["PATH"])
    monkeypatch.setenv("PSCLUSTER_TOKEN", "a-secret-of-another-cluster-0123456789")
    state = tmp_path / "state"
    assert run("slurm", "--dry-run", "--state", str(state), str(script))[0] == 0
    assert not state.exists()
    code, output = run("slurm", "--ps", "2", "--workers", "3", "--state", str(state), str(script))
    assert code == 0, output
    (folder,) = state.iterdir()
    assert "submitted job 7: 6 tasks" in output
    assert f"log: {folder}/job.log\ncancel: scancel 7" in output
    modes = {path.name: oct(os.stat(path).st_mode & 0o777) for path in (folder, folder / "job.sh", folder / "token")}
    assert modes == {folder.name: "0o700", "job.sh": "0o700", "token": "0o600"}
    assert "secret" not in seen.read_text()


def test_the_environment_of_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many threads as CPUs, a free port for each task of a node, and functions from the script's folder."""
    given = (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "PSCLUSTER_DATA_PORT",
        "PSCLUSTER_FUNCTIONS_FROM",
        "PYTHONUNBUFFERED",
    )
    for name in given:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    monkeypatch.setenv("MKL_NUM_THREADS", "1")
    monkeypatch.setenv("PSCLUSTER_METRICS_PORT", "9000")
    env = task_environ(Task("worker", 0), CLUSTER, str(tmp_path / "train.py"))
    assert [env.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONUNBUFFERED")] == ["4", "1", "1"]
    assert (env["PSCLUSTER_METRICS_PORT"], env["PSCLUSTER_DATA_PORT"]) == ("0", "0")
    assert str(tmp_path) in env["PSCLUSTER_FUNCTIONS_FROM"].split(os.pathsep)
    assert '"type": "worker"' in env["TF_CONFIG"]
    monkeypatch.setenv("PSCLUSTER_DATA_PORT", "off")
    assert task_environ(Task("worker", 0), CLUSTER, "x.py")["PSCLUSTER_DATA_PORT"] == "off"
    monkeypatch.setenv("PSCLUSTER_DATA_PORT", "many")
    with pytest.raises(ConfigurationError, match="many"):
        task_environ(Task("worker", 0), CLUSTER, "x.py")
