"""NumPy's functions on global arrays give what they give on the gathered ones: for all layouts of a 3x2 mesh."""

from __future__ import annotations

import itertools
import random
import warnings
from typing import Any

import numpy as np
import pytest
from tests.core.layouts.support import all_layouts
from tests.spmd.cases import CASES, Case, array_of

from pscluster import spmd


@pytest.fixture(scope="module")
def mesh() -> spmd.Mesh:
    """Six devices of this process."""
    return spmd.create_mesh({"x": 3, "y": 2})


def gathered(value: Any) -> Any:
    """The whole arrays of a result."""
    if isinstance(value, spmd.DTensor):
        return value.full()
    if isinstance(value, list | tuple):
        return [gathered(item) for item in value]
    return value


def compare(found: Any, wanted: Any, *, exact: bool) -> None:
    """Results have NumPy's types, shapes and values."""
    if isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            compare(one, other, exact=exact)
        return
    wanted = np.asarray(wanted)
    assert np.shape(found) == wanted.shape
    assert np.asarray(found).dtype == wanted.dtype
    if exact:
        np.testing.assert_array_equal(found, wanted)
    else:
        np.testing.assert_allclose(found, wanted, rtol=1e-3 if wanted.dtype.itemsize <= 4 else 1e-10, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_function_is_numpys(case: Case, mesh: spmd.Mesh) -> None:
    """For all layouts of its arguments, and lengths that the mesh does not divide, 0 and 1 among them."""
    for shapes in case.shapes:
        arrays = [array_of(shape, case.dtype, seed) for seed, shape in enumerate(shapes)]
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            wanted: Any = case.call(*arrays)
        for layouts in itertools.product(*(all_layouts(mesh, len(shape)) for shape in shapes)):
            tensors = [spmd.distribute(array, layout) for array, layout in zip(arrays, layouts, strict=True)]
            try:
                compare(gathered(case.call(*tensors)), wanted, exact=case.exact)
            except BaseException as error:
                error.add_note(f"{case.name} of {shapes}, {[layout.specs for layout in layouts]}")
                raise


def other_lengths(case: Case, source: random.Random) -> list[tuple[int, ...]]:
    """Shapes like those of a case, with other lengths: equal ones stay equal, and 1 may stay 1."""
    lengths: dict[int, int] = {}

    def other(length: int) -> int:
        if length == 1 and source.random() < 0.5:
            return 1
        return lengths.setdefault(length, source.choice([0, 1, 2, 3, 4, 5, 6, 7, 8]))

    return [tuple(map(other, shape)) for shape in source.choice(list(case.shapes))]


@pytest.mark.parametrize("dims", [{"x": 3, "y": 2}, {"x": 5}, {"a": 2, "b": 2, "c": 2}], ids=str)
def test_random_lengths_and_layouts(dims: dict[str, int]) -> None:
    """Where NumPy has a value, it is the same; where it raises an error, one is raised."""
    mesh, source = spmd.create_mesh(dims), random.Random(5)
    for number in range(250):
        case = source.choice([case for case in CASES if case.name != "cross"])  # of vectors of other lengths: not there
        arrays = [array_of(shape, case.dtype, seed) for seed, shape in enumerate(other_lengths(case, source))]
        layouts = [source.choice(all_layouts(mesh, array.ndim)) for array in arrays]
        wanted: Any = None
        raised = False
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            try:
                wanted = case.call(*arrays)
            except Exception:
                raised = True
            try:
                found = gathered(case.call(*map(spmd.distribute, arrays, layouts)))
                assert not raised, "NumPy raises an error"
                compare(found, wanted, exact=case.exact)
            except BaseException as error:
                if raised and isinstance(error, Exception) and not isinstance(error, AssertionError):
                    continue
                shapes = [array.shape for array in arrays]
                error.add_note(f"{number}: {case.name} of {shapes}, {[layout.specs for layout in layouts]}")
                raise
