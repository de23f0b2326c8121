"""Functions of the script as they were captured: each once, until it is another one."""

from __future__ import annotations

import functools
import logging
import types
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

from pscluster.core.functions.capture import Captures
from pscluster.core.functions.definitions import CapturedFunction, capture, class_definition, needs_definition
from pscluster.core.functions.policy import SerializationPolicy

logger = logging.getLogger(__name__)

MANY_MADE = 200
"""So many functions that one line makes are worth a warning."""

MAX_PLACES = 1000
"""Of so many lines it is counted."""

_Known: TypeAlias = tuple[CapturedFunction, Captures]


class CapturedFunctions:
    """Those of one coordinator.

    Args:
        policy: whether they may be pickled.
    """

    def __init__(self, policy: SerializationPolicy) -> None:
        self._policy = policy
        # By id of a function, or of an object and method of it, and gone when that is gone. Not by equality, which
        # may say anything of callable objects, and reads the values of variables.
        self._captured: dict[int, tuple[weakref.ref[Any], dict[Any, _Known]]] = {}
        self._classes: dict[type, CapturedFunction] = {}
        self._made: Counter[str] = Counter()  # functions, by the place that makes them

    def get(self, fn: Callable[..., Any]) -> CapturedFunction:
        """Return the function as it was captured first; captured now, if it was not, or its code is another one."""
        owner: Any = fn
        name: Any = None
        if isinstance(fn, types.MethodType):  # a new object every time it is looked up
            owner, name = fn.__self__, fn.__func__
        key = id(owner)
        owned, known = self._captured.get(key, (None, {}))
        if owned is None or owned() is not owner:
            known = {}
            try:
                reference = weakref.ref(owner, lambda _: self._captured.pop(key, None))
            except TypeError:  # not weakly referable: captured anew each time, with the same digest
                self._count_made(fn)
                return self.anew(fn)
            self._captured[key] = reference, known
        found = known.get(name)
        if found is None or not (found[1].are_same() or _goes_on(found)):
            if found is None:
                self._count_made(fn)
            found = known[name] = self.anew(fn), Captures(fn)
        return found[0]

    def anew(self, fn: Callable[..., Any], *, holds_data: bool = False) -> CapturedFunction:
        """Capture it, whatever was captured before."""
        return capture(fn, policy=self._policy, holds_data=holds_data)

    def of_class(self, cls: type) -> CapturedFunction | None:
        """Return the definition of a class; None: workers have it without."""
        if not needs_definition(cls):
            return None
        known = self._classes.get(cls)
        if known is None:
            known = self._classes[cls] = class_definition(cls, policy=self._policy)
        return known

    def _count_made(self, fn: Callable[..., Any]) -> None:
        """Warn, once for each, where a line of the script makes a function anew for every call."""
        place = _where_made(fn)
        if len(self._made) >= MAX_PLACES and place not in self._made:
            return
        self._made[place] += 1
        if self._made[place] == MANY_MADE:
            logger.warning(
                "%s was created again for %d calls of schedule: each costs about 0.3 ms, ten times as much as the same "
                "function again. Make it once, before the loop, and pass what changes from call to call as an argument",
                place,
                MANY_MADE,
            )


def _goes_on(known: _Known) -> bool:
    """Something that the function reaches is another: does it go on as it was captured?"""
    function, captures = known
    changes = captures.changes()
    if changes.code:
        logger.info(
            "%s is captured as a new function: its code, or the code of what it calls, has changed", function.name
        )
        return False
    for name in changes.values:
        logger.warning(
            "%s keeps using the %s that it was captured with, although that name has another value now: pass it as "
            "an argument, or define %s again to have it captured anew",
            function.name,
            name,
            function.name,
        )
    return True


def _where_made(fn: Callable[..., Any]) -> str:
    """In words: the function, and the line of its definition, or its class."""
    inner: Any = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    kind = "" if inner is fn else "a partial of "
    inner = getattr(inner, "__func__", inner)  # of a method
    code = getattr(inner, "__code__", None)
    if code is None:
        return kind + (getattr(inner, "__qualname__", "") or f"a {type(inner).__qualname__}")
    return f"{kind}{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
