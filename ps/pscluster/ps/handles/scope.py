"""The creator of variables and optimizers: a strategy's scope, found through a context variable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pscluster.core.context import current_function
from pscluster.core.errors import MisuseError
from pscluster.core.functions.policy import SerializationPolicy
from pscluster.v1 import definition_pb2, ps_pb2

if TYPE_CHECKING:
    from pscluster.ps.client.client import PsClient
    from pscluster.ps.handles.variables.variable import Variable

_T = TypeVar("_T")
Partitioner = Callable[[tuple[int, ...], np.dtype[Any]], Sequence[int]]


@dataclass(frozen=True, slots=True)
class VariableRequest:
    """The arguments of `Variable(...)`."""

    initial_value: object
    name: str | None
    dtype: npt.DTypeLike | None
    shape: Sequence[int] | None
    trainable: bool
    partitioner: Partitioner | None
    consistency: str = "sync"
    wire_dtype: str | None = None
    push_top_k: float | None = None
    table: ps_pb2.TableSpec | None = None  # if it is one

    @property
    def kind(self) -> str:
        """What it is, for a name if none is given."""
        return "variable" if self.table is None else "table"


class Creator(Protocol):
    """Makes the variables and optimizers that are declared in a strategy's scope."""

    @property
    def serialization(self) -> SerializationPolicy:
        """Whether it may send pickles to the servers."""

    @property
    def num_servers(self) -> int:
        """How many servers there are."""

    def create_variable(self, request: VariableRequest) -> Variable:
        """Place the variable on the servers."""

    def delete_variable(self, variable: Variable) -> None:
        """Delete a variable that was just made for something that could not be completed."""

    def reserving(self, namespace: str, name: str | None, kind: str | None = None) -> AbstractContextManager[str]:
        """Reserve a name for a "variable" (or an optimizer) or a "metric", and release it if the block raises.

        Without a name, generate one from the kind.
        """

    def create_optimizer(
        self, spec: ps_pb2.OptimizerSpec, forms: Sequence[definition_pb2.Definition]
    ) -> tuple[ps_pb2.OptimizerSpec, PsClient]:
        """Assign an id to a named optimizer, and declare it on the servers."""


_creator: ContextVar[Creator | None] = ContextVar("pscluster-creator", default=None)


_colocation: ContextVar[int | None] = ContextVar("pscluster-colocation", default=None)


@contextmanager
def _setting(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def creating_with(creator: Creator) -> AbstractContextManager[None]:
    """Make the variables and optimizers of the block with this creator."""
    return _setting(_creator, creator)


def colocated_with(server: int) -> AbstractContextManager[None]:
    """Create the variables of the block, uncut, on this server."""
    return _setting(_colocation, server)


def colocation() -> int | None:
    return _colocation.get()


def has_creator() -> bool:
    return _creator.get() is not None


def current_creator(wanted: str) -> Creator:
    """Return the creator of this scope. Outside of any, raise MisuseError, which names `wanted`."""
    creator = _creator.get()
    if creator is None:
        if current_function() is not None:
            raise MisuseError(
                f"{wanted} was created in a step function, which is not allowed: create it in the script, inside `with "
                "strategy.scope():`, and use it here by its name, or pass it as an argument"
            )
        raise MisuseError(f"{wanted} was created outside a strategy's scope: create it inside `with strategy.scope():`")
    return creator
