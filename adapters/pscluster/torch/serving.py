"""`serve`: makes the variables of a module's parameters, in the script."""

from __future__ import annotations

import copy
import functools
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from pscluster.core.checks import type_of
from pscluster.core.errors import MisuseError
from pscluster.core.functions.definitions import FunctionHandle, capture
from pscluster.ps.handles.gradients.parameters import Parameter, create_variables
from pscluster.ps.handles.optimizers import Optimizer
from pscluster.ps.handles.scope import current_creator
from pscluster.torch.local import module_of
from pscluster.torch.served import ServedModule
from pscluster.torch.structure import Structure
from pscluster.torch.tensors import array_of, name_of

logger = logging.getLogger(__name__)

_WANTED = "a served module"


def serve(
    module: nn.Module | Callable[[], nn.Module],
    *,
    optimizer: Optimizer,
    tables: Mapping[str, Optimizer] | Sequence[str] | None = None,
    initializers: Mapping[str, Callable[..., Any]] | None = None,
    name: str | None = None,
    check_numerics: bool = True,
) -> ServedModule:
    """Make a variable of each parameter of a module, with its own initial value, in `strategy.scope()`.

    Step functions then use the result; see `ServedModule.step`.

    Args:
        module: a module, or a function that makes one. Each worker makes it once, of which only the structure counts;
            so a function should be quick, and `device="meta"` saves the memory of large embeddings.
        optimizer: for all parameters that are trained (`requires_grad`) and have no other.
        tables: which `nn.Embedding` and `nn.EmbeddingBag` become tables, of which a step pulls and pushes the rows that
            it looks up: patterns such as "emb.*" for the names of their weights, or of themselves; with an optimizer
            each, or in a list for `optimizer`. Those made with `sparse=True` are tables in any case. One whose weight
            is also used by a module of another kind is served whole.
        initializers: by such patterns for any parameter, what makes its initial value on the servers in place of the
            module's own; required for those on `device="meta"`.
        name: of the module: its variables are then called "name/parameter". Default: like the parameters.
        check_numerics: have a step with NaN or infinity in a gradient raise, and push nothing. Costs one pass over each
            gradient.

    Raises:
        MisuseError: outside of a scope, a name is taken, or a parameter has no value.
        TypeError: an argument is of a wrong type.
        ValueError: a pattern fits no embedding or parameter, or an embedding has `max_norm`, which would change rows as
            they are looked up. In all cases no variable has been made.
    """
    creator = current_creator(_WANTED)
    _check_optimizer("optimizer", optimizer)
    if isinstance(module, nn.Module) and not creator.serialization.pickles:
        raise MisuseError(
            f"serve was given a {type(module).__name__}, which can't be sent to workers: give its class, or a function "
            f"at the top level of a file that makes it; {creator.serialization.why}"
        )
    make: Callable[[], Any] = functools.partial(_copied, _skeleton(module)) if isinstance(module, nn.Module) else module
    if not callable(make):
        raise TypeError(f"serve takes a module, or a function that makes one, not {type_of(module)}")
    made = module if isinstance(module, nn.Module) else module_of(make)
    structure = Structure.of(made)
    if not structure.parameters:
        raise MisuseError(f"the {type(made).__name__} has no parameters to serve")
    _refuse_max_norm(structure)
    by_name, of_tables = _tables_of(structure, tables, optimizer)
    initial = _by_pattern("initializers", initializers or {}, structure)
    function = FunctionHandle(capture(make, policy=creator.serialization))
    prefix = "" if name is None else f"{name}/"
    wanted = {
        prefix + parameter: _parameter(parameter, tensor, initial.get(parameter))
        for parameter, tensor in structure.parameters.items()
    }
    for buffer, tensor in structure.buffers.items():
        wanted[prefix + buffer] = Parameter(_value("buffer", buffer, tensor), trainable=False)
    variables = {key.removeprefix(prefix): variable for key, variable in create_variables(wanted, _WANTED).items()}
    groups: dict[int, tuple[Optimizer, list[str]]] = {}
    for parameter, tensor in structure.parameters.items():
        if tensor.requires_grad:
            own = by_name.get(parameter, optimizer)
            groups.setdefault(id(own), (own, []))[1].append(parameter)
    served = ServedModule(
        key=uuid.uuid4().hex,
        make=function,
        parameters={parameter: variables[parameter] for parameter in structure.parameters},
        buffers={buffer: variables[buffer] for buffer in structure.buffers},
        aliases=structure.aliases,
        tables=of_tables,
        groups=list(groups.values()),
        check_numerics=bool(check_numerics),
    )
    served.__dict__["maker"] = make  # here; a worker has what it was sent
    return served


