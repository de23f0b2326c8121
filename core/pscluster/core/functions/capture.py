"""Detect whether a function has changed since it was captured.

    CAPTURED --its code, a helper's, or the helper that a name refers to changes---> CHANGED   must be captured again
             --a name refers to another value--------------------------------------> CAPTURED  with the first value
             --a value changes in place--------------------------------------------> CAPTURED  unnoticed

Helpers are the user's functions and classes that the function reaches: through its globals, what it closes over, what
it is a partial or a method of, and so on from these. Names are those of globals that are read and of variables of
enclosing functions.

A check runs each time a function is scheduled, so it takes at most 2 microseconds: what it compares is divided into
groups of bounded size. Most functions have one group. Of several, each check compares one in turn, and all of them if
the last full check was a while ago, as when the user has run another cell in the meantime.

This keeps nothing alive except small values (numbers, strings, lists) without weak references: values are known by
their ids, and a weak reference tells when an id may have been reused.
"""

from __future__ import annotations

import functools
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, call, is_, itemgetter
from typing import Any, NamedTuple

from pscluster.core.functions.sources import ABSENT, attributes_of, cells_of, globals_read, is_library, parts_of
from pscluster.core.handles import Handle

_GROUP = 24  # names and functions in a group
_FULL_CHECK_SECONDS = 0.05
_MOST = 4000  # names and functions that are compared. A function that reaches more is a program, not a step
_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, functools.partial, type)
_IN_CLASSES = (types.FunctionType, staticmethod, classmethod, property)
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_codes = attrgetter("__code__")
_contents = attrgetter("cell_contents")


class Changes(NamedTuple):
    """What has changed."""

    code: bool  # code has, so the function is a new one
    values: list[str]  # names that refer to another value, each reported once


@dataclass(slots=True)
class _Name:
    owner: weakref.ref[Any]  # the function or class that uses it
    name: str
    identity: int
    is_code: bool
    value: Any  # if it can be compared, else ABSENT


@dataclass(slots=True)
class _Group:
    """Names and functions in the form that is quickest to compare."""

    names: list[tuple[weakref.ref[Any], str, Callable[[Any], Any], tuple[int, ...]]] = field(default_factory=list)
    missing: list[tuple[weakref.ref[Any], frozenset[str]]] = field(default_factory=list)
    cells: list[tuple[weakref.ref[Any], Callable[[Any], Any], tuple[int, ...]]] = field(default_factory=list)
    functions: tuple[weakref.ref[Any], ...] = ()
    codes: tuple[types.CodeType, ...] = ()

    def is_same(self) -> bool:
        try:
            for owner, space, get, identities in self.names:
                if tuple(map(id, get(getattr(owner(), space)))) != identities:
                    return False
            for owner, absent in self.missing:
                if not getattr(owner(), "__globals__").keys().isdisjoint(absent):  # noqa: B009  (may be None)
                    return False
            for owner, get, identities in self.cells:
                if tuple(map(id, map(_contents, get(getattr(owner(), "__closure__"))))) != identities:  # noqa: B009
                    return False
            return all(map(is_, map(_codes, map(call, self.functions)), self.codes))
        except (KeyError, ValueError, AttributeError, TypeError):  # a name or a function no longer exists
            return False


