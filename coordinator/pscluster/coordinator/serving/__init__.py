"""Models that are served: tables of checkpoints, read where there is no cluster, and what changes them.

It lives beside `checkpoints`, whose index it reads, and imports of that only the reading: no job, no client, no
transport. It takes half of the time that the names of `pscluster.coordinator` take to be imported.
"""

from pscluster.coordinator.serving.delta_files import Delta
from pscluster.coordinator.serving.deltas import export_delta
from pscluster.coordinator.serving.table import ServingTable
from pscluster.coordinator.serving.versions import TableVersion

__all__ = ["Delta", "ServingTable", "TableVersion", "export_delta"]
