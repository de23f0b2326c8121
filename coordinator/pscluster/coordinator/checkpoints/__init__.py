"""Checkpoints, on the coordinator: when they are made, what is in them, how they come back.

folder.py   a directory of several checkpoints
index.py    the index of a checkpoint: what is where, checked when it is read
manager.py  saving and restoring
saved.py    a checkpoint's variables, read without a cluster
tools.py    inspect, verify, merge: what the command line does with a checkpoint, without a cluster
"""

from pscluster.coordinator.checkpoints.manager import Checkpoint, CheckpointManager, RestoredFrom
from pscluster.coordinator.checkpoints.saved import SavedVariables

__all__ = ["Checkpoint", "CheckpointManager", "RestoredFrom", "SavedVariables"]
