"""Roles started by hand, in any order: each waits for those it needs and names them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from tests.roles.processes import DONE, JOB, Roles, environ, free_addresses, make_cluster, run, tf_config

PYTHON = (sys.executable, "-m")


def as_mapping(cluster: dict[str, list[str]]) -> dict[str, dict[str, str]]:
    """The same cluster with each job as a mapping of index to address."""
    return {job: {str(index): address for index, address in enumerate(tasks)} for job, tasks in cluster.items()}


@pytest.mark.parametrize("form", ["lists", "mappings"])
def test_wrong_order(form: str, tmp_path: Path) -> None:
    """With the coordinator first, then workers, and the servers last, each names what is missing, and the script
    completes."""
    lists = make_cluster(ps=2, workers=2)
    ps, workers = lists["ps"], lists["worker"]
    with Roles(lists if form == "lists" else as_mapping(lists), tmp_path) as roles:
        coordinator = roles.coordinator(JOB, "--steps", "20")
        waiting = coordinator.wait_for("waiting for")
        assert all(f"ps {i} at {ps[i]}" in waiting and f"worker {i} at {workers[i]}" in waiting for i in range(2))
        started = [roles.worker(0), roles.worker(1)]
        for process in started:
            waiting = process.wait_for("waiting for")
            assert all(f"ps {i} at {ps[i]}" in waiting for i in range(2))
            assert "worker 0 at" not in waiting, "a worker needs no other worker"
        coordinator.wait_for(r"waiting for ps 0 at \S+, ps 1 at \S+$")
        started += [roles.ps(0), roles.ps(1)]
        for process in started[2:]:
            process.wait_for("parameter server . serving on")
        assert "with ['--steps', '20']" in coordinator.wait_for(DONE)
        assert coordinator.wait() == 0
        for process in started:
            process.wait_for("the job is over: the coordinator's script has ended")
            assert process.is_running, "it waits for the next coordinator"


def test_python_m(tmp_path: Path) -> None:
    """`python -m pscluster.ps`, `.worker` and `.coordinator` are the commands of the same names."""
    with Roles(make_cluster(), tmp_path) as roles:
        script = roles.script(JOB)
        coordinator = roles.start("pscluster.coordinator", script, "-x", role="chief", command=PYTHON)
        coordinator.wait_for("waiting for ps 0")
        worker = roles.start("pscluster.worker", "--until-done", role="worker", command=PYTHON)
        worker.wait_for("waiting for ps 0")
        ps = roles.start("pscluster.ps", "--until-done", role="ps", command=PYTHON)
        assert "with ['-x']" in coordinator.wait_for(DONE)
        assert [process.wait() for process in (coordinator, worker, ps)] == [0, 0, 0]


def test_partial_knowledge(tmp_path: Path) -> None:
    """A role needs no more than docs/tf_config.md says: a server itself, a worker itself and the servers."""
    whole = make_cluster(ps=2, workers=2)
    everyone = as_mapping(whole)
    with Roles(whole, tmp_path) as roles:
        coordinator = roles.coordinator(JOB)
        parts = [
            ({"ps": {"1": everyone["ps"]["1"]}}, "ps", 1),
            ({"worker": {"1": everyone["worker"]["1"]}, "ps": everyone["ps"]}, "worker", 1),
            ({"worker": {"0": everyone["worker"]["0"]}, "ps": everyone["ps"]}, "worker", 0),
            ({"ps": {"0": everyone["ps"]["0"]}}, "ps", 0),
        ]
        for known, role, index in parts:
            roles.cluster = known
            roles.start(role, role=role, index=index)
        coordinator.wait_for(DONE)
        assert coordinator.wait() == 0


def test_nobody_waits_for_an_evaluator(tmp_path: Path) -> None:
    """A cluster that lists an evaluator works without it, and `pscluster evaluator` runs its script beside it."""
    cluster = {**make_cluster(), "evaluator": free_addresses(1)}
    with Roles(cluster, tmp_path) as roles:
        roles.ps()
        roles.worker()
        coordinator = roles.coordinator(JOB)
        coordinator.wait_for(DONE)
        assert "evaluator" not in coordinator.output
        assert coordinator.wait() == 0
        script = roles.script(
            "import sys\n"
            "from pscluster.coordinator import TFConfigClusterResolver\n"
            "print(TFConfigClusterResolver().task_type, sys.argv[1:])\n",
            "evaluator.py",
        )
        evaluator = roles.start("evaluator", script, "--once", role="evaluator")
        assert evaluator.wait() == 0
        assert evaluator.output.splitlines()[-1] == "evaluator ['--once']"


@pytest.mark.parametrize("role", ["worker", "chief"])
def test_deadline(role: str, tmp_path: Path) -> None:
    """When the time is over it exits with 1, and one line names the missing roles, what was tried and for how long."""
    cluster = make_cluster(ps=2, workers=1)
    (tmp_path / "script.py").write_text(JOB)
    command = ["worker"] if role == "worker" else ["coordinator"]
    script = [] if role == "worker" else [str(tmp_path / "script.py")]
    code, output = run(*command, "--connect-timeout", "2", *script, config=tf_config(cluster, role))
    assert code == 1, output
    errors = [line for line in output.splitlines() if line.startswith("pscluster: ")]
    assert len(errors) == 1, output
    (error,) = errors
    assert "Traceback" not in output
    missing = [("ps", 0), ("ps", 1)] + ([("worker", 0)] if role == "chief" else [])
    assert f"gave up after 2 s: {len(missing)} of {len(missing)} tasks are missing" in error
    for job, index in missing:
        assert f"{job} {index} at {cluster[job][index]}: nothing is listening there" in error


def test_deadline_names_only_the_missing(tmp_path: Path) -> None:
    """A role that is up is not listed as missing."""
    cluster = make_cluster(ps=2)
    with Roles(cluster, tmp_path) as roles:
        roles.ps(1).wait_for("serving on")
        worker = roles.worker(0, "--connect-timeout", "2")
        assert worker.wait() == 1
        last = worker.output.splitlines()[-1]
        assert "1 of 2 tasks are missing" in last
        assert f"ps 0 at {cluster['ps'][0]}" in last
        assert "ps 1" not in last


def test_long_wait_is_a_warning(tmp_path: Path) -> None:
    """A long wait is a warning with what was seen, visible even if only warnings are shown."""
    patched = tmp_path / "impatient.py"
    patched.write_text(
        "from pscluster.core.transport import channels\n"
        "channels._REMIND_SECONDS = 0.2\n"
        "from pscluster.worker.main import main\n"
        "main()\n"
    )
    cluster = make_cluster()
    with Roles(cluster, tmp_path) as roles:
        worker = roles.start(str(patched), "--log-level", "warning", role="worker", command=(sys.executable,))
        line = worker.wait_for("still waiting")
        assert re.search(rf"worker 0: .*for ps 0 at {re.escape(cluster['ps'][0])}: nothing is listening there", line)


def test_rpc_layer_is_accepted(tmp_path: Path) -> None:
    """`rpc_layer` and keys of other systems in TF_CONFIG change nothing."""
    cluster = make_cluster()
    config = json.loads(tf_config(cluster, "ps"))
    config |= {"rpc_layer": "grpc", "environment": "cloud", "model_dir": "/nowhere"}
    with Roles(cluster, tmp_path) as roles:
        roles.env = environ(json.dumps(config))
        roles.ps().wait_for("serving on")
