"""The names in pscluster itself that peers may use where pickles are off. Nothing outside this list is allowed.

There are two kinds. Public functions and classes that users pass into functions (initializers, metrics, schedules,
lookups, errors): they compute, and never open, write or start anything. And what the library wraps users' functions and
datasets in; the latter read files, so only workers accept them: see `pscluster.worker.data.sources`.

Methods are not listed: an object travels as its class and its state, and the user's code calls its methods.
"""

from __future__ import annotations

EVERYWHERE: dict[str, tuple[str, ...]] = {
    "pscluster.core.context": ("exact_reads", "experimental_get_current_worker_index"),
    "pscluster.core.errors": (
        *("PsClusterError", "ConfigurationError", "MisuseError", "InvalidUpdateError", "UnknownVariableError"),
        *("RefusedError", "VersionMismatchError", "AuthenticationError", "NotPermittedError", "BusyError"),
        *(
            "StaleError",
            "ProtocolError",
            "ShardMovedError",
            "UnavailableError",
            "PSUnavailableError",
            "CheckpointError",
        ),
        *("MemberUnavailableError", "MemberTimeoutError"),
        *("CheckpointMismatchError", "WaitTimeoutError", "CancelledError", "EndOfDatasetError", "DatasetError"),
        *("FunctionCancelled", "FunctionError", "WorkerLostError", "FunctionTimeoutError"),
        *("MeshError", "LayoutError", "ShardedGatherError", "UnsupportedFunctionError", "PackError", "TensorLostError"),
    ),
    "pscluster.jax.served": ("ServedParams",),
    "pscluster.keras.copies": ("Weight",),
    "pscluster.keras.metrics": ("ModelMetrics",),
    "pscluster.keras.served": ("ServedModel", "predict_on_batch", "test_on_batch", "train_on_batch"),
    "pscluster.ps.client.exchanges": ("Traffic",),  # returned by `strategy.traffic()`
    "pscluster.ps.initializers": (
        *("Initializer", "Zeros", "Ones", "Constant", "RandomUniform", "RandomNormal", "TruncatedNormal"),
        *("GlorotUniform", "GlorotNormal", "HeUniform", "HeNormal"),
    ),
    "pscluster.ps.handles.rows.lookup": (
        "embedding_bag",
        "embedding_lookup",
        "embedding_lookup_sparse",
        "safe_embedding_lookup_sparse",
    ),
    "pscluster.ps.handles.metric": ("Metric", "MetricLike"),
    "pscluster.ps.handles.metrics": (
        *("Sum", "Mean", "Accuracy", "SparseCategoricalAccuracy", "MeanSquaredError"),
        *("Precision", "Recall", "AUC"),
    ),
    "pscluster.ps.optim.ftrl": ("Ftrl",),
    "pscluster.ps.optim.rule": ("UpdateRule",),
    "pscluster.ps.optim.rules": ("SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Lion", "RMSprop"),
    "pscluster.ps.optim.schedules": (
        *("LearningRateSchedule", "ExponentialDecay", "PiecewiseConstantDecay", "PolynomialDecay"),
        *("InverseTimeDecay", "CosineDecay", "CosineDecayRestarts", "WarmUp"),
    ),
    "pscluster.ps.handles.indexing": ("IndexedSlices",),
    "pscluster.ps.handles.variables.sharded": ("ShardedVariable",),
    "pscluster.ps.handles.variables.variable": ("Variable",),
    "pscluster.torch.served": ("ServedModule",),
    "pscluster.worker.collectives.replica": ("replica_context",),
    "pscluster.worker.data.per_worker": ("InputContext",),
    "pscluster.worker.synchronous.losses": ("compute_average_loss", "scale_regularization_loss"),
    "pscluster.worker.strategy": ("ReduceOp",),
}
"""By module: functions and classes."""

ON_WORKERS: dict[str, tuple[str, ...]] = {
    # Not what starts a process, which would choose by itself what to load.
    "pscluster.launch.members.running": ("run_here",),
    "pscluster.worker.data.per_replica": ("made_in_sync", "sliced"),
    "pscluster.worker.data.per_worker": ("given",),
    "pscluster.worker.steps.evaluation": ("outputs_of", "states_of"),
    "pscluster.worker.data.pipelines": ("Pipeline", "numbered"),
    "pscluster.worker.data.processes.process_map": ("ProcessMap",),
    "pscluster.worker.data.files.line_files": ("LineBlocks", "Text"),
    "pscluster.worker.data.files.line_tables": ("Csv", "JsonLines"),
    "pscluster.worker.data.files.opening": ("DataFile",),
    "pscluster.worker.data.files.parquet": ("ParquetBlocks",),
    "pscluster.worker.data.files.partitions": ("Partitions",),
    "pscluster.worker.data.files.ranges": ("NpyFiles", "Together", "ArrowFiles", "HuggingFaceRows"),
    "pscluster.worker.data.files.tars": ("TarFiles",),
    "pscluster.worker.data.sources": ("MappedArray", "Arrays", "Examples", "Ranges", "Made", "Files"),
    "pscluster.worker.features.counts": ("Counts",),
    "pscluster.worker.features.layer": ("analyzed", "shared_layer"),
    "pscluster.worker.features.numeric": ("Moments", "Quantiles"),
    "pscluster.worker.steps.overlap": ("logs_of_overlapped_steps", "overlapped"),
    "pscluster.worker.per_worker_variable": ("OwnValue", "PerWorkerVariable", "value_here"),
    "pscluster.worker.programs.interpreter": ("run_local", "run_program"),
    "pscluster.worker.steps.training": ("logs_of_steps",),
}
"""Additional ones, on a worker."""


def names_of_ours(module: str, *, on_worker: bool) -> frozenset[str]:
    """Return the names that a peer may use from one of our modules."""
    return frozenset(EVERYWHERE.get(module, ()) + (ON_WORKERS.get(module, ()) if on_worker else ()))
