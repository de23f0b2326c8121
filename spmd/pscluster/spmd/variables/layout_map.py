"""LayoutMap: the layouts of a model's weights, by rules for their paths. The model is not edited for it.

A rule is a path, such as `feature.kernel`, or a regular expression for whole paths, such as `feature.*kernel`. A path
that is itself a key has that layout; otherwise the first rule counts, in the order in which they were added, that
matches all of it. With `strict`, several that match are an error. What no rule matches is replicated.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pscluster.core.checks import flag, type_of
from pscluster.core.errors import LayoutError, MisuseError
from pscluster.core.layouts.layout import Layout, Spec
from pscluster.core.layouts.mesh import Mesh
from pscluster.spmd.placing import distribute
from pscluster.spmd.tensor import DTensor
from pscluster.spmd.variables.report import Placed, Report
from pscluster.spmd.variables.scope import in_scope
from pscluster.spmd.variables.variable import DVariable
from pscluster.spmd.variables.weights import Weight, shape_and_type_of, value_of, weights_of, with_weights

Tree = TypeVar("Tree")

LayoutLike = Layout | Sequence[Spec]


@dataclass(frozen=True, slots=True)
class Found:
    """Which rule a path has, "" if none, and its layout."""

    rule: str
    layout: Layout


class LayoutMap(MutableMapping[str, LayoutLike]):
    """Rules from paths of weights to layouts, in order: see the module's docstring.

    Args:
        mesh: of all its layouts. None: that of the first one.
        strict: raise LayoutError if several rules match a path that is no key.
        require_all: raise LayoutError if a path is matched by no rule, or a rule matches no path, where weights are
            given layouts all at once: by `apply`, `variables` and `report`.
    """

    def __init__(self, mesh: Mesh | None = None, *, strict: bool = False, require_all: bool = False) -> None:
        if mesh is not None and not isinstance(mesh, Mesh):
            raise LayoutError(f"mesh is {type_of(mesh)}; give a Mesh")
        self.mesh = mesh
        try:
            self.strict, self.require_all = flag("strict", strict), flag("require_all", require_all)
        except ValueError as error:
            raise LayoutError(str(error)) from None
        self._rules: dict[str, tuple[re.Pattern[str], Layout]] = {}

    # As a dictionary of rules

    def __setitem__(self, rule: str, layout: LayoutLike) -> None:
        """Add a rule. Raise LayoutError if it is no regular expression, is there already, or its layout is none."""
        if not isinstance(rule, str) or not rule:
            raise LayoutError(f"{rule!r:.100} is not a rule: give a path of a weight, or a regular expression")
        try:
            pattern = re.compile(rule)
        except (re.error, RecursionError, OverflowError) as error:
            raise LayoutError(f"rule {rule!r:.200} is not a regular expression: {error}") from None
        if rule in self._rules:
            raise LayoutError(f"there is a rule {rule!r} already, {self._rules[rule][1]!r}: delete it first")
        if not isinstance(layout, Layout):
            if self.mesh is None:
                raise LayoutError(f"rule {rule!r} has no mesh: give LayoutMap(mesh), or a Layout")
            try:
                layout = Layout(layout, self.mesh)
            except LayoutError as error:
                raise LayoutError(f"rule {rule!r}: {error}") from None
        if self.mesh is None:
            self.mesh = layout.mesh
        elif layout.mesh != self.mesh:
            raise LayoutError(f"rule {rule!r} is for {layout.mesh!r}, but the map is for {self.mesh!r}: make another")
        self._rules[rule] = pattern, layout

    def __getitem__(self, path: str) -> Layout:
        """Return the layout that the rules have for a path. Raise KeyError if none matches: see `layout_for`."""
        found = self._find(path)
        if found is None:
            raise KeyError(f"no rule matches {path!r}: layout_for(path, rank) gives the layout of such a weight")
        return found.layout

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and self._find(path) is not None

    def __delitem__(self, rule: str) -> None:
        """Remove a rule."""
        del self._rules[rule]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __repr__(self) -> str:
        rules = ", ".join(f"{rule!r}: [{', '.join(layout.specs)}]" for rule, (_, layout) in self._rules.items())
        return f"<LayoutMap {{{rules}}} on {self.mesh!r}>"

    # Layouts of paths

    def _find(self, path: str) -> Found | None:
        if (exact := self._rules.get(path)) is not None:
            return Found(path, exact[1])
        found = [(rule, layout) for rule, (pattern, layout) in self._rules.items() if pattern.fullmatch(path)]
        if self.strict and len(found) > 1:
            names = ", ".join(repr(rule) for rule, _ in found)
            raise LayoutError(f"{path!r} is matched by {len(found)} rules, {names}: let only one of them match it")
        return Found(*found[0]) if found else None

    def layout_for(self, path: str, rank: int) -> Layout:
        """Return the layout of a weight with this path and number of axes: replicated if no rule matches.

        Raise LayoutError if the rule is for another number of axes, or there is neither rule nor mesh.
        """
        return self._found(path, rank).layout

    def _found(self, path: str, rank: int) -> Found:
        found = self._find(path)
        if found is None:
            if self.mesh is None:
                raise LayoutError(f"no rule matches {path!r}, and there is no mesh: give LayoutMap(mesh)")
            return Found("", Layout.replicated(self.mesh, rank))
        if found.layout.rank != rank:
            raise LayoutError(
                f"rule {found.rule!r} has a layout for {found.layout.rank} axes, "
                f"[{', '.join(found.layout.specs)}], but {path!r} has {rank}: make a rule for each number of axes"
            )
        return found

    # All weights at once

    def report(self, weights: Any, *, require_all: bool | None = None) -> Report:
        """Return which rule each weight has, its layout, blocks and bytes; and what does not fit.

        Args:
            weights: what `apply` takes; or a dictionary of paths to shapes, or to pairs of a shape and an element type.
            require_all: raise LayoutError for weights without a rule, rules without a weight, and weights with another
                number of axes than their rule. None: as the map was made.
        """
        placed: list[Placed] = []
        mismatched: list[str] = []
        used: set[str] = set()
        for weight in _unique(weights_of(weights)):
            shape, dtype = shape_and_type_of(weight)
            try:
                found = self._found(weight.path, len(shape))
            except LayoutError as error:
                mismatched.append(str(error))
                used.update(rule for rule, (pattern, _) in self._rules.items() if pattern.fullmatch(weight.path))
                continue
            used.add(found.rule)
            placed.append(Placed(weight.path, shape, dtype, found.rule, found.layout))
        unused = tuple(rule for rule in self._rules if rule not in used)
        report = Report(tuple(placed), unused, tuple(mismatched))
        if self.require_all if require_all is None else require_all:
            report.check()
        return report

    def apply(self, tree: Tree) -> Tree:
        """Return a model's weights as global arrays, in the layouts of their paths.

        Args:
            tree: nested dictionaries, lists and tuples of arrays, or a torch `state_dict`: those of the result are new.
                Or an object whose attributes are arrays, or such objects: it is returned, with its attributes replaced.
                Or a Keras model, or its list of weights: the result is a dictionary by path. The path of a weight joins
                keys, numbers and names of attributes by dots: `feature.kernel`, `layers.0.bias`; in a Keras model with
                `layers` it is the layer's name and the weight's.

        Raises:
            LayoutError: a weight has another number of axes than its rule; with `require_all`, a weight without a rule,
                or a rule without a weight. Nothing has been changed.
            MisuseError: there are no arrays, or two have the same path.
        """
        return self.placed(tree, lambda weight, layout: distribute(weight.value, layout))

    def variables(self, tree: Tree) -> Tree:
        """Return a model's weights as variables, named by their paths; otherwise as `apply` does."""
        return self.placed(tree, lambda weight, layout: DVariable(_initial(weight, layout), layout, weight.path))

    def placed(self, tree: Tree, make: Callable[[Weight, Layout], Any]) -> Tree:
        """Do what `apply` does, with anything that is made of weights and their layouts; for internal use."""
        if shapes := [weight for weight in weights_of(tree) if weight.is_shape]:
            raise MisuseError(f"{shapes[0].path!r} is a shape, {shapes[0].value!r:.100}: only report() takes those")
        report = self.report(tree)
        if report.mismatched:
            raise LayoutError(report.mismatched[0])
        layouts = {placed.path: placed.layout for placed in report.placed}
        placed: Tree = with_weights(tree, lambda weight: make(weight, layouts[weight.path]))
        return placed

    @contextlib.contextmanager
    def scope(self) -> Iterator[LayoutMap]:
        """Give variables that are made in the block, without a layout, that of their name."""
        with in_scope(self):
            yield self


def _unique(weights: Sequence[Weight]) -> Sequence[Weight]:
    """Return weights. Raise MisuseError if there are none, or two have one path."""
    if not weights:
        raise MisuseError("there are no weights: give arrays in dictionaries or lists, or an object that has some")
    paths: set[str] = set()
    for weight in weights:
        if weight.path in paths:
            raise MisuseError(f"two weights have the path {weight.path!r}: rename one of them")
        paths.add(weight.path)
    return weights


def _initial(weight: Weight, layout: Layout) -> Any:
    value = weight.value
    return value.relayout(layout) if isinstance(value, DTensor) else value_of(weight)
