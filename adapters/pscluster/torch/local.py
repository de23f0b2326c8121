"""Modules of a served module in one process: each in use by one step at a time, and kept for the next.

    made by the function --begin: parameters and buffers read--> in a step --end: gradients taken--> free
                                                                           --anything is raised----> dropped

Steps that run at the same time, such as those of several replicas of one worker, have one module each: a lock would be
held while replicas wait for each other. All that a step changes is on the servers, or is read again by the next step;
buffers that are not persistent stay as the module has them.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from pscluster.core.checks import type_of
from pscluster.core.context import current_function
from pscluster.core.dtypes import array_of as numbers_of
from pscluster.core.errors import InvalidUpdateError, MisuseError
from pscluster.ps.handles.gradients.parameters import Applied, nonfinite
from pscluster.ps.handles.indexing import Array, Gradient, Ids
from pscluster.ps.handles.reads import rows_and_variables
from pscluster.ps.handles.variables.variable import Variable
from pscluster.torch.structure import Structure
from pscluster.torch.tables import Table
from pscluster.torch.tensors import array_of, name_of, tensor_of

if TYPE_CHECKING:
    from pscluster.torch.served import ServedModule

logger = logging.getLogger(__name__)


class LocalModule:
    """A module made in this process, whose parameters are set from those on the servers."""

    def __init__(self, served: ServedModule, make: Callable[[], Any]) -> None:
        self.module = module_of(make)
        _seed_worker()
        structure = self._structure = Structure.of(self.module)
        self._check(served, structure)
        self.tables: dict[str, Table] = {}
        for name, parameter in list(structure.parameters.items()):
            if name in served.tables:
                self.tables[name] = Table(name, structure.owners[name], parameter)
                del structure.parameters[name]
            elif parameter.is_meta:
                replacement = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
                structure.replace(name, replacement)
        self._on_cpu = {name: tensor.device.type == "cpu" for name, tensor in structure.parameters.items()}
        tables = {name: table.weight for name, table in self.tables.items()}
        self._parameters: dict[str, Any] = structure.parameters | tables
        self._trained = {name: tensor.requires_grad for name, tensor in self._parameters.items()}
        self._parts = list(self.module.modules())
        self._held = _held_by(self._parts)
        self._buffers_read: list[bytes] = []
        self._versions: list[int] = []  # of the parameters that are no tables, when a step begins

    def _check(self, served: ServedModule, structure: Structure) -> None:
        """Raise MisuseError unless the module has what was served."""
        for kind, own, variables in (
            ("parameter", structure.parameters, served.parameters),
            ("buffer", structure.buffers, served.buffers),
        ):
            differences = [f"no {kind} {name!r}" for name in variables if name not in own]
            differences += [f"another {kind}, {name!r}" for name in own if name not in variables]
            for name, variable in variables.items():
                if name not in own:
                    continue
                here = name_of(own[name].dtype), tuple(own[name].shape)
                if here != (variable.dtype.name, variable.shape):
                    differences.append(
                        f"{kind} {name!r} of {here[0]} {here[1]}, not {variable.dtype.name} {variable.shape}"
                    )
            if differences:
                raise MisuseError(
                    f"the module made here is not the one that was served: it has {', '.join(differences[:3])}. Its "
                    "function must make the same module everywhere: serve it again after a change, and install the "
                    "same versions on all workers"
                )

    # A step

    def begin(self, served: ServedModule, ids: Mapping[str, Any]) -> None:
        """Read parameters, buffers and, of tables, the rows of these ids: one request per server."""
        wanted: list[tuple[Variable, Ids]] = []
        names = [served.table_named(key) for key in ids]
        for name, of_table in zip(names, ids.values(), strict=True):
            variable = served.parameters[name]
            wanted.append((variable, variable.row_ids(numbers_of(of_table)).reshape(-1).copy()))
        rows, values = rows_and_variables(wanted, [*served.dense.values(), *served.buffers.values()])
        parameters = self._structure.parameters
        for name, array in zip(served.dense, values, strict=False):
            parameter = parameters[name]
            tensor = tensor_of(array)
            parameter.data = tensor if self._on_cpu[name] else tensor.to(parameter.device)
            parameter.grad = None
        self._buffers_read = [array.tobytes() for array in values[len(served.dense) :]]
        for name, array in zip(served.buffers, values[len(served.dense) :], strict=True):
            buffer = self._buffer(name)
            tensor = tensor_of(array)
            if buffer.is_meta:
                self._set_buffer(name, tensor)
            else:
                buffer.data = tensor if buffer.device.type == "cpu" else tensor.to(buffer.device)
        self._versions = [parameter._version for parameter in parameters.values()]
        for name, table in self.tables.items():
            table.begin(served.parameters[name])
        for name, (_, flat), array in zip(names, wanted, rows, strict=True):
            self.tables[name].give_rows(flat, array)

    def check(self, served: ServedModule) -> None:
        """Raise MisuseError if the block has changed which parameters there are, or trains one that was frozen.

        Warn if it has changed values of parameters: it may have reasons, as for a gradient at a point beside them.
        """
        if _held_by(self._parts) != self._held:
            made, now = Structure(parameters=self._parameters), Structure.of(self.module)
            if differences := made.differences(now):
                raise MisuseError(
                    f"the block has changed which parameters its module has ({', '.join(differences[:5])}), and only "
                    "those that were served are trained: nothing is pushed. Make such changes in the function that "
                    "makes the module, and serve it again"
                )
            self._parts = list(self.module.modules())
            self._held = _held_by(self._parts)
        if thawed := [name for name in served.frozen if self._parameters[name].requires_grad]:
            raise MisuseError(
                f"the block trains {', '.join(map(repr, thawed[:5]))}, and this was frozen (requires_grad=False) when "
                "it was served, so it has no optimizer: nothing is pushed. Serve it with requires_grad, and freeze it "
                "in the blocks that should not train it"
            )
        parameters = zip(self._structure.parameters.items(), self._versions, strict=True)
        if changed := [name for (name, parameter), before in parameters if parameter._version != before]:
            _warn_once(
                served,
                "the block has changed the values of %s itself: only gradients go to the servers, where serve()'s "
                "optimizer applies them, so leave out torch's optimizer.step(). This is logged once a worker",
                changed,
            )

    def gradients(self, served: ServedModule) -> list[Applied]:
        """Return the gradients of each optimizer.

        Raises:
            InvalidUpdateError: one has NaN or infinity; the message names its parameter.
        """
        applied: list[Applied] = []
        missing: list[str] = []
        checked: dict[str, Array] = {}
        for optimizer, names in served.groups:
            pairs: list[tuple[Gradient | None, Variable]] = []
            for name in names:
                gradient: Any
                values: Any
                if (table := self.tables.get(name)) is not None:
                    if (gradient := table.gradient()) is None:
                        continue
                    values = gradient.values
                elif (tensor := self._structure.parameters[name].grad) is None:
                    if self._structure.parameters[name].requires_grad:
                        missing.append(name)
                    continue
                else:
                    gradient = values = array_of(tensor)
                checked[name] = values
                pairs.append((gradient, served.parameters[name]))
            if pairs:
                applied.append(Applied(optimizer, pairs))
        if served.check_numerics and (wrong := nonfinite(checked)):
            raise InvalidUpdateError(
                f"the gradient of {', '.join(wrong[:5])} has NaN or infinity, so this step pushes nothing: clip "
                "gradients, lower the learning rate, or look at the batch; serve(check_numerics=False) pushes it as "
                "it is"
            )
        if missing:
            _warn_once(
                served,
                "no gradient for %s: a step has not used this, or not called backward(), and pushes nothing for it. "
                "This is logged once a worker",
                missing,
            )
        return applied

    def changed_buffers(
        self, served: ServedModule
    ) -> tuple[list[tuple[Array, Variable]], list[tuple[Array, Variable]]]:
        """Return what the step has added to integer buffers, and the new values of others that it has changed.

        In a synchronous step: what it has added to all, in replica 0, and nothing in the others.
        """
        function = current_function()
        in_step = function is not None and function.steps is not None
        if in_step and function is not None and function.replica is not None and function.replica.replica_id:
            return [], []
        added: list[tuple[Array, Variable]] = []
        assigned: list[tuple[Array, Variable]] = []
        for (name, variable), before in zip(served.buffers.items(), self._buffers_read, strict=True):
            now = array_of(self._buffer(name))
            if now.tobytes() == before:
                continue
            if now.dtype.kind in ("iufc" if in_step else "iu") and now.shape == variable.shape:
                added.append((now - np.frombuffer(before, now.dtype).reshape(now.shape), variable))
            else:
                assigned.append((now, variable))
        return added, assigned

    def end(self) -> None:
        """Let go of gradients and rows, and of what the block has frozen."""
        for parameter in self._structure.parameters.values():
            parameter.grad = None
        for name, parameter in self._parameters.items():
            if parameter.requires_grad != self._trained[name]:
                parameter.requires_grad_(self._trained[name])
        for table in self.tables.values():
            table.end()

    def _buffer(self, name: str) -> Any:
        owner = self._structure.owners[name][0]
        if (buffer := owner.module._buffers.get(owner.attribute)) is None:
            raise MisuseError(
                f"the block has removed the buffer {name!r} of its module, which was served: nothing is pushed. Remove "
                "it in the function that makes the module, and serve it again"
            )
        return buffer

    def _set_buffer(self, name: str, tensor: torch.Tensor) -> None:
        for owner in self._structure.owners[name]:
            owner.module._buffers[owner.attribute] = tensor


def _held_by(parts: Sequence[nn.Module]) -> list[int]:
    """Return which parameters and parts these parts have, as quickly as each step needs it."""
    return [id(held) for part in parts for held in (*part._parameters.values(), *part._modules.values())]


_seed: int | None = None


def _seed_worker() -> None:
    """Give torch's generator another seed on each worker but the first, so that they drop other units.

    All processes begin with torch's own seed, or that of the function that makes the module. Once for each seed.
    """
    global _seed
    function = current_function()
    if function is None or torch.initial_seed() == _seed:
        return
    replica = 0 if function.replica is None else int(function.replica.replica_id)
    _seed = torch.initial_seed() + function.worker_index + replica
    if _seed != torch.initial_seed():
        torch.manual_seed(_seed)


def module_of(make: Callable[[], Any]) -> nn.Module:
    """Return the module that a function makes. TypeError if it is none."""
    module = make()
    if not isinstance(module, nn.Module):
        raise TypeError(f"the function that was served returned {type_of(module)}: it must return an nn.Module")
    return module


class Pool:
    """The modules of one served module in this process that no step uses. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[LocalModule] = []
        self.warned: set[tuple[str, str]] = set()

    def take(self, served: ServedModule, make: Callable[[], Any]) -> LocalModule:
        """Return a free module, or a new one."""
        with self._lock:
            if self._free:
                return self._free.pop()
        return LocalModule(served, make)

    def give(self, local: LocalModule) -> None:
        """Keep a module for the next step."""
        with self._lock:
            self._free.append(local)


_pools: weakref.WeakValueDictionary[str, Pool] = weakref.WeakValueDictionary()
_pools_lock = threading.Lock()


def pool_of(key: str) -> Pool:
    """Return the pool of a served module, which all functions of this process that have it share."""
    with _pools_lock:
        return _pools.setdefault(key, Pool())


def _warn_once(served: ServedModule, message: str, names: list[str]) -> None:
    warned = served.pool.warned
    if new := [name for name in names if (message, name) not in warned]:
        warned.update((message, name) for name in new)
        logger.warning(message, ", ".join(new[:5]) + (f" and {len(new) - 5} more" if len(new) > 5 else ""))
