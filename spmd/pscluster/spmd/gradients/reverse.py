"""`value_and_grad`: the value of a function, and its gradient with respect to its arguments, as one program."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pscluster.core.checks import type_of
from pscluster.core.errors import MisuseError, UnsupportedFunctionError
from pscluster.core.layouts.layout import Layout
from pscluster.spmd.creation import ones
from pscluster.spmd.functions.applying import xp
from pscluster.spmd.gradients.rules import RULES
from pscluster.spmd.gradients.tape import Node, Tape, record_relayout, recording
from pscluster.spmd.placing import distribute
from pscluster.spmd.tensor import DTensor
from pscluster.spmd.tracing.function import call_once
from pscluster.spmd.tracing.trace import check_is_function, is_tracing, leaves_of, rebuilt
from pscluster.spmd.variables.variable import DVariable


def value_and_grad(
    fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """Return a function that returns the value of `fn`, and the gradient of it.

    It is called as `fn` is, with global arrays in lists, tuples and dicts, and returns `(value, gradient)`. The
    gradient is what the argument is, with the gradient for each array in it: of its shape, element type and layout.
    Outside of a traced function each call is traced, and sent as one program; so errors come before anything runs, and
    arrays have no values in `fn`. In `spmd.function` it is part of the program.

    Args:
        fn: returns a real floating-point number, as a global array without axes.
        argnums: the positional argument that the gradient is of. Several: then the gradient is a tuple.
        has_aux: `fn` returns `(number, others)`; then the value that is returned is that, too.

    Raises, when it is called:
        MisuseError: the value is not such a number, or an argument has arrays that are not floating-point numbers.
        UnsupportedFunctionError: the value depends on an argument through a function without a gradient.
    """
    check_is_function("value_and_grad", fn)
    numbers = list(argnums) if isinstance(argnums, Sequence) else [argnums]
    if not numbers or not all(type(number) is int for number in numbers) or len(set(numbers)) < len(numbers):
        raise MisuseError(f"argnums is the number of a positional argument, or several different ones, not {argnums!r}")

    @functools.wraps(fn)
    def differentiated(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not is_tracing():
            result: tuple[Any, Any] = call_once(differentiated, args, kwargs)
            return result
        chosen = [_position(number, len(args)) for number in numbers]
        if len(set(chosen)) < len(chosen):
            raise MisuseError(f"argnums {tuple(numbers)} names one of {len(args)} positional arguments twice")
        arguments, sources = list(args), list[DTensor]()
        mesh = next((leaf.mesh for leaf in leaves_of((args, kwargs)) if isinstance(leaf, DTensor)), None)
        for number in chosen:
            arguments[number] = _sources(args[number], f"argument {_name(fn, number)}", mesh, sources)
        with recording(sources) as tape:
            returned = fn(*arguments, **kwargs)
        gradients = iter(gradients_of(tape, _value_of(returned, has_aux), sources))
        made = tuple(
            rebuilt(arguments[number], lambda leaf: next(gradients) if isinstance(leaf, DTensor) else leaf)
            for number in chosen
        )
        return returned, made[0] if isinstance(argnums, int) else made

    return differentiated


def _position(number: int, count: int) -> int:
    if not -count <= number < count:
        raise MisuseError(
            f"the gradient of argument {number} is asked for, but the function is called with {count} positional "
            "arguments: give it by position, or another argnums"
        )
    return number % count


def _name(fn: Callable[..., Any], number: int) -> str:
    """Return the name of a positional argument, or its number if it has none."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())[: number + 1]
    except (ValueError, TypeError):  # such as of some functions in C
        parameters = []
    is_named = len(parameters) > number and all(one.kind is not one.VAR_POSITIONAL for one in parameters)
    return parameters[number].name if is_named else str(number)


def _sources(argument: Any, name: str, mesh: Any, sources: list[DTensor]) -> Any:
    """Return an argument with its arrays in such a form that no other argument has the same ones; and add these."""

    def source_of(value: Any, path: str) -> Any:
        if isinstance(value, np.ndarray) and mesh is not None:
            value = distribute(value, Layout.replicated(mesh, value.ndim))
        if isinstance(value, DTensor):
            if value.dtype.kind != "f":
                raise MisuseError(
                    f"{path} is {value.dtype}, and gradients are of real floating-point numbers: convert it with "
                    "astype(), or choose other arguments by argnums"
                )
            # A variable may be used in the function as it is, too.
            source = value.value() if isinstance(value, DVariable) else DTensor(value.settled)
            sources.append(source)
            record_relayout(value, source)  # for the gradient of a gradient
            return source
        if value is None:
            return None
        raise MisuseError(
            f"{path} is {type_of(value)}, and gradients are of global arrays: make it one by distribute(), or pass it "
            "as another argument"
        )

    return rebuilt(argument, source_of, name)


