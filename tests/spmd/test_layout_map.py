"""LayoutMap: which rule counts for which weight, of models that keep their weights in any way; and what is refused."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from pscluster import spmd
from pscluster.core.errors import MisuseError
from pscluster.spmd import Layout, LayoutMap

MESH = spmd.create_mesh([("batch", 8)])
KERNEL, BIAS = Layout(["batch", None], MESH), Layout(["batch"], MESH)


class Dense:
    """A layer as people write it: its weights are made at the first call, for the width of the input."""

    def __init__(self, units: int, name: str = "dense") -> None:
        self.units, self.name = units, name
        self.kernel: Any = None
        self.bias: Any = None

    def __call__(self, x: Any) -> Any:
        if self.kernel is None:
            self.kernel = np.ones((x.shape[-1], self.units))
            self.bias = np.zeros(self.units)
        return np.matmul(x, self.kernel) + self.bias


class Model:
    """Two layers, and things that are no weights."""

    def __init__(self) -> None:
        self.feature, self.feature_2 = Dense(24, "first"), Dense(8, "second")
        self.owner, self.numpy, self.sizes, self.tags = self, np, (24, 8), ["a"]

    def __call__(self, x: Any) -> Any:
        return self.feature_2(self.feature(x))


def document_map(**options: bool) -> LayoutMap:
    """The two rules of the document."""
    rules = LayoutMap(MESH, **options)
    rules["feature.*kernel"] = KERNEL
    rules["feature.*bias"] = ("batch",)
    return rules


def test_which_rule_counts() -> None:
    """A key before all patterns, then the first that matches the whole path; the rest is replicated."""
    rules = LayoutMap(MESH)
    rules["d.*kernel"] = (None, "batch")
    rules[r"dense\.kernel"] = ("batch", None)
    rules["dense.kernel"] = (None, None)
    assert rules["dense.kernel"].is_replicated
    assert rules["dense_1.kernel"].specs == ("unsharded", "batch")
    assert rules.layout_for("dense.kernel.more", 3) == Layout.replicated(MESH, 3)
    assert "dense_1.kernel" in rules
    assert rules.get("kernel") is None
    with pytest.raises(KeyError, match="no rule matches 'kernel': layout_for"):
        rules["kernel"]
    assert list(rules) == ["d.*kernel", r"dense\.kernel", "dense.kernel"]
    assert len(rules) == 3
    del rules["d.*kernel"]
    assert rules.layout_for("dense_1.kernel", 2).is_replicated
    assert LayoutMap(MESH).layout_for("anything", 4) == Layout.replicated(MESH, 4)
    assert "'dense.kernel': [unsharded, unsharded]" in repr(rules)


def test_strict() -> None:
    """Several rules for one path are an error; a key is none of them."""
    rules = document_map(strict=True)
    rules["feature.kernel"] = (None, None)
    rules[".*kernel"] = (None, "batch")
    assert rules["feature.kernel"].is_replicated
    with pytest.raises(spmd.LayoutError, match=r"'feature_2.kernel' is matched by 2 rules, 'feature.\*kernel', '.\*k"):
        rules["feature_2.kernel"]
    assert "feature_2.kernel" in str(rules.report({"feature_2.kernel": (8, 8)}).problems)
    with pytest.raises(spmd.LayoutError, match="strict is 'x'; it must be True or False"):
        LayoutMap(strict="x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rule", "layout", "why"),
    [
        ("(", (None,), "rule '(' is not a regular expression: missing ), unterminated subpattern at position 0"),
        (3, (None,), "3 is not a rule: give a path"),
        ("", (None,), "'' is not a rule"),
        ("w", ("x",), "rule 'w': axis 0 can't be sharded over 'x': the mesh has the dimensions batch"),
        ("w", ("batch", "batch"), "rule 'w': axes 0 and 1 are both sharded over 'batch'"),
        ("w", "batch", "rule 'w': specs is 'batch'; give a list"),
        ("w", 7, "rule 'w': specs is 7; give a list"),
        ("w", Layout(["x"], spmd.create_mesh({"x": 2})), "rule 'w' is for <Mesh x=2 on 2 devices of 1 tasks>, but the"),
        ("known", (None,), "there is a rule 'known' already, <Layout [unsharded] of mesh batch=8>: delete it first"),
    ],
)
def test_rules_that_are_refused(rule: Any, layout: Any, why: str) -> None:
    """Each is named, with what is wrong; the map stays as it was."""
    rules = LayoutMap(MESH)
    rules["known"] = (None,)
    with pytest.raises(spmd.LayoutError, match=re.escape(why)):
        rules[rule] = layout
    assert list(rules) == ["known"]


def test_maps_without_a_mesh() -> None:
    """Its mesh is that of its first layout; before that, it has none for what no rule matches."""
    rules = LayoutMap()
    with pytest.raises(spmd.LayoutError, match="no rule matches 'w', and there is no mesh"):
        rules.layout_for("w", 1)
    with pytest.raises(spmd.LayoutError, match=r"rule 'w' has no mesh: give LayoutMap\(mesh\), or a Layout"):
        rules["w"] = ("batch",)
    with pytest.raises(spmd.LayoutError, match="mesh is an int; give a Mesh"):
        LayoutMap(8)  # type: ignore[arg-type]
    rules["w"] = BIAS
    assert rules.mesh == MESH
    assert rules.layout_for("b", 1).is_replicated


def test_attributes_of_objects() -> None:
    """Paths are those of attributes, not names of layers; weights that were made at the first call are replaced."""
    model = Model()
    before = model(np.ones((16, 16)))
    rules = document_map(require_all=True)
    assert rules.apply(model) is model
    found = {name: layer.kernel.layout for name, layer in (("a", model.feature), ("b", model.feature_2))}
    assert found == {"a": KERNEL, "b": KERNEL}
    assert model.feature_2.bias.layout == BIAS
    assert model.feature.kernel.layout.sharding_specs == ["batch", "unsharded"]
    assert model.tags == ["a"]
    x = spmd.copy_to_mesh(np.ones((16, 16)), Layout.replicated(MESH, 2))
    np.testing.assert_array_equal(model(x).full(), before)


def test_weights_that_are_shared() -> None:
    """An object, or an array, that occurs twice is made global once, with the layout of its first path."""
    model = Model()
    model.feature_2 = model.feature = Dense(16)
    model(np.ones((16, 16)))
    document_map().apply(model)
    assert model.feature.kernel is model.feature_2.kernel
    tied = np.ones((8, 8))
    tree: Any = document_map().apply({"feature": {"kernel": tied}, "other": [tied, 3, "text", None]})
    assert tree["feature"]["kernel"] is tree["other"][0]
    assert tree["other"][1:] == [3, "text", None]


class Pair(NamedTuple):
    """Has its parts by name."""

    weight: Any
    other: int


@dataclass(frozen=True, slots=True)
class Parts:
    """As models of functional frameworks are."""

    weight: Any
    pair: Pair


def test_nestings_and_state_dicts() -> None:
    """Keys and numbers are joined by dots; the nesting stays as it is."""
    rules = LayoutMap(MESH)
    rules[r"layers\.\d+\.weight"] = ("batch", None)
    tree: Any = {"layers": [{"weight": np.ones((8, 3)), "bias": np.zeros(3)}, ()], "scale": (np.float32(2),)}
    made = rules.apply(tree)
    assert isinstance(tree["layers"][0]["weight"], np.ndarray)
    assert made["layers"][0]["weight"].layout == KERNEL
    assert made["layers"][0]["bias"].layout.is_replicated
    assert made["layers"][1] == ()
    assert made["scale"][0].dtype == np.float32
    parts = Parts(np.ones((8, 3)), Pair(np.ones((8, 3)), 0))
    rules[r"pair\.weight"] = ("batch", None)
    rules["weight"] = (None, "batch")
    held = rules.apply(parts)
    assert isinstance(parts.weight, np.ndarray), "it is frozen"
    assert (held.pair.weight.layout, held.pair.other) == (KERNEL, 0)
    assert held.weight.layout.sharding_specs == ["unsharded", "batch"]
    assert type(held) is Parts
    assert type(held.pair) is Pair
    flat = rules.apply(OrderedDict([("layers.0.weight", np.ones((8, 3))), ("scale", np.ones(1))]))
    assert isinstance(flat, OrderedDict)
    assert rules.report(flat).unmatched == ("scale",)


class Weight:
    """Has what Keras' variables have."""

    def __init__(self, value: Any, path: str = "", name: str = "") -> None:
        self.value, self.path, self.name, self.shape, self.dtype = value, path, name, value.shape, value.dtype.name

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        del dtype, copy
        return self.value


