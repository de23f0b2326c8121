"""The training of digits with global arrays: compared with one process of NumPy, and run as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from tests.examples.digits_compared import X, Y, digits, trained, trained_alone
from tests.examples.test_examples import number_in, run_example
from tests.waiting import TIMEOUT

from pscluster import spmd
from pscluster.coordinator import ClusterCoordinator, LocalCluster, ParameterServerStrategy


def test_it_trains_as_one_process_does() -> None:
    """After 50 steps the parameters are the same but for rounding, however the weights lie.

    In float32 Adam divides gradients that are almost 0 by their size, so single elements differ by more: those of one
    process differ from the exact ones by as much. What is compared then is the norm.
    """
    command = [sys.executable, "-m", "tests.examples.digits_compared"]
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=env, timeout=TIMEOUT, check=False)
    assert ended.returncode == 0, ended.stderr
    of_all = json.loads(ended.stdout)
    assert [found["dtype"] for found in of_all] == ["float64", "float64", "float32", "float32"]
    for found in of_all:
        within = 1e-8 if found["dtype"] == "float64" else 1e-5
        assert found["steps"] == 50
        assert found["loss"] < within * 100
        assert found["relative" if found["dtype"] == "float32" else "largest"] < within
        ours, alone = found["accuracies"]
        assert ours == pytest.approx(alone, abs=0.002)
        assert alone > 0.9


def test_it_trains_on_a_cluster(cluster: LocalCluster) -> None:
    """With the weights on parameter servers, cut as the rules say."""
    alone, _ = trained_alone(10, "float64")
    with ParameterServerStrategy(cluster) as strategy:
        mesh = spmd.create_mesh({"batch": 8}, coordinator=ClusterCoordinator(strategy), devices_per_task=4)
        training, _ = trained(mesh, digits.SHARDED, 10, "float64")
        assert training.model.hidden.kernel.variable.num_shards == 8
        for weight, expected in zip(training.model.weights, alone.weights, strict=True):
            np.testing.assert_allclose(weight.full(), expected, rtol=0, atol=1e-8)


def test_images_do_not_depend_on_who_makes_them() -> None:
    """Any part of the set can be made alone; those for the test come from other digits."""
    some, labels = digits.images(5, first=600)
    np.testing.assert_array_equal(some, X[600:605])
    np.testing.assert_array_equal(labels, Y[600:605])
    (train, _), (test, _) = digits.originals(test=False), digits.originals(test=True)
    assert (len(train), len(test)) == (1437, 360)
    assert X.min() == 0
    assert X.max() <= 1


def test_the_script() -> None:
    """With few images it learns less than it promises at full size, which the exit code says."""
    code, output = run_example(
        "dtensor_digits.py", "--cluster", "--train", "2500", "--test", "300", "--epochs", "2", "--target", "0.97"
    )
    assert code == 1, output
    assert output.splitlines()[-1].startswith("that is less than the 0.97 this network reaches")
    assert 0.7 < number_in(r"epoch 2/2: .* accuracy ([\d.]+)", output) < 0.97
    first, second = (part.rpartition("epoch 2/2: ")[2].split(",")[:2] for part in output.split("\nsharded on"))
    assert first == second
