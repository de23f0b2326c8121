"""Whether a function is still what it was when it was captured.

    CAPTURED --its code, a helper's, or what a helper's name leads to, is another---> CHANGED   to be captured anew
             --a name leads to another value----------------------------------------> CAPTURED  with the first value
             --a value is changed in place------------------------------------------> CAPTURED  not seen

Helpers are functions and classes of the user's that the function reaches: by its globals, what it closes over, what it
is a partial or a method of, and from these on. Names are those of globals that are read and of variables of enclosing
functions.

A look takes at most 2 microseconds, as it is taken each time that a function is scheduled: what is looked at is divided
into parts of a bounded size. There is one, as a rule. Of several each look takes one in turn, and all of them where the
last whole look is a while ago, as it is when somebody has run another cell meanwhile.

Nothing is kept alive by this that would go otherwise, but for small values (numbers, texts, lists) that can't be
referred to weakly: values are known by their ids, and a weak reference tells when an id may have become another one's.
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

from pscluster.core.functions.sources import attributes_of, globals_read, is_library
from pscluster.core.handles import Handle

_PART = 24
"""Names and functions in a part."""

_WHOLE_SECONDS = 0.05
_MOST = 4000
"""Names and functions that are looked at. Whoever reaches more has a program, not a step."""

_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, functools.partial, type)
_IN_CLASSES = (types.FunctionType, staticmethod, classmethod, property)
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_ABSENT = object()
_codes = attrgetter("__code__")
_contents = attrgetter("cell_contents")


class Changes(NamedTuple):
    """What is another than it was.

    Attributes:
        code: whether code is, so that the function is a new one.
        values: names that lead to another value, each told of once.
    """

    code: bool
    values: list[str]


@dataclass(slots=True)
class _Name:
    """A name, and what it led to."""

    owner: weakref.ref[Any]  # the function or class that it is looked up for
    name: str
    identity: int
    is_code: bool
    value: Any  # of what can be compared, else _ABSENT


@dataclass(slots=True)
class _Part:
    """Some of what is looked at, as it is compared quickest."""

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
                if not getattr(owner(), "__globals__").keys().isdisjoint(absent):  # noqa: B009  (it may be gone)
                    return False
            for owner, get, identities in self.cells:
                if tuple(map(id, map(_contents, get(getattr(owner(), "__closure__"))))) != identities:  # noqa: B009
                    return False
            return all(map(is_, map(_codes, map(call, self.functions)), self.codes))
        except (KeyError, ValueError, AttributeError, TypeError):  # a name or a function is gone
            return False


class Captures:
    """What a function was captured with. Thread-safe, as far as the same change may be told of twice."""

    def __init__(self, function: Any) -> None:
        """Remember it as it is now."""
        self._stale: list[Any] = []  # filled where something that was captured is gone
        self._weak: dict[int, weakref.ref[Any]] = {}
        self._strong: list[Any] = []
        self._lock = threading.Lock()
        self._globals: dict[tuple[int, str], _Name] = {}
        self._attributes: list[_Name] = []
        self._cells: dict[tuple[int, int], _Name] = {}  # by function, and place in its closure
        self._missing: dict[int, tuple[weakref.ref[Any], set[str]]] = {}
        self._functions: list[tuple[weakref.ref[Any], types.CodeType]] = []
        self._read(function)
        self._parts: list[_Part] = []
        self._turn, self._next_whole = 0, 0.0
        self._divide()

    def are_same(self) -> bool:
        """Look whether anything has changed. False: `changes` says what, perhaps nothing that counts."""
        if self._stale:
            return False
        parts = self._parts
        if len(parts) == 1:
            return parts[0].is_same()
        now = time.monotonic()
        if now >= self._next_whole:
            self._next_whole = now + _WHOLE_SECONDS
            return all(part.is_same() for part in parts)
        self._turn = turn = (self._turn + 1) % len(parts)
        return parts[turn].is_same()

    def changes(self) -> Changes:
        """Say what has changed. Values that have are told of, and not looked at any more."""
        with self._lock:
            self._stale.clear()
            functions = [(owner(), code) for owner, code in self._functions]
            if any(function is None or function.__code__ is not code for function, code in functions):
                return Changes(True, [])
            for owner, names in self._missing.values():
                function = owner()
                if function is None or not function.__globals__.keys().isdisjoint(names):
                    return Changes(True, [])
            for each in self._attributes:
                cls = each.owner()
                if cls is None or id(vars(cls).get(each.name, _ABSENT)) != each.identity:
                    return Changes(True, [])
            return self._changed_values()

    def _changed_values(self) -> Changes:
        places: tuple[tuple[dict[Any, _Name], Callable[[Any, Any, str], Any]], ...] = (
            (self._globals, lambda function, _, name: function.__globals__.get(name, _ABSENT)),
            (self._cells, lambda function, key, _: _in_cells(function)[key[1]]),
        )
        rebound: list[str] = []
        for names, look in places:
            for key, each in list(names.items()):
                verdict = self._compare(each, look(each.owner(), key, each.name))
                if verdict is None:
                    return Changes(True, [])
                if not verdict:
                    rebound.append(each.name)
                    del names[key]
        self._divide()
        return Changes(False, list(dict.fromkeys(rebound)))

    def _compare(self, each: _Name, now: Any) -> bool | None:
        """Is it as good as the same? None: it was code, or is. An equal number or text takes the place of the first."""
        if id(now) == each.identity and (each.identity not in self._weak or self._weak[each.identity]() is now):
            return True
        if now is _ABSENT:
            return False  # what was deleted is no better taken anew
        if each.is_code or _is_code(now):
            return None
        if type(now) is type(each.value) and now == each.value:
            each.identity = id(now)
            self._strong.append(now)
            return True
        return False

    # As it is read

    def _read(self, function: Any) -> None:
        todo, seen = [function], set[int]()
        while todo and len(seen) < _MOST:
            item = todo.pop()
            if id(item) in seen or isinstance(item, Handle):
                continue
            seen.add(id(item))
            if isinstance(item, types.MethodType):
                todo += [item.__func__, type(item.__self__), item.__self__ if isinstance(item.__self__, type) else None]
            elif isinstance(item, functools.partial):
                todo += [item.func, *item.args, *item.keywords.values()]
            elif isinstance(item, types.FunctionType):
                if _is_users(item.__module__):
                    todo += self._read_function(item)
            elif isinstance(item, type):
                if _is_users(item.__module__):
                    todo += [*self._read_class(item), *item.__bases__]
            elif isinstance(item, staticmethod | classmethod):
                todo.append(item.__func__)
            elif isinstance(item, property):
                todo += [item.fget, item.fset]
            elif not isinstance(item, (*_PLAIN, types.ModuleType)):
                todo.append(attributes_of(item).get("__wrapped__"))
                todo.append(type(item))

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
            values = _in_cells(function)
            yield from values
            for place, (name, value) in enumerate(zip(function.__code__.co_freevars, values, strict=True)):
                self._cells[id(function), place] = self._named(owner, name, value)

    def _read_class(self, cls: type) -> Iterator[Any]:
        owner = weakref.ref(cls)
        for name, value in list(vars(cls).items()):
            if isinstance(value, _IN_CLASSES):
                yield value
                self._attributes.append(self._named(owner, name, value))

    def _named(self, owner: weakref.ref[Any], name: str, value: Any) -> _Name:
        identity = id(value)
        if value is not _ABSENT and identity not in self._weak:
            try:
                self._weak[identity] = weakref.ref(value, self._stale.append)
            except TypeError:
                self._strong.append(value)
        return _Name(owner, name, identity, _is_code(value), value if isinstance(value, _PLAIN) else _ABSENT)

    def _divide(self) -> None:
        """Into parts, each of them looked at in one go."""
        spaces: dict[tuple[int, str], list[_Name]] = {}
        for (place, _), each in self._globals.items():
            spaces.setdefault((place, "__globals__"), []).append(each)
        for each in self._attributes:
            spaces.setdefault((id(each.owner()), "__dict__"), []).append(each)
        closures: dict[int, list[tuple[int, _Name]]] = {}
        for (function, index), each in self._cells.items():
            closures.setdefault(function, []).append((index, each))
        parts, room = [_Part()], _PART

        def part(count: int) -> _Part:
            nonlocal room
            if room < _PART and count > room:
                parts.append(_Part())
                room = _PART
            room -= count
            return parts[-1]

        for (_, space), names in spaces.items():
            for some in _slices(names):
                get, identities = _getter([(each.name, each) for each in some])
                part(len(some)).names.append((some[0].owner, space, get, identities))
        for owner, absent in self._missing.values():
            for gone in _slices(sorted(absent)):
                part(len(gone)).missing.append((owner, frozenset(gone)))
        for cells in closures.values():
            for several in _slices(cells):
                get, identities = _getter(several)
                part(len(several)).cells.append((several[0][1].owner, get, identities))
        for functions in _slices(self._functions):
            mine = part(2 * len(functions))
            mine.functions += tuple(owner for owner, _ in functions)
            mine.codes += tuple(code for _, code in functions)
        self._parts = parts


def _in_cells(function: types.FunctionType) -> list[Any]:
    """What a function closes over, in order; _ABSENT for what is not assigned yet."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(_ABSENT)
    return found


def _is_users(module_name: Any) -> bool:
    if not isinstance(module_name, str):
        return True  # made by code without a module
    return module_name == "__main__" or not is_library(module_name)


def _is_code(value: Any) -> bool:
    """Is this something to call, rather than data (a model that can be called among it)?"""
    if isinstance(value, _CODE) or value is _ABSENT:
        return True
    if isinstance(value, Handle) or not callable(value):
        return False
    if "__wrapped__" in attributes_of(value):
        return True
    # What libraries make of functions (compiled ones, NumPy's) has a function's name, and their models have none.
    return not _is_users(type(value).__module__) and isinstance(getattr(value, "__name__", None), str)


def _getter(places: Sequence[tuple[Any, _Name]]) -> tuple[Callable[[Any], Any], tuple[int, ...]]:
    """What gives what is at these places, and what there was."""
    if len(places) == 1:  # of one place an itemgetter gives no tuple
        places = [*places, *places]
    return itemgetter(*(place for place, _ in places)), tuple(each.identity for _, each in places)


def _slices(items: list[Any]) -> Iterator[list[Any]]:
    """At most half a part each."""
    for at in range(0, len(items), _PART // 2):
        yield items[at : at + _PART // 2]
