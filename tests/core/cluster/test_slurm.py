"""The cluster of a Slurm job step: its notations, who is which task, and one line for each mistake."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pscluster.coordinator import SlurmClusterResolver
from pscluster.core.cluster.node_list import MAX_NODES, expand_counts, expand_nodes
from pscluster.core.errors import ConfigurationError

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "n[01-02],m1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
}
JOBS = {"chief": 1, "ps": 1, "worker": 3}


def resolver(environ: Mapping[str, str] = STEP, **options: Any) -> SlurmClusterResolver:
    return SlurmClusterResolver(JOBS, environ=environ, **options)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vm", ["vm"]),
        ("n[01-03,7],m1", ["n01", "n02", "n03", "n7", "m1"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("r[1-2]n[0-1]-ib", ["r1n0-ib", "r1n1-ib", "r2n0-ib", "r2n1-ib"]),
        ("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"]),
    ],
)
def test_node_lists(text: str, expected: list[str]) -> None:
    """As `scontrol show hostnames` prints them."""
    assert expand_nodes(text) == expected


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 30), st.integers(1, 8)), min_size=1, max_size=6))
def test_every_range_is_expanded(ranges: list[tuple[int, int, int]]) -> None:
    """Any ranges, padded to any width, are the names that they were made of."""
    items, names = [], []
    for prefix, (low, length, width) in enumerate(ranges):
        items.append(f"n{prefix}-[{low:0{width}}-{low + length:0{width}}]")
        names += [f"n{prefix}-{number:0{width}}" for number in range(low, low + length + 1)]
    assert expand_nodes(",".join(items)) == names


@given(st.text("n01-,[]", max_size=20) | st.text("12(x),", max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    """Nothing else is raised, and nothing long comes out."""
    for expand in (expand_nodes, expand_counts):
        with contextlib.suppress(ConfigurationError):
            assert 0 < len(expand(text)) <= MAX_NODES


def test_the_cluster_of_a_step() -> None:
    """Tasks fill the nodes in turn, jobs take the tasks in turn, and the ports follow from the job's id."""
    own = resolver()
    first = 20_000 + 7 * 64
    assert own.cluster_spec().as_dict() == {
        "chief": [f"n01:{first}"],
        "ps": [f"n01:{first + 1}"],
        "worker": [f"n02:{first}", f"n02:{first + 1}", f"m1:{first}"],
    }
    assert (own.task_type, own.task_id, own.get_task_info()) == ("worker", 1, ("worker", 1))
    assert own.master() == f"grpc://n02:{first + 1}"
    assert own.master("ps", 0, None) == f"grpc://n01:{first + 1}"
    assert SlurmClusterResolver(environ=STEP).cluster_spec() == own.cluster_spec()
    assert resolver(port_base=8888).cluster_spec().task_address("worker", 1) == "n02:8889"
    assert resolver({**STEP, "SLURM_JOB_ID": "8"}).cluster_spec().task_address("chief", 0) == f"n01:{first + 64}"
    batch = {"SLURM_JOB_NODELIST": "vm", "SLURM_TASKS_PER_NODE": "5", "SLURM_NTASKS": "5", "SLURM_JOB_ID": "7"}
    assert resolver(batch).cluster_spec().task_address("worker", 2) == f"vm:{first + 4}"
    assert resolver(batch, port_range=(3000, 3063)).cluster_spec().task_address("chief", 0) == "vm:3000"


@pytest.mark.parametrize(
    ("variables", "options", "message"),
    [
        ({"SLURM_STEP_NODELIST": "n[1-"}, {}, r'SLURM_STEP_NODELIST is "n\[1-", but it must be a list of nodes'),
        ({"SLURM_STEP_NODELIST": "n[3-1]"}, {}, r"but \[3-1\] is neither a number nor a rising range"),
        ({"SLURM_STEP_NODELIST": "a,b,a"}, {}, "but a may occur only once"),
        ({"SLURM_STEP_NODELIST": "n[1-99999999]"}, {}, "a list has at most 65,536 nodes; write, for example"),
        ({"SLURM_STEP_NODELIST": "n[0-999][0-999]"}, {}, "a list has at most 65,536 nodes"),
        ({"SLURM_STEP_NODELIST": "a"}, {}, r'TASKS_PER_NODE is "2\(x2\),1", but the step has 1 node;'),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x)"}, {}, r'is "2\(x\)", but it must be a list of numbers of tasks'),
        ({"SLURM_STEP_NUM_TASKS": "9"}, {}, 'NUM_TASKS is "9", but by SLURM_STEP_TASKS_PER_NODE the step has 5 tasks'),
        ({"SLURM_PROCID": "5"}, {}, 'SLURM_PROCID is "5", but the step\'s tasks are 0 to 4'),
        ({"SLURM_NODEID": "2"}, {}, "SLURM_NODEID is '2' for task 3 .* `srun --distribution=block`"),
        ({"SLURM_JOB_ID": "x"}, {}, 'SLURM_JOB_ID is "x", but it must be a whole number'),
        ({}, {"port_base": 65535}, "port_base is 65535, but a node has 2 tasks, .* give 65534 at most"),
        ({}, {"port_base": 0}, "port_base has the port 0; give one from 1 to 65535"),
        ({}, {"port_range": (5, 9)}, "port_range is 5 to 9, but a job with 2 tasks on a node takes 64 ports"),
        ({}, {"tasks_per_node": [5, 0, 0]}, "tasks_per_node is .* give whole numbers from 1"),
    ],
)
def test_mistakes(variables: dict[str, str], options: dict[str, Any], message: str) -> None:
    """The error names the variable, what it holds, and a hint."""
    with pytest.raises(ConfigurationError, match=message):
        (own := resolver({**STEP, **variables}, **options)).get_task_info(), own.cluster_spec()


def test_wrong_jobs_and_no_step() -> None:
    """Jobs that are none or too many, and a process that srun has not started."""
    for jobs, message in (
        ({"server": 5}, 'a key of jobs is "server", but the jobs are chief, worker, ps and evaluator'),
        ({"ps": -1}, "jobs has -1 tasks for 'ps'"),
        ({"ps": 2, "worker": 2}, "jobs has 4 tasks .* but the step has 5 .* `srun --ntasks=4`"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            SlurmClusterResolver(jobs, environ=STEP).cluster_spec()
    with pytest.raises(ConfigurationError, match="SLURM_STEP_NODELIST is not set, but srun sets it: start the tasks"):
        resolver({}).cluster_spec()
    with pytest.raises(ConfigurationError, match="SLURM_PROCID is not set"):
        _ = resolver({name: text for name, text in STEP.items() if name != "SLURM_PROCID"}).task_type
