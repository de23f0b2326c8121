"""Functions without pickles, as they are sent: their code by the file that it is in, what they capture as values.

A function that is found by its name in a module, or in the script, goes by that name. One that is not, a closure, a
lambda, a function inside of another, goes by the place of its code in the file: the receiver, whose file must be the
very same, compiles it and gives it what it closes over. Partials, bound methods and objects of the user's own classes
are taken apart. All that is data travels as arguments do (`pscluster.core.values`); handles go by their names.

Globals are what the receiver's own file makes of them, unless that would be something else: a handle, a literal that
was changed since, plain data that the file computes, a name that only the part under the main guard knows. Those
travel, too, and are set in the receiver's module. So one module has one of each: a global that was sent may not be
another value later.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import hashlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any, Generic, Protocol

import numpy as np

from pscluster.core.functions.source_files import Binding, SourceFile, read_source
from pscluster.core.functions.sources import attributes_of, closure_of, holds_handle, is_library, source_of
from pscluster.core.values import describe, encode
from pscluster.core.values.encoding import UnsendableError, children
from pscluster.core.values.handles import Handle, StaysHere
from pscluster.core.values.records import PYTHON_CLASS, is_record_class
from pscluster.v1 import definition_pb2, value_pb2

PART = "pscluster-part"
"""The kind of the handles that stand for parts in an assembly's values."""

MAIN = "__main__"
_INLINE_LIMIT = 1 << 10
_PLAIN = (int, float, complex, str, bytes, bytearray, memoryview, list, tuple, dict, set, frozenset)
_SCALARS = (bool, int, float, complex, str, bytes)
_BASES = (object, Generic, Protocol)
_STATEFUL = ("__init__", "__new__", "__setattr__", "__getstate__", "__setstate__")
_OF_EXTENSIONS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.MemberDescriptorType)
_REDUCERS = ("__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__", "__copyreg__")

Part = definition_pb2.AssemblyPart


class CannotGoByReferenceError(TypeError):
    """This can't be sent without a pickle. The message says what, why and how to mend it."""


class Assembled:
    """What is to be sent of a function.

    Attributes:
        assembly: the message.
        arrays: of it, one behind the other.
        handles: those that it names.
        named: it is no more than a name in one file, or in an installed module.

    Raises:
        CannotGoByReferenceError: it can't be sent so.
    """

    def __init__(self, found: Any, rename: Callable[[Handle], tuple[str, str]] | None) -> None:
        sender = _Sender(rename)
        try:
            sender.part_of(found)
        except UnsendableError as error:
            raise CannotGoByReferenceError(f"it {error.reason}") from None
        self.assembly = definition_pb2.Assembly(files=[file.message for file in sender.files.values()])
        self.assembly.parts.extend(sender.parts)
        self.assembly.sizes.extend(map(len, sender.attachments))
        self.arrays = b"".join(sender.attachments)
        self.handles = tuple(sender.handles)
        first = sender.parts[0]
        self.named = (
            len(sender.parts) == 1
            and first.kind == Part.NAMED
            and [each.number for each in sender.files.values()] == ([first.file] if first.file else [])
            and not any(file.HasField("globals") or file.HasField("own_globals") for file in self.assembly.files)
        )

    @property
    def digest(self) -> str:
        """SHA-256, hex."""
        return hashlib.sha256(self.assembly.SerializeToString(deterministic=True) + b"\0" + self.arrays).hexdigest()


class _File:
    """A file that parts are from."""

    def __init__(self, number: int, module: types.ModuleType, source: SourceFile) -> None:
        self.number = number
        self.module = module
        self.source = source
        self.message = definition_pb2.SourceFile(module=module.__name__, path=str(source.path), digest=source.digest)


# By file and global: a digest of the value that was sent, or nothing if the receivers' own was trusted.
_given: dict[tuple[str, str, str], str] = {}
_giving = threading.Lock()


