"""How NumPy's protocols reach global arrays: every ufunc, `like=`, questions, what is refused, and when errors come."""

from __future__ import annotations

import copy
import gc
import inspect
import re
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import overrides
from tests.spmd import cases
from tests.spmd.conftest import MakeMesh
from tests.waiting import until

from pscluster import spmd
from pscluster.core.errors import MisuseError
from pscluster.spmd import Layout
from pscluster.spmd.coverage import coverage, name_of, tables
from pscluster.worker.programs.operations import LATER_UFUNCS, UFUNCS

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/spmd.md"


@pytest.fixture
def mesh() -> spmd.Mesh:
    """Six devices of this process."""
    return spmd.create_mesh({"x": 3, "y": 2})


@pytest.fixture
def array(mesh: spmd.Mesh) -> spmd.DTensor:
    """A sharded matrix."""
    return spmd.distribute(np.arange(35.0).reshape(7, 5), Layout(["x", "y"], mesh))


@pytest.mark.parametrize("name", [*UFUNCS, *LATER_UFUNCS])
def test_every_ufunc(name: str, mesh: spmd.Mesh) -> None:
    """With operands that lie differently, and NumPy's types for its own."""
    ufunc: np.ufunc = getattr(np, name)
    codes = [types.partition("->")[0] for types in ufunc.types]
    for code in [code for code in codes if set(code) <= set("?lid")][:4]:
        operands = []
        for seed, letter in enumerate(code):
            values = np.random.default_rng(seed).random((7, 5)) * 5
            operands.append(np.minimum(values, 3).astype(letter) if letter != "?" else values > 2)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            wanted = ufunc(*operands)
        layouts = [Layout(specs, mesh) for specs in (["x", None], ["y", "x"])]
        found = ufunc(*map(spmd.distribute, operands, layouts))
        several = wanted if isinstance(wanted, tuple) else (wanted,)
        for one, other in zip(several, found if isinstance(found, tuple) else (found,), strict=True):
            assert other.dtype == one.dtype
            np.testing.assert_array_equal(other.full(), one)


def test_equal_numbers_are_not_confused(mesh: spmd.Mesh) -> None:
    """What is remembered of an operation is that of its number's type and sign, too: 1, 1.0 and True are equal."""
    whole, real = (spmd.distribute(np.arange(6, dtype=of), Layout(["x"], mesh)) for of in (np.int32, np.float64))
    for number in (1, 1.0, True, 1 + 0j, 1, True):
        found, wanted = (whole + number).full(), np.arange(6, dtype=np.int32) + number
        assert found.dtype == wanted.dtype, number
        np.testing.assert_array_equal(found, wanted)
    for zero in (0.0, -0.0, 0.0):
        assert np.signbit((real * zero).full()).all() == np.signbit(zero)


def test_every_covered_function_is_compared() -> None:
    """Each is called in the cases, or in this module."""
    text = Path(cases.__file__).read_text(encoding="utf-8") + Path(__file__).read_text(encoding="utf-8")
    missing = [
        name for name, covered in coverage()["functions"].items() if covered and not re.search(rf"np\.{name}\b", text)
    ]
    assert missing == []


def test_the_document_says_what_is_covered() -> None:
    """Its tables are what `python -m pscluster.spmd.coverage` prints, with the version of NumPy that it names."""
    text = DOCUMENT.read_text(encoding="utf-8")
    if f"NumPy {np.__version__.rpartition('.')[0]}" not in text:
        pytest.skip("the document is for another version of NumPy")
    assert tables().strip() in text


