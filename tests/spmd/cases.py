"""Functions of NumPy that are compared on global arrays: what is called, and with arrays of which shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Shape = tuple[int, ...]


class Case(NamedTuple):
    """A call; it is made with arrays of each of these shapes, one for each argument."""

    name: str
    call: Callable[..., Any]
    shapes: Sequence[Sequence[Shape]]
    dtype: str = "float64"
    exact: bool = True


MATRICES: list[list[Shape]] = [[(3, 2)], [(7, 5)], [(1, 4)], [(0, 3)]]
FULL: list[list[Shape]] = [[(3, 2)], [(7, 5)], [(1, 4)]]
VECTORS: list[list[Shape]] = [[(6,)], [(7,)], [(1,)], [(0,)]]
CUBES: list[list[Shape]] = [[(3, 2, 4)], [(5, 1, 3)]]
TWO: list[list[Shape]] = [[(3, 2), (3, 2)], [(7, 5), (7, 5)]]
BROADCAST: list[list[Shape]] = [[(7, 5), (5,)], [(7, 1), (1, 5)], [(3, 2), ()], [(0, 3), (3,)]]


_UPDATES = {"add": np.add, "subtract": np.subtract, "multiply": np.multiply, "min": np.minimum, "max": np.maximum}


def updated(a: Any, kind: str, index: Any, values: Any) -> Any:
    """Return `a.at[index]` set to values, or combined with them; of NumPy's arrays what is meant by that."""
    if hasattr(a, "at"):
        return getattr(a.at[index], kind)(values)
    out = np.array(a)
    if kind == "set":
        out[index] = values
    else:
        _UPDATES[kind].at(out, index, values)
    return out


