"""Optimizers of variables of a mesh: the rule is applied to each block, where it lives, once for each gradient.

With a cluster that is on the parameter servers, where the slots are, too, beside each block; on a mesh of this process'
own devices it is here. A gradient may lie in any layout, and have terms: those are combined by the workers first,
straight on the one that sends the block.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, NoReturn, cast

import numpy as np

from pscluster.core.checks import type_of
from pscluster.core.errors import InvalidUpdateError, LayoutError, MisuseError
from pscluster.core.functions.policy import SerializationPolicy
from pscluster.core.layouts.mesh import Mesh
from pscluster.ps.client.client import PsClient
from pscluster.ps.handles import optimizers
from pscluster.ps.handles.gradients.optimizer import LearningRate
from pscluster.ps.handles.scope import VariableRequest, creating_with
from pscluster.ps.optim.rules import RULES
from pscluster.ps.optim.specs import rule_of
from pscluster.spmd.execution.executors import Workers
from pscluster.spmd.execution.recording import Updating
from pscluster.spmd.meshes import session_of
from pscluster.spmd.methods import xp
from pscluster.spmd.tensor import DTensor
from pscluster.spmd.tracing.trace import is_tracing
from pscluster.spmd.variables.held import HeldOptimizer
from pscluster.spmd.variables.variable import DVariable
from pscluster.v1 import ps_pb2


class Optimizer:
    """An optimizer of a mesh's variables: use a subclass, such as `Adam`.

    Args:
        args, common: as of the optimizer of that name in `pscluster.coordinator.optimizers`; without `nonfinite`, and
            `use_ema` on clusters only.
        mesh: of the variables.
    """

    _kind: ClassVar[type[optimizers.Optimizer]]

    def __init_subclass__(cls, kind: type[optimizers.Optimizer]) -> None:
        cls._kind = kind

    def __init__(self, *args: Any, mesh: Mesh, **common: Any) -> None:
        if not isinstance(mesh, Mesh):
            raise MisuseError(f"mesh is {type_of(mesh)}; give the mesh of the variables")
        if common.get("nonfinite", "apply") != "apply":
            raise MisuseError(
                "nonfinite= is not available for global arrays: look at np.isfinite(gradient).all() yourself"
            )
        self.mesh = mesh
        executor = session_of(mesh).executor
        if isinstance(executor, Workers):
            with executor.coordinator.strategy.scope():
                self._handle = self._kind(*args, **common)
            self._applied: Any = self._handle
            return
        if common.get("use_ema"):
            raise MisuseError("use_ema= needs parameter servers: make the mesh with a coordinator")
        here = _Here()
        with creating_with(here):
            self._handle = self._kind(*args, **common)
        self._applied = here.held

    @property
    def name(self) -> str:
        """Its name in the strategy."""
        return self._handle.name

    @property
    def iterations(self) -> int:
        """The number of gradients applied, on the block with the most."""
        session_of(self.mesh).wait()
        return self._handle.iterations

    @property
    def learning_rate(self) -> LearningRate:
        """The rate, or its schedule."""
        return self._handle.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: LearningRate) -> None:
        if is_tracing():
            raise MisuseError("the learning rate can't be set while a function is traced: set it outside")
        session_of(self.mesh).wait()  # what was computed before is applied with the old one
        self._handle.learning_rate = value

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, DVariable]]) -> None:
        """Apply gradients to all of these variables at once, without waiting. Pairs without a gradient are skipped.

        Args:
            grads_and_vars: pairs of a gradient, a global array of the variable's mesh and shape in any layout, or a
                NumPy array, and its variable.

        Raises:
            TypeError: these are no such pairs.
            LayoutError: something lies on another mesh.
            InvalidUpdateError: a gradient of another shape or type, or a variable that is not of floats.
            MisuseError: a variable is given twice.
        """
        pairs = self._checked(grads_and_vars)
        gradients = self._preprocessed([gradient for gradient, _ in pairs])
        session_of(self.mesh).update(
            [
                Updating("gradient", variable.fitting(gradient, "gradient").with_terms, variable.stored, self._applied)
                for gradient, (_, variable) in zip(gradients, pairs, strict=True)
            ]
        )

    def _checked(self, grads_and_vars: Iterable[tuple[Any, DVariable]]) -> list[tuple[DTensor, DVariable]]:
        pairs: list[tuple[DTensor, DVariable]] = []
        given: Any = grads_and_vars
        for pair in [given] if isinstance(given, DTensor) else given:
            is_pair = isinstance(pair, tuple | list) and len(pair) == 2
            gradient, variable = pair if is_pair else (None, pair)
            if not is_pair or not isinstance(variable, DVariable):
                raise TypeError(f"apply_gradients takes pairs (gradient, DVariable), not {type_of(variable)}")
            if gradient is None:
                continue
            if variable.mesh != self.mesh:
                raise LayoutError(
                    f"variable {variable.name!r} lies on {variable.mesh!r}, but optimizer {self.name!r} is for "
                    f"{self.mesh!r}: make another optimizer"
                )
            if variable.dtype.kind != "f" and variable.dtype.name != "bfloat16":
                raise InvalidUpdateError(f"variable {variable.name!r} is {variable.dtype}: only floats take gradients")
            if any(variable is other for _, other in pairs):
                raise MisuseError(f"variable {variable.name!r} is given twice: add its gradients first")
            pairs.append((variable.fitting(gradient, "gradient"), variable))
        return pairs

    def _preprocessed(self, gradients: Sequence[DTensor]) -> Sequence[DTensor]:
        """Scale and clip gradients, as global arrays: so norms are of whole ones."""
        asked, made = self._handle.preprocessing, cast(Sequence[Any], gradients)
        if asked.loss_scale_factor is not None:
            made = [gradient / asked.loss_scale_factor for gradient in made]
        if asked.clipvalue is not None:
            made = [xp.clip(gradient, -asked.clipvalue, asked.clipvalue) for gradient in made]
        if asked.clipnorm is not None:
            made = [gradient * _shrinking(_squares(gradient), asked.clipnorm, gradient.dtype) for gradient in made]
        if asked.global_clipnorm is not None and made:
            squares = sum(map(_squares, made))
            made = [gradient * _shrinking(squares, asked.global_clipnorm, gradient.dtype) for gradient in made]
        return made

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} of {self.mesh!r}>"


def _squares(gradient: Any) -> Any:
    return xp.square(gradient.astype(np.float64)).sum()


def _shrinking(squares: Any, limit: float, dtype: np.dtype[Any]) -> Any:
    """Return what to multiply by, so that a norm, given as its square, is at most this."""
    norm = xp.sqrt(squares)
    return xp.where(norm > limit, limit / xp.maximum(norm, limit), 1.0).astype(dtype)


class SGD(Optimizer, kind=optimizers.SGD):
    """Stochastic gradient descent, with momentum or Nesterov's."""


