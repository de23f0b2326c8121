"""Evaluation snapshots: variables as they were at one moment, which an evaluation reads while training goes on.

    captured: the step's variables get other names --> paused (functions end) --> every server copies its shards
    --> going on --> on disk, as far as the servers keep anything there --> the step runs --> the copies are deleted

All copies are made while no function runs: they are of one moment, on all servers. No bytes travel. What the job knows
of them is their names: they count neither for placement nor among the strategy's variables.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time

from pscluster.coordinator.job.context import JobContext
from pscluster.coordinator.scheduling.dispatcher import Dispatcher
from pscluster.core.errors import PsClusterError, UnknownVariableError
from pscluster.core.fault_points import reach
from pscluster.core.handles import Handle
from pscluster.ps.handles.optimizers import Optimizer
from pscluster.ps.handles.variable import JoinedVariable, SlotVariable, Variable
from pscluster.ps.spec import PINNED
from pscluster.v1 import ps_pb2

logger = logging.getLogger(__name__)


def prefix_of(name: str) -> str:
    """What the names of all copies of one evaluation begin with; empty: this is none of any."""
    if not name.startswith(PINNED):
        return ""
    return name[: name.find("/", len(PINNED)) + 1]


class EvaluationSnapshot:
    """The copies for one evaluation. First `rename` is called for all that is captured, then `make`, last `drop`.

    Args:
        context: of the job whose variables they are.
    """

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._prefix = f"{PINNED}{context.variables.numbers(1)[0]}/"
        self._variables: set[str] = set()
        self._optimizers: set[str] = set()
        self._made = False

    def rename(self, handle: Handle) -> tuple[str, str]:
        """Kind and key of what a step is to have for this handle: a variable's copy, all else as it is."""
        kind, key = handle.handle_kind, handle.handle_key
        if isinstance(handle, SlotVariable):
            variable, optimizer, slot = json.loads(key)
            self._variables.add(variable)
            self._optimizers.add(optimizer)
            return kind, json.dumps([self._prefix + variable, optimizer, slot])
        if isinstance(handle, JoinedVariable):
            self._variables.update(handle.member_names)
            return kind, handle.key_with(self._prefix)
        if isinstance(handle, Variable):
            self._variables.add(key)
            return kind, self._prefix + key
        if isinstance(handle, Optimizer):  # asked for a slot or an average of a copy
            self._optimizers.add(key)
        return kind, key

    def make(self, dispatcher: Dispatcher, seconds: float) -> None:
        """Copy all that was renamed, as it is at one moment at which no function runs.

        Raises:
            WaitTimeoutError: functions still run after so many seconds; the message names them.
            UnknownVariableError: a variable is not there any more.
            InvalidUpdateError: a server has no memory for the copies.
            UnavailableError: a server can't be reached.
        """
        if not self._variables:
            return
        client, deadline = self._context.client, time.monotonic() + seconds
        known = client.directory()[0]  # wait for a server that is gone here, not while functions are paused
        variables = [spec for spec in known.variables if spec.name in self._variables]
        optimizers = [spec.id for spec in known.optimizers if spec.name in self._optimizers]
        if missing := sorted(self._variables.difference(spec.name for spec in variables)):
            raise UnknownVariableError(f"the step uses variables that are not in this job: {', '.join(missing)}")
        copies = []
        for spec, number in zip(variables, self._context.variables.numbers(len(variables)), strict=True):
            copy = ps_pb2.VariableSpec()
            copy.CopyFrom(spec)
            copy.id, copy.name = number, self._prefix + spec.name
            copies.append((spec.id, copy))
        self._made = True
        with dispatcher.barrier(round(max(deadline - time.monotonic(), 0.0), 3)):
            reach("coordinator.pin.before")
            client.copy_variables(copies, optimizers)
            reach("coordinator.pin.after")
        client.check_saved([copy.name for _, copy in copies])

    def are_lost(self) -> bool:
        """Has a server that was restarted come back without one of them?"""
        if not self._made:
            return False
        with contextlib.suppress(PsClusterError):
            for directory in self._context.client.directory():
                there = {spec.name for spec in directory.variables}
                if not there.issuperset(self._prefix + name for name in self._variables):
                    return True
        return False

    def drop(self) -> bool:
        """Delete them, on the servers that can be reached. False if one can't: it is to be tried again."""
        if not self._made:
            return True
        reach("coordinator.unpin.before")
        dropped = self._context.client.delete_variables(self._prefix)
        reach("coordinator.unpin.after")
        if not dropped:
            logger.warning("the snapshot of an evaluation is still on an unreachable server; it is deleted later")
        return dropped
