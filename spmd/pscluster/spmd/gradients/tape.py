"""What a function computes, recorded while it does so: the way that a gradient goes back.

It is recorded in the two places that all functions of global arrays come through: where an operation is applied, and
where an array is relaid out. An operation is recorded with its whole operands, as they were given, before they are
relaid out by the rule for layouts, so a rule for its gradient is about whole arrays. Functions that are made of others,
such as `numpy.var`, are recorded as these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pscluster.core.layouts.rule import Label
from pscluster.worker.programs.program import Placeholder

if TYPE_CHECKING:
    from pscluster.spmd.tensor import DTensor

RELAYOUT = "relayout"
"""The name under which it is recorded that an array is relaid out."""

CONSTANT = frozenset(
    ("angle", "around", "ceil", "floor", "floor_divide", "heaviside", "imag", "rint", "sign", "signbit", "trunc")
)
"""Operations that are constant between their jumps: their results count as constants."""

_tapes: ContextVar[tuple[Tape, ...]] = ContextVar("pscluster-tapes", default=())


@dataclass(frozen=True, slots=True)
class Node:
    """An operation that was applied. See `functions.applying.apply`."""

    function: str
    operands: Sequence[DTensor]
    labels: Sequence[Sequence[Label]]  # of each operand
    results: Sequence[DTensor]
    result_labels: Sequence[Sequence[Label]]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def values(self) -> list[Any]:
        """The positional arguments, with operands for their blocks."""
        return [self.operands[arg.number] if _is_block(arg) else arg for arg in self.args]

    def argument_of(self, position: int) -> int:
        """Return which positional argument an operand is."""
        return next(at for at, arg in enumerate(self.args) if _is_block(arg) and arg.number == position)


def _is_block(arg: Any) -> bool:
    return isinstance(arg, Placeholder) and arg.kind == "in"


class Tape:
    """Operations whose results depend on some arrays, in order. Keeps all of their arrays alive."""

    def __init__(self, sources: Sequence[DTensor]) -> None:
        self.nodes: list[Node] = []
        self._sources = list(sources)
        self._depending = {id(source) for source in sources}

    def depends(self, array: DTensor) -> bool:
        """Return whether an array was computed from the sources, or is one."""
        return id(array) in self._depending

    def record(self, node: Node) -> None:
        """Record an operation, if its results depend on the sources. Integers and bools count as constants."""
        if node.function not in CONSTANT and any(map(self.depends, node.operands)):
            depending = [id(result) for result in node.results if result.dtype.kind in "fc"]
            if depending:
                self.nodes.append(node)
                self._depending.update(depending)


@contextlib.contextmanager
def recording(sources: Sequence[DTensor]) -> Iterator[Tape]:
    """Record what the block computes from these arrays, beside what records already."""
    token = _tapes.set((*_tapes.get(), tape := Tape(sources)))
    try:
        yield tape
    finally:
        _tapes.reset(token)


def record(
    function: str,
    operands: Sequence[DTensor],
    labels: Sequence[Sequence[Label]],
    results: Sequence[DTensor],
    result_labels: Sequence[Sequence[Label]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Record an operation on all tapes that record here."""
    if tapes := _tapes.get():
        node = Node(function, operands, labels, results, result_labels, args, kwargs)
        for tape in tapes:
            tape.record(node)


def record_local(
    name: str,
    operands: Sequence[DTensor],
    results: Sequence[DTensor],
    vjp: Callable[..., Any] | None,
    returned: Any,
    arguments: Sequence[Any],
) -> None:
    """Record that a plain function was called on blocks, with what gives its gradient."""
    known = {"vjp": vjp, "returned": returned, "arguments": arguments}
    record(name, operands, [()] * len(operands), results, [()] * len(results), [], known)


def record_relayout(source: DTensor, result: DTensor) -> None:
    """Record that an array was relaid out."""
    record(RELAYOUT, [source], [()], [result], [()], [Placeholder("in", 0)], {})
