"""What a model carries along beside its parameters, such as the statistics of batch normalization.

A step computes new values from those that it has read. Other steps may have changed them since, so what is sent is by
how much they differ: the batches of all workers count, once each. Flags have no difference, and are assigned, which
synchronous steps refuse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pscluster.core.context import current_function
from pscluster.core.errors import InvalidUpdateError
from pscluster.ps.handles.indexing import Array
from pscluster.ps.handles.variables.variable import Variable


class StateChanges(NamedTuple):
    """How a step changes the state: amounts to add, and values to assign."""

    added: list[tuple[Array, Variable]]
    assigned: list[tuple[Array, Variable]]


def is_state(leaf: Any) -> bool:
    """Return whether a leaf of a state is an array that the servers can have: of numbers, or of flags."""
    import jax
    import jax.numpy as jnp

    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return False
    return bool(jnp.issubdtype(leaf.dtype, jnp.number) or jnp.issubdtype(leaf.dtype, jnp.bool_))


def changes_of(variables: Mapping[str, Variable], before: Sequence[Array], after: Mapping[str, Any]) -> StateChanges:
    """Return by how much a step has changed the state.

    Of replicas that step together the mean of the changes counts; of integers that of replica 0.

    Args:
        variables: those of the state, by name.
        before: their values when the step began.
        after: their values now.

    Raises:
        InvalidUpdateError: a value is none, or has another shape, or a type that does not fit. It is named.
    """
    function = current_function()
    replica = None if function is None else function.replica
    changes = StateChanges([], [])
    for (name, variable), old in zip(variables.items(), before, strict=True):
        new = np.asarray(after[name])
        if new.shape != variable.shape or not np.can_cast(new.dtype, variable.dtype, "same_kind"):
            given = f"shape {new.shape}, {new.dtype.name}"
            raise InvalidUpdateError(
                f"the state {name!r} has {given}, and was served with shape {variable.shape}, {variable.dtype.name}: "
                "nothing was applied; give what the model returns in its place"
            )
        if np.array_equal(new, old):
            continue
        if variable.dtype.kind == "b":
            changes.assigned.append((new, variable))
        elif variable.dtype.kind in "iu":
            if replica is None or replica.replica_id == 0:
                changes.added.append((new - old, variable))
        else:
            change = (new - old).astype(variable.dtype, copy=False)
            if replica is not None:
                change = change / change.dtype.type(replica.num_replicas)
            changes.added.append((change, variable))
    return changes
