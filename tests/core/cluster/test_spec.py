"""Cluster specs and TF_CONFIG: TensorFlow's behaviour, and a one-line answer to every mistake."""

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
from tests.core.cluster.support import CLUSTER, FULL, PS, WORKERS, addresses, message_of

from pscluster.core.cluster.addresses import split_address
from pscluster.core.cluster.resolvers import TFConfigClusterResolver
from pscluster.core.cluster.spec import JOBS, ClusterSpec, validate_for_strategy
from pscluster.core.cluster.tf_config import Task, TFConfig
from pscluster.core.errors import ConfigurationError, PsClusterError

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
