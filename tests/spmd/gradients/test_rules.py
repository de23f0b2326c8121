"""The rule of every operation, against numerical differentiation: on a 3x2 mesh, uneven, of length 0 and 1."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from tests.conftest import SEARCH
from tests.core.layouts.support import all_layouts
from tests.spmd import cases
from tests.spmd.cases import Case, array_of
from tests.spmd.gradients.cases import CASES

from pscluster import spmd
from pscluster.core.errors import MisuseError
from pscluster.spmd import Layout
from pscluster.spmd.gradients.rules import RULES
from pscluster.spmd.gradients.tape import CONSTANT

STEP = 1e-6

LAYOUTS = 1
"""Of a case for arrays of certain shapes, of all that there are; `PSCLUSTER_SEARCH=100` goes through all of them."""


@pytest.fixture(scope="module")
def mesh() -> spmd.Mesh:
    """Six devices of this process."""
    return spmd.create_mesh({"x": 3, "y": 2})


def weighted(results: Any) -> Any:
    """A number that depends on each element of results in another way."""
    several = results if isinstance(results, list) else [results]
    floats = [result for result in several if getattr(result, "dtype", np.dtype(bool)).kind == "f"]
    total: Any = 0.0
    for nth, result in enumerate(floats, 1):
        total = total + np.sum(result * (np.random.default_rng(nth).random(result.shape) + 0.5))
    return total


def numerical(function: Callable[..., Any], arrays: Sequence[Any]) -> list[Any]:
    """The gradient with respect to each array, by central differences."""
    gradients = []
    for nth, array in enumerate(arrays):
        gradient = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            ends = []
            for step in (STEP, -STEP):
                moved = [other.copy() for other in arrays]
                moved[nth][index] += step
                ends.append(function(*moved))
            gradient[index] = (ends[0] - ends[1]) / (2 * STEP)
        gradients.append(gradient)
    return gradients


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_gradient_is_that_of_differences(case: Case, mesh: spmd.Mesh) -> None:
    """Each has its argument's shape, element type and layout."""

    def loss(*arrays: Any) -> Any:
        return weighted(case.call(*arrays))

    for shapes in case.shapes:
        arrays = [array_of(shape, case.dtype, seed + 5) for seed, shape in enumerate(shapes)]
        wanted = numerical(loss, arrays)
        choices = list(itertools.product(*(all_layouts(mesh, len(shape)) for shape in shapes)))
        count = min(len(choices), round(LAYOUTS * SEARCH))
        for layouts in random.Random(case.name).sample(choices, count):
            tensors = [spmd.distribute(array, layout) for array, layout in zip(arrays, layouts, strict=True)]
            try:
                value, gradients = spmd.value_and_grad(loss, range(len(arrays)))(*tensors)
                np.testing.assert_allclose(value.full(), loss(*arrays), rtol=1e-12)
                for gradient, tensor, expected in zip(gradients, tensors, wanted, strict=True):
                    assert (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype)
                    assert gradient.layout == tensor.layout
                    np.testing.assert_allclose(gradient.full(), expected, rtol=1e-6, atol=1e-7)
            except BaseException as error:
                error.add_note(f"{case.name} of {shapes}, {[layout.specs for layout in layouts]}")
                raise


def test_every_rule_is_compared(mesh: spmd.Mesh) -> None:
    """Each occurs in a case; those that only gradients have occur in gradients of gradients."""
    names = {"add_along_axis", "add_at", "taken"}
    for case in CASES:
        tensors = [spmd.ones(shape, layout=Layout.replicated(mesh, len(shape))) for shape in case.shapes[0]]
        names.update(step.name for step in spmd.explain(case.call, *tensors).steps)
    names.update({"relayout"})
    assert RULES.keys() - names == set()
    assert CONSTANT - names - {"angle", "imag", "signbit"} == set()


def test_other_functions_have_the_right_gradient_or_are_refused(mesh: spmd.Mesh) -> None:
    """Also those that are made of others: none has a wrong gradient."""
    source = random.Random(7)
    in_float64 = [
        case
        for case in cases.CASES
        if case.dtype == "float64" and not case.name.endswith(("float32", "astype_function"))
    ]
    tried, refused = min(len(in_float64), round(40 * SEARCH)), 0
    for case in source.sample(in_float64, tried):
        shapes = source.choice(list(case.shapes))
        arrays = [array_of(shape, case.dtype, seed + 5) for seed, shape in enumerate(shapes)]
        layouts = [source.choice(all_layouts(mesh, array.ndim)) for array in arrays]

        def loss(*given: Any, case: Case = case) -> Any:
            return weighted(case.call(*given)) + np.sum(given[0] * 0)

        try:
            _, gradients = spmd.value_and_grad(loss, range(len(arrays)))(*map(spmd.distribute, arrays, layouts))
        except (spmd.UnsupportedFunctionError, MisuseError):
            refused += 1
            continue
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            wanted = numerical(loss, arrays)
        for gradient, expected in zip(gradients, wanted, strict=True):
            np.testing.assert_allclose(gradient.full(), expected, rtol=1e-5, atol=1e-6, err_msg=f"{case.name} {shapes}")
    assert refused < tried / 3
