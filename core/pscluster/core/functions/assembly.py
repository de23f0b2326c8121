"""Functions without pickles, as they are received: put together from this machine's own files, and data.

See `pscluster.core.functions.assembling` for what is sent. Nothing that comes is believed: where pickles are off, files
must lie in this role's own folders (`pscluster.core.functions.policy`), and what is named must be defined where it is
said to be: a module that has imported `os` does not lend its name to `os.system`. Code and globals are those of the
user's own files, and no global takes the place of what a file imports, of a class, or of what is built in: the code
does with what it was sent what it was written to do. Whatever the message, the outcome is what was meant, or an error.
"""

from __future__ import annotations

import builtins
import enum
import functools
import importlib.util
import types
from pathlib import Path
from typing import Any

from pscluster.core.errors import MisuseError, ProtocolError
from pscluster.core.functions.assembling import MAIN, PART, Part, holds_code, holds_parts
from pscluster.core.functions.own_modules import import_checked, import_object, is_own
from pscluster.core.functions.policy import trust
from pscluster.core.functions.scripts import UnresolvedReference, load_script
from pscluster.core.functions.source_files import SourceFile, read_source
from pscluster.core.functions.sources import source_of
from pscluster.core.values import HandleResolver, decode
from pscluster.core.values.arrays import plain_dtype
from pscluster.core.values.records import MODULE_MARK, PYTHON_CLASS
from pscluster.v1 import definition_pb2, value_pb2

_MAX_PARTS = 100_000


def assemble(assembly: definition_pb2.Assembly, arrays: memoryview, resolve_handle: HandleResolver) -> Any:
    """What was sent.

    Raises:
        UnresolvedReference: it names a file, or something in one, that is not here or is another version.
        MisuseError: it names what peers may not name here.
        ProtocolError: it makes no sense.
    """
    if not assembly.parts or len(assembly.parts) > _MAX_PARTS:
        raise ProtocolError(f"an assembly of {len(assembly.parts)} parts; it needs 1 to {_MAX_PARTS}")
    if sum(assembly.sizes) != len(arrays):
        raise ProtocolError(f"an assembly of {sum(assembly.sizes)} bytes of arrays, but {len(arrays)} came")
    try:
        return _Receiver(assembly, arrays, resolve_handle).all()
    except RecursionError:
        raise ProtocolError("the parts of an assembly lie too deep inside each other") from None