def _called(function: Any, array: Any) -> Any:
    """Call a function with the array for each argument that it needs."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return function(array)
    needed = [
        array
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]
    return function(*needed)


_NOT_BY_ARRAYS = frozenset({"fromfile", "genfromtxt", "loadtxt"})  # those with `like=` only


def _not_covered() -> list[Any]:
    """The functions that take arrays, and are not there."""
    known = coverage()["functions"]
    functions = sorted(overrides.get_overridable_numpy_array_functions(), key=name_of)  # in each process alike
    return [f for f in functions if not known.get(name_of(f), True) and name_of(f) not in _NOT_BY_ARRAYS]


@pytest.mark.parametrize("function", _not_covered(), ids=name_of)
def test_what_is_not_covered_is_refused(function: Any, array: spmd.DTensor) -> None:
    """With its name and the ways out; nothing is gathered in silence."""
    with pytest.raises((spmd.UnsupportedFunctionError, spmd.ShardedGatherError)) as caught:
        _called(function, array)
    if isinstance(caught.value, spmd.UnsupportedFunctionError):
        assert f"{name_of(function)} is not available for global arrays" in str(caught.value)
        assert "Either fetch the array and call it here: " in str(caught.value)
        assert "docs/spmd.md" in str(caught.value)


def test_what_does_not_fit_is_refused(array: spmd.DTensor, mesh: spmd.Mesh) -> None:
    """Arguments that can't be followed, with the reason; arrays of another mesh; large ones that are not global."""
    host = np.zeros((7, 5))
    given: Any = array
    calls: list[tuple[Any, str]] = [
        (lambda: np.add(array, 1, out=given), "since arrays do not change: write array = np.add(...)"),
        (lambda: np.add(array, 1, out=host), "or array[...] = np.add(...).full(), which gathers it"),
        (lambda: np.add(array, 1, where=host > 0), "write result = np.where(mask, np.add(...), 0)"),
        (lambda: np.divide(1, array, out=given, where=host > 0), "np.where(mask, np.divide(...), array)"),
        (lambda: np.sum(array, where=host > 0, out=host), "sum is not available for global arrays with out="),
        (lambda: np.matmul(array, array.T, axes=[(0, 1)] * 3), "matmul is not available for global arrays with axes="),
        (lambda: np.fft.fft(array), "np.fft.fft(array.full())"),
        (lambda: np.add.at(array, 0, 1), "add.at is not available"),
        (lambda: np.add.reduceat(array, [0]), "add.reduceat is not available"),
        (lambda: np.subtract.reduce(array), "np.subtract.reduce(array.full())"),
        (lambda: np.subtract.accumulate(array), "subtract.accumulate is not available"),
        (lambda: np.where(array > 1), "the shape of its result depends on values"),
        (lambda: array[array > 1], "the shape of the result depends on values"),
        (lambda: np.isnat(array), "isnat is not available"),
    ]
    for call, message in calls:
        with pytest.raises(spmd.UnsupportedFunctionError, match=re.escape(message)):
            call()
    with pytest.raises(spmd.UnsupportedFunctionError, match="with out="):
        host += array
    with pytest.raises(MisuseError, match="takes one value for all elements, of at most 1 axes"):
        given.at[given[:, 0] > 1].set(host)
    for values in (np.ones(3), np.ones((1, 5))):  # which would make the array larger, or have too many axes
        with pytest.raises((ValueError, MisuseError)):
            given[:, :1].at[given[:, 0] > 1].set(values)
    sharded = given.relayout([None, "x"])
    assert sharded.at[given[:, 0] > 1].set(0.0).layout == sharded.layout
    counts: Any = array.astype(np.int64)
    with pytest.raises(TypeError, match=r"at\[\].add\(\) of floats on elements of type int64: convert the array"):
        counts.at[0].add(0.5)
    with pytest.raises(ValueError, match="cannot convert float NaN"):
        counts.at[0].set(np.nan)
    narrow: Any = array.astype(np.uint8)
    for error, value in ((OverflowError, 300), (TypeError, 1j), (ValueError, [1, 2]), (TypeError, array * 1j)):
        with pytest.raises(error):
            narrow.at[0].set(value)
    for call in (lambda: array.astype("U5"), lambda: array.astype(object), lambda: array.astype("M8[s]")):
        with pytest.raises(MisuseError, match=r"holds numbers or bools, not .*: choose another type"):
            call()
    with pytest.raises(MisuseError, match=r"shape \(100, 100\), 80,000 bytes.*distribute"):
        spmd.ones((100, 100), layout=Layout(["x", None], mesh)) + np.ones((100, 100))
    with pytest.raises(TypeError, match=r"to dtype\('bool'\) according to the rule 'safe'"):
        np.sum(array, where=array)
    with pytest.raises(ValueError, match=r"where= of shape \(2, 5\) can't be broadcast to the array's, \(7, 5\)"):
        np.sum(array, where=array[:2] > 1)
    with pytest.raises(ValueError, match="has to specify 'initial'"):
        np.max(array, where=array > 1)
    of_mask: Any = np.mean(host + 2, where=array > -1)  # only the mask is a global array
    assert of_mask.full() == 2
    other = spmd.create_mesh({"x": 6})
    with pytest.raises(spmd.LayoutError, match="lie on different meshes"):
        array + spmd.ones((7, 5), layout=Layout.replicated(other, 2))


