"""TF_CONFIG, cluster specs and resolvers: TensorFlow's behaviour, and a one-line answer to every mistake."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pscluster.core.cluster.addresses import is_loopback, is_on_this_machine, parse_address, split_address
from pscluster.core.cluster.resolvers import (
    ClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
)
from pscluster.core.cluster.spec import JOBS, ClusterSpec, validate_for_strategy
from pscluster.core.cluster.tf_config import Task, TFConfig
from pscluster.core.errors import ConfigurationError, PsClusterError
from pscluster.core.transport.unix_sockets import MAX_PATH_BYTES

WORKERS = ["worker0:2222", "worker1:2222", "worker2:2222"]
PS = ["ps0:2222", "ps1:2222"]
CLUSTER: dict[str, Any] = {"ps": PS, "worker": WORKERS}
FULL: dict[str, Any] = {"chief": ["chief0:2222"], **CLUSTER, "evaluator": ["evaluator0:2222"]}


def message_of(call: Callable[[], object]) -> str:
    """The text of the ConfigurationError that the call raises, which must be one readable line."""
    with pytest.raises(ConfigurationError) as caught:
        call()
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert text.isascii()
    assert text.isprintable()
    assert len(text) < 400
    assert "; write, for example, " in text
    return text


@pytest.fixture
def set_config(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets TF_CONFIG to the JSON of its keyword arguments."""

    def set_to(**fields: object) -> None:
        monkeypatch.setenv("TF_CONFIG", json.dumps(fields))

    return set_to


# --- addresses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("localhost:1", ("localhost", 1)),
        ("ps-0.train_job.svc.cluster.local:65535", ("ps-0.train_job.svc.cluster.local", 65535)),
        ("10.0.0.5:2222", ("10.0.0.5", 2222)),
        ("[::1]:2222", ("::1", 2222)),
        ("[2001:DB8:0:0::1]:80", ("2001:db8::1", 80)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
    ],
)
def test_split_address_reads_names_and_both_kinds_of_ip(text: str, expected: tuple[str, int]) -> None:
    """Host and port are separated, with an IPv6 host without its brackets."""
    assert split_address(text) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ps0", "no port"),
        ("[::1]", "no port"),
        ("", "no port"),
        ("ps0:", "1 to 65535"),
        ("ps0:0", "1 to 65535"),
        ("ps0:65536", "1 to 65535"),
        ("ps0:-1", "1 to 65535"),
        ("ps0:22 ", "1 to 65535"),
        ("ps0:٢٢", "1 to 65535"),
        ("unix:/tmp/ps0", "a host and a port are needed"),
        ("::1:2222", "brackets"),
        ("a:b:2222", "brackets"),
        (":2222", "neither a name"),
        ("[zz]:2222", "neither a name"),
        ("[1::2::3]:2222", "neither a name"),
        ("256.0.0.1:2222", "neither a name"),
        ("a b:2222", "neither a name"),
        ("ps0\n:2222", "neither a name"),
        ("x" * 300 + ":2222", "neither a name"),
        ("grpc://ps0:2222", "no protocol"),
    ],
)
def test_split_address_says_what_is_wrong(text: str, reason: str) -> None:
    """Each kind of bad address has a specific reason, and the error names the key it was given."""
    text_of_error = message_of(lambda: split_address(text, "the key"))
    assert text_of_error.startswith("the key is ")
    assert reason in text_of_error


def test_an_address_without_a_port_is_completed_in_the_error() -> None:
    """The address shown as right is the user's own, with a port."""
    assert message_of(lambda: split_address("ps0.example.com")).endswith('"ps0.example.com:2222"')


