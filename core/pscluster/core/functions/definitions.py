"""Definitions: functions and classes that travel once, and are then referred to by their digest.

By reference, where the worker can find the very same (`pscluster.core.functions.by_reference` says when). The file's
digest goes along, so that a worker with another version says so. By value, as a cloudpickle, in all other cases, and
when a worker answers that it can't follow the reference; nothing goes by value where pickles are off.

What is captured is what is there at that moment: a function by value is pickled when it is captured. A
function by reference is pickled only if a worker asks for it.

One class never goes both ways to one worker, as the two would be different classes to `isinstance`: where pickles may
travel, classes of the script always go by value, those of a module by reference unless it holds handles or the worker
has not got it.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from pscluster.core.errors import ProtocolError, PsClusterError
from pscluster.core.functions.by_reference import MAIN, NotByReferenceError, WithoutPickle, reference_to
from pscluster.core.functions.by_value import dump, largest_captured, load, module_name_of
from pscluster.core.functions.loading import UnresolvedReference, found_by, import_checked, loaded_scripts
from pscluster.core.functions.policy import SerializationPolicy, chosen_policy
from pscluster.core.functions.sources import digest_of, import_folders, is_library, reaches_edited, source_of
from pscluster.core.handles import Handle
from pscluster.core.values import HandleResolver, RecordResolver, describe, imported_class
from pscluster.core.values.records import is_record_class
from pscluster.v1 import definition_pb2

__all__ = [
    "CapturedFunction",
    "FunctionHandle",
    "UnresolvedReference",
    "capture",
    "class_definition",
    "needs_definition",
    "partial_of",
    "record_resolver",
    "resolve",
    "split_off_bulk",
]

logger = logging.getLogger(__name__)

Rename = Callable[[Handle], tuple[str, str]]
"""What stands for a handle: a kind and a key, its own or others."""

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

    _function: Any = (
        None  # only of one by reference: the others may be forgotten, as a cache of these by function wants
    )
    _origin: definition_pb2.Definition | None = None  # of what goes by value; None: nothing does
    _pickles: list[bytes] = field(default_factory=list)
    handles: tuple[Handle, ...] = ()  # what it captured stays in use for as long as it may be sent
    _renamed: tuple[definition_pb2.Renamed, ...] = ()  # of the handles: what they are to be
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def nbytes(self) -> int:
        """Of what was captured with it, about; of a name alone none."""
        if self._pickles:
            return len(self._pickles[0])
        return 0 if self.by_reference is None else len(self.by_reference.arrays)

    @property
    def functions(self) -> Iterator[CapturedFunction]:
        """Those that it was captured with, inside of it: a receiver needs them first."""
        return (handle.function for handle in self.handles if isinstance(handle, FunctionHandle))

    def renamed(self, rename: Rename) -> CapturedFunction:
        """The same, as captured, but for the handles: `rename` is called with each for what it is to be."""
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
        if self.by_reference is not None:
            yield self._form_of(self.by_reference)
        if self._origin is None:
            return
        self.by_value()
        pickles = list(self._pickles)
        for pickled in pickles:
            form = self._form_of(self._origin)
            form.pickle = pickled
            if pickled is pickles[-1]:
                form.source_digest = ""  # it brings what it needs of that module
            yield form

    def _form_of(self, definition: definition_pb2.Definition) -> definition_pb2.Definition:
        """A copy, which is sent without its bulk."""
        form = definition_pb2.Definition()
        form.CopyFrom(definition)
        form.digest = self.digest
        form.renamed.extend(self._renamed)
        return form

    def __repr__(self) -> str:
        way = "by value" if self.by_reference is None else "by reference"
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


def capture(function: Any, *, policy: SerializationPolicy | None = None, holds_data: bool = False) -> CapturedFunction:
    """Capture a function, or whatever else can be called, with what it refers to.

    Args:
        function: to be captured.
        policy: whether it may be pickled; default: this process'.
        holds_data: it is there for the data that it brings with it; else a warning names what is very large.

    Raises:
        TypeError: it can't be called, or something it captured can't be sent. The message names the variable.
    """
    if not callable(function):
        raise TypeError(f"{describe(function)} can't be scheduled: pass a function")
    captured = _captured(function, _name_of(function), policy or chosen_policy())
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


def _captured(function: Any, name: str, policy: SerializationPolicy) -> CapturedFunction:
    if not policy.pickles:
        try:
            sent = WithoutPickle(function)
        except NotByReferenceError as error:
            raise TypeError(f"{name} can't be sent without a pickle: {error}. And {policy.why}") from None
        return CapturedFunction(sent.definition.digest, name, sent.definition, handles=tuple(sent.handles))
    reference = reference_to(function)
    # What workers have imported they keep: what is of another version of a file goes with all that it is made of.
    edited = reference is not None and reaches_edited(function)
    if reference is not None and not edited:
        return CapturedFunction(reference.digest, name, reference, function, _origin(function))
    dumped = dump(function, name, whole=edited)
    pickles, origin = [dumped.data], _origin(function)
    if dumped.names_own_module and not is_library(module_name_of(function)):
        # Made now, not when a worker asks for it: what was captured may change. If it can't be made, the
        # worker needs the module.
        with contextlib.suppress(TypeError):
            pickles.append(dump(function, name, whole=True).data)
    digest = hashlib.sha256(dumped.data).hexdigest()
    return CapturedFunction(digest, name, None, None, origin, pickles, dumped.handles)


def _name_of(function: Any) -> str:
    """For people."""
    while isinstance(function, functools.partial) and "__qualname__" not in vars(function):
        function = function.func
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]


def class_definition(cls: type, *, policy: SerializationPolicy | None = None) -> CapturedFunction:
    """Capture a class whose instances are to be sent, so that workers can be told of it like of a function.

    Raises:
        TypeError: no class, or one that can't be sent.
    """
    if not isinstance(cls, type):
        raise TypeError(f"{describe(cls)} is no class")
    return capture(cls, policy=policy)


def needs_definition(cls: type) -> bool:
    """May a worker be unable to find this class by its name? True for all but those of installed modules."""
    return not is_library(cls.__module__)


def split_off_bulk(form: definition_pb2.Definition) -> bytes:
    """Take the pickle, or a partial's arrays, out of a definition: they travel after the message that it is in."""
    bulk = form.arrays or form.pickle
    form.ClearField("pickle")
    form.ClearField("arrays")
    return bulk


def partial_of(name: str, function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """`functools.partial` of a function and its first arguments, under a name for people."""
    made: Any = functools.partial(function, *args)
    made.__qualname__ = name
    return made  # type: ignore[no-any-return]  # a partial can be called


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
        if not chosen_policy().pickles:
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
    if definition.HasField("arguments"):
        return found_by(definition, memoryview(bulk or definition.arrays), resolve_handle)
    if data := bulk or definition.pickle:
        chosen_policy().check_pickle()  # before anything is imported for it
        if definition.source_digest:
            import_checked(definition.module, definition.source_digest)
        return load(data, resolve_handle)
    return found_by(definition, memoryview(b""), resolve_handle)


def _look_further(definition: definition_pb2.Definition) -> bool:
    """Import from where the coordinator does, as far as that is here, and from the worker's own folder too.

    After what is imported from already, and not where pickles are off: there peers name no folders.
    """
    if not chosen_policy().pickles:
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
        chosen_policy().check_name(module, qualname)
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
