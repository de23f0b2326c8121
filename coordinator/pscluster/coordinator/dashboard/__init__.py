"""The live page: one look shows how the cluster does. docs/dashboard.md says what is on it."""

from __future__ import annotations

from pscluster.coordinator.dashboard.server import Dashboard

__all__ = ["Dashboard"]
