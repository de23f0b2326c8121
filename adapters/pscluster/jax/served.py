"""Pytrees of parameters on the parameter servers.

The arrays with floating elements become variables, one each, named by their paths. What else there is in the tree, such
as the activation functions of an equinox module, or integers, travels with the functions that use it.

In a step, `read` makes the tree anew from the servers' values. On a CPU, JAX uses the memory of an array in which it
was received, without a copy, if that begins at a cache line, as in arrays of 64 KiB or more. Gradients are sent from
JAX's memory as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pscluster.core.checks import type_of
from pscluster.core.errors import InvalidUpdateError, MisuseError
from pscluster.jax.arrays import is_traced, on_device
from pscluster.ps.handles.optimizers import Optimizer
from pscluster.ps.handles.parameters import Applied, Parameter, apply_all, assign_all, create_variables, nonfinite
from pscluster.ps.handles.reads import read_variables
from pscluster.ps.handles.variable import Variable


@dataclass(frozen=True, eq=False, repr=False)
class ServedParams:
    """A pytree whose arrays are on the parameter servers; `serve` makes it. Steps capture it, as they do variables.

    Attributes:
        variables: those of its arrays, by name.
        optimizer: what applies gradients to them.
    """

    name: str
    optimizer: Optimizer
    variables: dict[str, Variable]
    paths: tuple[str, ...]  # of all leaves
    served: tuple[str, ...]  # for each leaf the name of its variable; "" if it is none
    rest: tuple[Any, ...]  # the leaves that are none, in their order
    skeleton: Any  # the tree, with a number for each leaf: pickled alone, the structure of some trees is broken

    @cached_property
    def _structure(self) -> Any:
        import jax

        return jax.tree_util.tree_structure(self.skeleton)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_structure"}

    def read(self) -> Any:
        """Return the tree with the present values, as JAX arrays: one request per server, all servers at once.

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
        arrays = iter(on_device(read_variables(list(self.variables.values()))))
        rest = iter(self.rest)
        leaves = [next(arrays) if name else next(rest) for name in self.served]
        return jax.tree_util.tree_unflatten(self._structure, leaves)

    def apply(self, grads: Any, *, examples: float | None = None) -> None:
        """Apply gradients on the servers, once each, as `optimizer.apply_gradients` does: one request per server.

        Args:
            grads: a tree like that of `read()`, as `jax.grad` or `equinox.filter_grad` returns it: arrays of the
                parameters' shapes, and None, or nothing, for leaves that are not served.
            examples: with a `SynchronousStrategy`, of how many examples the gradients are the mean; see there.

        Raises:
            InvalidUpdateError: the tree has another structure, a gradient is missing, has another shape, or has NaN or
                infinity, unless the optimizer was made with another policy for that (`nonfinite=`). It is named, and
                nothing was applied.
            MisuseError: a function that is jitted calls it.
            PSUnavailableError: a server is unreachable.
        """
        if is_traced():
            raise MisuseError(
                f"gradients are applied to {self.name!r} in a function that JAX traces (jit, scan), before they have "
                "values: return them from it, and call apply() with what it returns"
            )
        gradients = self._leaves_of(grads, "gradients")
        arrays: list[np.ndarray[Any, Any]] = []
        for name, path, gradient in zip(self.served, self.paths, gradients, strict=True):
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
            check_finite(self.variables, arrays)
        pairs = list(zip(arrays, self.variables.values(), strict=True))
        apply_all([Applied(self.optimizer, pairs)], examples=examples)

    def assign(self, params: Any) -> None:
        """Replace all values by those of a tree of the same structure, such as one that was loaded from a file.

            served.assign(orbax.checkpoint.StandardCheckpointer().restore(path))

        Args:
            params: a tree like that of `read()`: arrays of the same shapes. Other leaves are ignored.

        Raises:
            InvalidUpdateError: the tree has another structure, or an array another shape. Nothing was assigned.
        """
        leaves = self._leaves_of(params, "parameters")
        values = {name: np.asarray(leaf) for name, leaf in zip(self.served, leaves, strict=True) if name}
        assign_all(values, self.variables)

    def _leaves_of(self, tree: Any, what: str) -> Sequence[Any]:
        """Return what a tree has in place of each leaf. InvalidUpdateError if its structure is another one."""
        import jax

        try:
            leaves: Sequence[Any] = self._structure.flatten_up_to(tree)
        except (ValueError, TypeError) as error:
            paths = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)[0]
            given = {_path(path) for path, _ in paths}
            differences = [f"{path!r} is missing" for path in self.paths if path not in given]
            differences += [f"{path!r} is not in it" for path in sorted(given - set(self.paths))]
            raise InvalidUpdateError(
                f"these {what} are not a tree like that of {self.name!r}: {', '.join(differences[:3]) or error}; give "
                "a tree like that of read()"
            ) from None
        return leaves

    def _check_without_gradient(self, path: str, gradient: Any) -> None:
        if gradient is None or callable(gradient) or getattr(gradient, "dtype", None) == _float0():
            return
        raise InvalidUpdateError(
            f"there is a gradient for {path!r}, which is not served, since it was no array of floating elements: "
            "nothing was applied; make it one before it is served, or leave its gradient out (None)"
        )

    def __repr__(self) -> str:
        return f"<ServedParams {self.name!r} of {len(self.variables)} arrays>"


