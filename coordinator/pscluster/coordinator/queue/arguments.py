"""Checks of what functions are scheduled with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from pscluster.coordinator.data.data_part import DataPart
from pscluster.core import checks
from pscluster.core.checks import type_of
from pscluster.core.errors import MisuseError
from pscluster.core.functions.definitions import CapturedFunction

_SECONDS = "number of seconds"


def check_arguments(args: object, kwargs: object) -> None:
    """Raise TypeError if these are not the arguments of a function, as a tuple or list and as a dict, or None."""
    if args is not None and (isinstance(args, str | bytes) or not isinstance(args, Sequence)):
        raise TypeError(f"args must be a tuple or list of arguments, not {type_of(args)}: write args=(x,)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a dict of arguments, not {type_of(kwargs)}")


def checked_limits(timeout: float | None, retries: int, wait: float | None) -> tuple[float | None, int]:
    """Return a function's timeout and retries. Raise ValueError or TypeError for a wrong one, or a wrong `wait`."""
    retries = checks.whole("retries", retries, at_least=0)
    if timeout is not None:
        timeout = checks.real("timeout", timeout, ", or None", kind=_SECONDS, finite=False, above=0)
    if wait is not None:
        check_seconds("wait", wait)
    return timeout, retries


def check_seconds(name: str, value: object) -> None:
    """Raise TypeError or ValueError if this is not a number of seconds from 0, or None."""
    checks.real(name, value, ", or None", kind=_SECONDS, finite=False, at_least=0)


def check_no_part(function: CapturedFunction) -> None:
    """Raise MisuseError if a function captures a part of a dataset."""
    if any(isinstance(handle, DataPart) for handle in function.handles):
        raise MisuseError(f"{function.name} captures a part of a dataset: pass it as an argument")


def number_of(key: str) -> int:
    """Return the servers' number of a key; 0 if it is empty. Two keys collide as rarely as random 64-bit numbers."""
    if not isinstance(key, str):
        raise TypeError(f"a key is a string, not {type_of(key)}")
    if not key:
        return 0
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1
