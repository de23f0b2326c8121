"""Definitions: functions and classes that travel once, and are then referred to by their digest.

They go by reference if the worker can find the same one (`pscluster.core.functions.by_reference` says when). The
file's digest goes along, so that a worker with another version says so. They go by value, as a cloudpickle, in all
other cases, and when a worker answers that it can't follow the reference; where pickles are off, nothing goes by value.

A function is captured as it is at that moment: by value, it is pickled at once; by reference, only if a worker asks.

No class goes both ways to one worker, as the two would be different classes to `isinstance`: where pickles may travel,
classes of the script always go by value, those of a module by reference unless it holds handles or the worker lacks it.
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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from pscluster.core.errors import MisuseError, ProtocolError, PsClusterError
from pscluster.core.functions.by_reference import MAIN, NotByReferenceError, WithoutPickle, reference_to
from pscluster.core.functions.by_value import dump, largest_captured, load, module_name_of
from pscluster.core.functions.loading import UnresolvedReference, import_checked, loaded_scripts, resolve_reference
from pscluster.core.functions.policy import SerializationPolicy, chosen_policy
from pscluster.core.functions.sources import (
    digest_of,
    import_folders,
    importer_of,
    is_library,
    reaches_edited,
    source_of,
)
from pscluster.core.handles import Handle
from pscluster.core.values import HandleResolver, describe
from pscluster.core.values.decoding import RecordResolver
from pscluster.core.values.records import imported_class, is_record_class
from pscluster.v1 import definition_pb2

logger = logging.getLogger(__name__)

Rename = Callable[[Handle], tuple[str, str]]
"""Returns the kind and the key to send for a handle, its own or others."""

LARGE_BYTES = 64 << 20  # a function that brings more with it is logged as a warning, with its largest part


@dataclass(frozen=True, eq=False, repr=False)
class CapturedFunction:
    """A function (or class) as it was when it was captured."""

    digest: str  # SHA-256, hex. The same function, captured again unchanged, has the same
    name: str  # for people
    by_reference: definition_pb2.Definition | None  # the definition to try first, if it may go by reference
    # Only if by reference: others must not keep their function alive, since a cache of these is keyed by function.
    _function: Any = None
    _origin: definition_pb2.Definition | None = None  # of a pickle; None: it is never pickled
    _pickles: list[bytes] = field(default_factory=list)
    handles: tuple[Handle, ...] = ()  # those it captured, which must stay in use while it may be sent
    _renamed: tuple[definition_pb2.Renamed, ...] = ()  # handles that are sent as others
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def nbytes(self) -> int:
        """The approximate size of what was captured with it; 0 for a name alone."""
        if self._pickles:
            return len(self._pickles[0])
        return 0 if self.by_reference is None else len(self.by_reference.arrays)

    @property
    def functions(self) -> Iterator[CapturedFunction]:
        """The captured functions inside this one: a receiver needs them first."""
        return (handle.function for handle in self.handles if isinstance(handle, FunctionHandle))

    def renamed(self, rename: Rename) -> CapturedFunction:
        """Return the same function with other handles: `rename` is called with each handle."""
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
        """Return the pickle. That of a function by reference is made now, with all that it uses of its own module."""
        with self._lock:
            if not self._pickles:
                self._pickles.append(dump(self._function, self.name, whole=True).data)
            return self._pickles[0]

    def forms(self) -> Iterator[definition_pb2.Definition]:
        """Yield the definitions to send a worker, in this order, while it answers `unresolved`.

        First by reference, if allowed. Then by value, with what it uses of its own module by name; last, for a worker
        that lacks that module, by value including that. Raise TypeError if it turns out that it can't be pickled.
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
        """Return a copy to send, from which the bulk may be split off."""
        form = definition_pb2.Definition()
        form.CopyFrom(definition)
        form.digest = self.digest
        form.renamed.extend(self._renamed)
        return form

    def __repr__(self) -> str:
        way = "by value" if self.by_reference is None else "by reference"
        return f"<CapturedFunction {self.name} {way}, {self.digest[:12]}>"


class FunctionHandle(Handle):
    """A captured function inside another one: the receiver knows it by its digest."""

    handle_kind: ClassVar[str] = "function"

    def __init__(self, function: CapturedFunction) -> None:
        """Name a function, which is sent before anything that holds this handle."""
        self.function = function

    @property
    def handle_key(self) -> str:
        return self.function.digest


class MadeHandle(FunctionHandle):
    """An object that a captured function, without arguments, makes where it is received: once for all that name it."""

    def __init__(self, kind: str, function: CapturedFunction) -> None:
        super().__init__(function)
        self.handle_kind = kind  # type: ignore[misc]  # of the object


def capture(function: Any, *, policy: SerializationPolicy | None = None, holds_data: bool = False) -> CapturedFunction:
    """Capture a function or another callable, with what it refers to.

    `policy` says whether it may be pickled; by default, that of this process. Log a warning if it is large, unless
    `holds_data`: it exists for its data. Raise TypeError, naming the variable, if something in it can't be sent.
    """
    if not callable(function):
        raise TypeError(f"{describe(function)} can't be scheduled: pass a function")
    captured = _captured(function, _name_of(function), policy or chosen_policy())
    if captured.nbytes > LARGE_BYTES and not holds_data:
        label, culprit, size = largest_captured(function)
        most = f", {size >> 20:,} MiB of it in its variable {label!r}, {describe(culprit)}" if label else ""
        logger.warning(
            "%s carries %s MiB to every worker%s: make that a Variable or a dataset, or load it in the function",
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
    # Workers keep what they have imported, so code of another version of a file goes with all that it uses.
    edited = reference is not None and reaches_edited(function)
    if reference is not None and not edited:
        return CapturedFunction(reference.digest, name, reference, function, _origin(function))
    dumped = dump(function, name, whole=edited)
    pickles, origin = [dumped.data], _origin(function)
    if dumped.names_own_module and not is_library(module_name_of(function)):
        # Now, not when a worker asks: what was captured may change. If this fails, the worker needs the module.
        with contextlib.suppress(TypeError):
            pickles.append(dump(function, name, whole=True).data)
    digest = hashlib.sha256(dumped.data).hexdigest()
    return CapturedFunction(digest, name, None, None, origin, pickles, dumped.handles)


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial) and "__qualname__" not in vars(function):
        function = function.func
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]


