"""Runs a training function on a worker: there, or in a process of its own.

Functions whose parameters are on the servers run in the worker's process (backend "numpy"). Those of frameworks that
keep state in their process, such as torch's process groups, get a new process in every attempt: it has the environment
that they expect from its start, runs in its main thread, and is killed if the function is told to stop.

    STARTING (the child loads the function) -> RUNNING (each question is passed on) -> returned or raised
    any   --told to stop----------> the child is killed; FunctionCancelled
    any   --the child dies--------> RuntimeError, which says how
    any   --this process dies-----> the child reads the end of its connection, and exits
    any   --it only serves, and the members have returned--> the child is killed; None is returned
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import multiprocessing.connection
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pscluster.coordinator.local.tasks import describe_exit
from pscluster.core.cluster.addresses import join_address
from pscluster.core.context import FunctionContext, current_function
from pscluster.core.errors import FunctionCancelled, MisuseError
from pscluster.core.functions.definitions import CapturedFunction
from pscluster.core.values import decode, encode
from pscluster.launch.answers.rendezvous import place_among
from pscluster.launch.members.context import Ask, Member, TrainContext, membership
from pscluster.launch.members.shards import Position, made
from pscluster.v1 import value_pb2, worker_pb2
from pscluster.worker.failures import RelayedFailure, failure_of


@dataclass(frozen=True, slots=True)
class Setup:
    """What all members of a run are told. Plain data."""

    name: str  # of the run
    path: str  # of its folder
    size: int  # how many members there are
    backend: str
    tf_workers: int  # of TensorFlow's ParameterServerStrategy, beside rank 0, its chief: processes that serve
    tf_ps: int  # the same, the ranks after those
    split: str
    seed: int
    resume_from: str | None

    def serves(self, rank: int) -> bool:
        """Return whether this process of a group is no member, and only serves."""
        return bool(self.tf_ps) and rank >= self.size


def run_here(
    train_fn: Callable[..., Any],
    config: Any,
    setup: dict[str, Any],
    datasets: Mapping[str, Any],
    variables: Any,
    rank: int,
) -> Any:
    """Run a training function in this worker's process, as one member; return what it returns."""
    context = _function()
    return run_member(
        train_fn, config, Setup(**setup), datasets, rank, context.ask, variables=variables, function=context, tells=True
    )


def run_in_process(
    name: str,
    forms: Sequence[bytes],
    config: Any,
    setup: dict[str, Any],
    datasets: Mapping[str, Any],
    rank: int,
) -> Any:
    """Run a training function in a new process, as one member; return what it returns.

    Args:
        forms: its definitions, to be tried in turn; see `CapturedFunction.forms`.
    """
    context = _function()
    known = Setup(**setup)
    serves = known.serves(rank)
    with _free_port() as port:  # until just before the child takes it
        info = context.ask({"do": "address", "port": port})
    env = {**os.environ, **environment(known, rank, info["addresses"])}
    sources = {name: made(source) for name, source in datasets.items()}
    start = {"forms": list(forms), "config": config, "setup": setup, "datasets": sources, "rank": rank}
    with _child(env) as (process, connection):
        context.on_cancel(process.kill)
        with contextlib.suppress(OSError):  # it has ended: see below
            connection.send_bytes(_packed(start))
        needed = threading.Event()
        needed.set()
        if serves:
            arguments = context.ask, needed, process.kill
            threading.Thread(target=_end_with_members, args=arguments, name="serving", daemon=True).start()
        outcome = _relay(connection, context.ask)
        code = process.wait()
    context.check()
    if not needed.is_set():
        return None
    if outcome is None:
        raise RuntimeError(f"the process of {name}, rank {rank}, {describe_exit(code)} before the function returned")
    if "failure" in outcome:
        raise RelayedFailure(worker_pb2.Failure.FromString(outcome["failure"]))
    return outcome["value"]


def _end_with_members(ask: Ask, needed: threading.Event, kill: Callable[[], None]) -> None:
    """Kill a process that serves when the trainer says that all members have returned."""
    try:
        ask({"do": "serve"})
    except (Exception, FunctionCancelled):
        return  # the function that asked has ended, or is told to
    needed.clear()
    kill()


def run_member(
    train_fn: Callable[..., Any],
    config: Any,
    setup: Setup,
    datasets: Mapping[str, Any],
    rank: int,
    ask: Ask,
    *,
    variables: Any = None,
    function: FunctionContext | None = None,
    tells: bool = False,
) -> Any:
    """Run a training function as one member, in this process; return what it returns: None if it calls `sys.exit(0)`.

    Args:
        rank: of the member; in an elastic run its number, and the trainer says which rank it has.
        tells: print who begins, and when: this process's output is a log of one worker, which may run several.
    """
    info = ask({"do": "begin"})
    if info.get("over"):  # of an elastic run, which needs no more members
        return None
    rank, size = info.get("rank", rank), info.get("size", setup.size)
    began_after = info.get("began_after")
    context = TrainContext(
        world_size=size,
        world_rank=rank,
        local_rank=info.get("local_rank", rank),
        local_world_size=info.get("local_world_size", size),
        node_rank=info.get("node_rank", 0),
        experiment_name=setup.name,
        run_path=setup.path,
        attempt=info["attempt"],
        variables=variables,
        reports=0 if began_after is None else info["committed"],
    )
    if tells:
        now = datetime.datetime.now(datetime.UTC).isoformat(sep=" ", timespec="seconds")
        who = f"process {rank} of the group" if setup.serves(rank) else f"rank {rank} of {size}"
        print(f"{now} {who} begins, attempt {context.attempt}", file=sys.stderr, flush=True)
    member = Member(
        context,
        ask,
        datasets,
        setup.split,
        setup.seed,
        committed=info["committed"],
        latest=None if info["latest"] is None else (info["latest"][0], info["latest"][1]),
        resume_from=setup.resume_from,
        restored=_positions(info["restored"]),
        furthest=_positions(info["furthest"]),
        function=function,
        updates=dict(info["updates"]),
        began_after=began_after,
    )
    with membership(member):
        try:
            value = train_fn() if config is None else train_fn(config)
        except SystemExit as exited:  # as a script may end
            if exited.code:
                raise
            value = None
        member.end()
        return value


