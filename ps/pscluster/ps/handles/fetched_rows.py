"""Rows of tables that were fetched for a step before it runs, and are given to its lookups.

A lookup of exactly the ids that were named gets them: once, since they are the caller's to change. Every other read
asks the servers. So does a lookup of a variable that the step has pushed to before: it reads what it has written.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pscluster.core.checks import type_of
from pscluster.core.errors import MisuseError
from pscluster.ps.handles.indexing import Array, Ids
from pscluster.ps.handles.row_plans import RowPlan, last_plan, use_plan
from pscluster.ps.handles.variable import JoinedVariable, Variable, distinct_rows


@dataclass(frozen=True, slots=True)
class _Fetched:
    variables: frozenset[int]
    ids: Ids
    rows: Array


class FetchedRows:
    """The rows of one step. For one thread after another."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, str], list[_Fetched]] = {}
        self._plan: RowPlan | None = None

    def fetch(self, lookups: object) -> None:
        """Fetch the rows that `lookups` has named: pairs of a table and ids. One request a server.

        Raises:
            MisuseError: they are no such pairs.
            InvalidUpdateError: an id is not a row (the message names it), or ids are not integers.
        """
        pairs = [_checked(pair) for pair in _pairs_of(lookups)]
        for (table, ids), rows in zip(pairs, distinct_rows(pairs), strict=True):
            fetched = _Fetched(_numbers_of(table), ids, rows)
            self._of.setdefault((table.handle_kind, table.handle_key), []).append(fetched)
        self._plan = last_plan()

    def take(self, table: Variable, ids: Ids) -> Array | None:
        """Return the rows of these ids, (ids, ...), if they were fetched, and not taken or dropped since."""
        known = self._of.get((table.handle_kind, table.handle_key), [])
        for at, fetched in enumerate(known):
            if np.array_equal(fetched.ids, ids):
                use_plan(self._plan)
                return known.pop(at).rows
        return None

    def drop(self, variables: set[int]) -> None:
        """Forget the rows of these variables: the step has changed them."""
        for known in self._of.values():
            known[:] = [fetched for fetched in known if fetched.variables.isdisjoint(variables)]


def _pairs_of(lookups: object) -> list[Any]:
    if isinstance(lookups, Variable) or not isinstance(lookups, Iterable):
        raise MisuseError(f"lookups returned {type_of(lookups)}: return a list of pairs (table, ids)")
    return list(lookups)


def _checked(pair: Any) -> tuple[Variable, Ids]:
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], Variable):
        raise MisuseError(f"lookups returned a list with {type_of(pair)}: return a list of pairs (table, ids)")
    table, ids = pair
    return table, table.row_ids(ids).reshape(-1).copy()


def _numbers_of(table: Variable) -> frozenset[int]:
    members = table.variables if isinstance(table, JoinedVariable) else [table]
    return frozenset(member.id for member in members if isinstance(member, Variable))
