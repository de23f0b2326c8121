"""JAX pytrees whose arrays are on the parameter servers. JAX is imported only once it is used."""

from __future__ import annotations

from pscluster.jax.schedules import schedule
from pscluster.jax.served import ServedParams, serve

__all__ = ["ServedParams", "schedule", "serve"]