@pytest.mark.parametrize("host", ["localhost", "LocalHost", "127.0.0.1", "127.255.0.9", "::1", "[::1]"])
def test_loopback_hosts(host: str) -> None:
    """127.0.0.0/8, ::1 and localhost are this machine."""
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "128.0.0.1", "127.evil.example", "localhost.evil.example"])
def test_other_hosts_are_not_loopback(host: str) -> None:
    """A name that only looks like loopback is not taken for it."""
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("unix:ps-0", "begins with /"),
        ("unix:./ps-0", "begins with /"),
        ("unix:", "begins with /"),
        ("unix:2222", "begins with /"),
        ("unix:@ps-0", "no abstract names"),
        ("unix:\0ps-0", "no abstract names"),
        ("unix-abstract:ps-0", "is written unix:/PATH"),
        ("unix:///tmp/ps-0", "is written unix:/PATH"),
        ("unix:/", "needless /"),
        ("unix:/tmp/../ps-0", "needless /"),
        ("unix:/tmp//ps-0", "needless /"),
        ("unix:/tmp/ps-0/", "needless /"),
        ("unix:/tmp/ps 0", "letters, digits"),
        ("unix:/tmp/ps%200", "letters, digits"),
        ("unix:/tmp/ps-0\n", "letters, digits"),
        ("unix:/tmp/ps-ü", "letters, digits"),
        ("unix:/tmp/ps-0.lock", "for the files beside a socket"),
        ("unix:/tmp/ps-0.data", "for the files beside a socket"),
        ("unix:/" + "x" * MAX_PATH_BYTES, "at most 99 bytes, not 100"),
        ("unix_:/tmp/ps-0", "1 to 65535"),
    ],
)
def test_paths_that_are_none_of_a_socket(text: str, reason: str) -> None:
    assert reason in message_of(lambda: parse_address(text, "the key"))
    assert reason in message_of(lambda: ClusterSpec({"ps": [text]}))


def test_unix_sockets_are_addresses(set_config: Callable[..., None]) -> None:
    """They work in a spec and its dict, TF_CONFIG, and both resolvers; each path once."""
    longest = "unix:/" + "x" * (MAX_PATH_BYTES - 1)
    cluster = {"chief": ["unix:/run/Job/chief-0"], "ps": ["unix:/run/job/ps-0", longest], "worker": ["w0:2222"]}
    spec = ClusterSpec(cluster)
    assert spec.as_dict() == cluster
    assert parse_address(longest) == (longest.removeprefix("unix:"), 0)
    assert parse_address("w0:2222") == ("w0", 2222)
    assert all(is_on_this_machine(spec.task_address("ps", index)) for index in (0, 1))
    assert not is_on_this_machine("w0:2222")
    set_config(cluster=cluster, task={"type": "ps", "index": 1})
    config = TFConfig.from_environ()
    assert TFConfig.parse(config.to_json()) == config
    resolver = TFConfigClusterResolver(rpc_layer="grpc")
    assert resolver.cluster_spec() == SimpleClusterResolver(spec).cluster_spec() == spec
    assert resolver.master("ps", 0) == "grpc://unix:/run/job/ps-0"
    twice = {"ps": ["unix:/run/job/ps-0"], "worker": ["unix:/run/job/ps-0"]}
    assert "cluster.ps[0] has that address too" in message_of(lambda: ClusterSpec(twice))
    assert ClusterSpec({"ps": ["unix:/run/job/ps-0", "unix:/run/job/PS-0"]}), "paths have cases"


# --- ClusterSpec (row 1) ---------------------------------------------------------------------------------


def test_spec_answers_like_the_peers() -> None:
    """Jobs, counts, indices and addresses of a dense cluster are those that tf.train.ClusterSpec gives."""
    spec = ClusterSpec(FULL)
    assert spec.jobs == ["chief", "ps", "worker", "evaluator"]
    assert spec.num_tasks("worker") == 3
    assert spec.task_indices("worker") == [0, 1, 2]
    assert spec.task_address("ps", 1) == "ps1:2222"
    assert spec.job_tasks("ps") == PS
    assert spec.as_dict() == FULL
    assert repr(spec) == f"ClusterSpec({FULL!r})"


@pytest.mark.parametrize("key", [int, str])
def test_spec_may_be_sparse(key: Callable[[int], Any]) -> None:
    """A mapping of index to address, with integer or string keys, may leave indices out."""
    spec = ClusterSpec({"worker": {key(3): "b:2", key(1): "a:1"}})
    assert spec.num_tasks("worker") == 2
    assert spec.task_indices("worker") == [1, 3]
    assert spec.job_tasks("worker") == [None, "a:1", None, "b:2"]
    assert spec.as_dict() == {"worker": {1: "a:1", 3: "b:2"}}