class _Receiver:
    """What one assembly is put together with."""

    def __init__(self, assembly: definition_pb2.Assembly, arrays: memoryview, resolve_handle: HandleResolver) -> None:
        self._assembly = assembly
        self._resolve_handle = resolve_handle
        self._arrays: list[memoryview] = []
        at = 0
        for size in assembly.sizes:
            self._arrays.append(arrays[at : at + size])
            at += size
        self._modules = [_module_of(file) for file in assembly.files]
        # Globals for the code in the assembly alone, where it has some: the module's with others in their places.
        self._own: list[dict[str, Any] | None] = [
            dict(vars(module)) if file.HasField("own_globals") else None
            for file, module in zip(assembly.files, self._modules, strict=True)
        ]
        self._made: dict[int, Any] = {}
        self._making: set[int] = set()

    def all(self) -> Any:
        """The first part, once all globals are set that the parts use."""
        for number, (file, module) in enumerate(zip(self._assembly.files, self._modules, strict=True)):
            if file.HasField("globals"):
                vars(module).update(self._globals_in(number, file.globals))
        for number, own in enumerate(self._own):
            if own is not None:
                own.update(vars(self._modules[number]))
                own.update(self._globals_in(number, self._assembly.files[number].own_globals))
        return self._part(0)

    def _globals_in(self, number: int, value: value_pb2.Value) -> dict[str, Any]:
        file = self._assembly.files[number]
        source = None if trust().pickles else self._source(number)
        found = self._decoded(value)
        if not isinstance(found, dict) or not all(type(name) is str for name in found):
            raise ProtocolError(f"the globals of {file.path} are no names with values")
        if any(name.startswith("__") for name in found):
            raise ProtocolError(f"globals of {file.path} that begin with two underscores are Python's own")
        if source is not None:
            sent = dict(zip((key.text for key in value.dict.keys), value.dict.values, strict=False))
            for name, each in found.items():
                _check_global(
                    source, self._modules[number], name, each, is_data=name in sent and not holds_parts(sent[name])
                )
        return found

    def _source(self, number: int) -> SourceFile:
        """What a file says whose code, or whose globals, a peer uses."""
        module = self._modules[number]
        path = source_of(module)
        if path is None:
            raise UnresolvedReference(f"{module.__name__} has no source file here")
        if not trust().pickles and not is_own(module):
            raise MisuseError(
                f"{path} is no file of this role's own folders: as pickles are off here, peers may name what it "
                "defines at its top, if anything, and no more"
            )
        try:
            return read_source(path, self._assembly.files[number].digest)
        except (OSError, SyntaxError, ValueError):
            raise UnresolvedReference(f"{path} was changed since it was loaded here: start this role again") from None

    def _imported(self) -> set[str]:
        """The modules that the user's files here import."""
        own = [number for number, module in enumerate(self._modules) if is_own(module)]
        return {imported for number in own for _, imported in self._source(number).imports}

    def _part(self, number: int) -> Any:
        if number in self._made:
            return self._made[number]
        if number in self._making or not 0 <= number < len(self._assembly.parts):
            raise ProtocolError(f"part {number} of an assembly is not there, or inside of itself")
        self._making.add(number)
        made = self._made[number] = self._make(number, self._assembly.parts[number])
        return made

    def _make(self, number: int, part: definition_pb2.AssemblyPart) -> Any:
        match part.kind:
            case Part.NAMED:
                return self._named(part)
            case Part.CODE:
                return self._function(number, part)
            case Part.PARTIAL:
                match self._decoded(part.value):
                    case (function, tuple() as args, dict() as keywords) if callable(function):
                        return functools.partial(function, *args, **keywords)
            case Part.METHOD:
                match self._decoded(part.value):
                    case (types.FunctionType() as function, owner) if owner is not None:
                        return types.MethodType(function, owner)
            case Part.OBJECT:
                return self._object(number, part)
            case Part.MODULE:
                return import_object(part.module, set() if trust().pickles else self._imported())
            case Part.PATH:
                return Path(part.value.text)
            case Part.DTYPE:
                return plain_dtype(self._decoded(part.value))
        raise ProtocolError(f"part {number} of an assembly is of no known kind, or not made as its kind is")

    def _decoded(self, value: value_pb2.Value) -> Any:
        def handle(kind: str, key: str) -> Any:
            return self._part(_number(key)) if kind == PART else self._resolve_handle(kind, key)

        return decode(value, attachments=self._arrays, resolve_handle=handle, resolve_record=self._record_class)

    def _record_class(self, part: str, _module: str, _qualname: str) -> type:
        found = self._part(_number(part))
        if not isinstance(found, type):
            raise ProtocolError("a record of something that is no class")
        return found

    def _file(self, part: definition_pb2.AssemblyPart) -> types.ModuleType:
        if not 0 < part.file <= len(self._modules):
            raise ProtocolError(f"a part of file {part.file} of {len(self._modules)}")
        return self._modules[part.file - 1]

    def _named(self, part: definition_pb2.AssemblyPart) -> Any:
        module = self._file(part) if part.file else import_checked(part.module, "")
        return found_in(module, part.name)

    def _function(self, number: int, part: definition_pb2.AssemblyPart) -> types.FunctionType:
        module = self._file(part)
        source = self._source(part.file - 1)
        codes = source.at(part.name, part.line)
        if part.ordinal >= len(codes):
            raise UnresolvedReference(f"{source.path} has no {part.name} in line {part.line} here")
        code = codes[part.ordinal]
        cells = {name: types.CellType() for name in code.co_freevars}
        own = self._own[part.file - 1]
        namespace = vars(module) if own is None else own
        function = types.FunctionType(code, namespace, part.name, None, tuple(cells.values()))
        self._made[number] = function  # it may be among its own variables
        captured = self._decoded(part.value)
        if not isinstance(captured, dict):
            raise ProtocolError(f"what {part.name} captured is no dict")
        for what, value in captured.items():
            match what, value:
                case "qualname", str():
                    function.__qualname__ = value
                case "defaults", tuple():
                    function.__defaults__ = value
                case "keywords", dict():
                    function.__kwdefaults__ = value
                case "attributes", dict():
                    function.__dict__.update(value)
                case str(), _ if what.startswith("cell ") and what[5:] in cells:
                    if not trust().pickles:
                        _check_imported(source, module, what[5:], value)
                    cells[what[5:]].cell_contents = value
                case _:
                    raise ProtocolError(f"{part.name} came with {what!r:.40}, which it has no use for")
        return function

    def _object(self, number: int, part: definition_pb2.AssemblyPart) -> Any:
        items = part.value.tuple.items
        if len(items) != 2:
            raise ProtocolError("an object that is not a class and a state")
        cls = self._decoded(items[0])
        if not isinstance(cls, type) or not all(base.__flags__ & PYTHON_CLASS for base in cls.__mro__[:-1]):
            raise ProtocolError("an object of something that is no class of Python's making")
        made: Any = object.__new__(cls)
        self._made[number] = made  # it may be inside of itself
        _set_state(made, self._decoded(items[1]))
        return made


