"""Evaluation: examples to states of metrics, states to results; with a shard on each worker, or all in one process.

And prediction: examples to outputs, joined in the examples' order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pscluster.core.checks import type_of
from pscluster.core.dtypes import array_of
from pscluster.core.errors import MisuseError
from pscluster.core.values import describe
from pscluster.core.values.records import is_record_class, layout_of, structure_of
from pscluster.ps.handles.metric import MetricLike, State

States = dict[str, State]
"""States by the metric's name."""


def states_of(step: Callable[[Any], Any], metrics: Mapping[str, MetricLike], elements: Iterable[Any]) -> States:
    """Return the states of the metrics after these elements, in order.

    For each element, the step returns the metrics' arguments: a tuple for all of them, or a dict with a tuple for each.
    Raise MisuseError if a dict has only some of the metrics' names, or none while a metric does not accept the dict.
    """
    states = {name: metric.initial() for name, metric in metrics.items()}
    for element in elements:
        result = step(element)
        by_metric = isinstance(result, dict) and _is_by_metric(result, metrics)
        for name, metric in metrics.items():
            values = result[name] if by_metric else result
            try:
                states[name] = metric.update(states[name], *(values if isinstance(values, tuple) else (values,)))
            except (TypeError, ValueError, MisuseError) as error:
                if by_metric or not isinstance(result, dict):
                    raise
                raise MisuseError(
                    f"the step returned a dict with {list(result)}, which has none of the metrics' names, and metric "
                    f"{name!r} does not take the dict itself ({error}): return a dict with {list(metrics)}"
                ) from error
    return states


def outputs_of(step: Callable[[Any], Any], elements: Iterable[Any]) -> list[Any]:
    """Return what the step returns for each of these elements, in order."""
    return [step(element) for element in elements]


def joined(outputs: Sequence[Any]) -> Any:
    """Return one structure of outputs, with the arrays of each leaf joined along the first axis; numbers become one.

    Raise MisuseError if they differ in structure, or in shape after the first axis.
    """
    if not outputs:
        return []
    first = outputs[0]
    cls: type = type(first)
    structure = structure_of(first)
    if (other := next((output for output in outputs if structure_of(output) != structure), None)) is not None:
        raise MisuseError(
            f"the step returned {describe(first)} for one element and {describe(other)} for another: return the same "
            "structure for all"
        )
    if is_record_class(cls):
        layout = layout_of(cls)
        return layout.build(layout.fields, list(map(joined, zip(*map(layout.values, outputs), strict=True))))
    if isinstance(first, dict):
        return {key: joined([output[key] for output in outputs]) for key in first}
    if isinstance(first, list | tuple):
        parts = map(joined, zip(*outputs, strict=True))
        return tuple(parts) if isinstance(first, tuple) else list(parts)
    try:
        return np.concatenate([np.atleast_1d(array_of(output)) for output in outputs])
    except (TypeError, ValueError) as error:
        raise MisuseError(
            f"the step's outputs can't be joined along their first axis: {error}. Return arrays with an example a row, "
            "or numbers"
        ) from None


def _is_by_metric(result: Mapping[Any, Any], metrics: Mapping[str, MetricLike]) -> bool:
    """Return whether the dict has an entry for each metric, rather than being itself for a metric that takes a dict."""
    missing = [name for name in metrics if name not in result]
    if missing and len(missing) < len(metrics):
        raise MisuseError(
            f"the step returned a dict with {list(result)}, and nothing for the metrics {missing}: return something "
            f"for each of {list(metrics)}"
        )
    return not missing


def results_of(metrics: Mapping[str, MetricLike], shards: Sequence[States]) -> dict[str, Any]:
    """Return the results over all shards, merged in order. Raise MisuseError if a metric's states do not match.

    The result of a metric that says that it has `several` is a dict of them.
    """
    results: dict[str, Any] = {}
    for name, metric in metrics.items():
        state = metric.initial()
        for shard in shards:
            other = shard[name]
            if state.keys() != other.keys():
                raise MisuseError(
                    f"metric {name!r} does not merge: one state has {sorted(state)}, another {sorted(other)}; update() "
                    "must return the same arrays as initial()"
                )
            try:
                state = metric.merge(state, other)
            except (ValueError, TypeError) as error:
                shapes = [{key: np.shape(values) for key, values in one_state.items()} for one_state in (state, other)]
                raise MisuseError(
                    f"metric {name!r} does not merge: {error}; the states' shapes are {shapes[0]} and {shapes[1]}"
                ) from error
        result = metric.result(state)
        results |= result if getattr(metric, "several", False) else {name: result}
    return results


def by_name(metrics: Mapping[str, MetricLike] | Sequence[MetricLike]) -> dict[str, MetricLike]:
    """Return metrics by name. Raise MisuseError if two have the same name, or something is not a metric."""
    given: object = metrics
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise MisuseError(f"the metrics are {given!r:.80}: give a list, such as [metrics.Accuracy()], or a dict")
    if not isinstance(metrics, Mapping):
        metrics = list(metrics)
        for index, metric in enumerate(metrics):
            if not hasattr(metric, "name"):
                _check_metric(metric, f"metrics[{index}]")
        names = [getattr(metric, "name", None) for metric in metrics]
        if twice := {name for name in names if names.count(name) > 1}:
            raise MisuseError(f"several metrics are named {sorted(map(str, twice))}: give them names, or a dict")
        metrics = dict(zip(map(str, names), metrics, strict=True))
    for name, metric in metrics.items():
        _check_metric(metric, f"metric {name!r}")
    if not metrics:
        raise MisuseError("no metrics are given: there would be nothing to report")
    return dict(metrics)


def _check_metric(metric: object, subject: str) -> None:
    methods = ("initial", "update", "merge", "result")
    missing = [method for method in methods if not callable(getattr(metric, method, None))]
    if isinstance(metric, str | type):
        raise MisuseError(f"{subject} is {metric!r:.80}: give an object, such as metrics.Accuracy()")
    if missing:
        raise MisuseError(f"{subject}, {type_of(metric)}, has no {', '.join(missing)}: see docs/datasets.md")