class _Sender:
    """What one assembly is made with."""

    def __init__(self, rename: Callable[[Handle], tuple[str, str]] | None) -> None:
        self._rename = rename
        self.parts: list[definition_pb2.AssemblyPart] = []
        self.files: dict[str, _File] = {}  # by module
        self.attachments: list[memoryview] = []
        self.handles: list[Handle] = []
        self._numbers: dict[int, int] = {}  # of parts, by the id of what they are
        self._kept: list[Any] = []  # lest an id is another one's
        self._globals: set[tuple[str, str, bool]] = set()
        self._code: set[int] = set()  # ids of functions that go by the place of their code
        self._followed: set[int] = set()

    # Parts

    def part_of(self, obj: Any) -> int:
        """The number of the part that this is."""
        number = self._numbers.get(id(obj))
        if number is None:
            number = self._numbers[id(obj)] = len(self.parts)
            self._kept.append(obj)
            self.parts.append(part := Part())
            self._fill(part, obj)
        return number

    def _fill(self, part: definition_pb2.AssemblyPart, obj: Any) -> None:
        if isinstance(obj, functools.partial):
            part.kind = Part.PARTIAL
            what = f"a partial of {name_of(obj.func)}"
            named = {"its function": obj.func, "its arguments": obj.args, "its keywords": obj.keywords}
            self._tuple(part, {f"{key} (of {what})": item for key, item in named.items()})
        elif isinstance(obj, types.MethodType):
            if isinstance(obj.__self__, type) and self._is_at(obj, obj.__self__.__module__, obj.__qualname__):
                self._name(part, obj.__self__.__module__, obj.__qualname__)
                self._follow(obj.__func__)
            else:
                part.kind = Part.METHOD
                self._tuple(
                    part, {f"{obj.__qualname__}": obj.__func__, f"the object of {obj.__qualname__}": obj.__self__}
                )
        elif isinstance(obj, types.ModuleType):
            part.kind, part.module = Part.MODULE, obj.__name__
            if obj.__name__ == MAIN:
                raise CannotGoByReferenceError("it uses the module __main__ as an object: use what is in it")
        elif isinstance(obj, enum.Enum):
            self._name(part, type(obj).__module__, f"{type(obj).__qualname__}.{obj.name}")
        elif isinstance(obj, PurePath):
            part.kind = Part.PATH
            part.value.text = str(obj)
        elif isinstance(obj, np.dtype):
            part.kind = Part.DTYPE
            if obj.hasobject:
                raise UnsendableError(f"is {obj!r}, whose elements are Python objects: name it inside of the function")
            self._put(np.lib.format.dtype_to_descr(obj), "a dtype", part.value)
        elif isinstance(obj, types.FunctionType):
            self._function(part, obj)
        elif isinstance(obj, type) or _has_own_name(obj):
            module, qualname = str(obj.__module__), obj.__qualname__
            if not self._is_at(obj, module, qualname):
                kind = "class" if isinstance(obj, type) else "function"
                raise CannotGoByReferenceError(
                    f"the {kind} {qualname} is not at the top of its module {module}, where the receiver could find "
                    "it: define it there"
                )
            self._name(part, module, qualname)
            self._follow(obj)
        else:
            self._object(part, obj)

    def _function(self, part: definition_pb2.AssemblyPart, function: types.FunctionType) -> None:
        module, qualname = function.__module__, function.__qualname__
        if isinstance(module, str) and self._is_at(function, module, qualname):
            self._name(part, module, qualname)
            if (file := self._file(module)) is not None and not _as_written(function, file.source):
                raise CannotGoByReferenceError(_changed(qualname, file))
        else:
            home = function.__globals__.get("__name__", "")
            loaded = sys.modules.get(home)
            if loaded is None or vars(loaded) is not function.__globals__:
                raise CannotGoByReferenceError(f"{qualname} is of no module that is imported: put it into a file")
            file = self._file(home, needed_by=qualname)
            assert file is not None, "it was needed"
            place = file.source.place_of(function.__code__)
            if place is None:
                raise CannotGoByReferenceError(_changed(qualname, file))
            part.kind, part.file, part.name = Part.CODE, file.number, function.__code__.co_name
            part.line, part.ordinal = place
            self._code.add(id(function))
            self._captured(part, function)
        self._follow(function)

    def _captured(self, part: definition_pb2.AssemblyPart, function: types.FunctionType) -> None:
        """What the function's code is to be put together with."""
        qualname = function.__qualname__
        cells = part.value.dict
        cells.keys.add(text="qualname")
        cells.values.add(text=qualname)
        for name, value in closure_of(function).items():
            cells.keys.add(text=f"cell {name}")
            self._put(value, f"its variable {name!r}", cells.values.add())
        defaults, keywords, attributes = function.__defaults__, function.__kwdefaults__, function.__dict__
        for what, found in (("defaults", defaults), ("keywords", keywords), ("attributes", attributes)):
            if found:
                cells.keys.add(text=what)
                self._put(found, f"its {what}", cells.values.add())

    def _object(self, part: definition_pb2.AssemblyPart, obj: Any) -> None:
        cls = type(obj)
        if isinstance(obj, StaysHere):
            raise UnsendableError(f"is {describe(obj)}, which {obj.why}")
        for base in cls.__mro__:
            if not _is_plain_base(base):
                own = "" if base is cls else f", which is a {base.__module__}.{base.__qualname__}"
                raise UnsendableError(
                    f"is {describe(obj)}{own}: without pickles plain data, arrays, handles, functions and objects of "
                    "your own classes travel; make it inside of the function"
                )
            for name in _REDUCERS:
                if name in vars(base) and base is not object:
                    raise UnsendableError(
                        f"is {describe(obj)}, whose class has a {name}, which is for pickles: give it as plain data"
                    )
        part.kind = Part.OBJECT
        state = obj.__getstate__()
        items = part.value.tuple.items
        self._put(cls, "its class", items.add())
        self._put(state, f"{cls.__qualname__}", items.add())

    def _name(self, part: definition_pb2.AssemblyPart, module: str, qualname: str) -> None:
        part.kind, part.module, part.name = Part.NAMED, module, qualname
        if (file := self._file(module)) is not None:
            part.file = file.number

    def _is_at(self, obj: Any, module_name: str, qualname: str) -> bool:
        """Would the receiver, whose file is the same, find it under this name?"""
        module = sys.modules.get(module_name)
        if module is None or "<" in qualname:
            return False
        found: Any = module
        for name in qualname.split("."):
            found = getattr(found, name, None)
        if found is not obj and not (isinstance(found, types.MethodType) and found == obj):
            return False
        file = self._file(module_name)
        return file is None or file.source.has_star or qualname.partition(".")[0] in file.source.bindings

    # Values

    def _tuple(self, part: definition_pb2.AssemblyPart, named: dict[str, Any]) -> None:
        items = part.value.tuple.items
        for path, value in named.items():
            self._put(value, path, items.add())

    def _put(self, obj: Any, path: str, into: value_pb2.Value) -> None:
        handles: list[Handle] = []
        try:
            encode(
                obj,
                path=path,
                attachments=self.attachments,
                inline_limit=_INLINE_LIMIT,
                remote=self._part_value,
                define=lambda cls: str(self.part_of(cls)),
                into=into,
                handles=handles,
            )
        except CannotGoByReferenceError:
            raise
        except TypeError as error:
            raise CannotGoByReferenceError(str(error)) from None
        self.handles += handles
        if self._rename is not None and handles:
            _rename_handles(into, {(each.handle_kind, each.handle_key): self._rename(each) for each in handles})

    def _part_value(self, obj: Any, _attachments: object) -> value_pb2.Value | None:
        if not _is_part(obj):
            return None
        value = value_pb2.Value()
        value.handle.kind, value.handle.key = PART, str(self.part_of(obj))
        return value

    # Files

    def _file(self, module_name: str, *, needed_by: str = "") -> _File | None:
        """The file of a module of the user's; None of an installed one."""
        known = self.files.get(module_name)
        if known is not None:
            return known
        if is_library(module_name) and not needed_by:
            return None
        if is_library(module_name):
            raise CannotGoByReferenceError(
                f"{needed_by} is defined inside of a function of the installed module {module_name}: use one that is "
                "at the top of a module"
            )
        module = sys.modules[module_name]
        path = source_of(module)
        if module_name == MAIN and (path is None or module.__spec__ is not None):
            raise CannotGoByReferenceError(
                "what is in __main__ has no file that the receiver could have: put it into a script that is started as "
                "a file, or into a module"
            )
        if path is None:
            if not needed_by:
                return None
            raise CannotGoByReferenceError(f"{needed_by} is of the module {module_name}, which has no source file")
        try:
            source = read_source(path)
        except (OSError, SyntaxError, ValueError) as error:
            raise CannotGoByReferenceError(f"{path} can't be read: {error}") from None
        if module_name == MAIN and not source.guarded:
            raise CannotGoByReferenceError(
                f'{path.name} has no `if __name__ == "__main__":`, and to take a function from it a worker has to '
                "import it: put what the script does under that line"
            )
        found = self.files[module_name] = _File(len(self.files) + 1, module, source)
        return found

    # Globals

    def _follow(self, obj: Any) -> None:
        """See to the globals that it uses, itself or by what it calls."""
        if id(obj) in self._followed:
            return
        self._followed.add(id(obj))
        self._kept.append(obj)
        if isinstance(obj, types.FunctionType):
            home = obj.__globals__.get("__name__", "")
            module = sys.modules.get(home)
            if module is None or is_library(home) or vars(module) is not obj.__globals__:
                return
            for name, attributes in _global_names(obj.__code__).items():
                # A copy of a variable is for this assembly alone, and no global of a module.
                self._global(home, name, attributes, self._rename is not None and id(obj) in self._code)
            for value in closure_of(obj).values():
                if isinstance(value, types.FunctionType | type):
                    self._follow(value)
            self._follow(attributes_of(obj).get("__wrapped__"))
        elif isinstance(obj, type):
            if not is_library(obj.__module__):
                for value in vars(obj).values():
                    self._follow(getattr(value, "__func__", getattr(value, "fget", value)))
        elif isinstance(obj, functools.partial):
            self._follow(obj.func)
        elif isinstance(obj, types.MethodType):
            self._follow(obj.__func__)
        elif obj is not None and _has_own_name(obj):
            self._follow(attributes_of(obj).get("__wrapped__"))

    def _global(self, module_name: str, name: str, attributes: set[str], own: bool) -> None:
        """See to one. With `own` it is for a function that is given globals of its own."""
        module = sys.modules[module_name]
        if is_library(module_name) or name not in vars(module) or name.startswith("__"):
            return  # built in, or the module's own; or it will be an error there as it would be here
        value = vars(module)[name]
        if isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is value:
            for attribute in attributes & vars(value).keys():
                self._global(value.__name__, attribute, attributes, False)
        if (module_name, name, own) in self._globals:
            return
        self._globals.add((module_name, name, own))
        file = self._file(module_name)
        if file is None:
            return
        sent = value_pb2.Value()
        if not self._is_same_there(file, name, value):
            self._put_global(file, name, value, own, sent)
        elif holds_code(value):
            self._follow(value)
        if not own:
            self._check_given(file, name, sent)
        if sent.WhichOneof("kind") is not None:
            found = file.message.own_globals.dict if own else file.message.globals.dict
            found.keys.add(text=name)
            found.values.add().CopyFrom(sent)

    def _is_same_there(self, file: _File, name: str, value: Any) -> bool:
        """Does the receiver's file make the same of it?"""
        if isinstance(value, Handle) or (not holds_code(value) and holds_handle(value)):
            return False
        binding = file.source.bindings.get(name)
        if binding is None:
            return file.source.has_star
        if binding.origin == "import":
            return binding.value is None or _imported(*binding.value) is value
        if binding.origin == "definition":
            return True
        if binding.origin == "function":
            return isinstance(value, types.FunctionType) and _as_written(value, file.source)
        if binding.origin == "literal":
            return type(binding.value) is type(value) and repr(binding.value) == repr(value)
        return not _is_data(value)

    def _put_global(self, file: _File, name: str, value: Any, own: bool, into: value_pb2.Value) -> None:
        before = len(self.handles)
        self._put(value, f"the global {name!r} of {file.source.path.name}", into)
        binding = file.source.bindings.get(name)
        if hasattr(builtins, name) if binding is None else _is_fixed(binding, into):
            raise CannotGoByReferenceError(
                f"it uses the global {name!r} of {file.source.path.name}, which is another one than the file imports "
                "or defines under that name, or than what is built in: give it another name, or pass it as an argument"
            )
        if self._rename is None or own:
            return
        renamed = any(self._rename(each) != (each.handle_kind, each.handle_key) for each in self.handles[before:])
        if renamed or any(each.handle.kind == PART for each in _walk(into)):
            raise CannotGoByReferenceError(
                f"it reaches variables through the global {name!r} of {file.source.path.name}, by way of another "
                "function, and is to have copies of them: pass that function what it needs as arguments"
            )

    def _check_given(self, file: _File, name: str, sent: value_pb2.Value) -> None:
        """A module has one value of a global, whatever functions use it."""
        mark = ""
        if sent.WhichOneof("kind") is not None:
            if holds_parts(sent):
                return  # functions and objects: the latest ones count
            mark = self._mark_of(sent)
        key = str(file.source.path), file.source.digest, name
        with _giving:
            before = _given.setdefault(key, mark)
        if before != mark:
            raise CannotGoByReferenceError(
                f"it uses the global {name!r} of {file.source.path.name}, which was another one when a function was "
                "sent before, and a worker has one of each global: pass it as an argument"
            )

    def _mark_of(self, sent: value_pb2.Value) -> str:
        """Tells values apart, wherever their arrays stand among the attachments."""
        plain = value_pb2.Value()
        plain.CopyFrom(sent)
        digest = hashlib.sha256()
        for each in _walk(plain):
            if each.array.attachment:
                digest.update(self.attachments[each.array.attachment - 1])
                each.array.attachment = 1
        digest.update(plain.SerializeToString(deterministic=True))
        return digest.hexdigest()