def _cases() -> list[Case]:
    cases: list[Case] = []

    def of(shapes: Sequence[Sequence[Shape]], *, dtype: str = "float64", exact: bool = True, **calls: Any) -> None:
        cases.extend(Case(name, call, shapes, dtype, exact) for name, call in calls.items())

    of(
        MATRICES,
        negative=lambda a: -a,
        power_and_scalars=lambda a: 2 * a**2 + 1 - a / 3,
        divmod=lambda a: np.divmod(a, 0.7),
        modf=np.modf,
        frexp=np.frexp,
        comparison=lambda a: (a > 0.5) & ~(a < 0.2),
        clip=lambda a: np.clip(a, 0.2, 0.8),
        clip_below=lambda a: np.clip(a, None, 0.8),
        round=lambda a: np.round(a, 1),
        where=lambda a: np.where(a > 0.5, a, -1),
        select=lambda a: np.select([a < 0.3, a < 0.6], [a, 2 * a], 5.0),
        nan_to_num=lambda a: np.nan_to_num(np.where(a > 0.5, np.nan, a), nan=7.0),
        sinc=np.sinc,
        isclose=lambda a: np.isclose(a, 0.5, atol=0.2),
        astype=lambda a: (a * 10).astype(np.int16),
        copy=np.copy,
        transpose=np.transpose,
        swapaxes=lambda a: np.swapaxes(a, 0, 1),
        expand_dims=lambda a: np.expand_dims(a, (0, 2)),
        ravel=np.ravel,
        newaxis=lambda a: a[:, None],
        row=lambda a: a[-1:],
        reversed=lambda a: a[:, ::-1],
        steps=lambda a: a[1::2, ..., :1],
        nothing=lambda a: a[3:1],
        ellipsis=lambda a: a[...],
        flip=np.flip,
        flipud=np.flipud,
        rot90=np.rot90,
        rot270=lambda a: np.rot90(a, 3),
        roll=lambda a: np.roll(a, 2, axis=0),
        roll_all=lambda a: np.roll(a, -3),
        roll_both=lambda a: np.roll(a, (1, 2), (0, 1)),
        tile=lambda a: np.tile(a, (2, 1, 2)),
        repeat=lambda a: np.repeat(a, 2, axis=1),
        repeat_flat=lambda a: np.repeat(a, 3),
        pad=lambda a: np.pad(a, ((1, 0), (0, 2)), constant_values=3.0),
        tril=np.tril,
        triu=lambda a: np.triu(a, 1),
        diagonal=np.diagonal,
        diag=lambda a: np.diag(a, -1),
        broadcast_to=lambda a: np.broadcast_to(a, (2, *a.shape)),
        split=lambda a: np.array_split(a, 3, axis=1),
        split_at=lambda a: np.array_split(a, [1, 4]),
        sort=lambda a: np.sort(a, axis=0),
        sort_flat=lambda a: np.sort(a, axis=None),
        argsort=lambda a: np.argsort(a, axis=1, kind="stable"),
        cumprod=lambda a: np.cumprod(a, axis=1),
        cumsum=lambda a: np.cumsum(a, axis=0),
        cumsum_flat=np.cumsum,
        accumulate=lambda a: np.add.accumulate(a, axis=1),
        diff=lambda a: np.diff(a, axis=0),
        diff_twice=lambda a: np.diff(a, 2, prepend=1.0),
        any=lambda a: np.any(a > 0.9, axis=0),
        any_and_all_of_some=lambda a: [
            np.any(a > 0.9, axis=0, where=a[:, :1] > 0.5),
            np.all(a, where=a > 0.5),
            np.logical_and.reduce(a > 0.2, axis=1, where=[True] * (a.shape[1] - 1) + [False]),
        ],
        extremes_of_some=lambda a: [
            np.max(a, axis=1, initial=0.3, where=a < 0.7),
            np.min((a * 9).astype("int8"), axis=0, initial=100, where=a > 0.5),
            np.nanmax(np.where(a > 0.8, np.nan, a), initial=-np.inf, where=a > 0.1),
            np.fmin.reduce(a, axis=None, initial=2, where=np.True_, keepdims=True),
        ],
        all=lambda a: np.all(a > 0.05),
        count_nonzero=lambda a: np.count_nonzero(a > 0.5, axis=1),
        zeros_like=np.zeros_like,
        full_like=lambda a: np.full_like(a, 3, dtype=np.int32),
        ones_like=lambda a: np.ones_like(a, shape=(2, 3, 1)),
        mask=lambda a: a[np.ones(a.shape[0], bool)],
        unwrap=lambda a: np.unwrap(a * 20, axis=0),
        linspace_interp=lambda a: np.interp(a, np.linspace(0, 1, 5), np.arange(5.0)),
        polyval=lambda a: np.polyval([1.0, 2.0, 3.0], a),
        digitize=lambda a: np.digitize(a, [0.2, 0.5, 0.9]),
        isin=lambda a: np.isin(a, [0.5, 0.1]),
        hstack=lambda a: np.hstack([a, a]),
        dstack=lambda a: np.dstack([a, a]),
        atleast_3d=np.atleast_3d,
        block=lambda a: np.block([[a, a], [a, a]]),
        by_one_bool=lambda a: [a[True], a[np.False_]],
        columns_first=lambda a: [np.ravel(a, "F"), np.reshape(a, (a.shape[1], -1, 1), order="F") if a.size else a],
        taken_none=lambda a: np.take(a, [], axis=1),
        no_difference=lambda a: np.diff(a, 0, prepend=0),
    )
    of(
        FULL,
        max=lambda a: np.max(a, axis=0),
        min=lambda a: np.min(a),
        ptp=lambda a: np.ptp(a, axis=1),
        nanmax=lambda a: np.nanmax(a, axis=1, keepdims=True),
        fmin=lambda a: np.fmin.reduce(a, axis=1),
        argmax=lambda a: np.argmax(a, axis=0),
        argmin_flat=np.argmin,
        argmax_keepdims=lambda a: np.argmax(a, axis=1, keepdims=True),
        nanargmin=lambda a: np.nanargmin(a, axis=1),
        median=lambda a: np.median(a, axis=0),
        quantile=lambda a: np.quantile(a, [0.1, 0.5], axis=1),
        percentile=lambda a: np.percentile(a, 30, axis=(0, 1), keepdims=True),
        partition=lambda a: np.sort(np.partition(a, 1, axis=-1), axis=-1) if a.shape[-1] > 1 else a,
        one=lambda a: a[0],
        one_of_the_last=lambda a: a[..., -1],
        element=lambda a: a[0, -1],
        take=lambda a: np.take(a, [0, -1, 0], axis=1),
        take_flat=lambda a: np.take(a, [[2, 1], [0, 2]]),
        fancy=lambda a: a[:, [1, 0, 1]],
        fancy_rows=lambda a: a[[0, 0, -1]],
        fancy_both=lambda a: a[[0, -1], [1, 0]],
        fancy_outer=lambda a: a[np.array([[0], [-1]]), [0, 1]],
        fancy_apart=lambda a: a[None, [0, -1], :, None][:, :, 0],
        take_along_axis=lambda a: np.take_along_axis(a, np.argsort(a, axis=1), axis=1),
        append=lambda a: np.append(a, a[:1], axis=0),
        delete=lambda a: np.delete(a, 0, axis=1),
        pieces=lambda a: list(np.split(a, a.shape[0])),
        prod_of_initial=lambda a: np.max(a, axis=1, initial=2.0),
        column_stack=lambda a: np.column_stack([a, a[:, 0]]),
        largest_so_far=lambda a: [np.maximum.accumulate(a, 1), np.logical_or.accumulate(a > 0.9)],
        triangles_of_rows=lambda a: [np.tril(a[0]), np.triu(a[0], 1)],
        quantiles_of_integers=lambda a: [
            np.nanpercentile((a * 9).astype(int), [20, 60], axis=0, method="nearest"),
            np.nanquantile(a[:, :, None], 0.3, axis=(0, 2), keepdims=True),
        ],
    )
    of(
        MATRICES,
        exact=False,
        sum=lambda a: np.sum(a),
        sum_rows=lambda a: a.sum(axis=1, keepdims=True),
        sum_to_float32=lambda a: np.sum(a, axis=0, dtype=np.float32),
        prod=lambda a: np.prod(a, axis=0),
        sums_of_some=lambda a: [
            np.sum(a, axis=0, where=a > 0.5),
            a.sum(where=a[:1] > 0.5, initial=3.0, keepdims=True),
            np.sum((a * 9).astype("uint8"), axis=1, where=a > 0.2),
            np.sum(a, axis=1, where=False, dtype="complex64"),
            np.prod((a + 0.5).astype("float32"), axis=(0, 1), where=a < 0.5),
            np.logaddexp.reduce(a, axis=1, where=a > 0.5),
            np.nansum(np.where(a > 0.5, np.nan, a), axis=0, where=a > 0.2),
        ],
        logaddexp=lambda a: np.logaddexp.reduce(a, axis=0),
        nansum=lambda a: np.nansum(np.where(a > 0.5, np.nan, a), axis=0),
        linalg_norm=lambda a: np.linalg.norm(a),
        vector_norms=lambda a: [np.linalg.norm(a, p, axis=0) for p in (None, 1, 0, 3)],
        trace=np.trace,
        cov=lambda a: (a - a.mean(axis=0, keepdims=True) if a.size else a).T @ a,
    )
    of(
        FULL,
        exact=False,
        mean=lambda a: np.mean(a, axis=1),
        mean_of_all=lambda a: a.mean(keepdims=True),
        means_of_some=lambda a: [
            np.mean(a, axis=0, where=a > 0.5),
            np.mean((a * 9).astype("float16"), where=a[:, :1] > 0.1, keepdims=True),
            np.mean(a > 0.5, axis=1, where=a > 0.3),
            np.mean(a * 10, axis=(), where=True, dtype="int32"),
            np.nanmean(np.where(a > 0.9, np.nan, a), axis=1, where=a > 0.2),
        ],
        variances_of_some=lambda a: [
            np.var(a, axis=0, where=a > 0.3),
            np.var(a.astype("float32") * 1j + a, where=a > 0.1, keepdims=True),
            np.std((a * 9).astype("int16"), axis=1, ddof=1, where=a[:1] > 0.1),
            np.nanvar(np.where(a > 0.9, np.nan, a), axis=1, ddof=0.5, where=a > 0.2),
        ],
        var=lambda a: np.var(a, axis=0),
        std=lambda a: np.std(a, ddof=1, axis=(0, 1)),
        nanmean=lambda a: np.nanmean(np.where(a > 0.9, np.nan, a)),
        nanstd=lambda a: np.nanstd(np.where(a > 0.9, np.nan, a)),
        average=lambda a: np.average(a, axis=1, weights=np.arange(1.0, a.shape[1] + 1)),
        max_norms=lambda a: [np.linalg.norm(a, p, axis=1) for p in (np.inf, -np.inf)],
        spectral_norm=lambda a: np.linalg.norm(a, 2),
        softmax=lambda a: (
            np.exp(a - a.max(axis=-1, keepdims=True))
            / np.exp(a - a.max(axis=-1, keepdims=True)).sum(axis=-1, keepdims=True)
        ),
        trapezoid=lambda a: np.trapezoid(a, axis=0) if hasattr(np, "trapezoid") else a,
        svd=lambda a: np.linalg.svd(a, compute_uv=False),
        pinv=np.linalg.pinv,
        einsum_trace=lambda a: np.einsum("ii->", a[:1, :1]),
        gram=lambda a: np.einsum("ij,ik->jk", a, a),
    )
    of(
        VECTORS,
        broadcast_row=lambda a: a * np.arange(3.0)[:, None],
        outer=lambda a: np.outer(a, a),
        add_outer=lambda a: np.add.outer(a, a),
        diag_of_vector=lambda a: np.diag(a, 1),
        ediff1d=lambda a: np.ediff1d(a, to_begin=9.0),
        meshgrid=lambda a: np.meshgrid(a, np.arange(2.0)),
        concatenate_pieces=lambda a: np.concatenate([a, a[:1], a]),
        searchsorted=lambda a: np.searchsorted(np.sort(a), [0.1, 0.5]),
        vstack=lambda a: np.vstack([a, a]),
        atleast_2d=np.atleast_2d,
        kron=lambda a: np.kron(a, [1.0, 2.0]),
        stack_of_vectors=lambda a: np.stack([a, a], axis=1),
        sum_of_squares=lambda a: (a * a).max(initial=0.0),
    )
    of(
        CUBES,
        transposed=lambda a: np.transpose(a, (2, 0, 1)),
        moveaxis=lambda a: np.moveaxis(a, 0, -1),
        rollaxis=lambda a: np.rollaxis(a, 2, 1),
        middle=lambda a: a[:, 0],
        squeeze=lambda a: np.squeeze(a[:, :1], 1),
        merged=lambda a: np.reshape(a, (a.shape[0], -1)),
        merged_first=lambda a: np.reshape(a, (-1, a.shape[2])),
        cut=lambda a: np.reshape(a, (a.shape[0], a.shape[1], -1, 1, a.shape[2])),
        fancy_middle=lambda a: a[:, [0, 0], :],
        fancy_first_and_last=lambda a: a[[0, 1], :, [1, 0]],
        apart_with_integer=lambda a: a[0, :, [1, 0]],
        mT=lambda a: a.mT if hasattr(a, "mT") else np.swapaxes(a, -1, -2),
        max_of_two=lambda a: np.max(a, axis=(0, 2)),
    )
    of(
        [[(6, 4)], [(12, 1)]],
        reshape=lambda a: np.reshape(a, (2, 3, -1)),
        reshape_flat=lambda a: a.reshape(-1),
        reshape_merging=lambda a: a.reshape(3, -1),
    )
    of([[(4, 4)], [(2, 3, 3)]], exact=False, inverse=lambda a: np.linalg.inv(a + 4 * np.eye(a.shape[-1])))
    of([[(4, 4)], [(2, 3, 3)]], exact=False, det=np.linalg.det, eigvalsh=lambda a: np.linalg.eigvalsh(a + a.mT))
    of(
        TWO,
        add=lambda a, b: a + b,
        maximum=np.maximum,
        stack=lambda a, b: np.stack([a, b], axis=1),
        concatenate=lambda a, b: np.concatenate([a, b], axis=1),
        where_of_two=lambda a, b: np.where(a > b, a, b),
        equal=lambda a, b: np.array_equal(a, b),
    )
    of(
        BROADCAST,
        broadcast=lambda a, b: a * b + b,
        broadcast_arrays=lambda a, b: list(np.broadcast_arrays(a, b)),
    )
    of(
        [[(2, 3), (3, 2)], [(7, 5), (5, 4)], [(1, 6), (6, 1)], [(4, 0), (0, 3)]],
        exact=False,
        matmul=lambda a, b: a @ b,
        dot=np.dot,
        tensordot=lambda a, b: np.tensordot(a, b, 1),
        einsum=lambda a, b: np.einsum("ij,jk", a, b),
        einsum_transposed=lambda a, b: np.einsum("ij,jk->ki", a, b),
        multi_dot=lambda a, b: np.linalg.multi_dot([a, b, b.T]),
    )
    of([[(5, 4), (7, 4)]], exact=False, inner=np.inner, vecdot=lambda a, b: np.einsum("...k,...k->...", a[:, None], b))
    of([[(2, 5, 3), (3, 4)], [(4, 3), (2, 3, 5)]], exact=False, batched=lambda a, b: a @ b)
    of(
        [[(5,), (5,)]],
        exact=False,
        vdot=np.vdot,
        vdot_of_bools=lambda a, b: np.vdot(a > 0.5, b > 0.1),
        vector_product=lambda a, b: a @ b,
    )
    of([[(5, 4), (4,)], [(3, 6), (6,)]], exact=False, matrix_vector=lambda a, b: a @ b)
    of([[(7, 3), (7, 3)], [(2, 3), (3,)]], cross=np.cross)
    of([[(4, 4), (4, 3)]], exact=False, solve=lambda a, b: np.linalg.solve(a + 4 * np.eye(4), b))
    of(
        [[(7, 5)]],
        dtype="int64",
        bits=lambda a: (a.astype(np.int64) << 2) ^ 5,
        integer_mean=lambda a: a.mean(axis=0),
        bincounts=lambda a: np.bitwise_or.reduce(a, axis=1),
        gcd=lambda a: np.gcd.reduce(a, axis=0),
        lcm=lambda a: [np.lcm.reduce(a + 1, axis=0), np.lcm.reduce(a[:1] + 1, axis=0)],
        reductions=lambda a: [np.bitwise_and.reduce(a), np.bitwise_xor.reduce(a, 1), np.logical_xor.reduce(a, 1)],
        remainder=lambda a: a % 3,
        by_array=lambda a: np.take(np.arange(100.0) * np.ones_like(a[0, 0]), a % 7),
    )
    of(
        [[(7, 5)]],
        dtype="complex128",
        exact=False,
        conjugate=np.conj,
        real=np.real,
        imaginary=lambda a: [a.imag, np.imag(a)],
        angle=np.angle,
        complex_var=np.var,
        complex_norm=np.linalg.norm,
        complex_scalar=lambda a: a * 2j,
        complex_product=lambda a: np.vdot(a, a),
    )
    of(
        [[(7, 5)]],
        dtype="float16",
        exact=False,
        type_of_average=lambda a: np.average((a * 9).astype(np.uint8), 0, a),
        type_of_edges=lambda a: np.ediff1d(a, to_begin=np.float64(1), to_end=[1, 2]),
        types_of_choices=lambda a: [np.select([a > 0.5], [a], 5), np.select([a > 0.5], [2], a.astype(int))],
        type_of_polynomial=lambda a: np.polyval([1, 2.5], a),
        infinite_nanvar=lambda a: np.nanvar(np.where(a > 0.5, np.inf, a), axis=0),
    )
    of([[(7, 5)]], dtype="float32", scalars_are_weak=lambda a: a * 2.0 + np.float32(1), float32_round=lambda a: a // 1)
    of([[(7, 5)]], dtype="float16", exact=False, half_mean=lambda a: a.mean(axis=0).astype(np.float32))
    of([[(7, 5)]], dtype="bool", logic=lambda a: ~a | (a ^ True), bool_sum=lambda a: a.sum(axis=0), bool_mean=np.mean)
    of(
        FULL,
        angle=np.angle,
        real_of_real=np.real,
        fix=np.fix,
        signs=lambda a: [np.isneginf(-a / 0), np.isposinf(a / 0), np.iscomplex(a), np.isreal(a)],
        amax=lambda a: np.amax(a, 0),
        amin=lambda a: np.amin(a, 1),
        nanmin=lambda a: np.nanmin(a, axis=0),
        nanargmax=lambda a: np.nanargmax(a, axis=0),
        nanmedian=lambda a: np.nanmedian(a, axis=1),
        nanquantile=lambda a: np.nanquantile(a, 0.3, axis=0),
        nanpercentile=lambda a: np.nanpercentile(a, [30, 60]),
        nancumsum=lambda a: np.nancumsum(np.where(a > 0.5, np.nan, a), axis=0),
        nancumprod=lambda a: np.nancumprod(a, axis=1),
        argpartition=lambda a: np.take_along_axis(a, np.argpartition(a, 0, axis=0), 0)[0],
        around=lambda a: np.around(a, 2),
        resize=lambda a: np.resize(a, (3, 5)),
        diagflat=lambda a: np.diagflat(a[0]),
        fliplr=np.fliplr,
        hsplit=lambda a: np.hsplit(a, [1]),
        vsplit=lambda a: np.vsplit(a, a.shape[0]),
        dsplit=lambda a: np.dsplit(a[:, :, None], 1),
        atleast_1d=lambda a: np.atleast_1d(a[0, 0]),
        broadcast_scalar=lambda a: np.broadcast_to(a[0, 0], (2, 3)),
        empty_like=lambda a: np.empty_like(a) * 0,
        identity_index=lambda a: a[()],
        integers_and_masks=lambda a: a[0, np.arange(a.shape[1]) % 2 == 0],
        mask_of_all=lambda a: a[np.arange(a.size).reshape(a.shape) % 3 == 0],
        numpy_integers=lambda a: a[np.int64(0), np.array(0)],
    )
    of(
        FULL,
        exact=False,
        i0=np.i0,
        nanprod=lambda a: np.nanprod(np.where(a > 0.5, np.nan, a), axis=0),
        nanvar=lambda a: np.nanvar(np.where(a > 0.9, np.nan, a), axis=1, ddof=0),
        gradient=lambda a: np.gradient(a[[0, 0, 0, -1]], 2.0, axis=0),
        average_of_all=lambda a: list(np.average(a, weights=a, returned=True)),
        mean_to_float32=lambda a: np.mean(a, dtype=np.float32),
        var_keepdims=lambda a: np.var(a, axis=1, keepdims=True, mean=np.mean(a, axis=1, keepdims=True)),
        interp_left=lambda a: np.interp(a, [0.2, 0.8], [1.0, 2.0], left=-1.0),
        einsum_lists=lambda a: np.einsum(a, [0, 1], a, [0, 2], [1, 2]),
        einsum_dots=lambda a: np.einsum("...j,j->...", a, np.arange(1.0 * a.shape[1])),
        einsum_sum=lambda a: np.einsum("ij->", a),
        norm_by_ord=lambda a: [np.linalg.norm(a, p) for p in (1, np.inf, "nuc")],
        qr=lambda a: np.abs(np.linalg.qr(a, "r")),
        cond=lambda a: np.linalg.cond(a),
        matrix_rank=lambda a: np.linalg.matrix_rank(a),
        inner_of_vectors=lambda a: np.inner(a[0], a[-1]),
    )
    if hasattr(np, "cumulative_sum"):
        of(
            FULL,
            exact=False,
            cumulative_sum=lambda a: np.cumulative_sum(a, axis=0, include_initial=True),
            cumulative_prod=lambda a: np.cumulative_prod(a, axis=1),
            unstack=lambda a: np.unstack(a, axis=1),
            bools=lambda a: [np.vecdot(a > 0.5, a > 0.2), np.vecmat(a[0] > 0.5, (a > 0.2).T)],
            vector_norms_of_matrices=lambda a: [np.linalg.vector_norm(a[None], axis=(0, 2), ord=p) for p in (1, 2, 3)],
            initial_of_scalars=lambda a: np.cumulative_sum(a[0, 0], include_initial=True),
            vector_norm=lambda a: [np.linalg.vector_norm(a), np.linalg.vector_norm(a, axis=1, ord=1)],
            matrix_norm=lambda a: np.linalg.matrix_norm(a),
            svdvals=lambda a: np.linalg.svdvals(a),
            matrix_transpose=lambda a: [np.matrix_transpose(a), np.linalg.matrix_transpose(a)],
            linalg_trace=lambda a: [np.linalg.trace(a), np.linalg.diagonal(a, offset=1)],
            linalg_products=lambda a: [np.linalg.matmul(a, a.T), np.linalg.outer(a[0], a[0])],
            more_products=lambda a: [np.linalg.vecdot(a, a), np.linalg.tensordot(a, a, axes=2)],
            matvec=lambda a: [np.matvec(a, a[0]), np.vecmat(a[:, 0], a), np.vecdot(a.T, a.T)],
            linalg_cross=lambda a: np.linalg.cross(np.resize(a, (2, 3)), np.resize(a, (3,))),
            astype_function=lambda a: np.astype(a, np.float32),
        )
    of(
        [[(4, 4)]],
        exact=False,
        matrix_power=lambda a: np.linalg.matrix_power(a, 3),
        cholesky=lambda a: np.linalg.cholesky(a @ a.T + np.eye(4)),
        eigh=lambda a: np.linalg.eigh(a + a.T)[0],
        slogdet=lambda a: list(np.linalg.slogdet(a)),
        svd_of_three=lambda a: np.linalg.svd(a)[1],
    )
    of(
        FULL,
        windows=lambda a: np.lib.stride_tricks.sliding_window_view(a, (1, 2)),
        windows_of_one=lambda a: np.lib.stride_tricks.sliding_window_view(a, a.shape[1], axis=-1),
        windows_from_the_last_axis=lambda a: np.lib.stride_tricks.sliding_window_view(a, (1, 2), axis=(-2, -1)),
        windows_twice=lambda a: np.lib.stride_tricks.sliding_window_view(a, (2, 1), axis=(1, 1)),
    )
    of(
        FULL,
        exact=False,
        cov=lambda a: [np.cov(a), np.cov(a, rowvar=False, bias=True), np.cov(a[0], a[-1], ddof=0)],
        corrcoef=lambda a: [np.corrcoef(a), np.corrcoef(a[:, 0], a[:, 1])],
    )
    of(
        [[(6,), (3,)], [(3,), (6,)], [(7,), (1,)], [(4,), (4,)], [(2,), (7,)]],
        exact=False,
        convolve=lambda a, v: [np.convolve(a, v, mode) for mode in ("full", "same", "valid")],
        correlate=lambda a, v: [np.correlate(a, v, mode) for mode in ("full", "same", "valid")],
    )
    of(
        FULL,
        at_row=lambda a: [updated(a, kind, -1, a[0] * 2) for kind in ("set", *_UPDATES)],
        at_column=lambda a: [updated(a, kind, (slice(None), 1), 0.5) for kind in ("set", *_UPDATES)],
        at_rows=lambda a: [updated(a, kind, [0, 0, -1], [[1.0], [2.0], [3.0]]) for kind in ("set", *_UPDATES)],
        at_slices=lambda a: updated(updated(a, "set", (slice(1, None), slice(None, None, 2)), 7), "add", ..., a),
        at_elements=lambda a: updated(a, "set", ([0, -1], [1, 0]), a[0, :2]),
        at_mask=lambda a: (
            [updated(a, kind, a > 0.5, 2) for kind in ("set", "add")] + [updated(a, "max", a[:, 0] > 0, a[0])]
        ),
        at_mask_here=lambda a: updated(a, "set", np.arange(a.size).reshape(a.shape) % 2 == 0, 3),
        at_nothing=lambda a: updated(a, "set", (slice(0), None), 1),
        at_indices=lambda a: updated(a, "add", np.argmax(a, axis=0), 1),
    )
    return cases


CASES = _cases()


def array_of(shape: Shape, dtype: str, seed: int) -> Any:
    """Reproducible values: no two of them are equal, if they are floats."""
    generator = np.random.default_rng(seed)
    if dtype == "bool":
        return generator.random(shape) > 0.5
    if dtype == "int64":
        return generator.integers(0, 40, shape)
    if dtype == "complex128":
        return generator.random(shape) + 1j * generator.random(shape)
    return generator.random(shape).astype(dtype)
