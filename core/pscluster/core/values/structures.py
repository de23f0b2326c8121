"""Nested Python data, leaf by leaf. Others import this from `pscluster.core.values`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from pscluster.core.errors import ProtocolError
from pscluster.core.limits import MAX_DEPTH
from pscluster.core.values.encoding import describe
from pscluster.core.values.records import UnsendableRecordError, is_record_class, layout_of


def map_structure(fn: Callable[[Any], Any], structure: Any, leaves: tuple[type, ...] = (), depth: int = 0) -> Any:
    """Return the same structure with every leaf replaced by `fn(leaf)`.

    Lists, tuples, dicts, named tuples and dataclass instances are structure; everything else, None and sets included,
    is a leaf, and so are instances of `leaves`. `depth` counts the structures around this one. Raise TypeError if the
    structure is too deep, or a dataclass instance can't be made from its fields.
    """
    cls: type = type(structure)
    is_record = is_record_class(cls) and not isinstance(structure, leaves)
    if not (is_record or isinstance(structure, list | tuple | dict)):
        return fn(structure)
    if depth >= MAX_DEPTH:
        raise TypeError(f"a structure nested more than {MAX_DEPTH} levels deep: does it contain itself?")
    if is_record:
        try:
            layout = layout_of(cls)
            values = [map_structure(fn, item, leaves, depth + 1) for item in layout.values(structure)]
            return layout.build(layout.fields, values)
        except (UnsendableRecordError, ProtocolError) as error:
            raise TypeError(f"{describe(structure)} {error}") from None
    if isinstance(structure, dict):
        mapped = copy.copy(structure)  # keeps what a subclass adds, such as the factory of a defaultdict
        for key, item in structure.items():
            mapped[key] = map_structure(fn, item, leaves, depth + 1)
        return mapped
    items = [map_structure(fn, item, leaves, depth + 1) for item in structure]
    return tuple(items) if isinstance(structure, tuple) else items
