"""A parameter server in this process: its role, and the server that serves it, from its start to its end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from pscluster.core.fault_points import reach
from pscluster.core.role.lifecycle import StopRequest
from pscluster.core.role.options import RoleOptions
from pscluster.core.role.server import RoleServer
from pscluster.ps.server.role import ParameterServerRole
from pscluster.ps.server.service import ParameterServerService
from pscluster.ps.server.telemetry import ServerTelemetry
from pscluster.ps.spec import BESIDE_PAYLOAD_BYTES, SERVICE
from pscluster.ps.storage.files.roots import Roots
from pscluster.ps.storage.manager import StateManager
from pscluster.ps.storage.options import DurabilityOptions
from pscluster.v1 import node_pb2

logger = logging.getLogger(__name__)

SEND_SECONDS = 0.25
"""Time for the last answers to be sent before connections are closed."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """What a server holds, and how; see the command line's help for each."""

    in_flight_mib: int
    durability: DurabilityOptions
    checkpoint_roots: Sequence[str] = ()


class ServerProcess:
    """Serves a parameter server on `address` from the moment it is made, with what is restored from its disk.

    Args:
        identity: of the server.
        address: where it listens.
        options: how to serve.
        store: what it holds.
        stop: asked when the job is over, if it is to exit then.
        own: at which it is dialled, if that is another address; "": it is not.
    """

    def __init__(
        self,
        identity: node_pb2.Identity,
        address: str,
        options: RoleOptions,
        store: StoreOptions,
        stop: StopRequest,
        own: str = "",
    ) -> None:
        self._grace = options.grace
        roots = Roots(store.checkpoint_roots)
        self._role = ParameterServerRole(identity.index, StateManager(store.durability), roots)
        self._service = ParameterServerService(self._role, store.in_flight_mib << 20)
        self.server = RoleServer(
            identity,
            self._role,
            {"ps": (SERVICE, self._service)},
            address,
            options,
            on_job_end=lambda: stop.ask("the job is over") if options.until_done else None,
            telemetry=ServerTelemetry(self._role, self._service.budget),
            own=own,
            admission=self._service.admission,
            overhead_bytes=BESIDE_PAYLOAD_BYTES,
        )

    def close(self) -> None:
        """Leave in order: end the requests in progress, stop serving, and save the state."""
        self.server.leave()
        if not self._service.drain.close(self._grace):
            logger.warning("requests still in progress after %g s were cancelled", self._grace)
        self.server.stop(SEND_SECONDS)  # streams do not end by themselves
        reach("ps.stop.before")
        self._role.manager.close()
