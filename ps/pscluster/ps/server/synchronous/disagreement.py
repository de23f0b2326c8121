"""Says how the replicas' parts in one synchronous step differ where they must not. Pure."""

from __future__ import annotations

import itertools

from pscluster.core.display.sanitize import shown
from pscluster.ps.server.state.store import Store
from pscluster.ps.server.synchronous.combine import Contribution, difference
from pscluster.ps.server.synchronous.run import Run
from pscluster.v1 import ps_pb2

_MAX_CALL = 300  # characters of a collective's name and place


def disagreement_of(
    store: Store, run: Run[Contribution], mine: ps_pb2.Contribution, new: Contribution | None = None
) -> str:
    """Return how the updates of a replica differ from those of the others; "" if they do not.

    `new` has those updates, unless they are still to come.
    """
    others = [staged for staged in run.in_order() if not staged.request.contribution.ended]
    known = [*itertools.islice(run.reducing.values(), 1), *(other.request.contribution for other in others[:1])]
    for theirs in known if not mine.ended else ():  # all that are known agree
        first, second = sorted((mine, theirs), key=lambda message: message.replica)
        if mine.updated != theirs.updated:
            return (
                f"in one step replica {first.replica} has applied gradients to {_named(store, first)}, and replica "
                f"{second.replica} to {_named(store, second)}: all replicas must do so to the same variables, "
                "in the same order"
            )
        if mine.calls != theirs.calls:
            return (
                f"in one step replica {first.replica} has called {_collectives(first)}, and replica {second.replica} "
                f"{_collectives(second)}: all replicas must make the same calls in the same order"
            )
        if mine.reduced != theirs.reduced:
            return (
                f"in one step replicas {first.replica} and {second.replica} have applied gradients to "
                f"{_named(store, first)}, but not alike: each must be dense or sparse on all replicas, with the "
                "same optimizer, and with examples= or without"
            )
    if new is None or mine.ended or not others:
        return ""
    error = difference([others[0], new])
    return "" if error is None else str(error)


def _collectives(message: ps_pb2.Contribution) -> str:
    if not message.calls:
        return "no collective"
    return f"{message.calls} collective{'s' * (message.calls > 1)} (the last: {shown(message.last_call[:_MAX_CALL])})"


def _named(store: Store, message: ps_pb2.Contribution) -> str:
    names = []
    for variable in message.updated:
        held = store.directory.variables.get(variable)
        names.append(repr(held.spec.name) if held is not None else f"variable {variable}")
    short = ", ".join(names[:4]) or "nothing"
    return short + (f" and {len(names) - 4} more" if len(names) > 4 else "")
