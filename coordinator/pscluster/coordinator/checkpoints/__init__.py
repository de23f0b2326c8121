"""Checkpoints, on the coordinator: when they are made, what is in them, how they come back.

index.py    the index of a checkpoint: what is where, checked when it is read
manager.py  saving and restoring, the directory of several checkpoints
tools.py    inspect, verify, merge: what the command line does with a checkpoint, without a cluster
"""

from pscluster.coordinator.checkpoints.manager import Checkpoint, CheckpointManager, RestoredFrom

__all__ = ["Checkpoint", "CheckpointManager", "RestoredFrom"]
