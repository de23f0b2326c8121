"""Evaluation: examples to states of metrics, states to results. A worker does it with a shard, one process with all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pscluster.core.errors import MisuseError
from pscluster.ps.metrics import MetricLike, State

States = dict[str, State]
"""Of several metrics, by name."""


def states_of(step: Callable[[Any], Any], metrics: Mapping[str, MetricLike], elements: Iterable[Any]) -> States:
    """What the metrics keep of these elements, in order.

    Args:
        step: gives for an element what the metrics take: a tuple for all of them, or a dict with a tuple for each.
        metrics: by name.
        elements: a shard of the dataset.
    """
    states = {name: metric.initial() for name, metric in metrics.items()}
    for element in elements:
        found = step(element)
        for name, metric in metrics.items():
            values = found[name] if isinstance(found, dict) and found.keys() == metrics.keys() else found
            states[name] = metric.update(states[name], *(values if isinstance(values, tuple) else (values,)))
    return states


def results_of(metrics: Mapping[str, MetricLike], shards: Sequence[States]) -> dict[str, Any]:
    """The results over all shards, merged in their order.

    Raises:
        MisuseError: a metric's states do not fit together.
    """
    results: dict[str, Any] = {}
    for name, metric in metrics.items():
        state = metric.initial()
        for shard in shards:
            other = shard[name]
            if state.keys() != other.keys():
                raise MisuseError(
                    f"metric {name!r} does not merge: one state has {sorted(state)}, another {sorted(other)}; update() "
                    "must give the arrays that initial() has"
                )
            try:
                state = metric.merge(state, other)
            except (ValueError, TypeError) as error:
                shapes = [{key: np.shape(values) for key, values in each.items()} for each in (state, other)]
                raise MisuseError(
                    f"metric {name!r} does not merge: {error}; the states' shapes are {shapes[0]} and {shapes[1]}"
                ) from error
        results[name] = metric.result(state)
    return results


def by_name(metrics: Mapping[str, MetricLike] | Sequence[MetricLike]) -> dict[str, MetricLike]:
    """A list's by their names. MisuseError if two have one, or something is no metric."""
    if not isinstance(metrics, Mapping):
        names = [getattr(metric, "name", None) for metric in metrics]
        if twice := {name for name in names if names.count(name) > 1}:
            raise MisuseError(f"several metrics are named {sorted(map(str, twice))}: give them names, or a dict")
        metrics = dict(zip(map(str, names), metrics, strict=True))
    for name, metric in metrics.items():
        missing = [
            word for word in ("initial", "update", "merge", "result") if not callable(getattr(metric, word, None))
        ]
        if missing:
            raise MisuseError(f"metric {name!r}, a {type(metric).__name__}, has no {missing}: see docs/datasets.md")
    if not metrics:
        raise MisuseError("no metrics are given: there would be nothing to tell")
    return dict(metrics)