def _is_plain_base(base: type) -> bool:
    """Is the state of an object in what Python keeps of it? Of the user's classes and ours, and of mere interfaces."""
    if base in _BASES or not is_library(base.__module__) or base.__module__.startswith("pscluster."):
        return True
    if not base.__flags__ & PYTHON_CLASS or any(name in vars(base) for name in _STATEFUL):
        return False
    return not any(isinstance(attribute, _OF_EXTENSIONS) for attribute in vars(base).values())


def holds_code(value: Any) -> bool:
    """Is this a function, a class, or something made of one?"""
    return isinstance(
        value, types.FunctionType | type | types.MethodType | functools.partial | types.ModuleType
    ) or _has_own_name(value)


def holds_parts(value: value_pb2.Value) -> bool:
    """Is it, or does it hold, more than data and handles?"""
    return any(each.handle.kind == PART or each.WhichOneof("kind") == "record" for each in _walk(value))


def name_of(function: Any) -> str:
    """For people."""
    while isinstance(function, functools.partial) and "__qualname__" not in vars(function):
        function = function.func
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]


def _imported(module: str, name: str | None) -> Any:
    found = sys.modules.get(module)
    return found if name is None else getattr(found, name, sys.modules.get(f"{module}.{name}"))


def _has_own_name(obj: Any) -> bool:
    """Built-in functions, what decorators such as `functools.cache` make, NumPy's functions."""
    return callable(obj) and all(isinstance(getattr(obj, name, None), str) for name in ("__module__", "__qualname__"))