def test_mistakes_raise_what_numpy_raises(array: spmd.DTensor) -> None:
    """At once: shapes that do not fit, axes and indices that are not there, and numbers that a type can't hold."""
    host = array.full()
    calls: list[Any] = [
        lambda a: a + np.ones(4),
        lambda a: a @ np.ones((4, 2)),
        lambda a: np.sum(a, axis=2),
        lambda a: np.sum(a, axis=(0, 0)),
        lambda a: a[7],
        lambda a: a[0, 0, 0],
        lambda a: a[..., ...],
        lambda a: a[[0, 9]],
        lambda a: a[np.ones(3, bool)],
        lambda a: a["x"],
        lambda a: a[1.5],
        lambda a: np.take(a, 9, axis=0),
        lambda a: np.reshape(a, (3, 5)),
        lambda a: np.reshape(a, 5),
        lambda a: np.transpose(a, (0, 0)),
        lambda a: np.repeat(a, -1),
        lambda a: np.pad(a, -1),
        lambda a: np.linalg.norm(a[0], "fro"),
        lambda a: np.nanmean(a, dtype=int),
        lambda a: np.ediff1d(a, to_begin=1j),
        lambda a: np.full_like(a, -1, "uint8"),
        lambda a: np.squeeze(a, 0),
        lambda a: np.concatenate([a, np.ones((2, 2))]),
        lambda a: np.stack([a, np.ones((2, 2))]),
        lambda a: np.split(a, 3),
        lambda a: np.max(a[:0]),
        lambda a: np.argmax(a[:0], axis=0),
        lambda a: a.astype(np.uint8) + 300,
        lambda a: np.einsum("ij,jk", a, a),
        lambda a: np.einsum("ijk", a),
        lambda a: np.broadcast_to(a, (5, 7)),
        lambda a: np.partition(a, 9),
        lambda a: np.linalg.inv(a[0]),
        lambda a: np.linalg.solve(a[0], a[0]),
        lambda a: f"{a:.3f}",
        lambda a: round(a),
        lambda a: np.expand_dims(a, 5),
        len,
    ]
    for call in calls[:-1]:
        with np.errstate(all="ignore"), pytest.raises(Exception) as wanted:  # noqa: PT011
            call(host)
        with pytest.raises(wanted.type):
            call(array)
    assert len(array) == 7


