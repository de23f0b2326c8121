"""Values inside of values."""

from __future__ import annotations

from pscluster.core.limits import MAX_DEPTH
from pscluster.v1 import value_pb2


def nesting(value: value_pb2.Value) -> int:
    """Return how many containers deep a value is; at most `MAX_DEPTH` + 1."""
    deepest, todo = 0, [(value, 0)]
    while todo:
        value, depth = todo.pop()
        kind = value.WhichOneof("kind")
        deepest = max(deepest, depth + (kind in CONTAINERS))
        if deepest > MAX_DEPTH:
            break
        todo.extend((child, depth + 1) for child in children(value, kind))
    return deepest


CONTAINERS = frozenset(["list", "tuple", "set", "frozenset", "dict", "record", "remote"])


def children(value: value_pb2.Value, kind: str | None) -> list[value_pb2.Value]:
    """Return the values directly inside a value of that kind."""
    match kind:
        case "list" | "tuple" | "set" | "frozenset":
            return list(getattr(value, kind).items)
        case "dict":
            return [*value.dict.keys, *value.dict.values]
        case "record":
            return list(value.record.values)
        case "remote":
            return [value.remote]
        case _:
            return []