def split_off_bulk(form: definition_pb2.Definition) -> bytes:
    """Take the pickle, or a partial's arrays, out of a definition: they travel after its message."""
    bulk = form.arrays or form.pickle
    form.ClearField("pickle")
    form.ClearField("arrays")
    return bulk


def partial_of(name: str, function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Return a `functools.partial` with a name for people."""
    partial: Any = functools.partial(function, *args)
    partial.__qualname__ = name
    return partial  # type: ignore[no-any-return]  # a partial can be called


def _origin(function: Any) -> definition_pb2.Definition:
    """Return where a function by value comes from: what its pickle names there must be of the same version."""
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
    """Return the function of a definition, on a worker: from its pickle, or without one by its reference.

    `bulk` is what `split_off_bulk` took out of it, if anything; `resolve_handle` returns this worker's own handles.

    Raises:
        MisuseError: where pickles are off: it is a pickle, or names what peers may not name.
        UnresolvedReference: it, or its pickle, names something that is missing here, or of another version.
    """
    if definition.renamed:
        new = {(entry.kind, entry.key): (entry.new_kind, entry.new_key) for entry in definition.renamed}
        of_new, resolve_handle = resolve_handle, lambda kind, key: of_new(*new.get((kind, key), (kind, key)))
    try:
        try:
            function = _find(definition, bulk, resolve_handle)
        except ModuleNotFoundError:
            if not _look_further(definition):
                raise
            function = _find(definition, bulk, resolve_handle)
        _look_further(definition)  # for what it imports when it runs
    except PsClusterError:
        raise
    except (Exception, SystemExit) as error:  # from importing modules and creating classes
        hint = "or register the module with cloudpickle.register_pickle_by_value"
        if not chosen_policy().pickles:
            hint = "or name the folder that it is in with --functions-from"
        which = ""
        if isinstance(error, ImportError) and (package := importer_of(error)):
            which, hint = f", which {package} imports", f"set what configures {package} in its environment, {hint}"
        raise UnresolvedReference(
            f"{definition.qualname or 'it'} can't be loaded on this worker ({type(error).__name__}: {error}{which}): "
            f"install what it imports there, {hint}"
        ) from error
    if not callable(function):
        raise UnresolvedReference(f"{definition.module}.{definition.qualname} can't be called here")
    return function  # type: ignore[no-any-return]  # callable() narrows Any to Any


def resolve_alone(forms: Iterable[bytes]) -> Callable[..., Any]:
    """Return the function of serialized definitions, each of which is enough, in a process that has no handles.

    Raises:
        UnresolvedReference: none can be resolved here; the last one's reason.
        MisuseError: it has a handle, or is refused as in `resolve`.
    """
    why = UnresolvedReference("there is no definition of a function")
    for data in forms:
        form = definition_pb2.Definition.FromString(data)
        try:
            return resolve(form, split_off_bulk(form), _no_handle)
        except UnresolvedReference as error:
            why = error
    raise why


def _no_handle(kind: str, key: str) -> NoReturn:
    raise MisuseError(f"{kind} {key} is on the cluster, which this process does not know")


def _find(definition: definition_pb2.Definition, bulk: bytes | memoryview, resolve_handle: HandleResolver) -> Any:
    if definition.HasField("arguments"):
        return resolve_reference(definition, memoryview(bulk or definition.arrays), resolve_handle)
    if data := bulk or definition.pickle:
        chosen_policy().check_pickle()  # before anything is imported for it
        if definition.source_digest:
            import_checked(definition.module, definition.source_digest)
        return load(data, resolve_handle)
    return resolve_reference(definition, memoryview(b""), resolve_handle)


def _look_further(definition: definition_pb2.Definition) -> bool:
    """Append the coordinator's import folders that exist here, and the current one, to `sys.path`, if any are new.

    Do nothing where pickles are off: peers must not name folders there.
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


def record_resolver(definition: Callable[[str], Any]) -> RecordResolver:
    """Return a worker's resolver of record classes: by definition if they have one, else by name.

    It may import modules for them, as a worker runs the coordinator's code anyway. `definition` returns what was
    defined under a digest, or raises ProtocolError.
    """

    def resolve_record(digest: str, module: str, qualname: str) -> type:
        if digest:
            cls = definition(digest)
            if not isinstance(cls, type):
                raise ProtocolError(f"{module}.{qualname} was defined as something that is not a class")
            return cls
        chosen_policy().check_name(module, qualname)
        if module == MAIN:
            return _class_of_script(qualname)
        if module not in sys.modules:
            try:
                import_checked(module, "")
            except (Exception, SystemExit) as error:
                raise ProtocolError(f"a record of a class in {module}, which can't be imported: {error}") from error
        return imported_class(digest, module, qualname)

    return resolve_record


def _class_of_script(qualname: str) -> type:
    for script in [*(module.__name__ for module in loaded_scripts()), MAIN]:
        try:
            cls = imported_class("", script, qualname)
        except ProtocolError:
            continue
        if is_record_class(cls):
            return cls
    raise ProtocolError(f"a record of the script's class {qualname}, which was not defined on this worker")
