"""Keras 3 models whose weights are on the parameter servers. Keras is imported only once it is used."""

from __future__ import annotations

from pscluster.keras.served import ServedModel
from pscluster.keras.serving import serve

__all__ = ["ServedModel", "serve"]
