"""Pytrees of parameters on the parameter servers.

The floating-point arrays become variables, one each, named by their paths. What else there is in the tree, such
as the activation functions of an equinox module, or integers, travels with the functions that use it.

What else a model carries along, such as the statistics of batch normalization, can be served beside it: see `state`.

In a step, `read` makes the tree anew from the servers' values. On a CPU, JAX uses the memory of an array in which it
was received, without a copy, if that begins at a cache line, as in arrays of 64 KiB or more. Gradients are sent from
JAX's memory as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from pscluster.core.checks import type_of
from pscluster.core.errors import InvalidUpdateError, MisuseError
from pscluster.jax.arrays import is_traced, on_device
from pscluster.jax.state import StateChanges, changes_of, is_state
from pscluster.ps.handles.gradients.parameters import (
    Applied,
    Parameter,
    apply_all,
    assign_all,
    create_variables,
    is_finite,
    nonfinite,
)
from pscluster.ps.handles.indexing import Array
from pscluster.ps.handles.optimizers import Optimizer
from pscluster.ps.handles.reads import read_variables
from pscluster.ps.handles.variables.variable import Variable


@dataclass(frozen=True, eq=False, repr=False)
class ServedParams:
    """A pytree whose arrays are on the parameter servers; `serve` makes it. Steps capture it, as they do variables.

    Attributes:
        variables: those of its arrays, by name; those of the state come last.
        optimizer: what applies gradients to the parameters.
    """

    name: str
    optimizer: Optimizer
    variables: dict[str, Variable]
    paths: tuple[str, ...]  # of all leaves
    served: tuple[str, ...]  # for each leaf the name of its variable; "" if it is none
    rest: tuple[Any, ...]  # the leaves that are none, in their order
    skeleton: Any  # the tree, with a number for each leaf: pickled alone, the structure of some trees is broken
    state: tuple[str, ...] | None  # the names of its variables; None: no state is served. Else the tree is a pair

    @cached_property
    def _structure(self) -> Any:
        import jax

        return jax.tree_util.tree_structure(self.skeleton)

    @cached_property
    def _parts(self) -> list[Any]:
        """The structures of the parameters and of the state; of the whole if no state is served."""
        return [self._structure] if self.state is None else self._structure.children()

    @cached_property
    def _trained(self) -> dict[str, Variable]:
        """The variables of the parameters, without those of the state."""
        return {name: variable for name, variable in self.variables.items() if name not in (self.state or ())}

    @cached_property
    def _alike(self) -> list[tuple[int, Any, list[int | None]]]:
        """Other structures of each part that have the same leaves by path, and in which order: see `_leaves_of`."""
        return []

    @cached_property
    def _last_read(self) -> threading.local:
        """The values of the state that each thread has read, as `values`."""
        return threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def read(self) -> Any:
        """Return the tree with the present values, as JAX arrays: one request per server, all servers at once.

        With a state that is served it is a pair, `params, state = served.read()`.

        Each array is consistent, as of one moment. Call it outside of functions that are jitted.

        Raises:
            MisuseError: a function that is jitted calls it.
            PSUnavailableError: a server is unreachable.
        """
        import jax

        if is_traced():
            raise MisuseError(
                f"{self.name!r} is read in a function that JAX traces (jit, scan), which would keep these values for "
                "all its later calls: call read() before it, and pass it the parameters"
            )
        values = read_variables(list(self.variables.values()))
        if self.state is not None:
            self._last_read.values = values[len(self._trained) :]
        arrays = iter(on_device(values))
        rest = iter(self.rest)
        leaves = [next(arrays) if name else next(rest) for name in self.served]
        return jax.tree_util.tree_unflatten(self._structure, leaves)

    def apply(self, grads: Any, *, state: Any = None, examples: float | None = None) -> None:
        """Apply gradients on the servers, once each, as `optimizer.apply_gradients` does: one request per server.

        Args:
            grads: a tree like that of `read()`, as `jax.grad` or `equinox.filter_grad` returns it: arrays of the
                parameters' shapes, and None, or nothing, for leaves that are not served.
            state: the new values of the state that is served, a tree like that of `read()`. By how much they differ
                from those that this thread has read is added, in the same request. Of replicas that step together the
                mean of the changes counts; of integers that of replica 0. Flags are assigned, which synchronous steps
                refuse. Default: the state stays as it is.
            examples: with a `SynchronousStrategy`, of how many examples the gradients are the mean; see there.

        Raises:
            InvalidUpdateError: a tree has another structure, a gradient is missing, or one has another shape, or NaN or
                infinity, unless the optimizer was made with another policy for that (`nonfinite=`); or a value of the
                state has. It is named, and nothing was applied.
            MisuseError: a function that is jitted calls it; or a state is given that is not served, or was not read.
            PSUnavailableError: a server is unreachable.
        """
        if is_traced():
            raise MisuseError(
                f"gradients are applied to {self.name!r} in a function that JAX traces (jit, scan), before they have "
                "values: return them from it, and call apply() with what it returns"
            )
        gradients = self._leaves_of(grads, "gradients")
        arrays: list[Array] = []
        for name, path, gradient in zip(self.served, self.paths, gradients, strict=False):  # the state's follow
            if not name:
                self._check_without_gradient(path, gradient)
                continue
            if gradient is None:
                raise InvalidUpdateError(
                    f"the gradient of {name!r} is None: nothing was applied; give zeros for a parameter that the loss "
                    "does not use, as jax.grad does"
                )
            array = np.asarray(gradient)  # waits until it is computed
            if array.shape != (shape := self.variables[name].shape):
                raise InvalidUpdateError(
                    f"the gradient of {name!r} has shape {array.shape}, and the parameter {shape}: nothing was "
                    "applied; give gradients of one step, not of several stacked by vmap or scan"
                )
            arrays.append(array)
        if self.optimizer.preprocessing.nonfinite == "apply":
            check_finite(self._trained, arrays)
        changes = StateChanges([], []) if state is None else self._changes_to(state)
        pairs = list(zip(arrays, self._trained.values(), strict=True))
        apply_all([Applied(self.optimizer, pairs)], examples=examples, add=changes.added, assign=changes.assigned)

    def _changes_to(self, state: Any) -> StateChanges:
        """Return how this state differs from the one that this thread has read, once for each time it was read."""
        if self.state is None:
            raise MisuseError(f"{self.name!r} was served without a state: give it to serve, too, as state=")
        before: list[Array] | None = getattr(self._last_read, "values", None)
        if before is None:
            raise MisuseError(
                f"the state of {self.name!r} was not read since it was last applied, and only by how much a step "
                "changes it is applied: compute it from that of params, state = served.read()"
            )
        after = self._values_of(state, "values of the state", 1)
        changes = changes_of({name: self.variables[name] for name in self.state}, before, after)
        if self.optimizer.preprocessing.nonfinite == "apply":
            check_finite((variable.name for _, variable in changes.added), (of for of, _ in changes.added), "state")
        del self._last_read.values
        return StateChanges([pair for pair in changes.added if is_finite(pair[0])], changes.assigned)

    def assign(self, params: Any, *, state: Any = None) -> None:
        """Replace all values by those of a tree of the same structure, such as one that was loaded from a file.

            served.assign(orbax.checkpoint.StandardCheckpointer().restore(path))

        Args:
            params: a tree like that of `read()`: arrays of the same shapes. Other leaves are ignored.
            state: likewise, of the state. Default: it stays as it is.

        Raises:
            InvalidUpdateError: a tree has another structure, or an array another shape. Nothing was assigned.
            MisuseError: a state is given that is not served.
        """
        values = self._values_of(params, "parameters")
        if state is None:
            assign_all(values, self._trained)
            return
        if self.state is None:
            raise MisuseError(f"{self.name!r} was served without a state: leave state= out")
        assign_all(values | self._values_of(state, "values of the state", 1), self.variables)

    def _values_of(self, tree: Any, label: str, part: int = 0) -> dict[str, Array]:
        """Return the arrays of a tree, by the names of their variables; as `_leaves_of`."""
        leaves = self._leaves_of(tree, label, part)
        names = self.served[self._parts[0].num_leaves :] if part else self.served
        return {name: np.asarray(leaf) for name, leaf in zip(names, leaves, strict=False) if name}

    def _leaves_of(self, tree: Any, label: str, part: int = 0) -> Sequence[Any]:
        """Return what a tree has in place of each leaf. InvalidUpdateError if its structure is another one.

        One that has the same leaves by their paths is taken, too, such as the `nnx.State` that flax's `nnx.grad` makes
        of a module. `part`: 0: of the parameters; 1: of the state.
        """
        import jax

        if self._alike and (known := self._leaves_by_path(tree, part)) is not None:
            return known
        try:
            leaves: Sequence[Any] = self._parts[part].flatten_up_to(tree)
        except (ValueError, TypeError) as error:
            prefix, count = ("state/" if part else ""), self._parts[0].num_leaves
            own, names = (self.paths[count:], self.served[count:]) if part else (self.paths[:count], self.served)
            paths, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_none)
            at = {(prefix + _path(path)).removesuffix("/"): index for index, (path, _) in enumerate(paths)}
            missing = [path for path, name in zip(own, names, strict=False) if name and path not in at]
            differences = [f"{path!r} is missing" for path in missing]
            differences += [f"{path!r} is not in it" for path in sorted(at.keys() - set(own))]
            if not differences and len(at) == len(paths):
                order = [at.get(path) for path in own]
                self._alike.append((part, structure, order))
                return [None if index is None else paths[index][1] for index in order]
            why = ", ".join(differences[:3]) or str(error)[:300]
            raise InvalidUpdateError(
                f"these {label} are not a tree like that of {self.name!r}: {why}; give a tree like that of read()"
            ) from None
        return leaves

    def _leaves_by_path(self, tree: Any, part: int) -> Sequence[Any] | None:
        """Return what a tree has in place of each leaf, if one of its structure was taken by paths; else None."""
        import jax

        leaves, structure = jax.tree_util.tree_flatten(tree, is_leaf=_is_none)
        for of_part, known, order in self._alike:
            if of_part == part and known == structure:
                return [None if index is None else leaves[index] for index in order]
        return None

    def _check_without_gradient(self, path: str, gradient: Any) -> None:
        if gradient is None or callable(gradient) or getattr(gradient, "dtype", None) == _float0():
            return
        raise InvalidUpdateError(
            f"there is a gradient for {path!r}, which is not served, since it was not a floating-point array: nothing "
            "was applied; convert it before it is served, or give None as its gradient"
        )

    def __repr__(self) -> str:
        return f"<ServedParams {self.name!r} of {len(self.variables)} arrays>"


def serve(params: Any, optimizer: Optimizer, *, state: Any = None, name: str = "params") -> ServedParams:
    """Put the arrays of a pytree on the parameter servers. Call it in `strategy.scope()`.

        with strategy.scope():
            served = pscluster.jax.serve(params, optimizers.Adam(1e-3))

        def step(batch):                                 # runs on a worker
            loss, grads = value_and_grad(served.read(), batch)
            served.apply(grads)
            return loss

    Args:
        params: nested dicts, lists and tuples, parameters of flax (`nnx.split(model, nnx.Param, ...)[1]`, or what
            linen's `init` returns), an equinox module, or any other pytree. Its floating-point arrays are
            served, each as a variable; all other leaves stay as they are.
        optimizer: one of `pscluster.coordinator.optimizers`, made in the same scope.
        state: a pytree of what steps change otherwise than by gradients, such as the statistics of batch normalization:
            `nnx.split(model, nnx.Param, nnx.BatchStat, ...)[2]`, linen's "batch_stats", equinox' `State`. Its arrays of
            numbers and flags are variables, too, which `read` returns beside the parameters, and `apply` updates.
        name: begins the names of the variables; the path of the leaf follows: "params/layers/0/weight". Those of the
            state begin with "params/state/".

    Raises:
        TypeError: `optimizer` is none of ours; optax's can't run on the servers.
        MisuseError: there is no array to serve, two leaves have one name, one is a random key, or the name is taken.
            Nothing was made.
    """
    import jax

    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"serve takes an optimizer of pscluster.coordinator.optimizers, which runs on the servers, not "
            f"{type_of(optimizer)}: optimizers.Adam(1e-3, epsilon=1e-8) is optax.adam(1e-3); for a schedule of optax "
            "see pscluster.jax.schedule"
        )
    if isinstance(params, Mapping) and {"params", "batch_stats"} <= params.keys():
        raise MisuseError(
            "'batch_stats' of flax would be trained as parameters, without gradients: give serve variables['params'], "
            "and state=variables['batch_stats'], which steps update"
        )
    trees = [("", params)] if state is None else [("", params), ("state/", state)]
    parameters: dict[str, Parameter] = {}
    paths: list[str] = []
    served: list[str] = []
    rest: list[Any] = []
    for prefix, tree in trees:
        for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            paths.append(path := (prefix + _path(keys)).removesuffix("/"))
            if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                raise MisuseError(
                    f"{path!r} is a random key, which all workers would share: serve the parameters without it "
                    "(nnx.split(model, nnx.Param, ...)), and give each step its own key"
                )
            if not (is_state(leaf) if prefix else _is_floating_array(leaf)):
                served.append("")
                rest.append(np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf)
                continue
            served.append(own := f"{name}/{path}" if path else name)
            if own in parameters:
                raise MisuseError(f"two leaves of the tree have the path {path!r}: rename one of them")
            value = np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))
            parameters[own] = Parameter(value, trainable=not prefix)
        if not parameters:
            raise MisuseError(f"there is no floating-point array to serve in {type_of(params)}: give parameters")
    whole = params if state is None else (params, state)
    skeleton = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(whole), range(len(paths)))
    variables = create_variables(parameters, f"serve({name!r})")
    of_state = None if state is None else tuple(own for own in variables if not parameters[own].trainable)
    return ServedParams(name, optimizer, variables, tuple(paths), tuple(served), tuple(rest), skeleton, of_state)


def check_finite(names: Iterable[str], arrays: Iterable[Array], label: str = "gradient") -> None:
    """Raise InvalidUpdateError, which names the gradients that have NaN or infinity."""
    if bad := nonfinite(dict(zip(names, arrays, strict=True))):
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise InvalidUpdateError(
            f"NaN or infinity in the {label} of {', '.join(bad[:3])}{more}: nothing was applied; lower the learning "
            'rate, clip (global_clipnorm=), or have the optimizer skip such steps (nonfinite="skip")'
        )


def _is_floating_array(leaf: Any) -> bool:
    import jax
    import jax.numpy as jnp

    return isinstance(leaf, jax.Array | np.ndarray | np.generic) and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _float0() -> Any:
    import jax

    return jax.dtypes.float0


def _path(path: Any) -> str:
    """Return a leaf's path as a name: "layers/0/weight". It is that of flax's Param, not of the value in it."""
    import jax

    text: str = jax.tree_util.keystr(path, simple=True, separator="/")
    last = path[-1] if path else None
    return text.removesuffix("/value") if isinstance(last, jax.tree_util.GetAttrKey) else text
