"""Rows of tables, and whole variables, that were fetched for a step before it runs, and are given to its reads.

A lookup of exactly the ids that were named gets them, and so does a read of a whole variable that was named: once,
since they are the caller's to change. Every other read asks the servers. So does a read of a variable that the step
has pushed to before: it reads what it has written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pscluster.core.checks import type_of
from pscluster.core.errors import MisuseError
from pscluster.core.phases import Begun, Phases, run
from pscluster.ps.handles.indexing import Array, Ids
from pscluster.ps.handles.reads import reading_rows_and_variables
from pscluster.ps.handles.rows.plans import RowPlan, last_plan, use_plan
from pscluster.ps.handles.variables.sharded import JoinedVariable
from pscluster.ps.handles.variables.variable import Variable


@dataclass(frozen=True, slots=True)
class _Fetched:
    variables: frozenset[int]
    ids: Ids
    rows: Array


class FetchedRows:
    """The rows of one step, and the whole variables. For one thread after another."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, str], list[_Fetched]] = {}
        self._whole: dict[int, Array] = {}
        self._plan: RowPlan | None = None
        self._rows: list[Array] | None = None  # of all pairs, until some are taken or dropped: then `_of` has the rest
        self._pairs: list[tuple[Variable, Ids]] = []
        self._variables: list[Variable] = []

    def name(self, lookups: object, *, whole: bool = True) -> None:
        """Take what `lookups` has named: pairs of a table and ids, and variables to be read whole.

        Unless `whole`, variables that are named whole are left to the step.

        Raises:
            MisuseError: they are no such pairs, or no variables that are read whole.
            InvalidUpdateError: an id is not a row (the message names it), or ids are not integers.
        """
        variables: dict[int, Variable] = {}
        for item in _named(lookups):
            if isinstance(item, tuple):
                self._pairs.append(item)
            elif whole:
                variables[item.id] = item
        self._variables = list(variables.values())

    def fetch(self) -> None:
        """Fetch what was named: one request a server."""
        run(self.fetching())

    def fetching(self) -> Phases[None]:
        """Do what `fetch` does. The requests are under way once it has begun, if all are small."""
        begun = Begun(reading_rows_and_variables(self._pairs, self._variables))
        plan = last_plan()  # of this thread
        with contextlib.closing(begun):
            yield begun.is_under_way
            rows, values = begun.finish()
        self._plan = plan if begun.is_under_way else last_plan()
        self._rows = rows
        self._whole.update(zip([variable.id for variable in self._variables], values, strict=True))

    def take_all(self, lookups: Sequence[tuple[Any, Any]]) -> list[Array] | None:
        """Return the rows of all pairs of a table and flat ids, if they were named so, and none taken or dropped since.

        The ids need no check: those of other types, too, are only compared.
        """
        if self._rows is None or self._plan is None or len(lookups) != len(self._pairs):
            return None
        for (table, ids), (named, _) in zip(lookups, self._pairs, strict=True):
            if type(ids) is not np.ndarray or ids.ndim != 1 or ids.dtype != np.int64:
                return None
            if table is not named and (table.handle_kind, table.handle_key) != (named.handle_kind, named.handle_key):
                return None
        partitions = tuple([table.partition for table, _ in self._pairs])
        if not self._plan.is_for(partitions, [ids for _, ids in lookups]):
            return None
        rows, self._rows = self._rows, None
        use_plan(self._plan)
        return rows

    def _by_table(self) -> dict[tuple[str, str], list[_Fetched]]:
        """Return what was fetched, and not taken or dropped since; from now on, by tables alone."""
        for (table, ids), of_table in zip(self._pairs, self._rows or (), strict=self._rows is not None):
            fetched = _Fetched(_numbers_of(table), ids, of_table)
            self._of.setdefault((table.handle_kind, table.handle_key), []).append(fetched)
        self._rows = None
        return self._of

    def take(self, table: Variable, ids: Ids) -> Array | None:
        """Return the rows of these ids, (ids, ...), if they were fetched, and not taken or dropped since."""
        known = self._by_table().get((table.handle_kind, table.handle_key), [])
        for at, fetched in enumerate(known):
            if fetched.ids.shape == ids.shape and (fetched.ids == ids).all():
                use_plan(self._plan)
                return known.pop(at).rows
        return None

    def has_whole(self, variable: int) -> bool:
        """Return whether the values of a variable, by id, were fetched, and not taken or dropped since."""
        return variable in self._whole

    def take_whole(self, variables: Sequence[int]) -> list[Array] | None:
        """Return the values of these variables, by id, if all were fetched, and not taken or dropped since."""
        if not all(map(self.has_whole, variables)):
            return None  # all are read at one time
        values = {variable: self._whole.pop(variable) for variable in dict.fromkeys(variables)}
        if len(values) == len(variables):
            return list(values.values())
        return [values[v] if v not in variables[:at] else values[v].copy() for at, v in enumerate(variables)]

    @property
    def is_empty(self) -> bool:
        """Whether all that was fetched is taken or dropped."""
        return self._rows is None and not self._whole and not any(self._of.values())

    def drop(self, variables: set[int]) -> None:
        """Forget what was fetched of these variables: the step has changed them."""
        for variable in variables:
            self._whole.pop(variable, None)
        for known in self._by_table().values():
            known[:] = [fetched for fetched in known if fetched.variables.isdisjoint(variables)]


_PAIR = tuple, list
_WANTED = "return a list of pairs (table, ids), and of variables that the step reads whole"


def _named(lookups: object) -> list[tuple[Variable, Ids] | Variable]:
    if isinstance(lookups, Variable) or not isinstance(lookups, Iterable):
        raise MisuseError(f"lookups returned {type_of(lookups)}: {_WANTED}")
    return [_checked(item) for item in lookups]


def _checked(item: Any) -> tuple[Variable, Ids] | Variable:
    if isinstance(item, Variable) and item.takes_whole_reads:
        return item
    if not isinstance(item, _PAIR) or len(item) != 2 or not isinstance(item[0], Variable):
        raise MisuseError(f"lookups returned a list with {type_of(item)}: {_WANTED}")
    table, ids = item
    return table, table.row_ids(ids).reshape(-1).copy()


def _numbers_of(table: Variable) -> frozenset[int]:
    members = table.variables if isinstance(table, JoinedVariable) else [table]
    return frozenset(member.id for member in members if isinstance(member, Variable))
