"""The keys by which handles of variables travel: id and name, since a name can be given again after a deletion."""

from __future__ import annotations

import contextlib

from pscluster.core.errors import ProtocolError


def variable_key(number: int, name: str) -> str:
    """Return the key of the variable with this id and name; with id 0, of the one that has the name then."""
    return f"{number}:{name}"


def parse_variable_key(key: str) -> tuple[int, str]:
    """Return id and name. ProtocolError if the key is invalid."""
    number, colon, name = key.partition(":")
    with contextlib.suppress(ValueError):  # as of too many digits
        if colon and number.isascii() and number.isdecimal():
            return int(number), name
    raise ProtocolError(f"{key[:80]!r} is not the key of a variable")
