"""Who makes variables and optimizers: a strategy's scope, found through the context of the call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from pscluster.core.context import current_function
from pscluster.core.errors import MisuseError
from pscluster.core.functions.policy import SerializationPolicy
from pscluster.v1 import definition_pb2, ps_pb2

if TYPE_CHECKING:
    from pscluster.ps.client.client import PsClient
    from pscluster.ps.handles.variable import Variable

Partitioner = Callable[[tuple[int, ...], np.dtype[Any]], Sequence[int]]


@dataclass(frozen=True, slots=True)
class VariableRequest:
    """What a user asked for with `Variable(...)`."""

    initial_value: object
    name: str | None
    dtype: npt.DTypeLike | None
    shape: Sequence[int] | None
    trainable: bool
    partitioner: Partitioner | None


class Creator(Protocol):
    """Whoever makes variables and optimizers where `Variable(...)` is called: a strategy's scope."""

    @property
    def serialization(self) -> SerializationPolicy:
        """Whether what it sends to the servers may be pickled."""
        ...

    def create_variable(self, request: VariableRequest) -> Variable:
        """Place the variable on the servers."""
        ...

    def delete_variable(self, variable: Variable) -> None:
        """Take back a variable that was just made: what it was a part of could not be made."""
        ...

    def reserving(self, what: str, name: str | None, kind: str | None = None) -> AbstractContextManager[str]:
        """Take this name for a "variable" (or an optimizer) or a "metric"; it is free again if the block raises.

        Without a name, one is made of the kind.
        """
        ...

    def create_optimizer(
        self,
        spec: ps_pb2.OptimizerSpec,
        forms: Sequence[definition_pb2.Definition],
    ) -> tuple[ps_pb2.OptimizerSpec, PsClient]:
        """Give the optimizer, which has a name, a number, and declare it to the servers."""
        ...


_creator: ContextVar[Creator | None] = ContextVar("pscluster-creator", default=None)


@contextmanager
def creating_with(creator: Creator) -> Iterator[None]:
    """Within the block `Variable(...)` and optimizers are made by this creator."""
    token = _creator.set(creator)
    try:
        yield
    finally:
        _creator.reset(token)


_colocation: ContextVar[int | None] = ContextVar("pscluster-colocation", default=None)


@contextmanager
def colocated_with(server: int) -> Iterator[None]:
    """Within the block variables are made, whole, on this server."""
    token = _colocation.set(server)
    try:
        yield
    finally:
        _colocation.reset(token)


def colocation() -> int | None:
    """The server on which variables are made here, if one was named."""
    return _colocation.get()


def has_creator() -> bool:
    """Is this in a strategy's scope?"""
    return _creator.get() is not None


def current_creator(what: str) -> Creator:
    """The creator here. MisuseError, naming what was to be made, outside of any scope."""
    creator = _creator.get()
    if creator is None:
        if current_function() is not None:
            raise MisuseError(
                f"{what} was created in a step function, which is not allowed: create it in the script, inside `with "
                "strategy.scope():`, and use it here by its name, or pass it as an argument"
            )
        raise MisuseError(f"{what} was created outside a strategy's scope: create it inside `with strategy.scope():`")
    return creator
