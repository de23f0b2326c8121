"""A cluster on Ray: each parameter server and worker is an actor, the coordinator is this process.

Supervised like a local cluster, see `SupervisedCluster`, with actors instead of processes of this machine, see
`actors`. A placement group reserves the room of all tasks before the first one is started; each worker that is added
later has one of its own. Ray can't make a group smaller: the room of the first tasks stays reserved for them, also
while there are fewer workers.

What can be lost: when a worker's actor or node dies, the functions in flight, which the coordinator schedules again. A
parameter server whose actor dies comes back on the same node, at the same port, with what `durability` says. One whose
node is gone comes back elsewhere: with a `state_dir` of all nodes it registers there, and the job goes on; without, it
is empty, the job fails, and the next one on this cluster finds the server. When this process dies, so do its actors.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from pscluster.coordinator.job.settings import process_options
from pscluster.coordinator.local.addresses import Addresses
from pscluster.coordinator.local.environment import THREADS_VARIABLES, role_environ
from pscluster.coordinator.local.scaling import ScalableCluster
from pscluster.coordinator.local.tasks import Phase, RestartPolicy, TaskKey, task_name
from pscluster.coordinator.local.temp_folder import OwnFolder
from pscluster.core import checks
from pscluster.core.checks import configuration_errors
from pscluster.core.cluster.addresses import is_loopback, join_address
from pscluster.core.cluster.spec import ClusterSpec
from pscluster.core.cluster.tf_config import Task, TFConfig
from pscluster.core.errors import ConfigurationError, MisuseError
from pscluster.core.functions.policy import FUNCTIONS_VARIABLE
from pscluster.core.ids import VERSION
from pscluster.core.role.options import GRACE_SECONDS, JOIN_VARIABLES
from pscluster.core.role.process import LOG_FORMATS, LOG_LEVELS
from pscluster.core.security.tls import INSECURE_VARIABLE, SERVER_ONLY_VARIABLE, TLS_VARIABLE, load_tls
from pscluster.core.security.tokens import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, load_token, new_token
from pscluster.launch.ray import connection
from pscluster.launch.ray.actors import Actors
from pscluster.launch.ray.connection import PLACEMENTS, RayClusterError, import_ray
from pscluster.launch.ray.role_actor import RoleActor
from pscluster.ps.storage.options import DURABILITY_VARIABLE, STATE_VARIABLE

_CPU = {"CPU": 1.0}
_PRIVATE = {
    TOKEN_VARIABLE,
    TOKEN_FILE_VARIABLE,
    TLS_VARIABLE,
    SERVER_ONLY_VARIABLE,
    DURABILITY_VARIABLE,
    STATE_VARIABLE,
    *JOIN_VARIABLES,
}
_CONCURRENCY = 4  # of an actor's methods: one waits, the others start, signal and clean


class RayCluster(ScalableCluster):
    """Parameter servers and workers as actors of a Ray cluster; a context manager and a cluster resolver.

    Attributes:
        token: the cluster's token.
        tls: the certificates of the coordinator, once the cluster is started; None without TLS.
        task_type, task_id, rpc_layer, environment: as for any resolver; this process is the chief.
    """

    noun = "Ray cluster"
    error = RayClusterError
    _processes: Actors

    def __init__(
        self,
        workers: int = 1,
        ps: int = 1,
        *,
        address: str = "auto",
        worker_resources: Mapping[str, float] = _CPU,
        ps_resources: Mapping[str, float] = _CPU,
        placement: str = "SPREAD",
        runtime_env: Mapping[str, Any] | None = None,
        timeout: float = 60.0,
        max_restarts: int = 10,
        env: Mapping[str, str] | None = None,
        log_level: str = "WARNING",
        log_format: str = "text",
        token: str | None = None,
        tls: bool | None = None,
        grace: float = GRACE_SECONDS + 5.0,
        durability: str | None = None,
        state_dir: str | None = None,
        allow_pickle: bool | None = None,
    ) -> None:
        """Check the arguments; `start()` or `with` starts the actors.

        Args:
            workers, ps: how many.
            address: of the Ray cluster: "auto", the one of this machine, or HOST:PORT. A process that is connected to
                Ray already, such as a task of Ray's, uses that connection.
            worker_resources, ps_resources: what Ray reserves for each, such as `{"CPU": 4, "GPU": 1}`.
            placement: a strategy of Ray's placement groups: "SPREAD" (on as many nodes as possible), "PACK",
                "STRICT_SPREAD", "STRICT_PACK".
            runtime_env: the actors' environment, as Ray takes it: as `ray.init` does, or, if this process is connected
                to Ray already, as an actor's options do, which know no folders of this machine.
            timeout: seconds for Ray to find room for all tasks, and to start their actors.
            max_restarts: restarts in a row of one task. A task that stays up for ten minutes resets the count.
            env: variables to add to the environment of the tasks' processes. They also have the variables of this
                process that begin with PSCLUSTER_. OMP_NUM_THREADS is the number of CPUs of a worker, unless it is
                here.
            log_level, log_format: of the tasks' processes; Ray shows their logs here.
            token: the cluster token. Default: a random one.
            tls: whether the tasks use mutual TLS, with certificates made for this cluster. Default: unless this
                machine's address is loopback.
            grace: seconds that a process has to stop after SIGTERM, before it is killed.
            durability, allow_pickle: as for `LocalCluster`.
            state_dir: where parameter servers keep their state, in a folder of this cluster's, on storage that all
                nodes reach: there a server finds it that comes back on another node. Default: a temporary folder on
                its node, removed with the cluster.

        Raises:
            ConfigurationError: an argument is invalid, or Ray is not installed.
        """
        with configuration_errors():
            workers = checks.whole("workers", workers, at_least=1, at_most=1000)
            ps = checks.whole("ps", ps, at_least=1, at_most=1000)
            max_restarts = checks.whole("max_restarts", max_restarts, at_least=0)
            self._timeout = checks.real("timeout", timeout, kind="number of seconds", above=0)
            grace = checks.real("grace", grace, kind="number of seconds", at_least=0)
            allow_pickle = None if allow_pickle is None else checks.flag("allow_pickle", allow_pickle)
            self._resources = {
                "ps": _checked_resources("ps_resources", ps_resources),
                "worker": _checked_resources("worker_resources", worker_resources),
            }
        if runtime_env is not None and not isinstance(runtime_env, Mapping):
            raise TypeError(f"runtime_env is {checks.type_of(runtime_env)}; give a dict")
        if placement not in PLACEMENTS:
            raise ConfigurationError(f"placement is {placement!r}; give one of {', '.join(PLACEMENTS)}")
        if token is not None:
            checks.text("token", token)
        if state_dir is not None:
            checks.path("state_dir", state_dir)
        if checks.text("log_level", log_level).upper() not in LOG_LEVELS:
            raise ConfigurationError(f"log_level is {log_level!r}; give one of {', '.join(LOG_LEVELS)}")
        if log_format not in LOG_FORMATS:
            raise ConfigurationError(f"log_format is {log_format!r}; give one of {', '.join(LOG_FORMATS)}")
        if state_dir is not None and not os.path.isabs(state_dir):
            raise ConfigurationError(f"state_dir is {state_dir!r}; give an absolute path, the same on all nodes")
        import_ray()
        self._env = {**_inherited(), **role_environ(env or {}, 1, durability, allow_pickle, None)}
        self._threads = [name for name in THREADS_VARIABLES if name not in (env or {})]
        self.token = new_token() if token is None else str(load_token(None, {TOKEN_VARIABLE: token}))
        self.tls = None
        self.allow_pickle = allow_pickle
        self._wants_tls = tls
        self._address, self._placement, self._runtime_env = address, placement, dict(runtime_env or {})
        self._options = ["--exit-with-parent", "--share-port", "--log-level", log_level, "--log-format", log_format]
        self._state_dir = state_dir
        self._id = f"pscluster-ray-{secrets.token_hex(8)}"
        super().__init__({"ps": ps, "worker": workers}, RestartPolicy(max_restarts=max_restarts), grace=grace)
        self._tasks = [(role, index) for role, count in self._counts.items() for index in range(count)]  # at the start
        self._processes = Actors(self, self._changed, self._inbox.put, self._timeout)
        self._is_connected = False  # by this cluster
        self._host = ""  # of this process
        self._own_folder: OwnFolder | None = None
        self._certifying = threading.Lock()
        self._chief: Addresses | None = None
        self._group: Any = None  # the room of `_tasks`
        self._added: dict[TaskKey, Any] = {}  # that of others

    # Starting and stopping

    def _open(self) -> None:
        self._is_connected = connection.connect(self._address, self._timeout, self._runtime_env)
        if connection.has_working_dir(self._runtime_env):
            self._env[FUNCTIONS_VARIABLE] = os.pathsep.join((self._env[FUNCTIONS_VARIABLE], os.curdir))
        self._host = import_ray().util.get_node_ip_address()
        self._chief = Addresses({"chief": 1}, self._host)
        is_near = is_loopback(self._host)
        if self._wants_tls is False and not is_near and not process_options().insecure:
            raise ConfigurationError(
                f"tls is False, but the tasks are reached over a network, as this one is at {self._host}, where anyone "
                f"on the path could read and change everything: leave tls out, or set {INSECURE_VARIABLE}=1"
            )
        if not is_near if self._wants_tls is None else self._wants_tls:
            from pscluster.core.security.certificates import make_certificates  # slow to import

            self._own_folder = OwnFolder()
            make_certificates(self._own_folder.tls, [self._host])
            self.tls = load_tls("coordinator", self._own_folder.tls)
        bundles = [self._resources[role] for role, _ in self._tasks]
        self._group = connection.place(bundles, self._placement, self._timeout)

    def _start_process(self, task: TaskKey) -> None:
        self._processes.start(task)

    def _request_stop(self, *, at_once: bool = False) -> None:
        super()._request_stop(at_once=at_once)
        self._processes.give_up_starts()

    def _reserve_workers(self, indices: Sequence[int], timeout: float) -> None:
        new = [("worker", index) for index in indices if ("worker", index) not in self._tasks]
        if new:
            bundles = [self._resources["worker"] for _ in new]
            groups = connection.place_each(bundles, timeout)
            with self._changed:
                if self._group is not None:  # else they would not be given back
                    self._added |= zip(new, groups, strict=True)
                    return
            for group in groups:
                _give_back(group)
            raise MisuseError("the cluster can't be scaled: it was stopped meanwhile")

    def _release_worker(self, index: int) -> None:
        task = "worker", index
        self._processes.forget(task)
        _give_back(self._added.pop(task, None))

    def _give_up_start(self, task: TaskKey) -> None:
        self._processes.give_up_start(task)

    def _release_resources(self) -> None:
        with self._changed:
            groups = [self._group, *self._added.values()]
            self._group, self._added = None, {}
        for group in groups:
            _give_back(group)
        if self._own_folder is not None:
            self._own_folder.remove()
            self._own_folder = None
        if self._chief is not None:
            self._chief.release()
        if self._is_connected:
            self._is_connected = False
            import_ray().shutdown()

    # As a resolver

    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of all tasks, as they are now, and one for the chief: this process.

        If tasks are about to start elsewhere, wait for them, up to the cluster's timeout.
        """
        with self._changed:
            if self._chief is None or self._monitor is None:
                raise MisuseError("the cluster has no addresses before its start: use `with RayCluster(...)`")
            self._changed.wait_for(lambda: self._ended.is_set() or not self._are_starting(), self._timeout)
            jobs: dict[str, dict[int, str]] = {"chief": {0: self._chief.spec.task_address("chief", 0)}}
            for (role, index), place in sorted(self._processes.places.items()):  # those that have started once
                jobs.setdefault(role, {})[index] = join_address(*place)
        return ClusterSpec(jobs, source="RayCluster")

    def _are_starting(self) -> bool:
        return any(state.phase in (Phase.WAITING, Phase.STARTING) for state in self._supervisor.states())

    def _address_of(self, task: TaskKey) -> str:
        with self._changed:
            return join_address(*self._processes.places[task])

    def hand_over_port(self, role: str, index: int) -> list[str]:
        """Return the options for a process that is about to listen at a task's address."""
        if self._chief is None or role != "chief":
            raise MisuseError(f"{task_name((role, index))} has its port on another node")
        return self._chief.hand_over((role, index))

    def worker_hosts(self) -> list[str]:
        """Return the hosts of the workers, in their order, as they are now; "" of one that has not had any yet."""
        with self._changed:
            places = self._processes.places
            return [places.get(("worker", index), ("", 0))[0] for index in range(self._counts["worker"])]

    def task_hosts(self) -> list[str]:
        """Return the hosts of all tasks, as they are now."""
        with self._changed:
            return sorted({host for host, _ in self._processes.places.values()})

    def why_gone(self, role: str, index: int, address: str = "") -> str:
        """Do what `SupervisedCluster.why_gone` does. A job finds a server that returns elsewhere with its state."""
        follows = role == "ps" and self._state_dir is not None
        return super().why_gone(role, index, "" if follows else address)

    # For `Actors`

    def actor(self, task: TaskKey) -> Any:
        """Return a new actor for a task, in its own bundle of the placement group."""
        ray = import_ray()
        strategies = ray.util.scheduling_strategies
        room = (self._group, self._tasks.index(task)) if task in self._tasks else (self._added[task], 0)
        options: dict[str, Any] = {
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(*room),
            "max_concurrency": _CONCURRENCY,
            "max_restarts": 0,
            **connection.actor_options(self._resources[task[0]]),
        }
        if self._runtime_env and not self._is_connected:
            options["runtime_env"] = self._runtime_env
        return ray.remote(RoleActor).options(**options).remote(task_name(task), VERSION)

    def arguments(self, task: TaskKey, host: str, port: int) -> tuple[Any, ...]:
        """Return the arguments of `RoleActor.start` for a task that is there."""
        role, index = task
        address = join_address(host, port)
        command = [f"pscluster.{role}", *self._options, "--bind", address]
        env = dict(self._env)
        config = "{}"
        if self._state_dir is not None:
            env[STATE_VARIABLE] = os.path.join(self._state_dir, self._id)
        if role == "worker" or self._state_dir is not None:  # it registers where it is
            assert self._chief is not None
            coordinator = self._chief.spec.task_address("chief", 0)
            command += ["--join", coordinator, "--task", str(index), "--advertise", address]
        else:
            config = TFConfig(ClusterSpec({role: {index: address}}, source="RayCluster"), Task(role, index)).to_json()
        env |= dict.fromkeys(self._threads, str(max(1, int(self._resources[role].get("CPU", 1)))))
        return command, env, config, self.token, self._certificates(role, host), self.folder(task)

    def folder(self, task: TaskKey) -> str:
        """Return the name of the task's folder on its node."""
        return os.path.join(self._id, f"{task[0]}-{task[1]}")

    def shortage(self, task: TaskKey) -> str:
        """Return what the task needs, and what of it there is."""
        return connection.shortage([self._resources[task[0]]])

    def _certificates(self, role: str, host: str) -> dict[str, bytes]:
        """Return the files of a role's TLS folder, valid for a host; none without TLS."""
        if self._own_folder is None:
            return {}
        from pscluster.core.security.certificates import hosts_in, renew_certificates

        folder = self._own_folder.tls
        with self._certifying:
            if host not in hosts_in(folder, role):
                renew_certificates(folder, by_role={role: [host]})
            return {path.name: path.read_bytes() for path in (folder / role).iterdir()}


def _give_back(group: Any) -> None:
    """Return what a placement group has reserved, if there is one."""
    if group is not None:
        with contextlib.suppress(Exception):  # Ray may be gone
            import_ray().util.remove_placement_group(group)


def _inherited() -> dict[str, str]:
    """Return the settings of this process that the tasks have, too."""
    return {name: value for name, value in os.environ.items() if name.startswith("PSCLUSTER_") and name not in _PRIVATE}


def _checked_resources(name: str, resources: Mapping[str, float]) -> dict[str, float]:
    amounts: dict[str, float] = {}
    if isinstance(resources, Mapping):
        real = functools.partial(checks.real, at_least=0, kind="amount")
        amounts = {str(key): real(f"{name}[{key!r}]", value) for key, value in resources.items() if value}
    if not amounts:
        raise ConfigurationError(
            f'{name} is {resources!r}; give a dictionary with an amount above 0, such as {{"CPU": 1}}'
        )
    return amounts