def serve(params: Any, optimizer: Optimizer, *, name: str = "params") -> ServedParams:
    """Put the arrays of a pytree on the parameter servers. Call it in `strategy.scope()`.

        with strategy.scope():
            served = pscluster.jax.serve(params, optimizers.Adam(1e-3))

        def step(batch):                                 # runs on a worker
            loss, grads = value_and_grad(served.read(), batch)
            served.apply(grads)
            return loss

    Args:
        params: nested dicts, lists and tuples, parameters of flax (`nnx.split(model, nnx.Param, ...)[1]`, or what
            linen's `init` returns), an equinox module, or any other pytree. Its arrays with floating elements are
            served, each as a variable; all other leaves stay as they are.
        optimizer: one of `pscluster.coordinator.optimizers`, made in the same scope.
        name: begins the names of the variables; the path of the leaf follows: "params/layers/0/weight".

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
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    paths = [_path(path) for path, _ in leaves]
    parameters: dict[str, Parameter] = {}
    served: list[str] = []
    rest: list[Any] = []
    for path, (_, leaf) in zip(paths, leaves, strict=True):
        if not _is_floating_array(leaf):
            if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                raise MisuseError(
                    f"{path!r} is a random key, which all workers would share: serve the parameters without it "
                    "(nnx.split(model, nnx.Param, ...)), and give each step its own key"
                )
            served.append("")
            rest.append(np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf)
            continue
        served.append(own := f"{name}/{path}" if path else name)
        if own in parameters:
            raise MisuseError(f"two leaves of the tree have the path {path!r}: rename one of them")
        parameters[own] = Parameter(np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype)))
    if not parameters:
        raise MisuseError(f"there is no array of floating elements to serve in {type_of(params)}: give parameters")
    skeleton = jax.tree_util.tree_unflatten(structure, range(len(leaves)))
    variables = create_variables(parameters, f"serve({name!r})")
    return ServedParams(name, optimizer, variables, tuple(paths), tuple(served), tuple(rest), skeleton)


def check_finite(names: Iterable[str], gradients: Iterable[np.ndarray[Any, Any]]) -> None:
    """Raise InvalidUpdateError, which names the gradients that have NaN or infinity."""
    if bad := nonfinite(dict(zip(names, gradients, strict=True))):
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise InvalidUpdateError(
            f"NaN or infinity in the gradient of {', '.join(bad[:3])}{more}: nothing was applied; lower the learning "
            'rate, clip (global_clipnorm=), or have the optimizer skip such steps (nonfinite="skip")'
        )


def _is_floating_array(leaf: Any) -> bool:
    import jax
    import jax.numpy as jnp

    return isinstance(leaf, jax.Array | np.ndarray | np.generic) and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _float0() -> Any:
    import jax

    return jax.dtypes.float0


def _path(path: Any) -> str:
    """Return a leaf's path as a name: "layers/0/weight". It is that of flax's Param, not of the value in it."""
    import jax

    text: str = jax.tree_util.keystr(path, simple=True, separator="/")
    last = path[-1] if path else None
    return text.removesuffix("/value") if isinstance(last, jax.tree_util.GetAttrKey) else text