def test_a_mapping_without_gaps_equals_the_list() -> None:
    """Two specs with the same tasks are equal, whatever form or order of jobs they were given in."""
    one = ClusterSpec({"ps": {"1": "ps1:2222", "0": "ps0:2222"}, "worker": WORKERS})
    other = ClusterSpec({"worker": tuple(WORKERS), "ps": PS}, source="elsewhere")
    assert one == other
    assert hash(one) == hash(other)
    assert one != ClusterSpec({"ps": PS})
    assert one != CLUSTER


def test_spec_copies_specs_and_is_cut_off_from_what_it_was_made_of() -> None:
    """A spec of a spec, a copy and a pickle are equal, and independent of any list passed in or out."""
    given_cluster = copy.deepcopy(CLUSTER)
    spec = ClusterSpec(given_cluster)
    given_cluster["ps"].append("ps2:2222")
    spec.jobs.clear()
    spec.as_dict().clear()
    assert spec.as_dict() == CLUSTER
    for same in (ClusterSpec(spec), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert same == spec
        assert same.source == "ClusterSpec"


def test_empty_specs_are_false() -> None:
    """A spec is true if it has a job, even one without tasks, as in TensorFlow."""
    assert not ClusterSpec({})
    assert ClusterSpec({"ps": []})
    assert ClusterSpec({"ps": []}) == ClusterSpec({"ps": {}})
    assert ClusterSpec({"ps": []}).job_tasks("ps") == []


def test_asking_for_what_is_not_there_names_what_is() -> None:
    """An unknown job or index is a ConfigurationError, hence a ValueError as with TensorFlow."""
    spec = ClusterSpec(CLUSTER)
    assert "has ps, worker" in message_of(lambda: spec.num_tasks("chief"))
    assert "has 3 tasks (0 to 2)" in message_of(lambda: spec.task_address("worker", 3))
    assert "no jobs" in message_of(lambda: ClusterSpec({}).job_tasks("ps"))
    assert "no tasks" in message_of(lambda: ClusterSpec({"ps": []}).task_address("ps", 0))
    many = ClusterSpec({"ps": {2 * i: f"ps{i}:2222" for i in range(100)}})
    assert "has 100 tasks (0, 2, 4, 6, 8, ... and 198)" in message_of(lambda: many.task_address("ps", 1))


@pytest.mark.parametrize(
    ("cluster", "key", "limit"),
    [
        ([], "cluster is []", "object of jobs"),
        ({"workers": WORKERS}, 'a key of cluster is "workers"', '"worker"'),
        ({"master": ["m:1"]}, 'a key of cluster is "master"', 'for example, "chief"'),
        ({7: WORKERS}, "a key of cluster is 7", "chief, worker, ps and evaluator"),
        ({"ps": "ps0:2222"}, 'cluster.ps is "ps0:2222"', "list addresses"),
        ({"ps": None}, "cluster.ps is null", "list addresses"),
        ({"ps": ["ps0:2222", 7]}, "cluster.ps[1] is 7", "a string"),
        ({"ps": ["ps0:2222", "ps1"]}, 'cluster.ps[1] is "ps1"', "no port"),
        ({"ps": {"4": "ps1:0"}}, 'cluster.ps[4] is "ps1:0"', "1 to 65535"),
        ({"ps": {"-1": "ps0:2222"}}, 'an index of cluster.ps is "-1"', "0 to 999999"),
        ({"ps": {True: "ps0:2222"}}, "an index of cluster.ps is true", "0 to 999999"),
        ({"ps": {10**6: "ps0:2222"}}, "an index of cluster.ps is 1000000", "0 to 999999"),
        ({"ps": {"1": "a:1", 1: "b:1"}}, 'cluster.ps[1] is "b:1"', 'was "a:1" before'),
        ({"ps": ["a:1", "a:1"]}, 'cluster.ps[1] is "a:1"', "cluster.ps[0] has that address too"),
        ({"ps": ["a:1"], "worker": ["A:01"]}, 'cluster.worker[0] is "A:01"', "cluster.ps[0] has that"),
        ({"ps": ["[::1]:1", "[0::1]:1"]}, 'cluster.ps[1] is "[0::1]:1"', "cluster.ps[0] has that"),
    ],
)
def test_a_spec_that_can_not_be_is_refused(cluster: Any, key: str, limit: str) -> None:
    """The error names the source, the key and the value, and the rule it breaks."""
    text = message_of(lambda: ClusterSpec(cluster, source="Somewhere"))
    assert text.startswith(f"Somewhere: {key}")
    assert limit in text


# --- TFConfig (rows 1 and 5) -----------------------------------------------------------------------------


@pytest.mark.parametrize(("job", "index"), [("chief", 0), ("worker", 2), ("ps", 1), ("evaluator", 0)])
def test_config_of_every_role(job: str, index: int) -> None:
    """One cluster serves all roles; only the task differs, and its index may be a string of digits."""
    for shown in (index, str(index)):
        config = TFConfig.parse(json.dumps({"cluster": FULL, "task": {"type": job, "index": shown}}))
        assert config == TFConfig(ClusterSpec(FULL), Task(job, index))
        assert config.task == Task(job, index)


def test_without_the_variable_all_is_empty() -> None:
    """A missing TF_CONFIG is the same as an empty object, and null the same as a key left out."""
    assert TFConfig.from_environ({}) == TFConfig.parse("{}") == TFConfig()
    assert TFConfig.parse('{"cluster": null, "task": null, "rpc_layer": null, "environment": null}') == TFConfig()
    assert TFConfig.parse('{"task": {}}') == TFConfig()


def test_from_environ_reads_the_process_environment(set_config: Callable[..., None]) -> None:
    """The environment of the process, as it is at the call, is the default."""
    set_config(cluster=CLUSTER, rpc_layer="grpc", environment="cloud")
    assert TFConfig.from_environ() == TFConfig(ClusterSpec(CLUSTER), None, "grpc", "cloud")


def test_keys_of_others_are_passed_over() -> None:
    """Keys that other systems put beside cluster and task change nothing, whatever their type."""
    extra = {"environment": 1, "session_master": [], "model_dir": None, "job": {"x": {}}, "": 0}
    assert TFConfig.parse(json.dumps({"cluster": CLUSTER, **extra})) == TFConfig(ClusterSpec(CLUSTER))


def test_a_role_may_know_only_itself_and_the_servers() -> None:
    """A worker's sparse cluster need not list the other workers, nor a server's any other task."""
    worker = TFConfig.parse(
        json.dumps({"cluster": {"worker": {"2": "w2:1"}, "ps": PS}, "task": {"type": "worker", "index": 2}})
    )
    assert worker.cluster.task_address("worker", 2) == "w2:1"
    server = TFConfig.parse('{"cluster": {"ps": {"1": "ps1:1"}}, "task": {"type": "ps", "index": 1}}')
    assert server.cluster.task_indices("ps") == [1]


def test_an_evaluator_needs_no_cluster() -> None:
    """The evaluator may be in the cluster, outside it, or have none."""
    task = {"type": "evaluator", "index": 0}
    for cluster in ({}, CLUSTER, FULL):
        assert TFConfig.parse(json.dumps({"cluster": cluster, "task": task})).task == Task("evaluator", 0)
    assert not TFConfig.parse(json.dumps({"task": task})).cluster


@pytest.mark.parametrize(
    ("text", "problem", "right"),
    [
        ("", "not JSON at line 1, column 1", "(Expecting value)"),
        ("{'cluster': {}}", "not JSON at line 1, column 2, near \"{'cluster'", "double quotes"),
        ('{\n "task": }', "not JSON at line 2, column 10", '"task": {"type": "worker", "index": 0}'),
        ("[1]", "is [1]", "a JSON object"),
        ("[" * 100_000, "nested too deeply, or has a number with too many digits", '{"cluster": '),
        ("9" * 5000, "nested too deeply, or has a number with too many digits", '{"cluster": '),
        ('{"cluster": {"ps": ["a:1"], "ps": ["b:1"]}}', 'the key "ps" occurs twice', '{"ps": ...} once'),
        ('{"cluster": 3}', "cluster is 3", "object of jobs"),
        ('{"cluster": {"ps": ["ps0:2222", "ps1"]}}', 'cluster.ps[1] is "ps1"', '"ps1:2222"'),
        ('{"task": "worker"}', 'task is "worker"', '{"task": {"type": "worker", "index": 0}}'),
        ('{"task": {"index": 0}}', "task.type is missing", "a type and an index"),
        ('{"task": {"type": "ps"}}', "task.index is missing", "a type and an index"),
        ('{"task": {"type": "wroker", "index": 0}}', 'task.type is "wroker"', 'for example, "worker"'),
        ('{"task": {"type": ["ps"], "index": 0}}', 'task.type is ["ps"]', "chief, worker, ps and evaluator"),
        ('{"task": {"type": "ps", "index": true}}', "task.index is true", "0 to 999999"),
        ('{"task": {"type": "ps", "index": 1.5}}', "task.index is 1.5", "0 to 999999"),
        ('{"task": {"type": "ps", "index": -1}}', "task.index is -1", "0 to 999999"),
        ('{"task": {"type": "ps", "index": "one"}}', 'task.index is "one"', "0 to 999999"),
        ('{"task": {"type": "ps", "index": 1e999}}', "task.index is Infinity", "0 to 999999"),
        ('{"task": {"type": "ps", "index": 0}}', 'task.type is "ps"', "cluster.ps has no tasks"),
        ('{"rpc_layer": "grpc+verbs"}', 'rpc_layer is "grpc+verbs"', '"grpc", or leave it out'),
        ('{"rpc_layer": 1}', "rpc_layer is 1", '"grpc", or leave it out'),
    ],
)
def test_a_mistake_in_the_variable_has_its_answer(text: str, problem: str, right: str) -> None:
    """Each mistake is named with its key and value, and a right one is shown."""
    error = message_of(lambda: TFConfig.parse(text))
    assert error.startswith("TF_CONFIG: ")
    assert problem in error
    assert right in error


def test_an_index_out_of_range_shows_those_there_are() -> None:
    """The whole message, once: key, value, limit, and a right one for the same role."""
    config = {"cluster": {"worker": WORKERS[:2], "ps": PS}, "task": {"type": "worker", "index": 3}}
    assert message_of(lambda: TFConfig.parse(json.dumps(config))) == (
        "TF_CONFIG: task.index is 3, but cluster.worker has 2 tasks (0 and 1); "
        'write, for example, {"task": {"type": "worker", "index": 1}}'
    )


def test_long_values_are_cut_and_line_breaks_escaped() -> None:
    """Garbage in the variable can't flood or forge a log."""
    garbage = "x\n\u2028\x85\ud800" * 1000
    for config in (
        {"task": {"type": garbage, "index": 0}},
        {"cluster": {"ps": [garbage]}},
        {"rpc_layer": garbage},
    ):
        text = message_of(lambda config=config: TFConfig.parse(json.dumps(config)))  # type: ignore[misc]
        assert "x\\n\\u2028" in text
        assert "..." in text


def test_the_manuals_examples_are_right() -> None:
    """Every JSON example of docs/tf_config.md parses, and its sample errors are the ones raised."""
    manual = Path(__file__).parents[3].joinpath("docs", "tf_config.md").read_text(encoding="utf-8")
    examples = re.findall(r"```json\n(.*?)```", manual, re.DOTALL)
    assert [TFConfig.parse(text).task for text in examples] == [Task("worker", 1), Task("worker", 2), Task("ps", 0)]
    validate_for_strategy(TFConfig.parse(examples[0]).cluster, "chief", 0)
    mistakes: list[dict[str, object]] = [
        {"cluster": {"worker": WORKERS[:2]}, "task": {"type": "worker", "index": 3}},
        {"cluster": {"ps": ["ps0:2222", "ps1"]}},
        {"cluster": {"master": ["master:2222"]}},
    ]
    for mistake in mistakes:
        assert message_of(lambda mistake=mistake: TFConfig.parse(json.dumps(mistake))) in manual  # type: ignore[misc]


# --- resolvers (rows 2 and 3) ----------------------------------------------------------------------------


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


# --- what a strategy needs (row 4) -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cluster", "task_type", "task_id"),
    [
        (FULL, "chief", 0),
        (FULL, "worker", 2),
        (FULL, "evaluator", 0),
        (FULL, None, None),
        (FULL, "chief", None),
        (CLUSTER, None, None),
        (CLUSTER, "evaluator", 0),
        ({"ps": {1: "ps1:1"}, "worker": {5: "w5:1"}}, "worker", 5),
    ],
)
def test_a_good_cluster_passes(cluster: Any, task_type: str | None, task_id: int | None) -> None:
    """A chief need not be listed unless this process is it, and an evaluator never."""
    validate_for_strategy(ClusterSpec(cluster), task_type, task_id)


