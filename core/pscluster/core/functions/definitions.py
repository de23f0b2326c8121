"""Definitions: functions and classes that travel once, and are then referred to by their digest.

By reference, where the worker can find the very same: a name in a module that it can import, or in the user's
script where loading that does nothing but define (`pscluster.core.functions.scripts` says when). The file's digest
goes along, so that a worker with another version says so. By value, as a cloudpickle, in all other cases, and
when a worker answers that it can't follow the reference.

Where pickles are off nothing goes by value: what a reference to a file can't say goes beside it, as data
(`pscluster.core.functions.assembling`), and classes of the script go by reference, too.

What is captured is what is there at that moment: a function by value is pickled when it is captured. A
function by reference is pickled only if a worker asks for it.

One class never goes both ways to one worker, as the two would be different classes to `isinstance`: classes
of the script always go by value, those of a module by reference unless it holds handles or the worker has
not got it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import logging
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from pscluster.core.errors import ProtocolError, PsClusterError
from pscluster.core.functions.assembling import Assembled, CannotGoByReferenceError, name_of
from pscluster.core.functions.assembly import assemble, found_in
from pscluster.core.functions.by_value import Rename, dump, largest_captured, load, module_name_of
from pscluster.core.functions.own_modules import import_checked
from pscluster.core.functions.policy import Trust, trust
from pscluster.core.functions.scripts import MAIN, UnresolvedReference, load_script, loaded_scripts, script_file
from pscluster.core.functions.source_files import codes_in
from pscluster.core.functions.sources import (
    digest_of,
    import_folders,
    is_library,
    reaches_edited,
    reaches_handle,
    source_of,
)
from pscluster.core.values import HandleResolver, RecordResolver, describe, imported_class
from pscluster.core.values.handles import Handle
from pscluster.core.values.records import is_record_class
from pscluster.v1 import definition_pb2

__all__ = [
    "CapturedFunction",
    "FunctionHandle",
    "UnresolvedReference",
    "capture",
    "class_definition",
    "name_of",
    "needs_definition",
    "partial_of",
    "record_resolver",
    "resolve",
    "split_off_bulk",
]

logger = logging.getLogger(__name__)

LARGE_BYTES = 64 << 20
"""A function that brings more with it is warned of, with what of it is large."""


@dataclass(frozen=True, eq=False, repr=False)
class CapturedFunction:
    """A function (or class) as it was when it was captured."""

    digest: str
    """SHA-256, hex. The same function captured again, unchanged, has the same."""
    name: str
    """For people."""
    by_reference: definition_pb2.Definition | None
    """The definition to try first, if it may go by reference."""

    _function: Any  # only of one by reference: the others may be forgotten, as a cache of these by function wants
    _origin: definition_pb2.Definition
    _pickles: list[bytes] = field(default_factory=list)
    handles: tuple[Handle, ...] = ()  # what it captured stays in use for as long as it may be sent
    _only: definition_pb2.Definition | None = None  # without pickles: the one form that there is
    _renamed: tuple[definition_pb2.Renamed, ...] = ()  # of the handles: what they are to be
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def nbytes(self) -> int:
        """Of what was captured with it, about; of one by reference none."""
        return len(self._pickles[0]) if self._pickles else len(self._origin.arrays)

    @property
    def functions(self) -> Iterator[CapturedFunction]:
        """Those that it was captured with, inside of it: a receiver needs them first."""
        return (handle.function for handle in self.handles if isinstance(handle, FunctionHandle))

    def renamed(self, rename: Rename) -> CapturedFunction:
        """The same, as captured, but for the handles: `rename` is called with each for what it is to be.

        Not of one that goes without a pickle, whose handles may be globals of a module that others use, too.
        """
        renamed, digest = [], hashlib.sha256(self.digest.encode())
        for handle in {(handle.handle_kind, handle.handle_key): handle for handle in self.handles}.values():
            kind, key = rename(handle)
            if (kind, key) != (handle.handle_kind, handle.handle_key):
                new = definition_pb2.Renamed(kind=handle.handle_kind, key=handle.handle_key, new_kind=kind, new_key=key)
                renamed.append(new)
                digest.update(new.SerializeToString(deterministic=True))
        if not renamed:
            return self
        return replace(self, digest=digest.hexdigest(), _renamed=tuple(renamed))

    def by_value(self) -> bytes:
        """The pickle. Of a function by reference it is made now, with all that it uses of its own module.

        Raises:
            TypeError: it can't be pickled.
        """
        with self._lock:
            if not self._pickles:
                self._pickles.append(dump(self._function, self.name, whole=True).data)
            return self._pickles[0]

    def forms(self) -> Iterator[definition_pb2.Definition]:
        """The definitions to send a worker, in this order, for as long as it answers `unresolved`.

        First by reference, if it may go so. Then by value, with what it uses of its own module by name; last,
        for a worker that lacks that module, by value with that too.

        Raises:
            TypeError: it turns out that it can't be pickled.
        """
        if self._only is not None:
            yield self._only
            return
        if self.by_reference is not None:
            yield self.by_reference
        self.by_value()
        pickles = list(self._pickles)
        for pickled in pickles:
            form = definition_pb2.Definition()
            form.CopyFrom(self._origin)
            form.digest, form.pickle = self.digest, pickled
            form.renamed.extend(self._renamed)
            if pickled is pickles[-1]:
                form.source_digest = ""  # it brings what it needs of that module
            yield form

    def __repr__(self) -> str:
        way = "by value" if self.by_reference is None and self._only is None else "by reference"
        return f"<CapturedFunction {self.name} {way}, {self.digest[:12]}>"


class FunctionHandle(Handle):
    """A captured function inside of one that is captured: the receiver has it by its digest."""

    handle_kind: ClassVar[str] = "function"

    def __init__(self, function: CapturedFunction) -> None:
        """`function`: it is sent before whatever names this."""
        self.function = function

    @property
    def handle_key(self) -> str:
        """The function's digest."""
        return self.function.digest


