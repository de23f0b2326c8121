"""Handles from their kind and key, as workers and coordinators send them to each other."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

from pscluster.core.errors import ProtocolError, UnknownVariableError
from pscluster.core.handles import Handle
from pscluster.ps.client.client import PsClient
from pscluster.ps.handles.keys import parse_variable_key
from pscluster.ps.handles.metrics import Metric
from pscluster.ps.handles.optimizers import Optimizer
from pscluster.ps.handles.variables.sharded import JoinedVariable
from pscluster.ps.handles.variables.slots import SlotVariable
from pscluster.ps.handles.variables.variable import Variable


def handle_of(kind: str, key: str, client: Callable[[], PsClient], resolve: Callable[[str, str], Any]) -> Handle | None:
    """Return the handle of something that lives on parameter servers; None for other kinds.

    `resolve` returns the handles that it consists of. UnknownVariableError if nothing has that name, ProtocolError if
    the key is invalid.
    """
    if kind == Variable.handle_kind:
        return _variable_of(key, client())
    if kind == JoinedVariable.handle_kind:
        return JoinedVariable.of_key(key, lambda member: resolve(Variable.handle_kind, member))
    if kind == Optimizer.handle_kind:
        return Optimizer.of(client().describe_optimizer(key), client())
    if kind == SlotVariable.handle_kind:
        variable, optimizer, slot = _slot_of(key)
        holder: Optimizer = resolve(Optimizer.handle_kind, optimizer)
        return holder.slot(resolve(Variable.handle_kind, variable), slot)
    if kind == Metric.handle_kind:
        return Metric.of(key, lambda state: resolve(Variable.handle_kind, state))
    return None


def _variable_of(key: str, client: PsClient) -> Variable:
    number, name = parse_variable_key(key)
    spec = client.describe_variable(name)
    if number not in (0, spec.id, spec.origin):
        raise UnknownVariableError(
            f"variable {name!r} was deleted, and another one has its name now: use that one, and define again the "
            "functions that captured the old one"
        )
    return Variable.of(spec, client)


def _slot_of(key: str) -> tuple[str, str, str]:
    """Return the key of a slot's variable, and the names of optimizer and slot. ProtocolError if it is invalid."""
    with contextlib.suppress(ValueError, RecursionError):
        match json.loads(key):
            case [str() as variable, str() as optimizer, str() as slot]:
                return variable, optimizer, slot
    raise ProtocolError(f"{key[:80]!r} is not the key of an optimizer's slot")