class Captures:
    """What a function was captured with. Thread-safe, except that the same change may be reported twice."""

    def __init__(self, function: Any) -> None:
        self._stale: list[Any] = []  # filled when something that was captured is garbage-collected
        self._weak: dict[int, weakref.ref[Any]] = {}
        self._strong: list[Any] = []
        self._lock = threading.Lock()
        self._globals: dict[tuple[int, str], _Name] = {}
        self._attributes: list[_Name] = []
        self._cells: dict[tuple[int, int], _Name] = {}  # by function, and index in its closure
        self._missing: dict[int, tuple[weakref.ref[Any], set[str]]] = {}
        self._functions: list[tuple[weakref.ref[Any], types.CodeType]] = []
        self._read(function)
        self._groups: list[_Group] = []
        self._turn, self._next_full_check = 0, 0.0
        self._divide()

    def are_same(self) -> bool:
        """Return whether nothing has changed. If False, `changes` says what has, possibly nothing that matters."""
        if self._stale:
            return False
        groups = self._groups
        if len(groups) == 1:
            return groups[0].is_same()
        now = time.monotonic()
        if now >= self._next_full_check:
            self._next_full_check = now + _FULL_CHECK_SECONDS
            return all(group.is_same() for group in groups)
        self._turn = turn = (self._turn + 1) % len(groups)
        return groups[turn].is_same()

    def changes(self) -> Changes:
        """Return what has changed. Changed values are reported once, and not compared again."""
        with self._lock:
            self._stale.clear()
            functions = [(owner(), code) for owner, code in self._functions]
            if any(function is None or function.__code__ is not code for function, code in functions):
                return Changes(True, [])
            for owner, names in self._missing.values():
                function = owner()
                if function is None or not function.__globals__.keys().isdisjoint(names):
                    return Changes(True, [])
            for attribute in self._attributes:
                cls = attribute.owner()
                if cls is None or id(vars(cls).get(attribute.name, ABSENT)) != attribute.identity:
                    return Changes(True, [])
            return self._changed_values()

    def _changed_values(self) -> Changes:
        kinds: tuple[tuple[dict[Any, _Name], Callable[[Any, Any, str], Any]], ...] = (
            (self._globals, lambda function, _, name: function.__globals__.get(name, ABSENT)),
            (self._cells, lambda function, key, _: cells_of(function)[key[1]]),
        )
        rebound: list[str] = []
        for names, value_now in kinds:
            for key, reference in list(names.items()):
                same = self._is_same(reference, value_now(reference.owner(), key, reference.name))
                if same is None:
                    return Changes(True, [])
                if not same:
                    rebound.append(reference.name)
                    del names[key]
        self._divide()
        return Changes(False, list(dict.fromkeys(rebound)))

    def _is_same(self, reference: _Name, now: Any) -> bool | None:
        """Return whether a name refers to the same value, or an equal plain one. None: it has changed, and is code."""
        identity = reference.identity
        if id(now) == identity and (identity not in self._weak or self._weak[identity]() is now):
            return True
        if now is ABSENT:
            return False  # capturing again would not bring back a deleted value
        if reference.is_code or _is_code(now):
            return None
        if type(now) is type(reference.value) and now == reference.value:
            reference.identity = id(now)  # from now on
            self._strong.append(now)
            return True
        return False

    # Reading the function

    def _read(self, function: Any) -> None:
        todo, seen = [function], set[int]()
        while todo and len(seen) < _MOST:
            item = todo.pop()
            if id(item) in seen or isinstance(item, Handle):
                continue
            seen.add(id(item))
            if isinstance(item, types.FunctionType):
                if _is_users(item.__module__):
                    todo += self._read_function(item)
            elif isinstance(item, type):
                if _is_users(item.__module__):
                    todo += [*self._read_class(item), *item.__bases__]
            elif not isinstance(item, (*_PLAIN, types.ModuleType)):
                todo += [*parts_of(item), type(item)]

    def _read_function(self, function: types.FunctionType) -> Iterator[Any]:
        owner = weakref.ref(function)
        self._functions.append((owner, function.__code__))
        space = function.__globals__
        for name in globals_read(function.__code__):
            if name in space:
                yield (value := space[name])
                if (id(space), name) not in self._globals:
                    self._globals[id(space), name] = self._named(owner, name, value)
            else:
                self._missing.setdefault(id(space), (owner, set()))[1].add(name)
        if function.__closure__:
            values = cells_of(function)
            yield from values
            for index, (name, value) in enumerate(zip(function.__code__.co_freevars, values, strict=True)):
                self._cells[id(function), index] = self._named(owner, name, value)

    def _read_class(self, cls: type) -> Iterator[Any]:
        owner = weakref.ref(cls)
        for name, value in list(vars(cls).items()):
            if isinstance(value, _IN_CLASSES):
                yield value
                self._attributes.append(self._named(owner, name, value))

    def _named(self, owner: weakref.ref[Any], name: str, value: Any) -> _Name:
        identity = id(value)
        if value is not ABSENT and identity not in self._weak:
            try:
                self._weak[identity] = weakref.ref(value, self._stale.append)
            except TypeError:
                self._strong.append(value)
        return _Name(owner, name, identity, _is_code(value), value if isinstance(value, _PLAIN) else ABSENT)

    def _divide(self) -> None:
        spaces: dict[tuple[int, str], list[_Name]] = {}
        for (space_id, _), reference in self._globals.items():
            spaces.setdefault((space_id, "__globals__"), []).append(reference)
        for reference in self._attributes:
            spaces.setdefault((id(reference.owner()), "__dict__"), []).append(reference)
        closures: dict[int, list[tuple[int, _Name]]] = {}
        for (function, index), reference in self._cells.items():
            closures.setdefault(function, []).append((index, reference))
        groups, room = [_Group()], _GROUP

        def group_for(count: int) -> _Group:
            nonlocal room
            if room < _GROUP and count > room:
                groups.append(_Group())
                room = _GROUP
            room -= count
            return groups[-1]

        for (_, space), names in spaces.items():
            for batch in _slices(names):
                get, identities = _getter([(reference.name, reference) for reference in batch])
                group_for(len(batch)).names.append((batch[0].owner, space, get, identities))
        for owner, absent in self._missing.values():
            for missing in _slices(sorted(absent)):
                group_for(len(missing)).missing.append((owner, frozenset(missing)))
        for cells in closures.values():
            for several in _slices(cells):
                get, identities = _getter(several)
                group_for(len(several)).cells.append((several[0][1].owner, get, identities))
        for functions in _slices(self._functions):
            group = group_for(2 * len(functions))
            group.functions += tuple(owner for owner, _ in functions)
            group.codes += tuple(code for _, code in functions)
        self._groups = groups


def _is_users(module_name: Any) -> bool:
    if not isinstance(module_name, str):
        return True  # made by code that has no module
    return module_name == "__main__" or not is_library(module_name)


def _is_code(value: Any) -> bool:
    """Return whether this is something to call, rather than data, such as a callable model."""
    if isinstance(value, _CODE) or value is ABSENT:
        return True
    if isinstance(value, Handle) or not callable(value):
        return False
    if "__wrapped__" in attributes_of(value):
        return True
    # Functions made by libraries (compiled ones, NumPy's) have a name; their models do not.
    return not _is_users(type(value).__module__) and isinstance(getattr(value, "__name__", None), str)


def _getter(items: Sequence[tuple[Any, _Name]]) -> tuple[Callable[[Any], Any], tuple[int, ...]]:
    """Return a getter of the values under these keys, and the ids of the values that were there."""
    if len(items) == 1:  # with one key, an itemgetter returns no tuple
        items = [*items, *items]
    return itemgetter(*(key for key, _ in items)), tuple(reference.identity for _, reference in items)


def _slices(items: list[Any]) -> Iterator[list[Any]]:
    """Yield slices of at most half a group."""
    for start in range(0, len(items), _GROUP // 2):
        yield items[start : start + _GROUP // 2]
