"""The scripts of the tests with Ray: `python ray_scripts.py NAME ADDRESS [ARGUMENTS]`."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from pscluster.coordinator import (
    ClusterCoordinator,
    IndexedSlices,
    ParameterServerStrategy,
    SynchronousStrategy,
    Variable,
    optimizers,
)
from pscluster.coordinator.checkpoints.manager import CheckpointManager
from pscluster.core.errors import PsClusterError, PSUnavailableError
from pscluster.launch import (
    RayCluster,
    RunConfig,
    ScalingConfig,
    Trainer,
    barrier,
    get_context,
    get_dataset_shard,
    report,
)


def _show(cluster: RayCluster) -> None:
    spec = cluster.cluster_spec()
    tasks = [(f"{role} {at}", pid, spec.task_address(role, at)) for (role, at), pid in cluster.pids.items()]
    print("tasks", json.dumps(tasks), flush=True)


def train(address: str) -> None:
    """Train until Ctrl-C, then again to the end, with the servers on the node that stays."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
    digits: Any = importlib.import_module("digits")
    strategies: list[ParameterServerStrategy] = []

    def strategy(*arguments: Any, **options: Any) -> ParameterServerStrategy:
        strategies.append(ParameterServerStrategy(*arguments, **options))
        return strategies[-1]

    with RayCluster(4, 2, address=address, ps_resources={"CPU": 1, "stable": 1}, log_level="INFO") as cluster:
        _show(cluster)
        digits.TFConfigClusterResolver, digits.ParameterServerStrategy = (lambda: cluster), strategy
        for steps in ("1000000", "2000"):
            sys.argv[1:] = ["--steps", steps]
            with contextlib.suppress(KeyboardInterrupt):
                digits.main()
            strategies[-1].close()


def away(address: str, folder: str) -> None:
    """Count to 40 on a server whose node is removed, in one job after another."""
    with RayCluster(1, 1, address=address, ps_resources={"CPU": 1, "away": 1}, log_level="INFO") as cluster:
        _show(cluster)
        while not _count(cluster, folder):
            _show(cluster)
        input()  # until the test kills this process


def follows(address: str, state: str) -> None:
    """Count to 40 on a server whose node is removed, and whose disk all nodes have."""
    resources = {"CPU": 1, "away": 1}
    with RayCluster(1, 1, address=address, ps_resources=resources, state_dir=state, durability="log") as cluster:
        _show(cluster)
        assert _count(cluster, "")
        _show(cluster)


def _count(cluster: RayCluster, folder: str) -> bool:
    """Go on counting, with checkpoints if there is a folder; return whether the job came to its end."""
    strategy = ParameterServerStrategy(cluster)
    with strategy.scope():
        total = Variable(np.float64(0), name="total")
    coordinator = ClusterCoordinator(strategy)
    with CheckpointManager(folder, strategy=strategy) if folder else contextlib.nullcontext() as manager:
        if manager is not None:
            manager.restore_or_initialize()
        print("it begins with", float(total.numpy()), flush=True)

        def add() -> None:
            total.assign_add(1.0)

        try:
            while (count := float(total.numpy())) < 40:
                coordinator.schedule(add)
                coordinator.join()
                if manager is not None:
                    manager.save()
                print("counted", count + 1, flush=True)
                if count + 1 == 10:
                    input()  # until the test has removed the node
        except PSUnavailableError as error:
            print("lost:", error, flush=True)
            strategy.close()
            return False
    print("total", float(total.numpy()), flush=True)
    strategy.close()
    return True


def _member() -> list[int]:
    """Count, and report it."""
    context = get_context()
    context.variables.assign_add(1.0)
    barrier()
    report({"count": float(context.variables.numpy())})
    return [context.node_rank, context.local_rank, context.local_world_size]


def inside(address: str, storage: str) -> None:
    """Run synchronous steps in a task of Ray's, and then a trainer."""
    import ray

    ray.init(address=address)

    def driver() -> dict[str, Any]:
        with RayCluster(2, 1, placement="PACK") as cluster, SynchronousStrategy(cluster) as strategy:
            with strategy.scope():
                total = Variable(np.zeros(3), name="total")
                sgd = optimizers.SGD(learning_rate=1.0)

            def step() -> None:
                sgd.apply_gradients([(-np.ones(3), total)], examples=8)

            strategy.run(step, steps=4)
            values = total.numpy().tolist()
        trainer = Trainer(
            _member,
            scaling=ScalingConfig(workers=2),
            run=RunConfig("run", storage=storage),
            variables=lambda _: Variable(np.float64(0), name="count"),
            launcher=functools.partial(RayCluster, worker_resources={"CPU": 2}),
        )
        result = trainer.fit()
        return {
            "values": values,
            "still connected": ray.is_initialized(),
            "members": result.return_values,
            "metrics": result.metrics,
        }

    print("result", json.dumps(ray.get(ray.remote(driver).remote())), flush=True)


