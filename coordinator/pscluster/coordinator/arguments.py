"""What the checks of users' arguments have in common, in the coordinator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pscluster.core.errors import ConfigurationError


@contextlib.contextmanager
def configuration_errors() -> Iterator[None]:
    """Raise a ValueError of the block, such as one of `core.checks`, as a ConfigurationError."""
    try:
        yield
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


def type_of(value: object) -> str:
    """Return a value's type as an error names it: "a list", "an int", "None"."""
    name = type(value).__name__
    article = "an" if name[0] in "aeiouAEIO" or name == "ndarray" else "a"
    return "None" if value is None else f"{article} {name}"
