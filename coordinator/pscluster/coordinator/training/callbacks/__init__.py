"""Callbacks of a training. They, their hooks and their arguments have Keras' names.

A user's callback derives from `Callback`, and sees the training in `self.training`.
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