@pytest.mark.parametrize(
    ("cluster", "task_type", "task_id", "problem"),
    [
        ({}, None, None, "cluster is empty"),
        (FULL, "master", 0, '{type} is "master", but the jobs are'),
        (FULL, "", 0, '{type} is "", but the jobs are'),
        (CLUSTER, "chief", 0, '{type} is "chief", but cluster.chief has no tasks'),
        (FULL | {"chief": ["a:1", "b:1"]}, "chief", 0, "cluster.chief has 2 tasks (0 and 1), but"),
        (
            FULL | {"evaluator": ["a:1", "b:1", "c:1"]},
            "chief",
            0,
            "cluster.evaluator has 3 tasks (0 to 2), but",
        ),
        (FULL, "chief", 1, "{id} is 1, but cluster.chief has 1 task (0)"),
        (FULL, "evaluator", 1, "{id} is 1, but cluster.evaluator has 1 task (0)"),
        (FULL, "worker", -1, "{id} is -1, but cluster.worker has 3 tasks (0 to 2)"),
        (
            {"worker": {3: "w:1", 5: "v:1"}, "ps": PS},
            "worker",
            4,
            "{id} is 4, but cluster.worker has 2 tasks (3 and 5)",
        ),
        ({"worker": WORKERS}, None, None, "cluster.ps has no tasks, but"),
        ({"worker": WORKERS, "ps": []}, None, None, "cluster.ps has no tasks, but"),
        ({"ps": PS}, None, None, "cluster.worker has no tasks, but"),
    ],
)
@pytest.mark.parametrize(
    ("source", "names"),
    [("TF_CONFIG", ("task.type", "task.index")), ("ClusterSpec", ("task_type", "task_id"))],
)
def test_a_strategy_refuses_what_it_can_not_use(
    cluster: Any,
    task_type: str | None,
    task_id: int | None,
    problem: str,
    source: str,
    names: tuple[str, str],
) -> None:
    """Each check of TensorFlow's constructor is made, and the error says where the cluster came from."""
    spec = ClusterSpec(cluster, source=source)
    text = message_of(lambda: validate_for_strategy(spec, task_type, task_id))
    assert text.startswith(f"{source}: " + problem.replace("{type}", names[0]).replace("{id}", names[1]))


