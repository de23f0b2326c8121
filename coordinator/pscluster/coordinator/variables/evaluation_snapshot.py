"""Evaluation snapshots: variables as they were at one moment, which an evaluation reads while training continues.

    capture the step, with other names for its variables --> pause (functions end) --> every server copies its shards
    --> resume --> save the copies, if the servers have durable state, and room --> run the step --> delete the copies

All copies are made while no function runs, so they are of the same moment on all servers. No bytes travel. Their specs
bear the evaluation's number: they are in no checkpoint, are not listed, and a coordinator that attaches deletes them.
They count neither for placement nor among the strategy's variables.
"""

from __future__ import annotations

import contextlib
import logging
import time

from pscluster.coordinator.job.context import JobContext
from pscluster.coordinator.scheduling.dispatcher import Dispatcher
from pscluster.core.errors import PsClusterError, UnknownVariableError
from pscluster.core.fault_points import reach
from pscluster.core.handles import Handle
from pscluster.ps.handles.optimizers import Optimizer
from pscluster.ps.handles.variables.sharded import JoinedVariable
from pscluster.ps.handles.variables.slots import SlotVariable
from pscluster.ps.handles.variables.variable import Variable
from pscluster.ps.spec import RESERVED
from pscluster.v1 import ps_pb2

logger = logging.getLogger(__name__)


class EvaluationSnapshot:
    """The copies for one evaluation. Call `rename` for all captured handles, then `make`, and finally `drop`."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        (self._evaluation,) = context.variables.numbers(1)
        self._prefix = f"{RESERVED}evaluation/{self._evaluation}/"
        self._variables: dict[str, int] = {}  # ids by name
        self._optimizers: set[str] = set()
        self._made = False

    def rename(self, handle: Handle) -> tuple[str, str]:
        """Return the kind and key that replace this handle in the step: those of the copy, if it is a variable."""
        kind = handle.handle_kind
        if isinstance(handle, Variable):
            members = [handle]
            if isinstance(handle, SlotVariable):
                members = [handle.variable]
                self._optimizers.add(handle.optimizer_name)
            elif isinstance(handle, JoinedVariable):
                members = handle.variables
            self._variables.update({member.name: member.id for member in members})
            return kind, handle.key_with(self._prefix)
        if isinstance(handle, Optimizer):  # for slots and averages of copies
            self._optimizers.add(handle.name)
        return kind, handle.handle_key

    def make(self, dispatcher: Dispatcher, seconds: float) -> None:
        """Copy all that was renamed, at one moment at which no function runs.

        WaitTimeoutError if functions still run after `seconds` seconds, UnknownVariableError if a variable no longer
        exists, InvalidUpdateError if a server has no memory for the copies, UnavailableError if one can't be reached.
        """
        if self._variables:
            with self._context.placing:  # all servers must name the same places
                copies = self._copy(dispatcher, seconds)
            for reason in self._context.client.check_saved([copy.name for _, copy in copies]):
                logger.warning(
                    "an evaluation reads copies of variables that are only in memory (%s): if that server restarts "
                    "before the evaluation has ended, it fails with an UnavailableError",
                    reason,
                )

    def _copy(self, dispatcher: Dispatcher, seconds: float) -> list[tuple[int, ps_pb2.VariableSpec]]:
        """Make the copies, which may not be saved yet; return the id of each one's source, and its spec."""
        client, deadline = self._context.client, time.monotonic() + seconds
        known = client.directory()[0]  # wait for a server that is down here, not while functions are paused
        variables = [spec for spec in known.variables if spec.name in self._variables]
        optimizers = [spec.id for spec in known.optimizers if spec.name in self._optimizers]
        there = {spec.name: spec.id for spec in variables}
        if missing := sorted(name for name, number in self._variables.items() if there.get(name) != number):
            raise UnknownVariableError(f"the step uses variables that are not in this job: {', '.join(missing)}")
        copies = []
        for spec, copy_id in zip(variables, self._context.variables.numbers(len(variables)), strict=True):
            copy = ps_pb2.VariableSpec()
            copy.CopyFrom(spec)
            copy.id, copy.name, copy.evaluation = copy_id, self._prefix + spec.name, self._evaluation
            copies.append((spec.id, copy))
        self._made = True
        with dispatcher.waits.barrier(round(max(deadline - time.monotonic(), 0.0), 3)):
            reach("coordinator.pin.before")
            client.copy_variables(copies, optimizers)
            reach("coordinator.pin.after")
        return copies

    def are_lost(self) -> bool:
        """Return whether a restarted server has lost one of the copies."""
        if not self._made:
            return False
        with contextlib.suppress(PsClusterError):
            for directory in self._context.client.directory():
                if sum(spec.evaluation == self._evaluation for spec in directory.variables) < len(self._variables):
                    return True
        return False

    def drop(self) -> bool:
        """Delete the copies. False if a server is unreachable, or can't save that they are gone: try again later."""
        if not self._made:
            return True
        reach("coordinator.unpin.before")
        dropped = self._context.client.delete_copies(self._evaluation)
        reach("coordinator.unpin.after")
        if not dropped:
            logger.warning(
                "the copies of an evaluation could not be deleted on all servers, since one is unreachable or can't "
                "save its state; the next evaluation or coordinator deletes them"
            )
        return dropped
