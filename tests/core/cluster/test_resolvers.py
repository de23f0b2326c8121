"""Resolvers: TensorFlow's behaviour, and a one-line answer to every mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.core.cluster.support import CLUSTER, message_of

from pscluster.core.cluster.resolvers import (
    ClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
)
from pscluster.core.cluster.spec import ClusterSpec
from pscluster.core.errors import ConfigurationError


def test_resolver_reads_the_variable_at_each_access(
    set_config: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is cached between accesses, so an older resolver sees a later TF_CONFIG."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    resolver = TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer, resolver.environment) == (
        None,
        None,
        None,
        "",
    )
    assert resolver.cluster_spec() == ClusterSpec({})
    assert resolver.master() == ""
    set_config(cluster=CLUSTER, task={"type": "ps", "index": "1"}, rpc_layer="grpc", environment="cloud")
    assert (resolver.task_type, resolver.task_id) == ("ps", 1)
    assert (resolver.rpc_layer, resolver.environment) == ("grpc", "cloud")
    assert resolver.cluster_spec() == ClusterSpec(CLUSTER)
    assert resolver.master() == "grpc://ps1:2222"


def test_arguments_and_settings_go_before_the_variable(set_config: Callable[..., None]) -> None:
    """A constructor's or setter's value overrides TF_CONFIG, and setting None returns to TF_CONFIG."""
    set_config(cluster=CLUSTER, task={"type": "ps", "index": 1}, environment="cloud")
    resolver = TFConfigClusterResolver("ps", 0, "grpc", "lab")
    assert (resolver.task_type, resolver.task_id) == ("ps", 0)
    assert (resolver.rpc_layer, resolver.environment) == ("grpc", "lab")
    assert resolver.master() == "grpc://ps0:2222"
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 2, None
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 2, None)
    assert resolver.master() == "worker2:2222"
    for name in ("task_type", "task_id"):
        setattr(resolver, name, None)
    assert (resolver.task_type, resolver.task_id) == ("ps", 1)


def test_master_takes_the_task_asked_for(set_config: Callable[..., None]) -> None:
    """Arguments of master() take precedence over the task, and an RPC layer precedes the address."""
    set_config(cluster=CLUSTER, task={"type": "ps", "index": 0})
    resolver = TFConfigClusterResolver()
    assert resolver.master() == "ps0:2222"
    assert resolver.master("worker", 1) == "worker1:2222"
    assert resolver.master(task_id=1, rpc_layer="grpc") == "grpc://ps1:2222"


def test_session_master_goes_before_all(set_config: Callable[..., None]) -> None:
    """TF_CONFIG's session_master is returned unchanged."""
    set_config(cluster=CLUSTER, session_master="sessionmaster:2222", rpc_layer="grpc")
    assert TFConfigClusterResolver().master("worker", 1) == "sessionmaster:2222"


def test_master_of_a_lone_task_is_empty(set_config: Callable[..., None]) -> None:
    """A cluster of one task needs no address, so the task need not be known."""
    set_config(cluster={"worker": ["worker0:2222"]})
    assert TFConfigClusterResolver().master() == ""


def test_master_without_a_task_says_what_is_missing(set_config: Callable[..., None]) -> None:
    """Among several tasks master() must know which one is meant."""
    set_config(cluster=CLUSTER)
    resolver = TFConfigClusterResolver()
    assert "task.type is missing" in message_of(resolver.master)
    assert "task.index is missing" in message_of(lambda: resolver.master("worker"))
    assert "cluster.worker[9] is requested" in message_of(lambda: resolver.master("worker", 9))


def test_a_wrong_key_does_not_hide_the_others(set_config: Callable[..., None]) -> None:
    """Only the property whose key is wrong raises; a missing part of the task is None."""
    set_config(cluster={"ps": ["ps0"]}, task={"type": "worker"}, rpc_layer="http")
    resolver = TFConfigClusterResolver()
    assert resolver.task_type == "worker"
    assert resolver.task_id is None
    assert "cluster.ps[0]" in message_of(resolver.cluster_spec)
    assert "rpc_layer" in message_of(lambda: resolver.rpc_layer)


def test_wrong_arguments_are_refused_at_once() -> None:
    """A constructor or setter refuses what TF_CONFIG could not hold."""
    make: Any = TFConfigClusterResolver
    assert message_of(lambda: make(task_type="master")).startswith("TFConfigClusterResolver: task_type is")
    assert message_of(lambda: make(task_id=-1)).startswith("TFConfigClusterResolver: task_id is -1")
    assert message_of(lambda: make(rpc_layer="http")).startswith("TFConfigClusterResolver: rpc_layer is")
    assert "rpc_layer is" in message_of(lambda: SimpleClusterResolver(ClusterSpec({})).master(rpc_layer="x"))


