"""The rule for layouts, over all pairs of layouts of a 3x2 mesh."""

import itertools
import string

import pytest
from tests.core.layouts.support import all_layouts

from pscluster.core.layouts.layout import Layout
from pscluster.core.layouts.mesh import UNSHARDED, Mesh
from pscluster.core.layouts.rule import Operand, Resolved, elementwise, resolve

GRID = Mesh({"x": 3, "y": 2})
U = UNSHARDED
PAIRS = list(itertools.product(all_layouts(GRID, 2), repeat=2))


def matmul(a: tuple[str, ...], b: tuple[str, ...], sizes: tuple[int, int] = (1, 1)) -> Resolved:
    """The rule for the product of two matrices."""
    return resolve([Operand(("m", "k"), a, sizes[0]), Operand(("k", "n"), b, sizes[1])], ("m", "n"))


@pytest.mark.parametrize(
    ("mesh", "a", "b", "result", "partial", "work"),
    [
        (Mesh({"x": 6}), (U, U), (U, U), (U, U), (), 12),
        (GRID, (U, "x"), ("x", U), (U, U), ("x",), 4),
        (GRID, ("y", "x"), ("x", U), ("y", U), ("x",), 2),
    ],
)
def test_the_products_of_the_overview(
    mesh: Mesh, a: tuple[str, ...], b: tuple[str, ...], result: tuple[str, ...], partial: tuple[str, ...], work: int
) -> None:
    """Of 2x3 and 3x2 matrices on six devices: 72, 24 and 12 multiplications, and the layouts that it prints."""
    resolved = matmul(a, b)
    assert (resolved.operands, resolved.result, resolved.partial) == ((a, b), result, partial)
    lengths = {"m": 2, "k": 3, "n": 2}
    assert resolved.work(lengths, dict(mesh.dims)) == work
    assert 6 * work in (72, 24, 12)


@pytest.mark.parametrize(("a", "b"), PAIRS)
@pytest.mark.parametrize("sizes", [(6, 6), (6, 7)])
def test_every_product(a: Layout, b: Layout, sizes: tuple[int, int]) -> None:
    """It is never refused, and what the rule says holds."""
    resolved = matmul(a.specs, b.specs, sizes)
    (m, k), (k_of_b, n) = resolved.operands
    # One label is sharded in one way, and one dimension shards one label.
    assert k == k_of_b
    assert resolved.result == (m, n)
    used = [spec for spec in (m, k, n) if spec != U]
    assert len(set(used)) == len(used)
    for specs in (*resolved.operands, resolved.result):
        Layout(specs, GRID)
    # Terms are left over the dimension of the contracted label, and of no other.
    assert resolved.partial == (() if k == U else (k,))
    # Labels of the result choose first, in order; each takes the first of what the operands ask for that is left.
    larger_first = (b.specs[0], a.specs[1]) if sizes[1] > sizes[0] else (a.specs[1], b.specs[0])
    taken: set[str] = set()
    for dim, asked in ((m, (a.specs[0],)), (n, (b.specs[1],)), (k, larger_first)):
        left = [spec for spec in asked if spec != U and spec not in taken]
        assert dim == (left[0] if left else U)
        taken.add(dim)


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_every_elementwise_function(a: Layout, b: Layout) -> None:
    """Both operands get one layout, which shards what one of them shards, as far as dimensions allow."""
    (labels_a, labels_b) = elementwise([(6, 4), (6, 4)])
    resolved = resolve([Operand(labels_a, a.specs, 24), Operand(labels_b, b.specs, 24)], labels_a)
    assert resolved.operands == (resolved.result, resolved.result)
    assert not resolved.partial
    if a.specs == b.specs or b.is_replicated:
        assert resolved.result == a.specs
    for axis, spec in enumerate(resolved.result):
        assert spec in (a.specs[axis], b.specs[axis], U)
        # Unsharded only if what the operands ask for shards the other axis.
        assert spec != U or {a.specs[axis], b.specs[axis]} <= {U, *resolved.result}


def test_operands_are_broadcast() -> None:
    """Axes are aligned at the right; one of length 1 that meets a longer one has no label."""
    assert elementwise([(4, 1, 3), (2, 3), ()]) == [(-3, None, -1), (-2, -1), ()]
    assert elementwise([(1, 3), (1, 1)]) == [(-2, -1), (-2, None)]
    one, row = elementwise([(5, 1), (5,)])
    resolved = resolve([Operand(one, ("x", "y"), 5), Operand(row, ("y",), 5)], (-2, -1))
    assert resolved.operands == (("x", U), ("y",))
    assert resolved.result == ("x", "y")


def test_labels_that_must_be_whole() -> None:
    """They are unsharded; so are those that occur twice in one operand."""
    resolved = resolve([Operand(("i", "j"), ("x", "y"))], ("i", "j"), whole="j")
    assert (resolved.operands, resolved.result) == ((("x", U),), ("x", U))
    diagonal = resolve([Operand(("i", "i"), ("x", "y"))], ("i",))
    assert (diagonal.operands, diagonal.result) == (((U, U),), (U,))


def test_sums_over_several_dimensions() -> None:
    """All labels that are not in the result leave terms, also of one operand."""
    resolved = resolve([Operand(("i", "j", "k"), ("x", U, "y"))], ())
    assert (resolved.result, resolved.partial) == ((), ("x", "y"))


def test_the_rule_is_deterministic_for_many_operands() -> None:
    """Dimensions are never shared, whatever the operands ask for."""
    layouts = all_layouts(GRID, 2)
    for chosen in itertools.product(layouts, repeat=3):
        operands = [Operand(tuple(string.ascii_lowercase[n : n + 2]), c.specs, 1) for n, c in enumerate(chosen)]
        resolved = resolve(operands, ("a", "d"))
        dims = list(resolved.dims.values())
        assert len(set(dims)) == len(dims)
        assert resolved == resolve(operands, ("a", "d"))