def capture(
    function: Any, rename: Rename | None = None, *, trusted: Trust | None = None, holds_data: bool = False
) -> CapturedFunction:
    """Capture a function, or whatever else can be called, with what it refers to.

    Args:
        function: to be captured.
        rename: called with each handle that it reaches, for kind and key of what it is to have instead.
        trusted: whether it may be pickled; default: as in this process.
        holds_data: it is there for the data that it brings with it; else a warning names what is very large.

    Raises:
        TypeError: it can't be called, or something it captured can't be sent. The message names the variable.
    """
    if not callable(function):
        raise TypeError(f"{describe(function)} can't be scheduled: pass a function")
    captured = _captured(function, name_of(function), rename, trusted or trust())
    if captured.nbytes > LARGE_BYTES and not holds_data:
        label, part, size = largest_captured(function)
        most = f", {size >> 20:,} of them its variable {label!r}, {describe(part)}" if label else ""
        logger.warning(
            "%s takes %s MiB with it to every worker%s: make that a Variable or a dataset, or load it in the function",
            captured.name,
            f"{captured.nbytes >> 20:,}",
            most,
        )
    return captured


def _captured(function: Any, name: str, rename: Rename | None, trusted: Trust) -> CapturedFunction:
    if not trusted.pickles:
        return _without_pickle(function, name, rename, trusted)
    reference = _reference_to(function)
    # What workers have imported they keep: what is of another version of a file goes with all that it is made of.
    edited = reference is not None and reaches_edited(function)
    if reference is not None and not edited:
        return CapturedFunction(reference.digest, name, reference, function, _origin(function))
    dumped = dump(function, name, whole=edited, rename=rename)
    pickles, origin = [dumped.data], _origin(function)
    if dumped.names_own_module and not is_library(module_name_of(function)):
        # Made now, not when a worker asks for it: what was captured may change. If it can't be made, the
        # worker needs the module.
        with contextlib.suppress(TypeError):
            pickles.append(dump(function, name, whole=True, rename=rename).data)
    digest = hashlib.sha256(dumped.data).hexdigest()
    return CapturedFunction(digest, name, None, None, origin, pickles, dumped.handles)


def _without_pickle(function: Any, name: str, rename: Rename | None, trusted: Trust) -> CapturedFunction:
    try:
        assembled = Assembled(function, rename)
    except CannotGoByReferenceError as error:
        raise TypeError(f"{name} can't be sent without a pickle: {error}. And {trusted.why}") from None
    if not assembled.named:
        form = definition_pb2.Definition(assembly=assembled.assembly, arrays=assembled.arrays)
        form.digest, form.module, form.qualname = assembled.digest, module_name_of(function), name
        return CapturedFunction(form.digest, name, None, None, form, handles=assembled.handles, _only=form)
    part = assembled.assembly.parts[0]
    path, digest = None, ""
    if part.file:
        path, digest = Path(assembled.assembly.files[0].path), assembled.assembly.files[0].digest
    form = _definition(part.module, part.name, path, digest)
    return CapturedFunction(form.digest, name, form, None, form, _only=form)


