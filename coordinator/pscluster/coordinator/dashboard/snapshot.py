"""What is known of a job at one moment, from which the live page is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pscluster.coordinator.observability.events import EventLog, Series
from pscluster.coordinator.observability.rates import Rates
from pscluster.coordinator.scheduling.queue_stats import QueueStats
from pscluster.core.transport.channels import PeerAddress
from pscluster.v1 import node_pb2


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    now: float  # seconds since the epoch
    clock: float  # the same moment, in monotonic seconds
    job: str
    coordinator: str
    memory_bytes: int
    ended: bool
    connected: bool
    queue: QueueStats | None  # None: there is no ClusterCoordinator yet
    servers: Mapping[PeerAddress, float]  # for how many seconds each has been unreachable
    workers: Sequence[PeerAddress]
    replies: Mapping[str, node_pb2.StatusReply]  # by task, of those that answered
    asked: bool  # whether tasks were queried at all
    rates: Rates
    event_log: EventLog
    series: Series
