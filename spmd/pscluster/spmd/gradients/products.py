"""Rules for products and linear algebra. Sums over sharded axes come in terms, as they do in products."""

from __future__ import annotations

import string
from typing import Any

import numpy as np

from pscluster.core.layouts.layout import Layout
from pscluster.spmd.creation import eye
from pscluster.spmd.functions.applying import xp
from pscluster.spmd.functions.products import parsed
from pscluster.spmd.gradients.rules import rule, spread, summed_to
from pscluster.spmd.gradients.tape import Node


@rule("matmul")
def _matmul(node: Node, position: int, g: Any) -> Any:
    a, b = node.operands
    if a.ndim == 1 and b.ndim == 1:
        return g * (b, a)[position]
    batch = list(range(max(a.ndim, b.ndim) - 2))
    every = list(range(g.ndim))
    if a.ndim == 1:  # k, ..kn -> ..n
        return xp.tensordot(g, b, (every, [*batch, b.ndim - 1])) if not position else a[:, None] * g[..., None, :]
    if b.ndim == 1:  # ..mk, k -> ..m
        return xp.tensordot(g, a, (every, every)) if position else g[..., None] * b
    if not position:  # ..mn, ..kn -> ..mk
        if b.ndim == 2:
            return xp.tensordot(g, b, ([g.ndim - 1], [1]))
        if a.ndim == 2:
            return xp.tensordot(g, b, ([*batch, g.ndim - 1],) * 2)
        return summed_to(xp.matmul(g, b.mT), a.shape)
    if b.ndim == 2:  # ..mk, ..mn -> ..kn
        return xp.tensordot(a, g, ([*batch, a.ndim - 2],) * 2)
    return summed_to(xp.matmul(a.mT, g), b.shape)


@rule("tensordot")
def _tensordot(node: Node, position: int, g: Any) -> Any:
    a, b = node.operands
    summed_a, summed_b = node.args[2]
    kept_a = [at for at in range(a.ndim) if at not in summed_a]
    kept_b = [at for at in range(b.ndim) if at not in summed_b]
    if not position:
        made = xp.tensordot(g, b, (list(range(len(kept_a), g.ndim)), kept_b))
        order = [*kept_a, *(summed_a[summed_b.index(at)] for at in sorted(summed_b))]
    else:
        made = xp.tensordot(a, g, (kept_a, list(range(len(kept_a)))))
        order = [*(summed_b[summed_a.index(at)] for at in sorted(summed_a)), *kept_b]
    places = [order.index(at) for at in range(len(order))]
    return made if places == sorted(places) else xp.transpose(made, places)


@rule("einsum")
def _einsum(node: Node, position: int, g: Any) -> Any:
    """Contract the gradient with all other operands."""
    operand = node.operands[position]
    inputs, output = parsed(node.args[0], [tensor.ndim for tensor in node.operands])
    own = inputs.pop(position)
    sides, tensors = [output, *inputs], [g, *node.operands[:position], *node.operands[position + 1 :]]
    free = (letter for letter in string.ascii_letters if letter not in node.args[0])
    letters: list[str] = []
    for letter, length in zip(own, operand.shape, strict=True):
        if letter not in letters:
            letters.append(letter)
            continue
        letters.append(other := next(free))  # only a diagonal has a gradient
        sides.append(letter + other)
        tensors.append(eye(length, dtype=g.dtype, layout=Layout.replicated(g.mesh, 2)))
    lengths: dict[str, int] = {}
    for side, tensor in zip(sides, tensors, strict=True):
        for letter, length in zip(side, tensor.shape, strict=True):
            lengths[letter] = max(lengths.get(letter, length), length)
    # Over a letter that is broadcast in the operand is summed; one that it alone has is broadcast back.
    there = [
        letter
        for letter, length in zip(letters, operand.shape, strict=True)
        if letter in lengths and (length != 1 or lengths[letter] == 1)
    ]
    made = xp.einsum(f"{','.join(sides)}->{''.join(there)}", *tensors, optimize=True)
    if missing := tuple(at for at, letter in enumerate(letters) if letter not in there):
        made = xp.expand_dims(made, missing)
    return spread(made, operand)


@rule("cross")
def _cross(node: Node, position: int, g: Any) -> Any:
    a, b = node.operands
    return summed_to(xp.cross(g, a) if position else xp.cross(b, g), node.operands[position].shape)


@rule("linalg.inv")
def _inv(node: Node, position: int, g: Any) -> Any:
    del position
    turned = node.results[0].mT
    return -(turned @ g @ turned)


@rule("linalg.det")
def _det(node: Node, position: int, g: Any) -> Any:
    a = node.operands[position]
    return (g * node.results[0])[..., None, None] * xp.linalg.inv(a).mT


@rule("linalg.slogdet")
def _slogdet(node: Node, position: int, g: Any) -> Any:
    _, of_logarithm = g
    return None if of_logarithm is None else of_logarithm[..., None, None] * xp.linalg.inv(node.operands[position]).mT


@rule("linalg.solve")
def _solve(node: Node, position: int, g: Any) -> Any:
    a, b = node.operands
    of_b = xp.linalg.solve(a.mT, g)
    if position:
        return summed_to(of_b, b.shape)
    out = node.results[0]
    product = -xp.einsum("...i,...j->...ij", of_b, out) if b.ndim == 1 else -(of_b @ out.mT)
    return summed_to(product, a.shape)


@rule("linalg.cholesky")
def _cholesky(node: Node, position: int, g: Any) -> Any:
    """See Murray, "Differentiation of the Cholesky decomposition", 2016, equation 10; symmetric."""
    del position
    low = node.results[0]
    lower = xp.tril(low.mT @ g) * (np.tri(low.shape[-1]) - 0.5 * np.eye(low.shape[-1]))
    inverse = xp.linalg.inv(low)
    whole = inverse.mT @ lower @ inverse
    return (whole + whole.mT) / 2