def class_definition(cls: type, *, trusted: Trust | None = None) -> CapturedFunction:
    """Capture a class whose instances are to be sent, so that workers can be told of it like of a function.

    Raises:
        TypeError: no class, or one that can't be sent.
    """
    if not isinstance(cls, type):
        raise TypeError(f"{describe(cls)} is no class")
    return capture(cls, trusted=trusted)


def needs_definition(cls: type) -> bool:
    """May a worker be unable to find this class by its name? True for all but those of installed modules."""
    return not is_library(cls.__module__)


def split_off_bulk(form: definition_pb2.Definition) -> bytes:
    """Take the pickle, or an assembly's arrays, out of a definition: they travel behind the message that it is in."""
    bulk = form.arrays if form.HasField("assembly") else form.pickle
    form.ClearField("pickle")
    form.ClearField("arrays")
    return bulk


def partial_of(name: str, function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """`functools.partial` of a function and its first arguments, under a name for people."""
    made: Any = functools.partial(function, *args)
    made.__qualname__ = name
    return made  # type: ignore[no-any-return]  # a partial can be called


def _reference_to(function: Any) -> definition_pb2.Definition | None:
    module_name = getattr(function, "__module__", None)
    qualname = getattr(function, "__qualname__", None)
    if not isinstance(module_name, str) or not isinstance(qualname, str):
        return None
    if module_name == MAIN:
        if (script := script_file(function)) is None or reaches_handle(function):
            return None
        return _definition(MAIN, qualname, *script)
    module = sys.modules.get(module_name)
    if module is None or not _is_found(function, module, qualname) or reaches_handle(function):
        return None
    path = source_of(module)
    if path is None:
        return _definition(module_name, qualname, None, "")
    if not is_library(module_name) and not _as_written(function, path):
        return None
    return _definition(module_name, qualname, path, digest_of(path))


def _origin(function: Any) -> definition_pb2.Definition:
    """Where a function by value comes from.

    What the pickle names of the function's own module must come from the same version of it.
    """
    module_name = module_name_of(function)
    module = sys.modules.get(module_name)
    path = source_of(module) if module is not None and not is_library(module_name) else None
    origin = definition_pb2.Definition(module=module_name, folders=import_folders())
    if path is not None:
        origin.source_path = str(path)
        origin.source_digest = "" if module_name == MAIN else digest_of(path)
    return origin


def _definition(module: str, qualname: str, path: Path | None, source_digest: str) -> definition_pb2.Definition:
    named = "\0".join(["reference", module, qualname, source_digest])
    return definition_pb2.Definition(
        digest=hashlib.sha256(named.encode()).hexdigest(),
        module=module,
        qualname=qualname,
        source_path=str(path) if path else "",
        source_digest=source_digest,
        folders=import_folders(),
    )


def _is_found(function: Any, module: types.ModuleType, qualname: str) -> bool:
    found: Any = module
    for name in qualname.split("."):
        found = getattr(found, name, None)
    # A bound method is a new object every time it is looked up.
    return found is function or (isinstance(found, types.MethodType | types.BuiltinMethodType) and found == function)


def _as_written(function: Any, path: Path) -> bool:
    """Is the function's code still what its file says? It is not if the file was edited since, for one."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if not isinstance(code, types.CodeType) or Path(code.co_filename).absolute() != path:
        return True  # a class, a decorator's wrapper: nothing to compare
    try:
        return code in codes_in(compile(path.read_bytes(), str(path), "exec", dont_inherit=True))
    except (OSError, SyntaxError, ValueError):
        return False


def resolve(
    definition: definition_pb2.Definition, bulk: bytes | memoryview, resolve_handle: HandleResolver
) -> Callable[..., Any]:
    """The function of a definition, on a worker: from its pickle, or without one by its reference.

    Args:
        definition: see there.
        bulk: what `split_off_bulk` took out of it, if it did.
        resolve_handle: what gives this worker's own handles.

    Raises:
        MisuseError: it is a pickle, or names what peers may not name, where pickles are off.
        UnresolvedReference: it names something that is not here or is another version, or its pickle does.
    """
    resolve_handle = _renaming(definition.renamed, resolve_handle)
    try:
        try:
            found = _find(definition, bulk, resolve_handle)
        except ModuleNotFoundError:
            if not _look_further(definition):
                raise
            found = _find(definition, bulk, resolve_handle)
        _look_further(definition)  # for what it imports only when it runs
    except PsClusterError:
        raise
    except (Exception, SystemExit) as error:  # whatever modules do when they are imported, and classes when made
        mend = "or register the module with cloudpickle.register_pickle_by_value"
        if not trust().pickles:
            mend = "or name the folder that it is in with --functions-from"
        raise UnresolvedReference(
            f"{definition.qualname or 'it'} can't be loaded on this worker ({type(error).__name__}: {error}): "
            f"install what it imports there, {mend}"
        ) from error
    if not callable(found):
        raise UnresolvedReference(f"{definition.module}.{definition.qualname} can't be called here")
    return found  # type: ignore[no-any-return]  # callable() narrows Any to Any


def _renaming(renamed: Sequence[definition_pb2.Renamed], resolve_handle: HandleResolver) -> HandleResolver:
    if not renamed:
        return resolve_handle
    places = {(each.kind, each.key): (each.new_kind, each.new_key) for each in renamed}
    return lambda kind, key: resolve_handle(*places.get((kind, key), (kind, key)))


def _find(definition: definition_pb2.Definition, bulk: bytes | memoryview, resolve_handle: HandleResolver) -> Any:
    if definition.HasField("assembly"):
        return assemble(definition.assembly, memoryview(bulk or definition.arrays), resolve_handle)
    if data := bulk or definition.pickle:
        trust().check_pickle()  # before anything is imported for it
        if definition.source_digest:
            import_checked(definition.module, definition.source_digest)
        return load(data, resolve_handle)
    found: Any
    if definition.module == MAIN:
        found = load_script(definition.source_path, definition.source_digest)
    else:
        found = import_checked(definition.module, definition.source_digest)
    if not trust().pickles:
        return found_in(found, definition.qualname)
    for name in definition.qualname.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise UnresolvedReference(f"{definition.module} has no {definition.qualname} here") from None
    return found


def _look_further(definition: definition_pb2.Definition) -> bool:
    """Import from where the coordinator does, as far as that is here, and from the worker's own folder too.

    Behind what is imported from already, and not where pickles are off: there peers name no folders.
    """
    if not trust().pickles:
        return False
    path = Path(definition.source_path)
    folders = [Path.cwd(), *map(Path, definition.folders)]
    if definition.source_path:
        above = 0 if definition.module == MAIN else definition.module.count(".") + (path.name == "__init__.py")
        folders.insert(0, path.parents[min(above, len(path.parents) - 1)])
    missing = [str(folder) for folder in dict.fromkeys(folders) if str(folder) not in sys.path]
    new = [folder for folder in missing if os.path.isdir(folder)]
    if new:
        sys.path.extend(new)
        importlib.invalidate_caches()
    return bool(new)


def record_resolver(definition: Callable[[str], Any] | None = None, *, may_import: bool = True) -> RecordResolver:
    """How `decode` finds the classes of records: by definition if they have one, else by name.

    Args:
        definition: what was defined under a digest; it raises ProtocolError for one that it does not know.
        may_import: a worker may import modules to find a class, as it runs what the coordinator says anyway.
            The coordinator, which reads what workers say, must not.
    """

    def resolve_record(digest: str, module: str, qualname: str) -> type:
        if digest and definition is not None:
            found = definition(digest)
            if not isinstance(found, type):
                raise ProtocolError(f"{module}.{qualname} was defined as something that is no class")
            return found
        trust().check_name(module, qualname)
        if may_import:
            if module == MAIN:
                return _class_of_script(qualname)
            _try_import(module)
        return imported_class(digest, module, qualname)

    return resolve_record


def _class_of_script(qualname: str) -> type:
    for script in [*(module.__name__ for module in loaded_scripts()), MAIN]:
        try:
            found = imported_class("", script, qualname)
        except ProtocolError:
            continue
        if is_record_class(found):
            return found
    raise ProtocolError(f"a record of the script's class {qualname}, which this worker was not told of")


def _try_import(module: str) -> None:
    if module not in sys.modules:
        try:
            import_checked(module, "")
        except (Exception, SystemExit) as error:
            raise ProtocolError(f"a record of a class in {module}, which can't be imported here: {error}") from error