def test_weights_of_keras() -> None:
    """In models with layers: name of the layer and attribute. In lists: the variables' paths, or names."""
    model = Dense(0)
    first, second = Dense(0, "d1"), Dense(0, "d2")
    first.weights = [Weight(np.ones((8, 2)), "seq/d1/kernel"), Weight(np.ones(8), "seq/d1/bias")]  # type: ignore[attr-defined]
    second.weights = [Weight(np.ones((8, 2)), name="d2/kernel:0")]  # type: ignore[attr-defined]
    model.layers = [first, second]  # type: ignore[attr-defined]
    rules = LayoutMap(MESH, require_all=True)
    rules["d.*kernel"] = KERNEL
    rules["d1.bias"] = BIAS
    made: Any = rules.apply(model)
    assert {path: weight.layout.specs for path, weight in made.items()} == {
        "d1.kernel": KERNEL.specs,
        "d1.bias": BIAS.specs,
        "d2.kernel": KERNEL.specs,
    }
    listed: Any = LayoutMap(MESH).apply([*first.weights, *second.weights])  # type: ignore[attr-defined]
    assert list(listed) == ["seq.d1.kernel", "seq.d1.bias", "d2.kernel"]


def test_report() -> None:
    """A table of what each weight gets; rules without weights, weights without rules, and other numbers of axes."""
    rules = document_map()
    rules["featur"] = (None,)
    paths = {"feature.kernel": ((16, 24), np.float64), "feature.bias": (24,), "head": (3, 3), "feature_2.bias": (1, 2)}
    report = rules.report(paths)
    assert report.unused == ("featur",)
    assert report.unmatched == ("head",)
    assert str(report).splitlines() == [
        "path            shape            rule             layout      blocks  bytes of one",
        "feature.kernel  float64[16, 24]  feature.*kernel  (batch, -)  8       384",
        "feature.bias    float32[24]      feature.*bias    (batch)     8       12",
        "head            float32[3, 3]    (none)           (-, -)      1       36",
        "rule 'feature.*bias' has a layout for 1 axes, [batch], but 'feature_2.bias' has 2: make a rule for each number"
        " of axes",
        "no weight is matched by 'featur'",
    ]
    with pytest.raises(spmd.LayoutError, match=r"do not fit: rule .*no weight is matched by 'featur'; no rule matches"):
        rules.report(paths, require_all=True)
    model = Model()
    model(np.ones((16, 16)))
    with pytest.raises(spmd.LayoutError, match=r"matched by 'featur'\. The weights are 'feature.kernel', 'fea"):
        rules.report(model, require_all=True)


def test_what_is_refused_leaves_everything_as_it_was() -> None:
    """Weights with another number of axes than their rule, and what holds no arrays."""
    model = Model()
    model(np.ones((16, 16)))
    rules = document_map()
    rules["feature_2.bias"] = (None, None)
    with pytest.raises(spmd.LayoutError, match=r"rule 'feature_2.bias' has a layout for 2 axes.* but .* has 1"):
        rules.apply(model)
    assert isinstance(model.feature.kernel, np.ndarray)
    with pytest.raises(MisuseError, match="there are no weights: give arrays"):
        rules.apply({"a": 3})
    with pytest.raises(MisuseError, match="'a' is a shape"):
        rules.apply({"a": (3, 3)})
    with pytest.raises(MisuseError, match=r"two weights have the path 'a\.b'"):
        rules.apply({"a": {"b": np.ones(1)}, "a.b": np.ones(1)})