def _value_of(returned: Any, has_aux: bool) -> DTensor:
    if has_aux and not (isinstance(returned, tuple) and len(returned) == 2):
        raise MisuseError(f"with has_aux a function returns (value, others), not {type_of(returned)}")
    value = returned[0] if has_aux else returned
    if not isinstance(value, DTensor):
        raise MisuseError(f"a gradient is of a global array without axes; the function has returned {type_of(value)}")
    if value.shape or value.dtype.kind != "f":
        raise MisuseError(
            f"a gradient is of one real floating-point number; the function has returned an array of shape "
            f"{value.shape} and type {value.dtype}: return its sum() or mean(), for example"
        )
    return value


def gradients_of(tape: Tape, value: DTensor, sources: Sequence[DTensor]) -> list[DTensor]:
    """Go back through what a tape has recorded, and return the gradient of a number with respect to each source.

    Each array's gradient is brought into the array's own layout: terms of a sum are combined straight into it.
    """
    gradients: dict[int, DTensor] = {}  # by the array's identity: the tape keeps them all alive
    if tape.depends(value):
        gradients[id(value)] = ones((), value.dtype, layout=value.layout)
    for node in reversed(tape.nodes):
        of_results = [gradients.get(id(result)) for result in node.results]
        if all(g is None for g in of_results):
            continue
        rule = _rule_of(node, of_results)
        for position, operand in enumerate(node.operands):
            g: Any = rule(position) if tape.depends(operand) else None
            if g is None:
                continue
            g = g.relayout(operand.layout).astype(operand.dtype)
            before: Any = gradients.get(id(operand))
            gradients[id(operand)] = g if before is None else (before + g).relayout(operand.layout)
    zeros: Any = xp.zeros_like
    return [gradients[id(source)] if id(source) in gradients else zeros(source) for source in sources]


def _rule_of(node: Node, of_results: Sequence[DTensor | None]) -> Callable[[int], Any]:
    """Return what gives the gradient with respect to an operand, by its number.

    Raise UnsupportedFunctionError if there is nothing.
    """
    if "vjp" in node.kwargs:
        return _of_local(node, of_results).__getitem__
    is_complex = any(array.dtype.kind == "c" for array in (*node.operands, *node.results))
    if (rule := RULES.get(node.function)) is None or is_complex:
        name = node.function.removesuffix(".reduce")
        raise UnsupportedFunctionError(
            f"{name} has no gradient{' of complex numbers' if is_complex else ''}. Either write the function with "
            "those that docs/spmd.md lists as having one; or call it in local_map(), with a vjp"
        )
    known = rule
    return lambda position: known(node, position, of_results[0] if len(of_results) == 1 else of_results)


def _of_local(node: Node, of_results: Sequence[DTensor | None]) -> list[DTensor | None]:
    """Return the gradients with respect to the operands of a plain function, as its vjp gives them."""
    vjp, arguments, returned = (node.kwargs[name] for name in ("vjp", "arguments", "returned"))
    if vjp is None:
        raise UnsupportedFunctionError(
            f"{node.function} has no gradient, since what it calls is not known here. Either give local_map a vjp; or "
            "write it with functions that docs/spmd.md lists as having one"
        )
    by_result = {id(result): g for result, g in zip(node.results, of_results, strict=True)}
    made = vjp(rebuilt(returned, lambda result: by_result[id(result)]), returned, *arguments)
    if len(arguments) == 1 and not (isinstance(made, tuple) and len(made) == 1):
        made = (made,)
    if not isinstance(made, list | tuple) or len(made) != len(arguments):
        count = f"{len(made)} gradients" if isinstance(made, list | tuple) else type_of(made)
        raise MisuseError(f"the vjp of {node.function} has returned {count}, for {len(arguments)} arguments")
    leaves = [leaf for given, argument in zip(made, arguments, strict=True) for leaf in _like(given, argument)]
    if len(leaves) != len(node.operands):
        raise MisuseError(
            f"the vjp of {node.function} has returned {len(leaves)} gradients, for {len(node.operands)} arrays: they "
            "are nested as the arguments are"
        )
    for g, operand in zip(leaves, node.operands, strict=True):
        if g is not None and (not isinstance(g, DTensor) or g.shape != operand.shape):
            raise MisuseError(
                f"the vjp of {node.function} has returned {g!r:.100} as the gradient of an array of shape "
                f"{operand.shape}: return a global array of that shape, or None, for each array"
            )
    return leaves


def _like(given: Any, argument: Any) -> list[Any]:
    """Return the leaves of a gradient, which is nested as an argument is; None stands for all of its arrays."""
    leaves = leaves_of(argument)
    return [None] * len(leaves) if given is None else leaves_of(given)
