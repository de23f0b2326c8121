"""Evaluation: examples to states of metrics, states to results. A worker does it with a shard, one process with all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pscluster.core.errors import MisuseError
from pscluster.ps.handles.metrics import MetricLike, State

States = dict[str, State]
"""Of several metrics, by name."""


def states_of(step: Callable[[Any], Any], metrics: Mapping[str, MetricLike], elements: Iterable[Any]) -> States:
    """What the metrics keep of these elements, in order.

    Args:
        step: gives for an element what the metrics take: a tuple for all of them, or a dict with a tuple for each.
        metrics: by name.
        elements: a shard of the dataset.

    Raises:
        MisuseError: a dict that has something for some of the metrics, and not for others; or for none of them, and a
            metric can't take the dict itself.
    """
    states = {name: metric.initial() for name, metric in metrics.items()}
    for element in elements:
        found = step(element)
        by_metric = isinstance(found, dict) and _is_by_metric(found, metrics)
        for name, metric in metrics.items():
            values = found[name] if by_metric else found
            try:
                states[name] = metric.update(states[name], *(values if isinstance(values, tuple) else (values,)))
            except (TypeError, ValueError, MisuseError) as error:
                if by_metric or not isinstance(found, dict):
                    raise
                raise MisuseError(
                    f"the step returned a dict with {list(found)} and none of the metrics' names, and metric {name!r} "
                    f"does not take the dict itself ({error}): return a dict with {list(metrics)}"
                ) from error
    return states


def _is_by_metric(found: Mapping[Any, Any], metrics: Mapping[str, MetricLike]) -> bool:
    """Has the dict something for each metric? Else it is for one that takes a dict."""
    missing = [name for name in metrics if name not in found]
    if missing and len(missing) < len(metrics):
        raise MisuseError(
            f"the step gave a dict with {list(found)}, and nothing for the metrics {missing}: give something for each "
            f"of {list(metrics)}"
        )
    return not missing


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
    given: object = metrics
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise MisuseError(f"the metrics are {given!r:.80}: give a list, such as [metrics.Accuracy()], or a dict")
    if not isinstance(metrics, Mapping):
        metrics = list(metrics)
        for number, metric in enumerate(metrics):
            if not hasattr(metric, "name"):
                _check_metric(metric, f"metrics[{number}]")
        names = [getattr(metric, "name", None) for metric in metrics]
        if twice := {name for name in names if names.count(name) > 1}:
            raise MisuseError(f"several metrics are named {sorted(map(str, twice))}: give them names, or a dict")
        metrics = dict(zip(map(str, names), metrics, strict=True))
    for name, metric in metrics.items():
        _check_metric(metric, f"metric {name!r}")
    if not metrics:
        raise MisuseError("no metrics are given: there would be nothing to tell")
    return dict(metrics)


def _check_metric(metric: object, what: str) -> None:
    methods = ("initial", "update", "merge", "result")
    missing = [word for word in methods if not callable(getattr(metric, word, None))]
    if isinstance(metric, str | type):
        raise MisuseError(f"{what} is {metric!r:.80}: give an object, such as metrics.Accuracy()")
    if missing:
        raise MisuseError(f"{what}, a {type(metric).__name__}, has no {', '.join(missing)}: see docs/datasets.md")