def test_like(array: spmd.DTensor, mesh: spmd.Mesh) -> None:
    """Creation with `like=` makes replicated arrays on the mesh; `zeros_like` and so on lie as the array does."""
    made: list[tuple[Any, Any]] = [
        (np.ones((2, 3), like=array), np.ones((2, 3))),
        (np.zeros(3, np.int8, like=array), np.zeros(3, np.int8)),
        (np.empty(3, like=array) * 0, np.zeros(3)),
        (np.full((2,), 2.5, like=array), np.full((2,), 2.5)),
        (np.arange(2, 9, 3, like=array), np.arange(2, 9, 3)),
        (np.eye(3, k=1, like=array), np.eye(3, k=1)),
        (np.identity(3, like=array), np.identity(3)),
        (np.tri(3, like=array), np.tri(3)),
        (np.array([1, 2], like=array), np.array([1, 2])),
        (np.asarray([1, 2], np.float32, like=array), np.array([1, 2], np.float32)),
        (np.asanyarray(3.0, like=array), np.array(3.0)),
        (np.ascontiguousarray([3.0], like=array), np.array([3.0])),
        (np.asfortranarray([3.0], like=array), np.array([3.0])),
        (np.require([3.0], like=array), np.array([3.0])),
        (np.fromfunction(lambda i: 2 * i, (3,), like=array), np.array([0.0, 2.0, 4.0])),
        (np.fromiter([1, 2], int, like=array), np.array([1, 2])),
        (np.frombuffer(b"ab", np.uint8, like=array), np.array([97, 98], np.uint8)),
        (np.fromstring("1 2", sep=" ", like=array), np.array([1.0, 2.0])),
        (np.asarray(array, np.float32, like=array), array.full().astype(np.float32)),
    ]
    for found, wanted in made:
        assert isinstance(found, spmd.DTensor)
        assert found.dtype == wanted.dtype
        assert found.mesh == mesh
        np.testing.assert_array_equal(found.full(), wanted)
    assert made[0][0].layout.is_replicated
    same: Any = np.asarray(array, like=array)
    assert same is array
    zeros: Any = np.zeros_like(array)
    assert zeros.layout == array.layout
    three: Any = np.full_like(array, 1, shape=(3,))
    assert three.layout == Layout([None], mesh)


def test_questions(array: spmd.DTensor) -> None:
    """About shapes and types, answered here."""
    a: Any = array
    assert (np.shape(a), np.ndim(a), np.size(a), np.size(a, 1)) == ((7, 5), 2, 35, 5)
    assert (np.iscomplexobj(a), np.isrealobj(a), np.can_cast(a, np.float32)) == (False, True, False)
    assert np.result_type(a, np.float32) == np.common_type(a) == np.min_scalar_type(a) == np.float64
    assert np.may_share_memory(a, a)
    assert not np.shares_memory(a, a + 1)
    assert np.allclose(a, a + 1e-12)
    assert np.array_equal(a, a * 1)
    assert np.array_equal(a * np.nan, a * np.nan, equal_nan=True)
    assert not np.array_equal(a, a[:3])
    assert np.array_equiv(a, np.arange(35.0).reshape(7, 5))
    assert not np.array_equiv(a, np.zeros(4))
    assert np.array_repr(a) == repr(a)
    assert np.array_str(a) == np.array2string(a) == str(a)
    made: Any = np.linspace(0, 1, 5) + spmd.linspace(0, 1, 5, layout=Layout(["x"], array.mesh))
    np.testing.assert_array_equal(made.full(), 2 * np.linspace(0, 1, 5))


def test_operators_in_place_make_other_arrays(array: spmd.DTensor) -> None:
    """The name gets another array; who had the old one keeps it."""
    wanted = array.full()
    before = array
    array += 1
    array *= 2
    array -= 3
    array /= 4
    array **= 2
    array //= 2
    array %= 5
    wanted = (((wanted + 1) * 2 - 3) / 4) ** 2 // 2 % 5
    np.testing.assert_array_equal(array.full(), wanted)
    np.testing.assert_array_equal(before.full(), np.arange(35.0).reshape(7, 5))
    bits = array.astype(np.int64)
    bits <<= 3
    bits >>= 1
    bits |= 1
    bits &= 7
    bits ^= 2
    np.testing.assert_array_equal(bits.full(), ((wanted.astype(np.int64) << 3 >> 1) | 1) & 7 ^ 2)
    array @= np.ones((5, 2))
    np.testing.assert_array_equal(array.full(), wanted @ np.ones((5, 2)))


