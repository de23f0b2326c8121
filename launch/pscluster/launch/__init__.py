"""Trainer: one function and one configuration, on one process or many.

A name's module is imported when it is first asked for: workers, and the processes that they start, need few of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pscluster.launch.config import CheckpointConfig as CheckpointConfig
    from pscluster.launch.config import FailureConfig as FailureConfig
    from pscluster.launch.config import RunConfig as RunConfig
    from pscluster.launch.config import ScalingConfig as ScalingConfig
    from pscluster.launch.errors import TrainingFailedError as TrainingFailedError
    from pscluster.launch.members.callbacks import ReportCheckpoint as ReportCheckpoint
    from pscluster.launch.members.callbacks import ReportCheckpointCallback as ReportCheckpointCallback
    from pscluster.launch.members.context import TrainContext as TrainContext
    from pscluster.launch.members.context import barrier as barrier
    from pscluster.launch.members.context import broadcast as broadcast
    from pscluster.launch.members.context import broadcast_from_rank_zero as broadcast_from_rank_zero
    from pscluster.launch.members.context import get_checkpoint as get_checkpoint
    from pscluster.launch.members.context import get_context as get_context
    from pscluster.launch.members.context import get_dataset_shard as get_dataset_shard
    from pscluster.launch.members.context import report as report
    from pscluster.launch.members.shards import DatasetShard as DatasetShard
    from pscluster.launch.ray.cluster import RayCluster as RayCluster
    from pscluster.launch.ray.connection import RayClusterError as RayClusterError
    from pscluster.launch.result import Result as Result
    from pscluster.launch.storage.checkpoint import Checkpoint as Checkpoint
    from pscluster.launch.trainer import TensorflowTrainer as TensorflowTrainer
    from pscluster.launch.trainer import TorchTrainer as TorchTrainer
    from pscluster.launch.trainer import Trainer as Trainer
else:
    _OF = {
        "members.callbacks": ("ReportCheckpoint", "ReportCheckpointCallback"),
        "storage.checkpoint": ("Checkpoint",),
        "config": ("CheckpointConfig", "FailureConfig", "RunConfig", "ScalingConfig"),
        "members.context": (
            *("TrainContext", "barrier", "broadcast", "broadcast_from_rank_zero"),
            *("get_checkpoint", "get_context", "get_dataset_shard", "report"),
        ),
        "errors": ("TrainingFailedError",),
        "ray.cluster": ("RayCluster",),
        "ray.connection": ("RayClusterError",),
        "result": ("Result",),
        "members.shards": ("DatasetShard",),
        "trainer": ("TensorflowTrainer", "TorchTrainer", "Trainer"),
    }
    __all__ = sorted(name for names in _OF.values() for name in names)

    def __getattr__(name):
        for module, names in _OF.items():
            if name in names:
                globals()[name] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__all__})
