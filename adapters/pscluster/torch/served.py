"""A served module as users hold it, in the script and in step functions: names and handles, no weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from pscluster.core.checks import type_of
from pscluster.core.dtypes import array_of as numbers_of
from pscluster.core.errors import InvalidUpdateError, MisuseError
from pscluster.ps.handles.gradients.parameters import apply_all, assign_all
from pscluster.ps.handles.indexing import Ids
from pscluster.ps.handles.optimizers import Optimizer
from pscluster.ps.handles.reads import read_variables
from pscluster.ps.handles.variables.variable import Variable
from pscluster.torch.local import Pool, pool_of
from pscluster.torch.structure import plain_name
from pscluster.torch.tensors import array_of, tensor_of
from pscluster.worker.data.sources import Sent


@dataclass(eq=False, repr=False)
class ServedModule(Sent):
    """A module whose parameters are on the parameter servers; from `serve`.

    It may be an argument or a captured value of a function that runs on workers, which make the module there, once.

    Attributes:
        parameters: the variable of each parameter, by its name in `state_dict()`; one for tied ones.
        buffers: the same of persistent buffers.
        aliases: the other names of tied parameters, and which one each stands for.
        tables: the parameters of which steps pull rows only.
        groups: each optimizer, with the names of its parameters; frozen ones have none.
        check_numerics: whether a step with NaN or infinity in a gradient raises, and pushes nothing.
        key: of the modules made in a process; for internal use, like `make`.
    """

    key: str
    make: Any
    parameters: dict[str, Variable]
    buffers: dict[str, Variable]
    aliases: dict[str, str]
    tables: list[str]
    groups: list[tuple[Optimizer, list[str]]]
    check_numerics: bool

    @cached_property
    def dense(self) -> dict[str, Variable]:
        """The parameters that steps pull whole."""
        return {name: variable for name, variable in self.parameters.items() if name not in self.tables}

    @cached_property
    def frozen(self) -> list[str]:
        """The parameters that no optimizer trains: they were served with `requires_grad=False`."""
        trained = {name for _, names in self.groups for name in names}
        return [name for name in self.parameters if name not in trained]

    @cached_property
    def pool(self) -> Pool:
        """The modules made in this process; for internal use."""
        return pool_of(self.key)

    @cached_property
    def maker(self) -> Callable[[], Any]:
        """What makes the module: on a worker, the function that was sent; for internal use."""
        made: Callable[[], Any] = self.make
        return made

    @contextmanager
    def step(self, ids: Mapping[str, Any] | None = None, *, examples: float | None = None) -> Iterator[nn.Module]:
        """Pull the parameters for the block, and push the gradients that it has made at its end.

        Gradients are zero when the block begins; several `backward()` add up. Frozen parameters, and those without a
        gradient, are not pushed; nothing is if the block raises. What the block does to gradients counts, such as
        `torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)`, also for the rows of tables. What it does to
        values of parameters does not, which is logged; what it freezes, by `requires_grad_(False)`, is frozen for this
        block.

        Buffers are pushed as well, if the block has changed them: to integer ones the difference is added, so that
        `num_batches_tracked` counts the steps of all workers; of others the value of the step that ended last stays.
        In steps of a `SynchronousStrategy` those of replica 0 count.

        Args:
            ids: of tables, by the name of parameter or embedding, the ids that the block will look up: their rows come
                in one request per server, not one per table and server. Other ids may be looked up as well.
            examples: in a step of a `SynchronousStrategy`: of how many examples the gradients are the mean; see
                `Optimizer.apply_gradients`.

        Yields:
            The module, in the mode (training or evaluation) in which its function made it. It is this block's alone.

        Raises:
            MisuseError: the module made on this worker is not the one that was served; or the block has added, removed
                or replaced a parameter, or trains one that was frozen when it was served. Nothing was pushed.
            InvalidUpdateError: NaN or infinity in a gradient, with `check_numerics`; an id that is no row of its table.
        """
        local = self.pool.take(self, self.maker)
        local.begin(self, ids or {})
        yield local.module
        local.check(self)
        gradients = local.gradients(self)
        added, assigned = local.changed_buffers(self)
        apply_all(gradients, examples=examples, add=added, assign=assigned)
        local.end()
        self.pool.give(local)

    @contextmanager
    def evaluation(self, ids: Mapping[str, Any] | None = None) -> Iterator[nn.Module]:
        """Pull the parameters for the block, which computes without gradients, in evaluation mode; push nothing.

            with served.evaluation() as module:
                right = (module(x).argmax(1) == y).float().mean()

        Args:
            ids: as in `step`.

        Yields:
            The module, as in `step`.
        """
        local = self.pool.take(self, self.maker)
        local.begin(self, ids or {})
        modes = [(part, part.training) for part in local.module.modules()]
        local.module.eval()
        with torch.no_grad():
            yield local.module
        local.check(self)
        for part, mode in modes:
            part.training = mode
        local.end()
        self.pool.give(local)

    def lookups(self, ids: Mapping[str, Any]) -> list[tuple[Variable, Ids] | Variable]:
        """Return what a function for `schedule(..., lookups=)` or `fit(..., lookups=, overlap=1)` returns.

        Besides the rows, these are the parameters that are no tables. The step then gives the same ids to `step`.

        Args:
            ids: as in `step`.
        """
        wanted: list[tuple[Variable, Ids] | Variable] = [*self.dense.values()]
        for key, of_table in ids.items():
            variable = self.parameters[self.table_named(key)]
            wanted.append((variable, variable.row_ids(numbers_of(of_table)).reshape(-1)))
        return wanted

    def table_named(self, key: str) -> str:
        """Return the parameter of a table, by its name or that of its embedding. MisuseError if there is none."""
        for name in (key, f"{key}.weight"):
            if (name := self.aliases.get(name, name)) in self.tables:
                return name
        raise MisuseError(f"there is no table {key!r} here: there are {', '.join(self.tables) or 'none'}")

    # As in torch

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the values on the servers, for `load_state_dict` of an ordinary module. Tied names share a tensor."""
        variables = self.parameters | self.buffers
        values = dict(zip(variables, map(tensor_of, read_variables(list(variables.values()))), strict=True))
        return OrderedDict(values | {alias: values[name] for alias, name in self.aliases.items()})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the values on the servers by those of an ordinary module's `state_dict()`, in one request per server.

        What optimizers keep stays as it is.

        Raises:
            InvalidUpdateError: a name is missing or unknown, or a value has another shape or type. Nothing has changed.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"load_state_dict takes what state_dict() returns, not {type_of(state)}")
        values: dict[str, Any] = {}
        for key, value in state.items():
            name = plain_name(key)
            value = array_of(value) if isinstance(value, torch.Tensor) else value
            values.setdefault(self.aliases.get(name, name), value)
        try:
            assign_all(values, self.parameters | self.buffers)
        except InvalidUpdateError as error:
            raise InvalidUpdateError(f"the state does not fit the served module: {error}") from None

    def __repr__(self) -> str:
        tables = f", {len(self.tables)} of them tables" if self.tables else ""
        return f"<{type(self).__name__} of {len(self.parameters)} parameters{tables}>"
