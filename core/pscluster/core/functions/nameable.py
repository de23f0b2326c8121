"""What of pscluster itself peers may name where pickles are off: a list, name by name, and nothing that is not in it.

Two kinds. The public functions and classes that users pass into functions (initializers, metrics, schedules, lookups,
errors): they compute, and neither open, write nor start anything. And what the library itself sends users' functions
and datasets with; the latter read files, so workers alone take them, see `pscluster.worker.data.sources`.

Methods are not in it: an object travels as its class and its state, and users' own code calls them.
"""

from __future__ import annotations

_ERRORS = (
    *("PsClusterError", "ConfigurationError", "MisuseError", "InvalidUpdateError", "UnknownVariableError"),
    *("RefusedError", "VersionMismatchError", "AuthenticationError", "NotPermittedError", "BusyError", "StaleError"),
    *("ProtocolError", "UnavailableError", "PSUnavailableError", "CheckpointError"),
    *("CheckpointMisfitError", "WaitTimeoutError", "CancelledError", "EndOfDatasetError", "DatasetError"),
    *("FunctionCancelled", "FunctionError", "FunctionTimeoutError"),
)

EVERYWHERE: dict[str, frozenset[str]] = {
    "pscluster.core.context": frozenset(("experimental_get_current_worker_index",)),
    "pscluster.core.errors": frozenset(_ERRORS),
    "pscluster.ps.client.exchanges": frozenset(("Traffic",)),  # what `strategy.traffic()` gives
    "pscluster.ps.initializers": frozenset(
        (
            *("Initializer", "Zeros", "Ones", "Constant", "RandomUniform", "RandomNormal", "TruncatedNormal"),
            *("GlorotUniform", "GlorotNormal", "HeUniform", "HeNormal"),
        )
    ),
    "pscluster.ps.handles.lookup": frozenset(("embedding_bag", "embedding_lookup", "embedding_lookup_sparse")),
    "pscluster.ps.handles.metrics": frozenset(
        (
            *("Metric", "MetricLike", "Sum", "Mean", "Accuracy", "SparseCategoricalAccuracy", "MeanSquaredError"),
            *("Precision", "Recall", "AUC"),
        )
    ),
    "pscluster.ps.optim.rules": frozenset(
        ("UpdateRule", "SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Ftrl", "Lion", "RMSprop")
    ),
    "pscluster.ps.optim.schedules": frozenset(
        (
            *("LearningRateSchedule", "ExponentialDecay", "PiecewiseConstantDecay", "PolynomialDecay"),
            *("InverseTimeDecay", "CosineDecay", "CosineDecayRestarts", "WarmUp"),
        )
    ),
    "pscluster.ps.handles.variable": frozenset(("IndexedSlices", "ShardedVariable", "Variable")),
    "pscluster.worker.data.per_worker": frozenset(("InputContext",)),
    "pscluster.worker.strategy": frozenset(("ReduceOp", "ReduceOp.SUM", "ReduceOp.MEAN")),
}
"""By module: functions and classes."""

ON_WORKERS: dict[str, frozenset[str]] = {
    "pscluster.worker.data.per_worker": frozenset(("given",)),
    "pscluster.worker.evaluation": frozenset(("states_of",)),
    "pscluster.worker.data.pipelines": frozenset(("Pipeline", "numbered")),
    "pscluster.worker.data.sources": frozenset(("MappedArray", "Arrays", "Examples", "Ranges", "Made", "Files")),
    "pscluster.worker.training": frozenset(("logs_of_steps",)),
}
"""These, too, on a worker."""

MODULES = frozenset(
    f"pscluster.{name}"
    for name in (
        "core.errors",
        "ps.initializers",
        "ps.handles.lookup",
        "ps.handles.metrics",
        "ps.optim",
        "ps.optim.schedules",
    )
)
"""Modules that may be passed as objects: the public ones whose names are in the list."""


def is_nameable(module: str, qualname: str, *, on_worker: bool) -> bool:
    """May a peer name this of ours?"""
    if qualname in EVERYWHERE.get(module, ()):
        return True
    return on_worker and qualname in ON_WORKERS.get(module, ())
