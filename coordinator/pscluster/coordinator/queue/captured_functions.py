"""The script's functions as captured: each once, until its code changes."""

from __future__ import annotations

import functools
import logging
import types
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

from pscluster.core.checks import type_of
from pscluster.core.functions.capture import Captures
from pscluster.core.functions.definitions import CapturedFunction, capture
from pscluster.core.functions.policy import SerializationPolicy
from pscluster.core.functions.sources import is_library

logger = logging.getLogger(__name__)

MANY_MADE = 200
"""Warn when one line has made this many functions."""

MAX_CALL_SITES = 1000
"""Lines for which functions are counted."""

_Known: TypeAlias = tuple[CapturedFunction, Captures]


class CapturedFunctions:
    """The captured functions of one coordinator. Its policy says whether they may be pickled."""

    def __init__(self, policy: SerializationPolicy) -> None:
        self._policy = policy
        # By the id of a function, or of an object and its method, and dropped with it. Not by equality, which callable
        # objects may define in any way, and which reads the values of variables.
        self._captured: dict[int, tuple[weakref.ref[Any], dict[Any, _Known]]] = {}
        self._classes: dict[type, CapturedFunction] = {}
        self._made: Counter[str] = Counter()  # functions, by the line that makes them

    def get(self, fn: Callable[..., Any]) -> CapturedFunction:
        """Return the function as first captured; capture it now if that is new, or its code has changed."""
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
            except TypeError:  # no weak reference to it: captured each time, with the same digest
                self._count_made(fn)
                return self.capture(fn)
            self._captured[key] = reference, known
        entry = known.get(name)
        if entry is None or not (entry[1].are_same() or _is_kept(entry)):
            if entry is None:
                self._count_made(fn)
            entry = known[name] = self.capture(fn), Captures(fn)
        return entry[0]

    def capture(self, fn: Callable[..., Any], *, holds_data: bool = False) -> CapturedFunction:
        """Capture a function, whether or not it was captured before."""
        return capture(fn, policy=self._policy, holds_data=holds_data)

    def of_class(self, cls: type) -> CapturedFunction | None:
        """Return the definition of a class; None if workers find it by name, in an installed module."""
        if is_library(cls.__module__):
            return None
        if (known := self._classes.get(cls)) is None:
            known = self._classes[cls] = capture(cls, policy=self._policy)
        return known

    def _count_made(self, fn: Callable[..., Any]) -> None:
        """Warn, once a line, if a line of the script makes a new function for every call."""
        site = _where_made(fn)
        if len(self._made) >= MAX_CALL_SITES and site not in self._made:
            return
        self._made[site] += 1
        if self._made[site] == MANY_MADE:
            logger.warning(
                "%s was created again for %d calls of schedule: each costs about 0.3 ms, ten times as much as the same "
                "function again. Make it once, before the loop, and pass what changes from call to call as an argument",
                site,
                MANY_MADE,
            )


def _is_kept(known: _Known) -> bool:
    """Return whether a function whose captures have changed is used as it was captured; log the changes."""
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
            "an argument, or define %s again to have it captured again",
            function.name,
            name,
            function.name,
        )
    return True


def _where_made(fn: Callable[..., Any]) -> str:
    """Describe a function by its name and the line of its definition, or by its class."""
    inner: Any = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    kind = "" if inner is fn else "a partial of "
    inner = getattr(inner, "__func__", inner)  # of a method
    code = getattr(inner, "__code__", None)
    if code is None:
        return kind + (getattr(inner, "__qualname__", "") or type_of(inner))
    return f"{kind}{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
