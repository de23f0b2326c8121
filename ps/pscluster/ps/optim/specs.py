"""Update rules as they are declared: from the hyperparameters, and the schedule, of an OptimizerSpec."""

from __future__ import annotations

import json

from pscluster.core.errors import InvalidUpdateError
from pscluster.ps.optim.rule import UpdateRule
from pscluster.ps.optim.schedules import from_spec
from pscluster.v1 import ps_pb2


def rule_of(spec: ps_pb2.OptimizerSpec, rule_class: type[UpdateRule]) -> UpdateRule:
    """Return the rule of an optimizer. InvalidUpdateError if the class does not take its hyperparameters."""
    try:
        rule = rule_class.from_spec(spec.numbers, spec.flags)
        if spec.schedule:
            schedule = from_spec(json.loads(spec.schedule))
            # The rule is frozen; the schedule, which counts steps from 0, replaces its constant rate.
            object.__setattr__(rule, "learning_rate_at", lambda step: schedule(step - 1))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidUpdateError(f"optimizer {spec.name!r}: {error}") from None
    return rule