def test_methods(array: spmd.DTensor) -> None:
    """Those that NumPy's arrays have."""
    a: Any = array
    host = array.full()
    calls: tuple[Any, ...] = (
        lambda v: v.sum(axis=0),
        lambda v: v.T,
        lambda v: v.reshape(5, 7),
        lambda v: v.transpose(1, 0),
        lambda v: v.flatten(),
        lambda v: v.copy(),
        lambda v: v.max(axis=1),
        lambda v: v.round(1),
        lambda v: v.cumsum(axis=1),
        lambda v: v.take([1, 2], axis=1),
        lambda v: v.real,
        lambda v: v.conjugate(),
        lambda v: v.argpartition(2),
        lambda v: abs(v),
    )
    for call in calls:
        np.testing.assert_array_equal(call(a).full(), call(host))
    assert [row.full().tolist() for row in a.relayout([None, "y"])] == host.tolist()
    assert f"{a.mean():.2f} {a.sum():9.1e} {a.max()}".startswith(f"{host.mean():.2f} {host.sum():9.1e} DTensor(")
    assert (round(a.mean() / 7, 3), round(a.max())) == (2.429, 34)
    assert (34.0 in a, 35.0 in a) == (True, False)
    with pytest.raises(AttributeError, match=re.escape("has no sort(), since it does not change: use np.sort(array)")):
        a.sort()
    with pytest.raises(AttributeError, match="no attribute 'flat'; NumPy's arrays do, and full\\(\\) gathers one"):
        list(a.flat)
    with pytest.raises(spmd.UnsupportedFunctionError, match="nonzero"):
        a.nonzero()
    assert not hasattr(a, "no_such")
    assert copy.copy(a) is copy.deepcopy({"a": a})["a"] is a


def test_errors_on_devices_come_with_the_next_fetch(make_mesh: MakeMesh) -> None:
    """The first one, once; what came of it is lost, and everything else goes on."""
    mesh = make_mesh({"x": 3, "y": 2})
    good = spmd.arange(5, layout=Layout(["x"], mesh))
    singular: Any = spmd.zeros((2, 2), layout=Layout.replicated(mesh, 2))
    spmd.barrier(mesh)
    bad: Any = np.linalg.inv(singular)
    where = "" if mesh.tasks[0][0] == "localhost" else r"operations on global arrays failed on worker \d .*"
    with pytest.raises(np.linalg.LinAlgError, match=f"^{where}Singular matrix"):
        (bad + 1).full()
    with pytest.raises(spmd.TensorLostError, match=r"was not made, since an operation has failed: .*Singular"):
        bad.full()
    with pytest.raises(spmd.TensorLostError, match="was not made"):
        bad + 1
    np.testing.assert_array_equal((good + 1).full(), np.arange(1, 6))
    np.linalg.inv(singular)
    with pytest.raises(np.linalg.LinAlgError):
        spmd.barrier(mesh)
    spmd.barrier(mesh)
    np.testing.assert_array_equal(good.full(), np.arange(5))

    # What comes from here is not lost with the program that it went with: neither a recorded nor a traced one.
    sent: Any = spmd.distribute(np.zeros((2, 2)), Layout.replicated(mesh, 2))
    inverse: Any
    for inverse in (np.linalg.inv, spmd.function(np.linalg.inv), np.linalg.inv):
        with pytest.raises(np.linalg.LinAlgError):
            inverse(sent).full()
    other = spmd.distribute(np.ones(2), Layout(["x"], mesh))
    np.linalg.inv(sent)
    used: Any = other + 1
    with pytest.raises(np.linalg.LinAlgError):
        spmd.barrier(mesh)
    with pytest.raises(spmd.TensorLostError):
        used.full()
    assert ((sent + 1).full().tolist(), (other + 1).full().tolist()) == ([[1, 1], [1, 1]], [2, 2])

    callers: list[weakref.ref[Any]] = []

    def failing() -> None:
        local = spmd.ones(3, layout=Layout(["x"], mesh))
        callers.append(weakref.ref(local._ref))
        inverse(singular).full()

    with pytest.raises(np.linalg.LinAlgError):
        failing()
    until(lambda: gc.collect() >= 0 and callers[0]() is None, "the error keeps nothing that its callers had")
