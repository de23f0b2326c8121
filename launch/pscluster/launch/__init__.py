"""Trainer: one function and one configuration, on one process or many."""

from __future__ import annotations

from pscluster.launch.checkpoint import Checkpoint as Checkpoint
from pscluster.launch.config import CheckpointConfig as CheckpointConfig
from pscluster.launch.config import FailureConfig as FailureConfig
from pscluster.launch.config import RunConfig as RunConfig
from pscluster.launch.config import ScalingConfig as ScalingConfig
from pscluster.launch.context import TrainContext as TrainContext
from pscluster.launch.context import barrier as barrier
from pscluster.launch.context import broadcast as broadcast
from pscluster.launch.context import broadcast_from_rank_zero as broadcast_from_rank_zero
from pscluster.launch.context import get_checkpoint as get_checkpoint
from pscluster.launch.context import get_context as get_context
from pscluster.launch.context import get_dataset_shard as get_dataset_shard
from pscluster.launch.context import report as report
from pscluster.launch.result import Result as Result
from pscluster.launch.shards import DatasetShard as DatasetShard
from pscluster.launch.trainer import Trainer as Trainer
from pscluster.launch.trainer import TrainingFailedError as TrainingFailedError
