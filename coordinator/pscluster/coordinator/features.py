"""Preprocessing layers: from strings, integers and numbers to what models take, as Keras does. See docs/features.md."""

from __future__ import annotations

from pscluster.coordinator.checkpoints.saved_layers import load
from pscluster.worker.features.hashing import CategoryCrossing, HashedCrossing, Hashing
from pscluster.worker.features.layer import Layer
from pscluster.worker.features.lookups import IntegerLookup, StringLookup
from pscluster.worker.features.numeric import Discretization, Normalization

__all__ = [
    "CategoryCrossing",
    "Discretization",
    "HashedCrossing",
    "Hashing",
    "IntegerLookup",
    "Layer",
    "Normalization",
    "StringLookup",
    "load",
]
