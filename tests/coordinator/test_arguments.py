"""Numbers that users give: each is refused, with its name, before anything is done with it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest

from pscluster.coordinator import (
    Checkpoint,
    CheckpointManager,
    ClusterSpec,
    Dashboard,
    LocalCluster,
    ParameterServerStrategy,
    PerReplica,
    Server,
    SidecarEvaluator,
    SlurmClusterResolver,
    callbacks,
)
from pscluster.coordinator.variables.placement import ShardPlacer
from pscluster.core.checks import type_of
from pscluster.core.errors import ConfigurationError, MisuseError

NUMBERS: dict[str, tuple[Callable[..., object], list[object]]] = {
    "num_ps": (LocalCluster, [0, 1.5, None]),
    "num_workers": (LocalCluster, [0, 1.5, None]),
    "max_restarts": (LocalCluster, [-1, 1.5, None]),
    "grace": (LocalCluster, [-0.5, math.inf, None]),
    "ps_timeout": (lambda **options: ParameterServerStrategy(LocalCluster(), **options), [0, math.inf, None]),
    "max_to_keep": (lambda **options: CheckpointManager("unused", **options), [0, 1.5]),
    "every": (lambda **options: CheckpointManager("unused", **options), [0, math.inf]),
    "barrier_timeout": (lambda **options: Checkpoint(None, **options), [0, math.inf, None]),  # type: ignore[arg-type]
    "max_evaluations": (lambda **options: SidecarEvaluator(len, "unused", **options), [0, 1.5]),
    "poll": (lambda **options: SidecarEvaluator(len, "unused", **options), [0, math.inf, None]),
    "timeout": (lambda **options: SidecarEvaluator(len, "unused", **options), [0]),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_out_of_its_range_is_refused(name: str) -> None:
    """So are NaN, strings and flags."""
    take, refused = NUMBERS[name]
    for value in (*refused, math.nan, "3", True):
        with pytest.raises(ConfigurationError) as caught:
            take(**{name: value})
        assert str(caught.value).startswith(f"{name} is {value!r}; it must be a "), value


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: ParameterServerStrategy(cast("Any", "ps0:2222")),
            "needs a cluster, such as TFConfigClusterResolver()",
        ),
        (lambda: ParameterServerStrategy(LocalCluster(), job_name=cast("Any", 3)), "job_name is an int; give a string"),
        (lambda: Checkpoint(cast("Any", "unused")), "strategy is a str; give a ParameterServerStrategy"),
        (lambda: callbacks.EarlyStopping(cast("Any", 3)), "monitor is an int; give the name of a log"),
        (lambda: Dashboard(cast("Any", 3)), "coordinator is an int; give a ClusterCoordinator, or the strategy"),
        (lambda: CheckpointManager(cast("Any", 3), strategy=cast("Any", 4)), "directory is an int; give a path"),
        (lambda: Server(cast("Any", 3)), "a Server takes a ClusterSpec or a resolver, not an int"),
        (lambda: Server(ClusterSpec({}), protocol=cast("Any", 3)), "protocol is an int; give a string"),
        (lambda: PerReplica(cast("Any", 3)), "PerReplica takes the values of all replicas, not an int"),
        (lambda: SlurmClusterResolver(cast("Any", 3)), "jobs is an int; give the number of tasks by job"),
        *(
            (partial(cast("Any", LocalCluster), **{name: 3}), f"{name} is an int; give a {wanted}")
            for wanted, names in (
                ("string", ("host", "token", "log_level")),
                ("path", ("cwd", "log_dir", "state_dir")),
            )
            for name in names
        ),
    ],
)
def test_another_type_is_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(TypeError, match=re.escape(words)):
        call()


def test_settings_of_other_types_are_refused() -> None:
    for arguments in ({"port_base": "x"}, {"port_range": 3}):
        with pytest.raises(ConfigurationError, match=r"port_(base|range) .*; give (one|two)"):
            SlurmClusterResolver(**cast("Any", arguments))
    with pytest.raises(ConfigurationError, match="allow_pickle is 'x'; it must be True or False"):
        LocalCluster(allow_pickle=cast("Any", "x"))
    with pytest.raises(ConfigurationError, match="features has an int: give layers"):
        Checkpoint(cast("Any", None), features=cast("Any", 3))
    for role, index in (("ps", "x"), ("ps", 0.5), ("ps", None), (["ps"], 0)):
        with pytest.raises(MisuseError, match=r"there is no .* in a cluster of"):
            LocalCluster().is_alive(cast("Any", role), cast("Any", index))


@pytest.mark.parametrize("num_ps", [0, math.nan, "2", True])
def test_shards_need_a_server(num_ps: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"num_ps is .*; it must be a whole number, 1 or more"):
        ShardPlacer(num_ps)


def test_types_have_their_article() -> None:
    values: list[object] = [None, 1, [], ConfigurationError()]
    assert list(map(type_of, values)) == ["None", "an int", "a list", "a ConfigurationError"]
