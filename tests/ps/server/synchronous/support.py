"""One server of a job in this process, with its directory: what replicas send it, and what a restart finds."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tests.ps.storage.support import IDENTITY, JOB, NEVER, Part, declare, dense, killed, padded, values_of

from pscluster.core.transport.frames import padding
from pscluster.ps.server.requests import update_checks
from pscluster.ps.server.state.store import Store
from pscluster.ps.server.synchronous.steps import StepPath
from pscluster.ps.server.write_path import write
from pscluster.ps.storage.manager import StateManager
from pscluster.ps.storage.options import Durability, DurabilityOptions
from pscluster.v1 import ps_pb2

RUN = 99
STAGE, COMMIT, WAIT, OPEN, REDUCE = (
    ps_pb2.Contribution.STAGE,
    ps_pb2.Contribution.COMMIT,
    ps_pb2.Contribution.WAIT,
    ps_pb2.Contribution.OPEN,
    ps_pb2.Contribution.REDUCE,
)


def add(value: float, variable: int = 1) -> Part:
    """Add a value to a variable."""
    return dense(ps_pb2.ADD, np.full(2, float(value)), variable)


def gradient(value: float, variable: int = 1) -> Part:
    """Apply a gradient to a variable by optimizer 9."""
    return dense(ps_pb2.APPLY_GRADIENT, np.full(2, float(value)), variable, optimizer=9)


def piece(value: float, start: int, variable: int = 1) -> Part:
    """A piece of one element of the first gradient that was reduced."""
    item, _ = gradient(value, variable)
    item.offset = 8 * start
    return item, (np.full(1, float(value)),)


class Server:
    """A server with two variables of zeros, 1 and 2. Two replicas contribute unless told otherwise."""

    def __init__(self, index: int, folder: Path, kind: Durability = Durability.LOG) -> None:
        self.index, self.folder, self.kind = index, folder, kind
        self._found: list[Server] = []  # after it was killed
        self.manager = StateManager(DurabilityOptions(kind, folder, NEVER, fsync=False))
        recovered = self.manager.restore()
        self.store = Store(index, JOB) if recovered is None else recovered.store
        if recovered is None:
            self.manager.begin(self.store, IDENTITY)
            for variable in (1, 2):
                declare(self.store, variable, np.zeros(2))
            self.manager.save()
        self.path = StepPath(functools.partial(write, self.manager), self.manager.log_contribution)

    def restarted(self) -> Server:
        """Return what a server finds if this one is killed now."""
        folder = killed(self.folder)
        found = Server(self.index, folder, self.kind)
        self._found.append(found)
        return found

    def send(
        self,
        kind: ps_pb2.Contribution.Kind,
        replica: int,
        *parts: Part,
        step: int = 0,
        epoch: int = 1,
        run: int = RUN,
        replicas: int = 2,
        job: int = JOB,
        term: int = 0,
        ended: bool = False,
        after: int | None = None,
        updated: Sequence[int] | None = None,
        reduced: int = 0,
        wait: bool = False,
        positions: Mapping[int, int] | None = None,
        before: Mapping[int, int] | None = None,
    ) -> ps_pb2.StepState:
        """Send a contribution as the service does. The step before was committed in epoch `after`, or the same."""
        request = ps_pb2.UpdateRequest(job=job, incarnation=100 + replica, function=1 + replica, term=term)
        for nth, (item, segments) in enumerate(parts, 1):
            item.nth, item.value_bytes = nth, segments[-1].nbytes
            request.items.append(item)
        arrays = [array for _, segments in parts for array in segments]
        request.contribution.CopyFrom(
            ps_pb2.Contribution(
                run=run,
                step=step,
                epoch=epoch,
                replica=replica,
                replicas=replicas,
                kind=kind,
                ended=ended,
                updated=[item.variable for item in request.items if item.kind == ps_pb2.APPLY_GRADIENT]
                if updated is None
                else updated,
                reduced=reduced,
                wait=wait,
                positions=positions,
                before=before,
                after=epoch if after is None else after,
            )
        )
        total = sum(array.nbytes + padding(array.nbytes) for array in arrays)
        changes = update_checks.check_update(self.store, request, total)
        return self.path.contribute(self.store, request, changes, padded(*arrays), total).state

    def reach(self, step: int, run: int = RUN, epoch: int = 1) -> None:
        """Read after this many steps, the last of which was committed in this epoch."""
        self.path.reach_step(self.store, ps_pb2.StepCount(run=run, step=step, epoch=epoch))

    def value(self, variable: int = 1) -> float:
        """Return the value of a variable's elements, which are the same."""
        first, second = values_of(self.store, variable)
        assert first == second
        return float(first)

    def close(self) -> None:
        """Stop, with all that were found after it."""
        for found in self._found:
            found.close()
        self.manager.close()
