"""Optimizer update rules, pure functions on arrays, and the drivers that run them on shards and on rows.

`rules` holds the rules and the protocol for rules of your own, `kernels` what applies them.
"""

from __future__ import annotations

from pscluster.ps.optim.kernels import apply_dense, apply_rows, compute_dtype, deduplicate, new_slots
from pscluster.ps.optim.rules import (
    RULES,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    Array,
    Ftrl,
    Lion,
    RMSprop,
    Scalars,
    UpdateRule,
    number,
)

__all__ = [
    "RULES",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Array",
    "Ftrl",
    "Lion",
    "RMSprop",
    "Scalars",
    "UpdateRule",
    "apply_dense",
    "apply_rows",
    "compute_dtype",
    "deduplicate",
    "new_slots",
    "number",
]
