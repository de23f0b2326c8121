"""The results of a replica's steps that are asked for, as a worker returns them and the script takes them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from pscluster.core.dtypes import array_of
from pscluster.core.errors import MisuseError
from pscluster.core.values import describe, map_structure
from pscluster.v1 import worker_pb2

_Collect = worker_pb2.SynchronousSteps

NO_RESULT: Final = object()
"""In place of a result that there is not: the replica took no part in the step, or its result was lost."""


class NumberedResults:
    """The results of one replica, each with the number of its step in the call, from 0."""

    def __init__(self, collect: worker_pb2.SynchronousSteps.Collect) -> None:
        self._collect = collect
        self._numbers: list[int] = []
        self._results: list[Any] = []
        self._spare = False  # what there is is of a step that was dropped

    def add(self, number: int, result: Any, *, dropped: bool = False) -> None:
        """Take the result of a step; of the last one only, unless all are collected.

        That of a step that was `dropped` counts as the last one, and in a mean if there is no other.
        """
        if self._collect == _Collect.LAST or self._spare:
            self._numbers.clear()
            self._results.clear()
        elif dropped and (self._collect == _Collect.ALL or self._results):
            return
        self._spare = dropped
        self._numbers.append(number)
        self._results.append(result)

    def collected(self) -> tuple[list[int], list[Any]]:
        """Return the results that are asked for, with their numbers. A mean has that of the last step."""
        if self._collect == _Collect.MEAN and self._results:
            return self._numbers[-1:], [_mean(self._results)]
        return self._numbers, self._results

    def of_all(self) -> Any:
        """Return the results that are asked for, of steps that all replicas have taken: a list, or one of them."""
        _, results = self.collected()
        if self._collect == _Collect.ALL:
            return results
        return results[-1] if results else None


def of_steps(how: int, numbered: tuple[Sequence[int], Sequence[Any]], done: int) -> Any:
    """Return what `NumberedResults.of_all` returns of all results, with `NO_RESULT` in place of those that are missing.

    `numbered` is what `NumberedResults.collected` has returned; `done` is how many steps count.
    """
    numbers, results = numbered
    if how != _Collect.ALL:
        return results[-1] if results else NO_RESULT
    by_number = dict(zip(numbers, results, strict=True))
    return [by_number.get(number, NO_RESULT) for number in range(done)]


def _mean(results: list[Any]) -> Any:
    """Return the mean of structures, leaf by leaf."""
    leaves: list[list[Any]] = []
    for result in results:
        own: list[Any] = []
        map_structure(own.append, result)
        leaves.append(own)
    if len({len(own) for own in leaves}) > 1:
        raise MisuseError('collect="mean" needs results of the same structure in all steps')
    try:
        means = iter([np.mean([array_of(leaf) for leaf in of_all], axis=0)[()] for of_all in zip(*leaves, strict=True)])
    except (TypeError, ValueError):
        raise MisuseError(
            f'collect="mean" needs numbers, or arrays of one shape, not {describe(results[-1])}: return those, or use '
            'collect="last"'
        ) from None
    return map_structure(lambda _: next(means), results[-1])