def _meet(folder: str) -> dict[str, Any]:
    """Meet the other ranks where the environment says, and return what it says; at first two attempts die."""
    context, env = get_context(), os.environ
    rank, size, where = int(env["RANK"]), int(env["WORLD_SIZE"]), (env["MASTER_ADDR"], int(env["MASTER_PORT"]))
    if rank == 0:
        with socket.create_server(where) as server:
            others = [server.accept()[0] for _ in range(size - 1)]
        met = sorted(int(other.recv(8)) for other in others)
        for other in others:
            other.sendall(b"met")
    else:
        with contextlib.closing(_connected(where)) as server:
            server.sendall(str(rank).encode())
            met = [len(server.recv(3))]
    report({"met": len(met)})
    if rank == context.attempt < 3:  # first the function's process, then its worker
        os.kill(os.getpid() if rank == 1 else os.getppid(), signal.SIGKILL)
    barrier()
    Path(folder, f"{rank}-{context.attempt}").touch()
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    mine = [context.local_rank, context.local_world_size, context.node_rank]
    return {"where": where[0], "met": met, "says": [int(env[name]) for name in names] == mine, "node": mine[2]}


def _count_rows(folder: str) -> list[int]:
    """Count each row on the servers, epoch by epoch, until a file says how many there are."""
    context, shard, ends = get_context(), get_dataset_shard(), Path(folder, "ends")
    while shard.epoch < (int(ends.read_text()) if ends.exists() else 1 << 30):
        for rows in shard.iter_batches(5):
            context.variables.scatter_add(IndexedSlices(np.ones(len(rows), np.int64), rows))
            time.sleep(0.01)
        report({"size": context.world_size, "epoch": shard.epoch})
    seen: list[int] = context.variables.numpy().tolist()
    return seen


def elastic(address: str, folder: str) -> None:
    """Fit an elastic run, whose number of workers standard input changes."""
    clusters: list[RayCluster] = []

    def launcher(**options: Any) -> RayCluster:
        # Three workers have room on the first node, and one on the other.
        resources: dict[str, Any] = {"worker_resources": {"CPU": 2}, "ps_resources": {"CPU": 1, "stable": 1}}
        clusters.append(RayCluster(address=address, placement="PACK", **resources, **options))
        return clusters[-1]

    trainer = Trainer(
        _count_rows,
        folder,
        ScalingConfig(workers=(1, 5)),
        RunConfig("elastic", storage=f"{folder}/runs"),
        datasets={"train": np.arange(201)},
        variables=lambda _: Variable(np.zeros(201, np.int64), name="seen"),
        launcher=launcher,
    )

    def scale() -> None:
        for line in sys.stdin:
            try:
                trainer.scale(int(line), timeout=5 if int(line) == 5 else 60)
                print("scaled to", line, flush=True)
            except PsClusterError as error:
                print("not scaled:", error, flush=True)
            _show(clusters[0])

    threading.Thread(target=scale, daemon=True).start()
    result = trainer.fit()
    seen = np.max(result.return_values or [], axis=0)
    print("result", json.dumps([seen.tolist(), result.rows_again]), flush=True)


def _connected(where: tuple[str, int]) -> socket.socket:
    """Connect as soon as rank 0 listens."""
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(where)
        time.sleep(0.05)


def group(address: str, folder: str) -> None:
    """Run a function that finds its group as torch does."""
    result = Trainer(
        _meet,
        folder,
        ScalingConfig(workers=3),
        RunConfig("group", storage=f"{folder}/runs"),
        backend="torch",
        launcher=functools.partial(RayCluster, address=address, ps_resources={"CPU": 1, "stable": 1}),
    ).fit()
    print("result", json.dumps([result.metrics, result.return_values]), flush=True)


def _of_module() -> object:
    """Return what a module of Ray's working_dir has, which is nowhere else."""
    return importlib.import_module("only_there").VALUE


def asks(address: str, folder: str) -> None:
    """Ask for more than there is, for no TLS, then for little, whose tasks are killed and restarted by the script."""
    for options in ({"worker_resources": {"CPU": 100}}, {"worker_resources": {"GPU": 1}}, {"tls": False}):
        try:
            RayCluster(2, 1, address=address, timeout=2, **options).start()
        except Exception as error:
            print(type(error).__name__, error, flush=True)
    os.environ["PSCLUSTER_IN_FLIGHT_MIB"], os.environ["OTHER"] = "300", "not for the tasks"
    names = ("OMP_NUM_THREADS", "PSCLUSTER_IN_FLIGHT_MIB", "MINE", "OTHER")
    shipped = {"working_dir": folder}
    with RayCluster(
        1, 1, address=address, worker_resources={"CPU": 2}, env={"MINE": "1"}, runtime_env=shipped
    ) as cluster:
        print(cluster, flush=True)
        with ParameterServerStrategy(cluster) as strategy:
            coordinator = ClusterCoordinator(strategy)
            values = coordinator.schedule(lambda: [os.environ.get(name) for name in names]).fetch()
            print("variables", values, flush=True)
            print("module", coordinator.schedule(_of_module).fetch(), flush=True)
            server = cluster.cluster_spec().task_address("ps", 0)
            killed = cluster.kill("worker", 0)
            other = cluster.wait_restarted("worker", 0, killed)
            print("killed", coordinator.schedule(os.getppid).fetch() > 0, other != killed, flush=True)
        stopped = cluster.pids["ps", 0]
        print("restarted", cluster.restart("ps", 0) != stopped, flush=True)
        print("where it was", cluster.cluster_spec().task_address("ps", 0) == server, flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
