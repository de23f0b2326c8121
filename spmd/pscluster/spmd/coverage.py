"""Which of NumPy's functions take global arrays: `python -m pscluster.spmd.coverage` prints the tables of the docs."""

from __future__ import annotations

import importlib
import textwrap
from typing import Any

import numpy as np
from numpy.testing import overrides

from pscluster.spmd import functions as functions  # registers them
from pscluster.spmd.gradients.rules import RULES
from pscluster.spmd.gradients.tape import CONSTANT
from pscluster.spmd.tensor import FUNCTIONS, LIKE
from pscluster.worker.programs.operations import LATER_UFUNCS, UFUNCS

for _name in ("char", "fft", "ma", "polynomial", "strings"):
    # NumPy imports them when they are first used, and only then knows their functions.
    importlib.import_module(f"numpy.{_name}")


def name_of(function: Any) -> str:
    """Return a function's name below `numpy`."""
    module = getattr(function, "__module__", "numpy") or "numpy"
    return f"{module}.{function.__name__}".removeprefix("numpy.")


def is_covered(function: Any) -> bool:
    """Return whether a function of NumPy takes global arrays."""
    elementwise = isinstance(function, np.ufunc) and function.__name__ in (*UFUNCS, *LATER_UFUNCS)
    return elementwise or function in FUNCTIONS or function in LIKE


def coverage() -> dict[str, dict[str, bool]]:
    """Return, for NumPy's ufuncs and its other functions that arrays of others can take over, which are covered."""
    kinds: dict[str, Any] = {
        "ufuncs": overrides.get_overridable_numpy_ufuncs(),
        "functions": overrides.get_overridable_numpy_array_functions(),
    }
    return {
        kind: {name: of for name, of in sorted((name_of(f), is_covered(f)) for f in found) if not name.startswith("_")}
        for kind, found in kinds.items()
    }


_INTERNAL = frozenset(("add_along_axis", "add_at", "divide_by", "getitem", "relayout", "taken", "update_at"))

_REDUCTIONS = {"add": "sum", "fmax": "nanmax", "fmin": "nanmin", "maximum": "max", "minimum": "min", "multiply": "prod"}


def with_gradients() -> list[str]:
    """Return the functions that gradients have rules for; those that are made of them have one, too."""
    names = set()
    for name in RULES.keys() - _INTERNAL:
        ufunc, reduction, _ = name.partition(".reduce")
        names.add(_REDUCTIONS.get(ufunc, name) if reduction else name)
    return sorted(names)


def tables() -> str:
    """Return the coverage as text for the documentation."""
    lines: list[str] = []
    for kind, covered in coverage().items():
        there = [name for name, is_there in covered.items() if is_there]
        missing = [name for name, is_there in covered.items() if not is_there]
        lines += [f"Of {len(covered)} {kind} {len(there)} are there:", "", *_wrapped(there), ""]
        lines += ["and these are not:", "", *_wrapped(missing), ""]
    lines += ["Gradients have rules for", "", *_wrapped(with_gradients()), ""]
    lines += ["and these count as constants:", "", *_wrapped(sorted(CONSTANT)), ""]
    return "\n".join(lines)


def _wrapped(names: list[str]) -> list[str]:
    return textwrap.wrap(", ".join(f"`{name}`" for name in names), 118, break_on_hyphens=False)


if __name__ == "__main__":
    print(tables())