def environment(setup: Setup, rank: int, addresses: Sequence[tuple[str, int]]) -> dict[str, str]:
    """Return the variables that a framework's launcher sets for a member.

    Args:
        addresses: host and port of each rank, where the others can reach it.
    """
    size, (host, port) = str(setup.size), addresses[0]
    place = place_among(rank, [host for host, _ in addresses])
    env = {"PSCLUSTER_RANK": str(rank), "PSCLUSTER_WORLD_SIZE": size}
    if setup.backend == "torch":
        env |= {
            "RANK": str(rank),
            "WORLD_SIZE": size,
            "LOCAL_RANK": str(place["local_rank"]),
            "LOCAL_WORLD_SIZE": str(place["local_world_size"]),
            "GROUP_RANK": str(place["node_rank"]),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
        }
    elif setup.backend == "jax":
        env |= {
            "JAX_COORDINATOR_ADDRESS": join_address(host, port),
            "JAX_NUM_PROCESSES": size,
            "JAX_PROCESS_ID": str(rank),
            # Of these three JAX reads only the first. It finds the others if it believes to be under Open MPI.
            "OMPI_MCA_orte_hnp_uri": "pscluster",
            "OMPI_COMM_WORLD_SIZE": size,
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(place["local_rank"]),
        }
    elif setup.backend == "tensorflow":
        counts = {"worker": len(addresses)}
        if setup.tf_ps:
            counts = {"chief": 1, "worker": setup.tf_workers, "ps": setup.tf_ps}
        tasks = [(job, index) for job, count in counts.items() for index in range(count)]
        cluster: dict[str, list[str]] = {job: [] for job in counts}
        for (job, _), where in zip(tasks, addresses, strict=True):
            cluster[job].append(join_address(*where))
        job, index = tasks[rank]
        env["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
    return env


def forms_of(function: CapturedFunction) -> list[bytes]:
    """Return the definitions of a function for `run_in_process`, with what they carry."""
    if function.handles:
        raise MisuseError(
            f"{function.name} captures variables of the cluster, and runs in a process of its own, which does not know "
            'them: use backend="numpy", or keep its parameters in the process'
        )
    return [form.SerializeToString() for form in function.forms()]


def _function() -> FunctionContext:
    context = current_function()
    if context is None:
        raise MisuseError("this runs on a worker")
    return context


def _positions(plain: Mapping[str, Sequence[int]]) -> dict[str, Position]:
    return {name: Position(*numbers) for name, numbers in plain.items()}


@contextmanager
def _free_port() -> Iterator[int]:
    """Hold a port that is free on all addresses of this machine, within the block."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as bound:
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(("", 0))  # it never listens
        yield bound.getsockname()[1]


# The connection to the child


def _packed(message: Mapping[str, Any]) -> bytes:
    return encode(dict(message)).SerializeToString()


def unpacked(data: bytes) -> dict[str, Any]:
    """Return a message between a worker and its child."""
    message: dict[str, Any] = decode(value_pb2.Value.FromString(data))
    return message


@contextmanager
def _child(env: Mapping[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], multiprocessing.connection.Connection]]:
    """Start a child; it is gone at the end of the block."""
    mine, its = multiprocessing.connection.Pipe()
    with mine:
        with its:
            process = subprocess.Popen(  # noqa: S603  (our own command line)
                [sys.executable, "-m", "pscluster.launch.members.child", str(its.fileno())],
                env=dict(env),
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
            )
        try:
            yield process, mine
        finally:
            process.kill()
            process.wait()


def _relay(connection: multiprocessing.connection.Connection, ask: Ask) -> dict[str, Any] | None:
    """Pass the child's questions on until it has an outcome. None if it ends without one."""
    sending = threading.Lock()

    def answer(number: int, question: dict[str, Any]) -> None:
        try:
            message = {"number": number, "value": ask(question)}
        except FunctionCancelled:
            return  # the child is killed
        except Exception as error:
            message = {"number": number, "failure": failure_of(error).SerializeToString()}
        with sending, contextlib.suppress(OSError):
            connection.send_bytes(_packed(message))

    # The child's threads may ask at the same time, and each waits for its own answer.
    while True:
        try:
            message = unpacked(connection.recv_bytes())
        except (EOFError, OSError):
            return None
        if "question" not in message:
            return message
        arguments = message["number"], message["question"]
        threading.Thread(target=answer, args=arguments, name="question", daemon=True).start()


def plain_setup(setup: Setup) -> dict[str, Any]:
    """Return it as data that can be sent."""
    return dataclasses.asdict(setup)
