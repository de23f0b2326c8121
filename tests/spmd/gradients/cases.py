"""Functions whose gradients are compared with numerical ones: what is called, with arrays of which shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tests.spmd.cases import Case, Shape, updated

MATRIX: list[list[Shape]] = [[(7, 5)]]
MATRICES: list[list[Shape]] = [[(7, 5)], [(3, 2)], [(1, 4)], [(0, 3)]]
FULL: list[list[Shape]] = [[(7, 5)], [(3, 2)], [(1, 4)]]
CUBE: list[list[Shape]] = [[(5, 1, 3)]]
TWO: list[list[Shape]] = [[(7, 5), (7, 5)]]
BROADCAST: list[list[Shape]] = [[(7, 5), (5,)], [(7, 1), (1, 5)], [(3, 2), ()], [(0, 3), (3,)]]


def _cases() -> list[Case]:
    cases: list[Case] = []

    def of(shapes: Sequence[Sequence[Shape]], **calls: Any) -> None:
        cases.extend(Case(name, call, shapes) for name, call in calls.items())

    of(
        MATRIX,
        negative=lambda a: -a,
        positive=lambda a: +a,
        conjugate=lambda a: np.conj(a).real,
        exp=np.exp,
        exp2=np.exp2,
        expm1=np.expm1,
        log=np.log,
        log2=np.log2,
        log10=np.log10,
        log1p=np.log1p,
        sqrt=np.sqrt,
        cbrt=np.cbrt,
        square=np.square,
        reciprocal=np.reciprocal,
        absolute=lambda a: np.abs(a - 0.5),
        fabs=lambda a: np.fabs(0.5 - a),
        sin=np.sin,
        cos=np.cos,
        tan=np.tan,
        arcsin=np.arcsin,
        arccos=np.arccos,
        arctan=np.arctan,
        sinh=np.sinh,
        cosh=np.cosh,
        tanh=np.tanh,
        arcsinh=np.arcsinh,
        arccosh=lambda a: np.arccosh(a + 1),
        arctanh=np.arctanh,
        angles=lambda a: np.deg2rad(a) + np.radians(a) + np.rad2deg(a) + np.degrees(a),
        sinc=lambda a: np.sinc(a) + np.sinc(a * 0),
        nan_to_num=lambda a: np.nan_to_num(np.where(a > 0.5, np.nan, a)),
        ldexp=lambda a: np.ldexp(a, 3),
        jumps=lambda a: (
            np.floor(a * 9) * a
            + np.ceil(a)
            + np.trunc(a * 3) * a
            + np.rint(a * 5)
            + np.sign(a - 0.5) * a
            + np.round(a, 1)
            + a // 0.3
            + np.heaviside(a, 0.5)
        ),
        powers=lambda a: a**2 + (a + 0.5) ** -1.5 + a**1 + a**0 + 2.0**a + np.float_power(a, 3),
        scalars=lambda a: 2 * a + 1 - a / 3 + 3 / a - (1 - a),
        clip=lambda a: np.clip(a, 0.3, 0.6) + np.clip(a, None, 0.7) + np.clip(a, 0.2, None),
        where=lambda a: np.where(a > 0.5, a * a, -1),
        select=lambda a: np.select([a < 0.3, a < 0.6], [a, 2 * a], 5.0),
        astype=lambda a: a.astype(np.float32).astype(np.float64) * 0 + a,
        extremes_of_scalars=lambda a: np.maximum(a, 0.5) + np.minimum(0.4, a) + np.fmax(a, 0.3) + np.fmin(a, 0.9),
    )
    of(
        MATRICES,
        sum=np.sum,
        sum_rows=lambda a: a.sum(axis=1, keepdims=True),
        sum_columns=lambda a: np.add.reduce(a),
        transpose=lambda a: a.T,
        ravel=np.ravel,
        expand_dims=lambda a: np.expand_dims(a, (0, 2)),
        newaxis=lambda a: a[:, None],
        part=lambda a: a[1::2, ..., :1],
        reversed=lambda a: a[:, ::-1],
        nothing=lambda a: a[3:1],
        broadcast_to=lambda a: np.broadcast_to(a, (2, *a.shape)),
        split=lambda a: list(np.array_split(a, 3, axis=1)),
        tile=lambda a: np.tile(a, (2, 1, 2)),
        repeat=lambda a: np.repeat(a, 2, axis=1),
        pad=lambda a: np.pad(a, ((1, 0), (0, 2)), constant_values=3.0),
        flip=np.flip,
        roll=lambda a: [np.roll(a, (1, 2), (0, 1)), np.roll(a, 3, axis=1)],
        triangles=lambda a: [np.tril(a), np.triu(a, 1)],
        diagonal=lambda a: [np.diagonal(a), np.diagonal(a, -1), np.diagonal(a, 1, 1, 0)],
        cumsum=lambda a: np.cumsum(a, axis=0),
        diff=lambda a: [np.diff(a, axis=0), np.diff(a, 2)],
        sort=lambda a: [np.sort(a, axis=0), np.sort(a, axis=None)],
        stack=lambda a: np.stack([a, 2 * a], axis=1),
        norm=lambda a: np.linalg.norm(a + 1),
    )
    of(
        FULL,
        max=lambda a: np.max(a, axis=0),
        min=lambda a: np.min(a),
        max_initial=lambda a: np.max(a, axis=1, initial=0.6),
        nanmax=lambda a: [np.nanmax(a, axis=1, keepdims=True), np.nanmin(a)],
        ptp=lambda a: np.ptp(a, axis=1),
        prod=lambda a: np.prod(a, axis=1),
        prod_of_zeros=lambda a: np.prod(np.where(a > 0.9, 0, a), axis=0),
        logaddexp_reduce=lambda a: [np.logaddexp.reduce(a, axis=0), np.logaddexp2.reduce(a, axis=1)],
        hypot_reduce=lambda a: np.hypot.reduce(a, axis=1),
        mean=lambda a: np.mean(a, axis=0),
        mean_of_all=lambda a: a.mean(keepdims=True),
        var=lambda a: np.var(a, axis=0),
        moments_of_some=lambda a: [np.mean(a, 0, where=a > 0.1), np.std(a, where=a > 0.1), np.sum(a, where=a > 0.5)],
        std=lambda a: np.std(a, ddof=-1, axis=(0, 1)),
        average=lambda a: np.average(a, axis=1, weights=np.arange(1.0, a.shape[1] + 1)),
        softmax=lambda a: (
            np.exp(a - a.max(axis=-1, keepdims=True))
            / np.exp(a - a.max(axis=-1, keepdims=True)).sum(axis=-1, keepdims=True)
        ),
        logsumexp=lambda a: np.log(np.sum(np.exp(a - np.max(a)), axis=1)) + np.max(a),
        one=lambda a: a[0],
        element=lambda a: a[0, -1],
        take=lambda a: [np.take(a, [0, -1, 0], axis=1), np.take(a, [[0, 0], [1, 2]])],
        take_modes=lambda a: [np.take(a, [9, 0], axis=0, mode="wrap"), np.take(a, [9, -3], axis=1, mode="clip")],
        fancy=lambda a: a[:, [1, 0, 1]],
        fancy_rows=lambda a: a[[0, 0, -1]],
        fancy_outer=lambda a: a[np.array([[0], [-1]]), [0, 1]],
        fancy_apart=lambda a: a[None, [0, -1], :, None][:, :, 0],
        mask=lambda a: a[np.arange(a.size).reshape(a.shape) % 3 == 0],
        at_set=lambda a: [updated(a, "set", [0, 0, -1], a[:3] * 2), updated(a, "set", (slice(None), 1), a[:, 0])],
        at_add=lambda a: [updated(a, "add", [0, 0, -1], a[:1]), updated(a, "subtract", (slice(1, 3), 1), a[0, 0])],
        along=lambda a: np.take_along_axis(a, np.argsort(a, axis=1)[:, :2], axis=1),
        along_broadcast=lambda a: np.take_along_axis(a, np.argsort(a, axis=0)[:, :1], axis=0),
        repeat_each=lambda a: np.repeat(a, np.arange(a.shape[1]), axis=1),
        gram=lambda a: np.einsum("ij,ik->jk", a, a),
        einsum_sums=lambda a: [np.einsum("ij->", a), np.einsum("ij->i", a), np.einsum("ij->ji", a)],
        outer=lambda a: np.outer(a[0], a[-1]),
    )
    of(
        [[(6,)], [(7,)], [(1,)], [(0,)]],
        diag=lambda a: np.diag(a, 1),
        concatenate_pieces=lambda a: np.concatenate([a, a[:1], a]),
        add_outer=lambda a: np.add.outer(a, a),
        kron=lambda a: np.kron(a, [1.0, 2.0]),
    )
    of(
        CUBE,
        squeeze=lambda a: np.squeeze(a, 1),
        merged=lambda a: [np.reshape(a, (a.shape[0], -1)), np.reshape(a, (-1, 3))],
        moveaxis=lambda a: np.moveaxis(a, 0, -1),
        fancy_first_and_last=lambda a: a[[0, 1, 0], :, [1, 0, 1]],
        diagonal_apart=lambda a: [np.diagonal(a, 0, 0, 2), np.diagonal(a, 0, 2, 1)],
        max_of_two=lambda a: np.max(a, axis=(0, 2)),
        along_of_one=lambda a: np.take_along_axis(a, np.zeros((5, 2, 2), int), axis=2),
    )
    of([[(6, 4)]], reshape=lambda a: np.reshape(a, (2, 3, -1)), reshape_flat=lambda a: a.reshape(-1))
    of(
        TWO,
        arctan2=np.arctan2,
        hypot=np.hypot,
        maximum=np.maximum,
        minimum=np.minimum,
        fmax_fmin=lambda a, b: np.fmax(a, b) * np.fmin(b, a),
        logaddexp=lambda a, b: np.logaddexp(a, b) + np.logaddexp2(a, b),
        copysign=lambda a, b: np.copysign(a, b - 0.5),
        remainder=lambda a, b: a % (b * 0.3) + np.fmod(a - 0.5, b * 0.3),
        power=lambda a, b: a**b,
        clip_by_arrays=lambda a, b: np.clip(a, b - 0.2, b + 0.2) + np.clip(0.5, a, b) + np.clip(a, b, 0.5),
        where_of_two=lambda a, b: np.where(a > b, a, b * b),
        concatenate=lambda a, b: np.concatenate([a, b], axis=1),
        stack_of_two=lambda a, b: np.stack([a, b], axis=1),
        relayout=lambda a, b: (a.relayout_like(b) if hasattr(a, "relayout_like") else a) * b,
        tensordot=lambda a, b: [np.tensordot(a, b, ([0, 1], [0, 1])), np.tensordot(a, b, ([1], [1]))],
        tensordot_turned=lambda a, b: np.tensordot(a, b.T, ([0, 1], [1, 0])),
        einsum_sharing=lambda a, b: [np.einsum("ij,ij->j", a, b), np.einsum("ij,kj->", a, b)],
    )
    of(BROADCAST, broadcast=lambda a, b: a * b + b / (a + 1), subtract=lambda a, b: a - b)
    of(
        [[(7, 5), (5, 4)], [(1, 6), (6, 1)], [(4, 0), (0, 3)]],
        matmul=lambda a, b: a @ b,
        dot=np.dot,
        einsum=lambda a, b: np.einsum("ij,jk->ki", a, b),
    )
    of([[(2, 5, 3), (3, 4)], [(4, 3), (2, 3, 5)], [(2, 1, 4, 3), (3, 3, 2)]], batched=lambda a, b: a @ b)
    of([[(5, 4), (4,)], [(2, 3, 4), (4,)], [(4,), (4, 5)], [(4,), (2, 4, 5)], [(5,), (5,)]], vectors=lambda a, b: a @ b)
    of([[(7, 5), (1, 5)]], einsum_broadcast=lambda a, b: [np.einsum("ij,ij->j", a, b), np.einsum("ij,ij->i", b, a)])
    of([[(3, 3), (3,)]], einsum_diagonal=lambda a, b: [np.einsum("ii,i->i", a, b), np.einsum("ii", a)])
    of([[(7, 3), (7, 3)], [(2, 3), (3,)]], cross=np.cross)
    of(
        [[(3, 3)], [(2, 3, 3)]],
        inv=lambda a: np.linalg.inv(a + 4 * np.eye(3)),
        det=lambda a: np.linalg.det(a + 4 * np.eye(3)),
        slogdet=lambda a: np.linalg.slogdet(a + 4 * np.eye(3))[1],
        cholesky=lambda a: np.linalg.cholesky(a @ np.swapaxes(a, -1, -2) + np.eye(3)),
    )
    of([[(3, 3), (3, 2)], [(3, 3), (3,)]], solve=lambda a, b: np.linalg.solve(a + 4 * np.eye(3), b))
    return cases


CASES = _cases()