def test_simple_resolver_gives_back_what_it_got() -> None:
    """Everything comes from the constructor; the variable is not read."""
    spec = ClusterSpec(CLUSTER)
    resolver = SimpleClusterResolver(spec, "m:1", "worker", 1, "lab", "grpc")
    assert isinstance(resolver, ClusterResolver)
    assert resolver.cluster_spec() is spec
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert (resolver.environment, resolver.rpc_layer) == ("lab", "grpc")
    resolver.task_type, resolver.task_id = "ps", 0
    assert (resolver.task_type, resolver.task_id) == ("ps", 0)


def test_simple_resolvers_master() -> None:
    """It is the given master, unless both parts of a task are requested."""
    resolver = SimpleClusterResolver(ClusterSpec(CLUSTER), "m:1")
    assert resolver.master() == resolver.master("ps") == "m:1"
    assert resolver.master("ps", 1) == "ps1:2222"
    assert resolver.master("ps", 1, "grpc") == "grpc://ps1:2222"
    assert SimpleClusterResolver(ClusterSpec(CLUSTER), rpc_layer="grpc").master() == ""


def test_simple_resolver_ignores_the_variable(set_config: Callable[..., None]) -> None:
    """Defaults are none and empty, even where TF_CONFIG is set."""
    set_config(cluster=CLUSTER, task={"type": "ps", "index": 0}, rpc_layer="grpc", environment="cloud")
    resolver = SimpleClusterResolver(ClusterSpec({}))
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer, resolver.environment) == (
        None,
        None,
        None,
        "",
    )


def test_simple_resolver_checks_types_as_the_peer() -> None:
    """A dict is not a ClusterSpec and a number is not a master: TypeError."""
    make: Any = SimpleClusterResolver
    with pytest.raises(TypeError, match="cluster_spec must be of type ClusterSpec, not dict"):
        make(CLUSTER)
    with pytest.raises(TypeError, match="master must be of type str, not int"):
        make(ClusterSpec(CLUSTER), 1)


def test_union_of_resolvers() -> None:
    """Lists are joined, numbered tasks keep their numbers, and what is not given is the first resolver's."""
    first = SimpleClusterResolver(
        ClusterSpec({"ps": ["a:1"], "worker": ["b:1", "c:1"]}), "m:1", "worker", 1, "lab", "grpc"
    )
    second = SimpleClusterResolver(ClusterSpec({"worker": ["d:1"], "chief": ["e:1"]}))
    union = UnionResolver(first, second)
    lists = {"ps": ["a:1"], "worker": ["b:1", "c:1", "d:1"], "chief": ["e:1"]}
    assert union.cluster_spec() == ClusterSpec(lists)
    assert (union.task_type, union.task_id, union.rpc_layer, union.environment) == ("worker", 1, "grpc", "lab")
    assert (union.master(), union.master("worker", 2)) == ("grpc://m:1", "grpc://d:1")
    union.task_type, union.task_id = "ps", 0
    assert (union.task_type, union.task_id) == ("ps", 0)
    given = UnionResolver(second, task_type="chief", task_id=0)
    assert (given.task_type, given.task_id, given.rpc_layer) == ("chief", 0, None)
    gaps = SimpleClusterResolver(ClusterSpec({"worker": {2: "f:1", 5: "g:1"}}))
    assert UnionResolver(first, gaps).cluster_spec().as_dict()["worker"] == {0: "b:1", 1: "c:1", 2: "f:1", 5: "g:1"}


def test_wrong_unions_of_resolvers() -> None:
    """What is no resolver, a number or an address that two have."""
    first, gaps = (SimpleClusterResolver(ClusterSpec({"worker": tasks})) for tasks in (["a:1"], {0: "b:1", 2: "c:1"}))
    with pytest.raises(ValueError, match="at least one resolver"):
        UnionResolver()
    with pytest.raises(TypeError, match="takes cluster resolvers, not a dict"):
        UnionResolver({"ps": ["a:1"]})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"several resolvers have worker 0, .*: give each task its own number"):
        UnionResolver(first, gaps).cluster_spec()
    assert "has that address too" in message_of(UnionResolver(first, first).cluster_spec)
    assert "task_type is" in message_of(lambda: UnionResolver(first, task_type="master"))
