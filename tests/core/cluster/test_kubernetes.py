"""The cluster and the task of a pod, from its environment."""

from __future__ import annotations

import pytest

from pscluster.coordinator import KubernetesClusterResolver
from pscluster.core.cluster.spec import ClusterSpec
from pscluster.core.cluster.tf_config import Task
from pscluster.core.errors import ConfigurationError
from pscluster.core.role.options import own_task

POD = {
    "PSCLUSTER_POD": "train-ps-1",
    "PSCLUSTER_POD_ROLE": "ps",
    "PSCLUSTER_PS_SERVICE": "train-ps:2222",
    "PSCLUSTER_PS_REPLICAS": "2",
    "PSCLUSTER_COORDINATOR": "train-coordinator:2222",
}
CLUSTER = ClusterSpec(
    {"ps": ["train-ps-0.train-ps:2222", "train-ps-1.train-ps:2222"], "chief": ["train-coordinator:2222"]}
)


@pytest.fixture(autouse=True)
def pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is in a server's pod."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for name, value in POD.items():
        monkeypatch.setenv(name, value)


def test_each_role(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's index is its pod's ordinal, the coordinator is chief 0, and a worker has no index before it joins."""
    resolver = KubernetesClusterResolver()
    assert resolver.cluster_spec() == CLUSTER
    assert (resolver.task_type, resolver.task_id) == ("ps", 1)
    assert resolver.master() == "train-ps-1.train-ps:2222"
    assert resolver.master("chief", 0, "grpc") == "grpc://train-coordinator:2222"
    monkeypatch.setenv("PSCLUSTER_POD_ROLE", "coordinator")
    assert (resolver.task_type, resolver.task_id) == ("chief", 0)
    monkeypatch.setenv("PSCLUSTER_POD_ROLE", "worker")
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", None, "")
    assert KubernetesClusterResolver(task_type="ps", task_id=0).task_id == 0


def test_the_role_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pscluster ps` takes its task from the pod, unless TF_CONFIG is set."""
    config, index = own_task("ps")
    assert (config.cluster, config.task, index) == (CLUSTER, Task("ps", 1), 1)
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"ps": ["a:1"]}, "task": {"type": "ps", "index": 0}}')
    assert own_task("ps")[1] == 0


@pytest.mark.parametrize("name", POD)
def test_a_missing_variable_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the missing variable, and what could be in it."""
    monkeypatch.delenv(name)
    resolver = KubernetesClusterResolver()
    with pytest.raises(ConfigurationError, match=f"^{name} is not set in this pod; .* such as "):
        _ = resolver.cluster_spec(), resolver.task_id


WRONG = [
    ("PSCLUSTER_POD", "train-ps", "does not end with an ordinal"),
    (
        "PSCLUSTER_POD",
        "train-ps-2",
        "PSCLUSTER_PS_REPLICAS is 2, so the last server is 1: .* with --ps instead of scaling",
    ),
    ("PSCLUSTER_POD_ROLE", "chief", "PSCLUSTER_POD_ROLE is 'chief'; give ps, worker or coordinator"),
    ("PSCLUSTER_PS_SERVICE", "train-ps", 'PSCLUSTER_PS_SERVICE is "train-ps", but it has no port'),
    ("PSCLUSTER_PS_REPLICAS", "0", "PSCLUSTER_PS_REPLICAS is '0'; give the number of servers"),
    ("PSCLUSTER_COORDINATOR", "a:b", 'PSCLUSTER_COORDINATOR is "a:b"'),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_wrong_values(name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the variable, its value and what is right."""
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=message):
        own_task("ps")
