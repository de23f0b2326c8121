"""The live page: the state of the cluster at a glance. docs/dashboard.md describes it."""

from __future__ import annotations

from pscluster.coordinator.dashboard.server import Dashboard

__all__ = ["Dashboard"]
