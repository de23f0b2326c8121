"""Unchanged scripts of TensorFlow's own strategies under the trainer, also if one of their processes is killed."""

from __future__ import annotations

import importlib.util
import re
import sys
import textwrap
from pathlib import Path

import pytest
from tests.roles.processes import run

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not importlib.util.find_spec("tensorflow"), reason="TensorFlow is not installed"),
]

MIRRORED = """
    import json, os
    import numpy as np
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    x = np.arange(200, dtype=np.float32) / 200
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    data = tf.data.Dataset.from_tensor_slices((x, 2 * x)).batch(40).with_options(options)
    with strategy.scope():
        w, b = tf.Variable(0.0), tf.Variable(0.0)

    @tf.function
    def step(batch):
        def replica(inputs, targets):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((w * inputs + b - targets) ** 2) / 40
            gradients = tape.gradient(loss, [w, b])
            for variable, gradient in zip((w, b), tf.distribute.get_replica_context().all_reduce("sum", gradients)):
                variable.assign_sub(0.3 * gradient)
            return loss
        return strategy.reduce("sum", strategy.run(replica, args=batch), axis=None)

    for epoch in range(5):
        losses = [float(step(batch)) for batch in strategy.experimental_distribute_dataset(data)]
    print(f"replicas {strategy.num_replicas_in_sync}, loss {sum(losses) / len(losses):.6f}\\n", end="", flush=True)
"""

SERVERS = """
    import os
    os.environ["GRPC_FAIL_FAST"] = "use_caller"
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    spec = resolver.cluster_spec()
    if resolver.task_type in ("worker", "ps"):
        tf.distribute.Server(spec, job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc").join()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    with strategy.scope():
        w, count = tf.Variable(0.0), tf.Variable(0, dtype=tf.int64)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    @tf.function
    def step():
        x = tf.random.uniform([32])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((w * x - 2 * x) ** 2)
        w.assign_sub(0.3 * tape.gradient(loss, w))
        count.assign_add(1)

    for _ in range(200):
        coordinator.schedule(step)
    coordinator.join()
    sizes = f"{spec.num_tasks('worker')} workers, {spec.num_tasks('ps')} servers"
    print(f"{sizes}, count {int(count.numpy())}, slope {float(w.numpy()):.2f}\\n", end="", flush=True)
"""

DRIVER = """
    import os, runpy, signal, sys
    from pathlib import Path
    from pscluster.launch import RunConfig, ScalingConfig, Trainer, get_context, report

    script, folder, ps = sys.argv[1:]

    def train():
        if get_context().world_rank == 1 and not Path(folder, "died").exists():
            Path(folder, "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        runpy.run_path(script, run_name="__main__")
        report({"done": 1})

    if __name__ == "__main__":
        scaling = ScalingConfig(workers=2, ps=int(ps) or None)
        result = Trainer(train, scaling=scaling, run=RunConfig("run", folder), backend="tensorflow").fit()
        print(result.state, len(result.return_values), result.metrics)
"""


def fit(tmp_path: Path, script: str, ps: int) -> str:
    """Run a script under the trainer; return what is printed."""
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    (tmp_path / "driver.py").write_text(textwrap.dedent(DRIVER))
    command = (sys.executable, str(tmp_path / "driver.py"))
    code, output = run(str(tmp_path / "script.py"), str(tmp_path), str(ps), command=command, TF_CPP_MIN_LOG_LEVEL="2")
    assert code == 0, output
    assert (tmp_path / "died").exists()
    return output


def test_a_script_of_multi_worker_mirrored_strategy_runs_unchanged(tmp_path: Path) -> None:
    """Both workers learn from all rows: the loss is one, and is the same on both."""
    output = fit(tmp_path, MIRRORED, 0)
    first, second = re.findall(r"replicas 2, loss (\S+)", output)
    assert first == second
    assert float(first) < 0.1
    assert "finished 2 {'done': 1}" in output


def test_a_script_of_parameter_server_strategy_runs_unchanged(tmp_path: Path) -> None:
    """Its chief alone returns and reports; its workers and servers end with it."""
    output = fit(tmp_path, SERVERS, 2)
    assert "2 workers, 2 servers, count 200, slope 2.00" in output
    assert "finished 1 {'done': 1}" in output
