"""The cluster of a Slurm job step, read from the variables that Slurm sets for each of its tasks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pscluster.core.checks import type_of
from pscluster.core.cluster.node_list import expand_counts, expand_nodes, wrong_variable
from pscluster.core.cluster.resolvers import ClusterResolver
from pscluster.core.cluster.spec import ClusterSpec, checked_job
from pscluster.core.errors import ConfigurationError

PORT_RANGE = (20_000, 32_767)
"""Ports that a job may be given: below those from which Linux makes connections."""

_PORTS_A_JOB = 64
_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_COUNTS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
_IN_A_STEP = "srun sets it: start the tasks with `srun --ntasks=4 python train.py` in a job"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a task of the step runs."""

    node: int
    local: int


class SlurmClusterResolver(ClusterResolver):
    """Describes the cluster from the environment of a Slurm job step; as in TensorFlow.

    The tasks of the step take the jobs in the order of `jobs`: with `{"chief": 1, "ps": 2, "worker": 4}`, task 0
    (SLURM_PROCID) is the chief, 1 and 2 are the parameter servers, 3 to 6 the workers. A task's host is the name of its
    node, its port the first one of the job plus its number on that node. Nodes are filled one after the other, which
    `srun --distribution=block` does; another distribution is refused.

    Unless `port_base` is given, the job's first port follows from SLURM_JOB_ID, so that jobs on one node do not
    collide: `port_range` is cut into blocks of 64 ports (more if a node has more tasks), and jobs take them in turn.
    If another program has a task's port nevertheless, that task fails to listen, with an error that names the port.
    Two steps of one job that run at the same time on the same nodes need a different `port_base` each.

    GPUs are Slurm's business (`--gpus-per-task` sets CUDA_VISIBLE_DEVICES), so TensorFlow's `gpus_per_node`,
    `gpus_per_task` and `auto_set_gpu` are not here.

    Args:
        jobs: the number of tasks by job, in order. Default: one chief, one ps, and all others are workers.
        port_base: the port of the first task on each node.
        tasks_per_node: the number of tasks of each node, or of all nodes. Default: what Slurm says.
        rpc_layer: "grpc" or None.
        port_range: the first and the last port that a job may be given where `port_base` is not.
        environ: where the variables are read, at each access.

    Raises:
        ConfigurationError: an argument is invalid; later, if a variable is: the error names it and its value.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int | None = None,
        tasks_per_node: int | Sequence[int] | None = None,
        rpc_layer: str | None = "grpc",
        *,
        port_range: tuple[int, int] = PORT_RANGE,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        super().__init__(None, None, rpc_layer, "")
        self._jobs = None if jobs is None else _checked_jobs(jobs)
        if not isinstance(port_range, Sequence) or len(port_range) != 2:
            raise ConfigurationError(f"port_range is {port_range!r}; give two ports, such as {PORT_RANGE}")
        low, high = port_range
        for name, port in (("port_base", port_base), ("port_range", low), ("port_range", high)):
            if port is not None and port not in range(1, 65_536):
                raise ConfigurationError(
                    f"{name} has the port {port!r}; give one from 1 to 65535, such as {low or 8888}"
                )
        if high < low:
            raise ConfigurationError(f"port_range is {low} to {high}; give a rising one, such as {PORT_RANGE}")
        self._port_base, self._port_range, self._tasks_per_node = port_base, (low, high), tasks_per_node
        self._environ = environ

    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of the step's tasks. ConfigurationError if a variable is missing or wrong."""
        nodes, places, first = self._nodes(), self._places(), self._first_port()
        addresses = iter([f"{nodes[place.node]}:{first + place.local}" for place in places])
        cluster = {job: [next(addresses) for _ in range(count)] for job, count in self._counts(len(places)).items()}
        return ClusterSpec(cluster, source="SlurmClusterResolver")

    def get_task_info(self) -> tuple[str, int]:
        """Return this process's job and its index there. ConfigurationError if a variable is missing or wrong."""
        places = self._places()
        rank = self._whole("SLURM_PROCID", len(places))
        self._check_place(rank, places[rank])
        index = rank
        for job, count in self._counts(len(places)).items():
            if index < count:
                return job, index
            index -= count
        raise AssertionError(f"task {rank} of {len(places)} is in no job")

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return a task's address, by default this process's. ConfigurationError if there is no such task."""
        own = self.get_task_info() if task_type is None or task_id is None else (task_type, task_id)
        job, index = own[0] if task_type is None else task_type, own[1] if task_id is None else task_id
        return self._url(self.cluster_spec().task_address(job, index), rpc_layer)

    def _config(self) -> Mapping[str, object]:
        job, index = self.get_task_info()
        return {"task": {"type": job, "index": index}}

    def _nodes(self) -> list[str]:
        variable, text = self._first_of(_NODE_LISTS, "n[01-03]")
        return expand_nodes(text, variable)

    def _places(self) -> list[_Place]:
        nodes, given = len(self._nodes()), self._tasks_per_node
        if given is None:
            variable, text = self._first_of(_COUNTS, "2(x3)")
            counts = expand_counts(text, variable)
        else:
            variable, counts = "tasks_per_node", [given] * nodes if isinstance(given, int) else list(given)
            text = str(given)
            if not all(isinstance(count, int) and count > 0 for count in counts):
                raise ConfigurationError(f"tasks_per_node is {given}; give whole numbers from 1, such as 2 or [2, 1]")
        if len(counts) != nodes:
            raise wrong_variable(variable, text, f"the step has {nodes} node{'s' * (nodes != 1)}", f"1(x{nodes})")
        places = [_Place(node, local) for node, count in enumerate(counts) for local in range(count)]
        name, number = self._first_of(_TASKS, str(len(places)))
        if number != str(len(places)):
            raise wrong_variable(name, number, f"by {variable} the step has {len(places)} tasks", str(len(places)))
        return places

    def _counts(self, tasks: int) -> dict[str, int]:
        """Return the number of tasks by job."""
        if self._jobs is None:
            if tasks < 3:
                raise ConfigurationError(
                    f"the step has {tasks} task{'s' * (tasks != 1)}, but a cluster needs a chief, a ps and a worker: "
                    "start it with `srun --ntasks=3`, or more"
                )
            return {"chief": 1, "ps": 1, "worker": tasks - 2}
        if (wanted := sum(self._jobs.values())) != tasks:
            raise ConfigurationError(
                f"jobs has {wanted} tasks ({self._jobs}), but the step has {tasks} (SLURM_STEP_NUM_TASKS): start it "
                f"with `srun --ntasks={wanted}`, or give as many jobs"
            )
        return self._jobs

    def _check_place(self, rank: int, place: _Place) -> None:
        """Raise ConfigurationError if Slurm has placed this task otherwise."""
        for variable, expected in (("SLURM_NODEID", place.node), ("SLURM_LOCALID", place.local)):
            found = self._environ.get(variable, str(expected))
            if found != str(expected):
                raise ConfigurationError(
                    f"{variable} is {found!r} for task {rank} (SLURM_PROCID), but with nodes filled one after the "
                    f"other it is {expected}; start the step with `srun --distribution=block`"
                )

    def _first_port(self) -> int:
        (low, high), most = self._port_range, max(place.local for place in self._places()) + 1
        first = self._port_base
        if first is None:
            block = -(-most // _PORTS_A_JOB) * _PORTS_A_JOB
            blocks = (high - low + 1) // block
            if not blocks:
                raise ConfigurationError(
                    f"port_range is {low} to {high}, but a job with {most} tasks on a node takes {block} ports; give "
                    "a wider one, or port_base"
                )
            first = low + self._whole("SLURM_JOB_ID") % blocks * block
        if first + most - 1 > 65_535:
            raise ConfigurationError(
                f"port_base is {first}, but a node has {most} tasks, and ports end at 65535; give {65_536 - most} at "
                "most"
            )
        return first

    def _first_of(self, variables: Sequence[str], right: str) -> tuple[str, str]:
        for variable in variables:
            if text := self._environ.get(variable):
                return variable, text
        raise wrong_variable(variables[0], None, _IN_A_STEP, right)

    def _whole(self, variable: str, end: int | None = None) -> int:
        text = self._environ.get(variable)
        if text is None:
            raise wrong_variable(variable, None, _IN_A_STEP, "0")
        if not (text.isascii() and text.isdecimal() and len(text) < 19 and (end is None or int(text) < end)):
            limit = f"the step's tasks are 0 to {end - 1}" if end is not None else "it must be a whole number"
            raise wrong_variable(variable, text, limit, "0")
        return int(text)


def _checked_jobs(jobs: Mapping[str, int]) -> dict[str, int]:
    if not isinstance(jobs, Mapping):
        raise TypeError(f"jobs is {type_of(jobs)}; give the number of tasks by job, such as {{'ps': 2, 'worker': 4}}")
    for job, count in jobs.items():
        checked_job(job, "SlurmClusterResolver: a key of jobs")
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ConfigurationError(f"jobs has {count!r} tasks for {job!r}; give a whole number from 0, such as 2")
    return {job: count for job, count in jobs.items() if count}