def test_errors_are_the_peers_kind_too() -> None:
    """Code that catches TensorFlow's ValueError catches ours."""
    with pytest.raises(ValueError, match="cluster is empty") as caught:
        validate_for_strategy(ClusterSpec({}), None, None)
    assert isinstance(caught.value, PsClusterError)


# --- for any input ---------------------------------------------------------------------------------------

addresses = st.one_of(
    st.from_regex(r"[a-z][a-z0-9-]{0,10}(\.[a-z]{1,5})?", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(lambda ip: f"[{ip}]"),
).flatmap(lambda host: st.integers(1, 65535).map(lambda port: f"{host}:{port}"))


@st.composite
def specs(draw: Any) -> ClusterSpec:
    """Clusters of any shape, dense and sparse, in which every address is unique."""
    cluster: dict[str, Any] = {}
    pool = draw(st.lists(addresses, unique_by=split_address, max_size=12))
    for job in draw(st.permutations(JOBS)):
        mine = [pool.pop() for _ in range(draw(st.integers(0, len(pool))))]
        if draw(st.booleans()):
            indices = st.integers(0, 999_999)
            chosen = draw(st.lists(indices, min_size=len(mine), max_size=len(mine), unique=True))
            key = draw(st.sampled_from([int, str]))
            cluster[job] = {key(index): address for index, address in zip(chosen, mine, strict=True)}
        elif mine or draw(st.booleans()):
            cluster[job] = mine
    return ClusterSpec(cluster)


@given(specs())
def test_a_spec_comes_back_from_its_dict(spec: ClusterSpec) -> None:
    """as_dict loses nothing, and agrees with what the methods say of each task."""
    assert ClusterSpec(spec.as_dict()) == spec
    for job in spec.jobs:
        listed = {i: address for i, address in enumerate(spec.job_tasks(job)) if address is not None}
        assert listed == {index: spec.task_address(job, index) for index in spec.task_indices(job)}
        assert len(listed) == spec.num_tasks(job)


@given(specs(), st.sampled_from([None, "grpc"]), st.text(), st.data())
def test_a_config_comes_back_from_its_json(
    spec: ClusterSpec, rpc_layer: str | None, environment: str, data: st.DataObject
) -> None:
    """parse(to_json) gives an equal value, of one line, for any cluster and any task in it."""
    tasks = [Task(job, index) for job in spec.jobs for index in spec.task_indices(job)]
    task = data.draw(st.sampled_from([None, *tasks]))
    config = TFConfig(spec, task, rpc_layer, environment)
    text = config.to_json()
    assert len(text.splitlines()) == 1
    assert TFConfig.parse(text) == config
    assert TFConfig.from_environ({"TF_CONFIG": text}) == config


words = st.one_of(
    st.sampled_from(["cluster", "task", "type", "index", "rpc_layer", "session_master", "master", "0", "1", *JOBS]),
    st.sampled_from(["a:1", "b:2222", "a", "[::1]:1", "a:0", "grpc", "grpc+x"]),
    st.text(max_size=20),
)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | words
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4),
    max_leaves=20,
)
tasks_or_worse = st.lists(words) | st.dictionaries(words | st.integers(-1, 3).map(str), words) | values
configs = values | st.fixed_dictionaries(
    {},
    optional={
        "cluster": st.dictionaries(st.sampled_from(JOBS) | words, tasks_or_worse, max_size=4) | values,
        "task": st.fixed_dictionaries({}, optional={"type": words | values, "index": st.integers() | values}) | values,
        "rpc_layer": words | values,
        "session_master": words | values,
        "environment": values,
    },
)


