"""Gradients that are applied together give, bit for bit, what they give one after another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pscluster.ps.optim.joint import Part, apply_together, views_of
from pscluster.ps.optim.kernels import apply_dense, apply_rows, new_slots
from pscluster.ps.optim.rules import RULES, SGD, Adam, Ftrl, RMSprop, UpdateRule

SHAPES = [(50, 8), (7,), (200, 3), (), (9, 8), (40, 33)]
BY_ROWS = {0: [3, 4, 49], 2: list(range(0, 200, 3)), 4: [8], 5: [0, 39]}
SPECIAL = [Ftrl(learning_rate_power=-0.3), Ftrl(l1_regularization_strength=0.1), Adam(amsgrad=True)]
SPECIAL += [SGD(0.1, momentum=0.9, nesterov=True), RMSprop(centered=True, momentum=0.5), SGD(0.1, weight_decay=0.1)]


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("rule", [*(rule() for rule in RULES.values()), *SPECIAL], ids=str)
def test_every_rule_gives_the_same(rule: UpdateRule, dtype: str) -> None:
    """Whole parameters and rows, for three steps, with an unaligned gradient, NaN and infinity."""
    rng = np.random.default_rng(0)
    alone: list[tuple[Any, dict[str, Any]]] = [
        (rng.normal(size=shape).astype(dtype), new_slots(rule, shape, dtype)) for shape in SHAPES
    ]
    together = [(param.copy(), {name: slot.copy() for name, slot in slots.items()}) for param, slots in alone]
    for step in (1, 2, 30):
        parts = []
        for number, ((param, slots), (copy, copies)) in enumerate(zip(alone, together, strict=True)):
            ids = np.array(BY_ROWS[number]) if number in BY_ROWS else None
            shape = param.shape if ids is None else (len(ids), *param.shape[1:])
            memory = bytearray(int(np.prod(shape)) * param.itemsize + 1)
            grad = np.frombuffer(memory, dtype, offset=1).reshape(shape)
            grad[...] = rng.normal(size=shape)
            if step == 2:
                grad.reshape(-1)[-1] = [np.nan, np.inf][number % 2]
            if ids is None:
                apply_dense(rule, param, grad, slots, step)
            else:
                apply_rows(rule, param, ids, grad, slots, step)
            arrays = [copy, *(copies[name] for name in rule.slots)]
            parts.append(Part(views_of(arrays, by_rows=ids is not None), grad.reshape(-1), ids))
        apply_together(rule, parts, step)
        for (param, slots), (copy, copies) in zip(alone, together, strict=True):
            for expected, found in zip((param, *slots.values()), (copy, *copies.values()), strict=True):
                assert expected.tobytes() == found.tobytes()


def test_a_rate_that_can_not_be_had_changes_nothing() -> None:
    """The rule raises before anything is written."""

    class Failing(Ftrl):
        def learning_rate_at(self, step: int) -> float:
            raise ZeroDivisionError(step)

    rule = replace(Failing(), learning_rate=0.1)
    arrays = [np.ones(4, np.float32), *(np.zeros(4, np.float32) for _ in rule.slots)]
    with pytest.raises(ZeroDivisionError):
        apply_together(rule, [Part(arrays, np.ones(4, np.float32), None)] * 2, 1)
    assert (arrays[0] == 1).all()
