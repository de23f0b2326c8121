"""Where the processes of a framework's group find each other: what each is told, and its environment."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pscluster.core.errors import ProtocolError, StaleError
from pscluster.launch.answers.rendezvous import Rendezvous, Serving, place_among
from pscluster.launch.answers.session import Answer
from pscluster.launch.members.running import Setup, environment

HOSTS = ["10.0.0.1", "10.0.0.2", "10.0.0.1"]
ADDRESSES = [(host, 4000 + rank) for rank, host in enumerate(HOSTS)]


def test_all_of_an_attempt_are_told_together() -> None:
    meets = Rendezvous(2, 10.0)
    assert meets.ask(1, 1, "b", 41, "q1", 0.0) == []
    assert meets.hosts == []
    answers = meets.ask(0, 1, "a", 40, "q0", 1.0)
    assert {answer.question for answer in answers} == {"q0", "q1"}
    assert all(answer.value == {"addresses": [["a", 40], ["b", 41]]} for answer in answers)
    assert meets.hosts == ["a", "b"]
    assert meets.expire(100.0) == []


def test_a_later_attempt_begins_anew() -> None:
    """Who has asked in an earlier one is not mixed with it, before or after."""
    meets = Rendezvous(2, 10.0)
    meets.ask(0, 1, "a", 40, "old", 0.0)
    assert meets.ask(1, 2, "b", 51, "q1", 9.0) == []
    with pytest.raises(StaleError, match="a later attempt"):
        meets.ask(1, 1, "b", 41, "old", 9.0)
    assert meets.expire(11.0) == [], "it waits since it has begun"
    (first, second) = meets.ask(0, 2, "c", 50, "q0", 12.0)
    assert first.value == second.value == {"addresses": [["c", 50], ["b", 51]]}


def test_one_that_does_not_ask() -> None:
    """The others are told who is missing; one that asks then waits anew."""
    meets = Rendezvous(3, 10.0)
    meets.ask(1, 1, "b", 41, "q1", 0.0)
    assert meets.expire(10.0) == []
    (answer,) = meets.expire(10.5)
    assert "has waited 10 s for rank 0, 2 to say where it is" in str(answer.error)
    assert meets.expire(30.0) == []


@pytest.mark.parametrize(("rank", "port"), [(2, 1), (-1, 1), (0, 0), (0, 65536)])
def test_what_makes_no_sense(rank: int, port: int) -> None:
    with pytest.raises(ProtocolError, match=f"port {port} of rank {rank}, in a group of 2"):
        Rendezvous(2, 10.0).ask(rank, 1, "a", port, "q", 0.0)


def test_places_on_the_same_host() -> None:
    assert place_among(2, HOSTS) == {"local_rank": 1, "local_world_size": 2, "node_rank": 0}
    assert place_among(1, HOSTS) == {"local_rank": 0, "local_world_size": 1, "node_rank": 1}
    assert place_among(3, HOSTS) == {}


def environ(backend: str, rank: int, addresses: Any = ADDRESSES) -> dict[str, str]:
    setup = Setup("run", "/run", len(addresses), backend, 0, 0, "all", 0, None)
    return environment(setup, rank, addresses)


def test_the_environment_of_each_framework() -> None:
    """It names an address of rank 0's node, and which of the node's processes this is."""
    torch = environ("torch", 2)
    assert (torch["MASTER_ADDR"], torch["MASTER_PORT"], torch["RANK"]) == ("10.0.0.1", "4000", "2")
    assert (torch["LOCAL_RANK"], torch["LOCAL_WORLD_SIZE"], torch["GROUP_RANK"]) == ("1", "2", "0")
    jax = environ("jax", 1, [("fd00::1", 4000), ("fd00::2", 4001)])
    assert (jax["JAX_COORDINATOR_ADDRESS"], jax["JAX_PROCESS_ID"]) == ("[fd00::1]:4000", "1")
    assert jax["OMPI_COMM_WORLD_LOCAL_RANK"] == "0"
    config = json.loads(environ("tensorflow", 1)["TF_CONFIG"])
    workers = ["10.0.0.1:4000", "10.0.0.2:4001", "10.0.0.1:4002"]
    assert config == {"cluster": {"worker": workers}, "task": {"type": "worker", "index": 1}}


def test_a_cluster_of_tensorflows_parameter_servers() -> None:
    """Rank 0 is the chief, then come the workers and the servers."""
    addresses = [("h", 4000 + rank) for rank in range(5)]
    cluster = {"chief": ["h:4000"], "worker": ["h:4001", "h:4002"], "ps": ["h:4003", "h:4004"]}
    setup = Setup("run", "/run", 1, "tensorflow", 2, 2, "all", 0, None)
    configs = [json.loads(environment(setup, rank, addresses)["TF_CONFIG"]) for rank in range(5)]
    assert all(config["cluster"] == cluster for config in configs)
    tasks = [(config["task"]["type"], config["task"]["index"]) for config in configs]
    assert tasks == [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0), ("ps", 1)]


def test_who_serves_does_so_until_all_members_have_returned() -> None:
    serving = Serving(2)
    assert serving.serve(1, "s1") == []
    assert serving.returned(0, 1) == []
    assert serving.serve(2, "s2") == [], "another attempt has begun"
    with pytest.raises(StaleError):
        serving.returned(1, 1)
    assert serving.returned(0, 2) == []
    assert serving.returned(0, 2) == []
    assert serving.returned(1, 2) == [Answer("s2")]
    assert serving.serve(2, "late") == [Answer("late")]