def _check_optimizer(argument: str, optimizer: object) -> None:
    if isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"{argument} is torch's {type(optimizer).__name__}, which updates tensors of one process: give one that "
            "runs on the servers, such as pscluster.torch.optimizer_from(it)"
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{argument} is {type_of(optimizer)}: give an optimizer, such as optimizers.Adam(1e-3)")


def _refuse_max_norm(structure: Structure) -> None:
    for owners in structure.owners.values():
        for owner in owners:
            if owner.is_embedding and owner.module.max_norm is not None:
                named = repr(owner.name) if owner.name else "the module"
                raise ValueError(
                    f"{named} has max_norm={owner.module.max_norm}, which changes rows as they are looked up, "
                    "where nothing can push them: make it without max_norm, and keep rows small by weight_decay, say"
                )


def _tables_of(
    structure: Structure, tables: Mapping[str, Optimizer] | Sequence[str] | None, optimizer: Optimizer
) -> tuple[dict[str, Optimizer], list[str]]:
    """Return the optimizers of embeddings that have their own, and the names of those that are tables."""
    if isinstance(tables, str) or not isinstance(tables, Mapping | Sequence | None):
        raise TypeError(f"tables is {type_of(tables)}: give a dict of patterns and optimizers, or a list of patterns")
    patterns: dict[str, Optimizer] = {}
    for pattern in tables or ():
        patterns[pattern] = tables[pattern] if isinstance(tables, Mapping) else optimizer
        _check_optimizer(f"tables[{pattern!r}]", patterns[pattern])
    embeddings = {
        name: owners
        for name, owners in structure.owners.items()
        if name in structure.parameters and any(owner.is_embedding for owner in owners)
    }
    found = _by_pattern("tables", patterns, structure, embeddings)
    chosen = []
    for name, owners in embeddings.items():
        if name not in found and not any(owner.module.sparse for owner in owners if owner.is_embedding):
            continue
        if others := [owner.name for owner in owners if not owner.is_embedding]:
            logger.warning(
                "%s is served whole: %s uses the same weight, and needs all of it", name, others[0] or "the module"
            )
        elif not structure.parameters[name].is_floating_point() or structure.parameters[name].ndim != 2:
            raise ValueError(f"{name!r} can't be a table: it must have rows of floats")
        else:
            chosen.append(name)
    return found, chosen


def _by_pattern(
    argument: str, patterns: Mapping[str, Any], structure: Structure, among: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return by parameter what the first pattern that fits it stands for. ValueError if a pattern fits none."""
    names: dict[str, set[str]] = {name: {name} for name in among or structure.parameters}
    if among is not None and not among:
        names = {}
    for name, all_names in names.items():
        all_names.update(alias for alias, first in structure.aliases.items() if first == name)
        if among is not None:
            all_names.update(owner.name for owner in structure.owners[name])
    found: dict[str, Any] = {}
    for pattern, value in patterns.items():
        if not isinstance(pattern, str):
            raise TypeError(f"{argument} has the key {pattern!r:.80}: give patterns such as 'emb.*'")
        fitting = [name for name, known in names.items() if any(fnmatchcase(one, pattern) for one in known)]
        if not fitting:
            kind = "parameter" if among is None else "nn.Embedding or nn.EmbeddingBag"
            raise ValueError(
                f"{argument} has {pattern!r}, which fits no {kind}: there are {', '.join(list(names)[:10]) or 'none'}"
            )
        for name in fitting:
            found.setdefault(name, value)
    return found


def _parameter(name: str, tensor: torch.Tensor, initializer: Callable[..., Any] | None) -> Parameter:
    trainable = bool(tensor.requires_grad)
    if initializer is not None:
        return Parameter(initializer, tuple(tensor.shape), name_of(tensor.dtype), trainable)
    return Parameter(_value("parameter", name, tensor), trainable=trainable)


def _value(kind: str, name: str, tensor: torch.Tensor) -> Any:
    if tensor.is_meta:
        hint = f'initializers={{"{name}": ...}}' if kind == "parameter" else "its module on another device"
        raise MisuseError(f"{kind} {name!r} is on the device 'meta', where it has no values: give {hint}")
    return array_of(tensor)


def _skeleton(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose parameters have no memory."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        for parameter in module.parameters()
    }
    skeleton: nn.Module = copy.deepcopy(module, memo)
    return skeleton


def _copied(module: nn.Module) -> nn.Module:
    copied: nn.Module = copy.deepcopy(module)
    return copied