def _check_global(source: SourceFile, module: types.ModuleType, name: str, value: Any, *, is_data: bool) -> None:
    """MisuseError if this is no global that may be another one than the file makes."""
    binding, before = source.bindings.get(name), vars(module).get(name)
    match binding.origin if binding is not None else "":
        case "":
            fixed = hasattr(builtins, name) or (source.has_star and holds_code(before))
        case "import":
            fixed = not is_data or holds_code(before)  # data of another file, which holds variables by now
        case "computed":
            fixed = holds_code(before)  # imports and definitions that are tried one after the other, among others
        case origin:
            fixed = origin == "definition"
    if fixed or (isinstance(before, types.ModuleType) and value is not before):
        raise MisuseError(
            f"the global {name!r} of {source.path.name} was sent, but the file imports or defines it, or it is built "
            "in: as pickles are off here, it can be nothing else. Give what is sent another name, or pass it as an "
            "argument"
        )
    _check_imported(source, module, name, value)


def _check_imported(source: SourceFile, module: types.ModuleType, name: str, value: Any) -> None:
    """MisuseError if a module stands where the file imports another one."""
    if not isinstance(value, types.ModuleType):
        return
    imported = sorted(each for known, each in source.imports if known == name)
    if imported and value.__name__ not in [_absolute(each, module) for each in imported]:
        raise MisuseError(f"{source.path.name} imports {', '.join(imported)} as {name}, but {value.__name__} was sent")


def _absolute(imported: str, module: types.ModuleType) -> str:
    try:
        return importlib.util.resolve_name(imported, vars(module).get("__package__"))
    except ImportError:
        return imported


def _set_state(made: Any, state: Any) -> None:
    own = getattr(made, "__setstate__", None)
    if own is not None:
        own(state)
        return
    attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    for each in (attributes, slots):
        if each is None:
            continue
        if not isinstance(each, dict) or not all(isinstance(name, str) for name in each):
            raise ProtocolError(f"the state of {type(made).__qualname__} is no names with values")
    if attributes:
        vars(made).update(attributes)
    for name, value in (slots or {}).items():
        object.__setattr__(made, name, value)


def found_in(module: types.ModuleType, qualname: str) -> Any:
    """What is defined in a module under this name.

    Raises:
        UnresolvedReference: nothing is, or what was imported from elsewhere.
        MisuseError: it is pscluster's own, and not for peers to name.
    """
    trust().check_name(module.__name__, qualname)
    found: Any = module
    names = qualname.split(".")
    for place, name in enumerate(names):
        if place and not isinstance(found, type):
            break
        try:
            found = getattr(found, name)
        except AttributeError:
            break
    else:
        home = getattr(found, "__module__", None)
        alias = vars(module).get(MODULE_MARK, module.__name__)
        if (isinstance(found, enum.Enum | type) or callable(found)) and home in (module.__name__, alias):
            return found
    raise UnresolvedReference(f"{module.__name__} defines no {qualname} here")


def _module_of(file: definition_pb2.SourceFile) -> types.ModuleType:
    if file.module == MAIN:
        return load_script(file.path, file.digest)
    return import_checked(file.module, file.digest)


def _number(key: str) -> int:
    return int(key) if key.isascii() and key.isdecimal() and len(key) < 10 else -1