def exercise(text: str) -> None:
    """Check that everything that reads TF_CONFIG either works or raises a one-line ConfigurationError."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.environ", {"TF_CONFIG": text})  # any text, even what a real environment can't hold
        resolver = TFConfigClusterResolver()
        calls: list[Callable[[], object]] = [
            lambda: TFConfig.parse(TFConfig.parse(text).to_json()),
            lambda: validate_for_strategy(resolver.cluster_spec(), resolver.task_type, resolver.task_id),
            resolver.master,
            lambda: (resolver.task_type, resolver.task_id),
            lambda: (resolver.rpc_layer, resolver.environment),
        ]
        for call in calls:
            try:
                call()
            except ConfigurationError:
                message_of(call)


@given(configs)
def test_any_json_is_read_or_refused_in_one_line(value: object) -> None:
    """Any JSON value is read, or is a ConfigurationError of one line."""
    exercise(json.dumps(value))


@given(st.text())
@example("[" * 2000)
@example('{"task": {"type": ' + "[" * 900 + "]" * 900 + "}}")
@example('{"cluster": {"ps": ' + '{"0":' * 900 + "1" + "}" * 900 + "}}")
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    """Any text is read, or is a ConfigurationError, however deep or strange it is."""
    exercise(text)


@given(st.text(max_size=40) | addresses)
def test_any_address_is_split_or_refused_in_one_line(text: str) -> None:
    """An accepted address has a host and a port in range; all others are a ConfigurationError of one line."""
    try:
        host, port = split_address(text)
    except ConfigurationError:
        message_of(lambda: split_address(text))
    else:
        assert host
        assert 1 <= port <= 65535


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