def _is_part(obj: Any) -> bool:
    """Is it none of what values can carry, but what an assembly can?"""
    if isinstance(obj, enum.Enum | type | types.FunctionType | functools.partial | np.dtype | PurePath):
        return True
    if isinstance(obj, (Handle, np.generic, np.ndarray, *_PLAIN)) or is_record_class(type(obj)):
        return False
    if not isinstance(obj, types.ModuleType) and hasattr(obj, "__array__"):
        raise UnsendableError(f"is {describe(obj)}, which would arrive as an array of NumPy: make it one before")
    return True


def _is_data(value: Any) -> bool:
    """Does it arrive as the very same, of the same types?"""
    todo, seen = [value], set[int]()
    while todo:
        each = todo.pop()
        cls = type(each)
        if cls in (list, tuple, set, frozenset, dict):
            if id(each) not in seen:
                seen.add(id(each))
                todo += [*each, *each.values()] if cls is dict else each
        elif isinstance(each, np.generic) or cls is np.ndarray:
            if each.dtype.hasobject:
                return False
        elif each is not None and cls not in _SCALARS:
            return False
    return True


def _as_written(function: types.FunctionType, source: SourceFile) -> bool:
    """Is its code in the file? Of a decorator's wrapper, whose code is in another one, nothing is said."""
    code = function.__code__
    return Path(code.co_filename).absolute() != source.path or source.place_of(code) is not None


