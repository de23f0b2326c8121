"""Checkpoints, on the coordinator: when they are made, what is in them, how they come back.

checkpoint.py    saving and restoring one: a consistent cut
folder.py        a directory of several checkpoints
index.py         the index of a checkpoint: what is where, checked when it is read
manager.py       several in a directory, and what a script does when it starts
restore_plan.py  what each server is to read
saved.py         a checkpoint's variables, read without a cluster
tools.py         inspect, verify, merge: what the command line does with a checkpoint, without a cluster
"""

from pscluster.coordinator.checkpoints.checkpoint import Checkpoint
from pscluster.coordinator.checkpoints.manager import CheckpointManager, RestoredFrom
from pscluster.coordinator.checkpoints.saved import SavedVariables

__all__ = ["Checkpoint", "CheckpointManager", "RestoredFrom", "SavedVariables"]
