"""The parameters of a framework's model as variables: made together, assigned together, and updated in one request.

What the adapters of frameworks share. It knows arrays and names only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pscluster.core.errors import InvalidUpdateError
from pscluster.ps.client.updates.shard_update import ShardUpdate
from pscluster.ps.handles.indexing import Array, Gradient, Ids
from pscluster.ps.handles.optimizers import Optimizer
from pscluster.ps.handles.scope import current_creator
from pscluster.ps.handles.variables.variable import Variable
from pscluster.ps.optim.row_sums import Groups
from pscluster.v1 import ps_pb2


class Parameter(NamedTuple):
    """How a variable is made; the arguments are those of `Variable`."""

    initial_value: Any
    shape: tuple[int, ...] | None = None
    dtype: npt.DTypeLike | None = None
    trainable: bool = True


class Applied(NamedTuple):
    """Gradients for one optimizer: pairs of a gradient, or None, and its variable."""

    optimizer: Optimizer
    pairs: Sequence[tuple[Gradient | None, Variable]]


def create_variables(parameters: Mapping[str, Parameter], purpose: str) -> dict[str, Variable]:
    """Make a variable for each parameter, under its name, in the strategy's scope; all of them, or none.

    `purpose` is wanted, for the error outside of a scope.
    """
    creator = current_creator(purpose)
    made: dict[str, Variable] = {}
    try:
        for name, parameter in parameters.items():
            made[name] = Variable(
                parameter.initial_value,
                name=name,
                shape=parameter.shape,
                dtype=parameter.dtype,
                trainable=parameter.trainable,
            )
    except BaseException:
        for variable in made.values():
            creator.delete_variable(variable)
        raise
    return made


def apply_all(
    gradients: Sequence[Applied],
    *,
    examples: float | None = None,
    add: Iterable[tuple[npt.ArrayLike, Variable]] = (),
    assign: Iterable[tuple[npt.ArrayLike, Variable]] = (),
) -> None:
    """Apply gradients of several optimizers, and add to or replace other variables, in one request per server.

    Args:
        gradients: of each optimizer; as in `Optimizer.apply_gradients`, which also says what `examples` is. What one of
            them refuses is raised before anything is sent.
        add: amounts to add to variables.
        assign: new values of variables.
    """
    others = [(kind, *pair) for kind, pairs in ((ps_pb2.ADD, add), (ps_pb2.ASSIGN, assign)) for pair in pairs]
    variables = [variable for _, pairs in gradients for _, variable in pairs] + [variable for *_, variable in others]
    if not variables:
        return
    with variables[0].client.gate:
        updates: list[ShardUpdate] = []
        for optimizer, pairs in gradients:
            updates += optimizer.plan_for(pairs).updates_of(pairs, examples=examples)
        for kind, value, variable in others:
            updates += variable.shard_updates(kind, value)
        if updates:
            variables[0].client.update(updates)


def assign_all(values: Mapping[str, npt.ArrayLike], variables: Mapping[str, Variable]) -> None:
    """Replace the values of variables by name, in one request per server.

    Raises:
        InvalidUpdateError: a name is missing or unknown, or a value has another shape or a type that does not fit.
            Nothing was assigned.
    """
    if missing := sorted(variables.keys() - values.keys()):
        raise InvalidUpdateError(f"there is no value for {', '.join(missing[:5])}: give one for each variable")
    if unknown := sorted(values.keys() - variables.keys()):
        raise InvalidUpdateError(f"there is no variable for {', '.join(unknown[:5])}: leave these values out")
    for name, value in values.items():
        if (shape := np.shape(value)) != variables[name].shape:
            raise InvalidUpdateError(
                f"variable {name!r} has shape {variables[name].shape}, but the value has shape {shape}"
            )
    apply_all((), assign=[(value, variables[name]) for name, value in values.items()])


def distinct(ids: Ids) -> tuple[Ids, Ids]:
    """Return the distinct ones of flat ids, ascending, and for each id which of these it is."""
    groups = Groups.of(ids)
    return groups.ids, groups.inverse


def nonfinite(arrays: Mapping[str, Array]) -> list[str]:
    """Return which of these floating arrays have NaN or infinity.

    The sum of the squares shows it in one pass without memory, unless it overflows.
    """
    found = []
    with np.errstate(all="ignore"):
        for name, array in arrays.items():
            if array.dtype.kind == "f" and array.itemsize > 2 and array.flags.c_contiguous:
                flat = array.reshape(-1)
                if math.isfinite(flat.dot(flat)):
                    continue
            if not np.isfinite(array).all():
                found.append(name)
    return found


def is_finite(array: Array) -> bool:
    """Return whether no element of a floating array is NaN or infinity; see `nonfinite`."""
    return not nonfinite({"": array})