def _is_fixed(binding: Binding, sent: value_pb2.Value) -> bool:
    """Would the receiver keep what its own file makes of this global?"""
    return binding.origin == "definition" or (binding.origin == "import" and holds_parts(sent))


def _changed(qualname: str, file: _File) -> str:
    return (
        f"the code of {qualname} is not in {file.source.path}: the file was changed since it was loaded, or a "
        "decorator or `exec` has made it. Start the script again, or write the function out at the top of the file"
    )


def _global_names(code: types.CodeType) -> dict[str, set[str]]:
    """The globals that code uses, functions inside it included, and the names of attributes that it asks for."""
    found, attributes = set[str](), set[str]()
    todo = [code]
    while todo:
        code = todo.pop()
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                found.add(instruction.argval)
            elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                attributes.add(instruction.argval)
        todo += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return dict.fromkeys(sorted(found), attributes)


def _walk(value: value_pb2.Value) -> Iterator[value_pb2.Value]:
    todo = [value]
    while todo:
        value = todo.pop()
        yield value
        todo += children(value, value.WhichOneof("kind"))


def _rename_handles(value: value_pb2.Value, names: dict[tuple[str, str], tuple[str, str]]) -> None:
    for each in _walk(value):
        if each.WhichOneof("kind") == "handle":
            place = each.handle.kind, each.handle.key
            each.handle.kind, each.handle.key = names.get(place, place)
