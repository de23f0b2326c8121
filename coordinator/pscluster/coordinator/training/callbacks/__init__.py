"""What is called on the way through a training. The hooks have Keras' names; so have the callbacks and their arguments.

A callback of one's own derives from `Callback`, and finds what the training is at in `self.training`. In a loop of
one's own a `CallbackList` calls several of them. All run in the coordinator's script, one at a time.
"""

from __future__ import annotations

from pscluster.coordinator.training.callbacks.base import Callback, CallbackList, Execution, Logs, Training
from pscluster.coordinator.training.callbacks.checkpoint import BackupAndRestore, ModelCheckpoint
from pscluster.coordinator.training.callbacks.logging import CSVLogger, TensorBoard
from pscluster.coordinator.training.callbacks.monitor import Mode, Monitor
from pscluster.coordinator.training.callbacks.rate import LearningRateScheduler, ReduceLROnPlateau
from pscluster.coordinator.training.callbacks.stopping import EarlyStopping, TerminateOnNaN

__all__ = [
    "BackupAndRestore",
    "CSVLogger",
    "Callback",
    "CallbackList",
    "EarlyStopping",
    "Execution",
    "LearningRateScheduler",
    "Logs",
    "Mode",
    "ModelCheckpoint",
    "Monitor",
    "ReduceLROnPlateau",
    "TensorBoard",
    "TerminateOnNaN",
    "Training",
]
