"""Checkpoints, on the coordinator: when they are made, what is in them, how they are restored."""

from pscluster.coordinator.checkpoints.checkpoint import Checkpoint
from pscluster.coordinator.checkpoints.manager import CheckpointManager, RestoredFrom
from pscluster.coordinator.checkpoints.saved import SavedVariables

__all__ = ["Checkpoint", "CheckpointManager", "RestoredFrom", "SavedVariables"]
