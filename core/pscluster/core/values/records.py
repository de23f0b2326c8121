"""Records on the wire: dataclass instances and named tuples, their class by name and their fields in order.

Instances are taken apart and rebuilt without running any of the class' own code, `__init__` and `__post_init__`
included. So only fields travel, and an instance with other attributes is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any

from pscluster.core.errors import ProtocolError

# Global of a module whose name here differs from its name in other processes: that other name.
MODULE_MARK = "__pscluster_module__"
_PYTHON_CLASS = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made at run time, not a built-in type with its own layout


class UnsendableRecordError(TypeError):
    """This instance, or any of its class, can't be sent. The message says why and how to fix it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """How instances of a class are taken apart and rebuilt."""

    cls: type
    module: str
    qualname: str
    fields: tuple[str, ...]
    is_tuple: bool
    known: frozenset[str]  # fields, and cached properties, which the receiver computes again when needed

    def values(self, record: Any) -> Sequence[Any]:
        """Return the fields' values. UnsendableRecordError if one was never set, or there are attributes besides."""
        if self.is_tuple:
            return tuple(tuple.__iter__(record))
        try:
            values = [getattr(record, name) for name in self.fields]
        except AttributeError as error:
            raise UnsendableRecordError(f"lacks a field: {error}") from None
        own = getattr(record, "__dict__", None)
        if own and (more := [name for name in own.keys() - self.known if not name.startswith("__")]):
            raise UnsendableRecordError(
                f"has the attribute {min(more)!r}, which is not a field and would be lost: declare it as a field"
            )
        return values

    def build(self, fields: Sequence[str], values: Sequence[Any]) -> Any:
        """Make an instance with these values without calling the class. Raise ProtocolError if its fields differ."""
        if tuple(fields) != self.fields:
            values = self._in_order(fields, values)
        if self.is_tuple:
            return tuple.__new__(self.cls, values)
        try:
            record: Any = object.__new__(self.cls)
        except TypeError as error:  # abstract here, or derived from a class of an extension module
            raise ProtocolError(f"{self.module}.{self.qualname} can't be made from its fields: {error}") from None
        for name, value in zip(self.fields, values, strict=True):
            try:
                object.__setattr__(record, name, value)
            except Exception as error:  # a field that is a descriptor may raise anything
                raise ProtocolError(f"field {name!r} of {self.module}.{self.qualname} can't be set: {error}") from error
        return record

    def _in_order(self, fields: Sequence[str], values: Sequence[Any]) -> Sequence[Any]:
        by_name = dict(zip(fields, values, strict=True))
        extra, missing = by_name.keys() - set(self.fields), set(self.fields) - by_name.keys()
        if extra or missing or len(by_name) != len(values):
            differences = [f"unknown {name!r}"[:60] for name in sorted(extra)[:5]]
            differences += [f"missing {name!r}" for name in sorted(missing)[:5]]
            raise ProtocolError(
                f"the fields received are not those of {self.module}.{self.qualname} here: "
                f"{', '.join(differences) or 'a name came twice'}"
            )
        return [by_name[name] for name in self.fields]


@functools.cache  # structures are walked leaf by leaf, and most leaves are of few classes
def is_record_class(cls: type) -> bool:
    """Return whether a class is a dataclass, or one of named tuples."""
    return dataclasses.is_dataclass(cls) or _is_named_tuple(cls)


def _is_named_tuple(cls: type) -> bool:
    names = getattr(cls, "_fields", None)
    return issubclass(cls, tuple) and isinstance(names, tuple) and all(isinstance(name, str) for name in names)


def structure_of(value: Any) -> Any:
    """Return something that is equal for two values exactly if they have the same structure at their top."""
    cls: type = type(value)
    if is_record_class(cls):
        return cls
    if isinstance(value, dict):
        return dict, frozenset(value)
    if isinstance(value, list | tuple):
        return (tuple if isinstance(value, tuple) else list), len(value)
    return None


@functools.cache
def layout_of(cls: type) -> Layout:
    """Return the layout of a record class.

    Raise UnsendableRecordError if its instances are more than their fields, as with a dataclass derived from `dict`.
    """
    named_tuple = _is_named_tuple(cls) and not dataclasses.is_dataclass(cls)
    if named_tuple:
        fields: tuple[str, ...] = tuple(getattr(cls, "_fields"))  # noqa: B009
    else:
        fields = tuple(field.name for field in dataclasses.fields(cls))
        for base in cls.__mro__[:-1]:
            if not base.__flags__ & _PYTHON_CLASS:
                raise UnsendableRecordError(
                    f"is also a {base.__name__}, so its fields are not all of it: pass a dataclass that is not"
                )
    cached = {
        name
        for base in cls.__mro__
        for name, attribute in vars(base).items()
        if isinstance(attribute, functools.cached_property)
    }
    return Layout(cls, module_of(cls), cls.__qualname__, fields, named_tuple, frozenset(fields) | cached)


def module_of(cls: type) -> str:
    """Return the name under which other processes know a class' module."""
    module = sys.modules.get(cls.__module__)
    name = vars(module).get(MODULE_MARK) if module is not None else None
    return name if isinstance(name, str) else cls.__module__


def imported_class(definition: str, module: str, qualname: str) -> type:  # noqa: ARG001  (a RecordResolver)
    """Return the class of that name in an already imported module, or raise ProtocolError. No code is run."""
    cls: Any = sys.modules.get(module)
    if cls is None:
        raise ProtocolError(f"a record of class {module}.{qualname}, whose module is not imported here"[:500])
    for name in qualname.split("."):
        cls = getattr(cls, "__dict__", {}).get(name)
    if not isinstance(cls, type):
        raise ProtocolError(f"a record of class {module}.{qualname}, but there is no such class here"[:500])
    return cls


def layout_for(cls: type) -> Layout:
    """Return the layout of a class named on the wire. ProtocolError if its instances can't be made from fields."""
    if not is_record_class(cls):
        raise ProtocolError(f"{cls.__module__}.{cls.__qualname__} is neither a dataclass nor a named tuple here")
    try:
        return layout_of(cls)
    except UnsendableRecordError as error:
        raise ProtocolError(f"{cls.__module__}.{cls.__qualname__} {error}") from None