class Adagrad(Optimizer, kind=optimizers.Adagrad):
    """Adagrad."""


class Adam(Optimizer, kind=optimizers.Adam):
    """Adam, or AMSGrad."""


class AdamW(Optimizer, kind=optimizers.AdamW):
    """Adam with decoupled weight decay, 0.004 by default."""


class RMSprop(Optimizer, kind=optimizers.RMSprop):
    """RMSprop, optionally centered and with momentum."""


class Ftrl(Optimizer, kind=optimizers.Ftrl):
    """Follow the regularised leader."""


class Adadelta(Optimizer, kind=optimizers.Adadelta):
    """Adadelta."""


class Lion(Optimizer, kind=optimizers.Lion):
    """Lion."""


_numbers = itertools.count(1)


class _Here:
    """Makes one optimizer in this process, and is to it what the servers are to others."""

    serialization = SerializationPolicy()
    num_servers = 1
    held: HeldOptimizer

    def __init__(self) -> None:
        self.optimizers: dict[int, str] = {}
        self._spec = ps_pb2.OptimizerSpec()

    @contextlib.contextmanager
    def reserving(self, namespace: str, name: str | None, kind: str | None = None) -> Iterator[str]:
        """Yield the name, or the kind."""
        yield name or kind or namespace

    def create_optimizer(
        self, spec: ps_pb2.OptimizerSpec, forms: Sequence[Any]
    ) -> tuple[ps_pb2.OptimizerSpec, PsClient]:
        """Take an optimizer, or change the numbers of one."""
        del forms
        rule = rule_of(spec, RULES[spec.rule])
        if not self._spec.id:
            spec.id = next(_numbers)
            self.held = HeldOptimizer(spec.id, rule)
        self.held.rule = rule
        self._spec.CopyFrom(spec)
        return spec, cast(PsClient, self)

    def describe_optimizer(self, name: str) -> ps_pb2.OptimizerSpec:
        """Return it."""
        del name
        self._spec.iterations = self.held.iterations
        return self._spec

    def create_variable(self, request: VariableRequest) -> NoReturn:
        """Refuse."""
        raise MisuseError(f"an optimizer in this process makes no variables, such as {request.name!r}")

    def delete_variable(self, variable: Any) -> NoReturn:
        """Refuse."""
        raise MisuseError(f"there are no variables to delete, such as {variable!r}")
