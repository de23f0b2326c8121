"""Resolve functions by reference: find them in this machine's own files, by name and the file's digest.

Nothing received is trusted. Where pickles are off, files must lie in this role's own folders
(`pscluster.core.functions.policy`), and a name must be defined in the module it is attributed to: importing `os` in a
module does not make `os.system` available under that module's name.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import sys
import threading
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pscluster.core.errors import MisuseError, ProtocolError, PsClusterError
from pscluster.core.functions.by_reference import INNER, MAIN
from pscluster.core.functions.nameable import names_of_ours
from pscluster.core.functions.policy import chosen_policy, not_nameable
from pscluster.core.functions.sources import digest_of, in_library, source_of
from pscluster.core.limits import MAX_INNER_DEFINITIONS
from pscluster.core.transport.frames import cut
from pscluster.core.values import HandleResolver, decode_call
from pscluster.core.values.records import MODULE_MARK
from pscluster.v1 import definition_pb2


class UnresolvedReference(PsClusterError):  # noqa: N818  (a reply of the worker, not a fault)
    """What a definition names is missing here, or of another version: it must come by value."""


# Definitions


def resolve_reference(definition: definition_pb2.Definition, arrays: memoryview, resolve_handle: HandleResolver) -> Any:
    """Return what a definition without a pickle names, with its arguments if it has any.

    Raise UnresolvedReference if that, or its file, is missing here or of another version; MisuseError if peers may not
    name it here; ProtocolError if the definition makes no sense.
    """
    if sum(definition.sizes) != len(arrays):
        raise ProtocolError(f"a definition declares {sum(definition.sizes)} bytes of arrays, but {len(arrays)} came")
    return _resolved(definition, cut(arrays, definition.sizes), resolve_handle)


def _resolved(
    definition: definition_pb2.Definition, attachments: Sequence[memoryview], resolve_handle: HandleResolver
) -> Any:
    if definition.module == MAIN:
        module = load_script(definition.source_path, definition.source_digest)
    else:
        module = import_checked(definition.module, definition.source_digest)
    target = _named_in(module, definition.qualname)
    if not definition.HasField("arguments"):
        return target
    if len(definition.inner) > MAX_INNER_DEFINITIONS:
        raise ProtocolError(
            f"a definition contains {len(definition.inner):,} others; the limit is {MAX_INNER_DEFINITIONS:,}"
        )
    others = [_resolved(other, attachments, resolve_handle) for other in definition.inner]

    def named(key: str) -> Any:
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < len(others)):
            raise ProtocolError(f"a definition refers to {key[:40]!r}, but contains {len(others)} others")
        return others[int(key)]

    def record_class(key: str, _module: str, _qualname: str) -> type:
        if not isinstance(cls := named(key), type):
            raise ProtocolError("a record of something that is not a class")
        return cls

    args, keywords = decode_call(
        definition.arguments,
        attachments=attachments,
        resolve_handle=lambda kind, key: named(key) if kind == INNER else resolve_handle(kind, key),
        resolve_record=record_class,
    )
    if not callable(target):
        raise UnresolvedReference(f"{definition.module}.{definition.qualname} can't be called here")
    return functools.partial(target, *args, **keywords)


def _named_in(module: types.ModuleType, qualname: str) -> Any:
    """Return the object of this name in a module; where pickles are off, only if the module defines it."""
    chosen_policy().check_name(module.__name__, qualname)
    value: Any = module
    for depth, name in enumerate(qualname.split(".")):
        if depth and not chosen_policy().pickles and not isinstance(value, type):
            break
        try:
            value = getattr(value, name)
        except AttributeError:
            break
    else:
        homes = (module.__name__, vars(module).get(MODULE_MARK, module.__name__))
        if chosen_policy().pickles or (callable(value) and getattr(value, "__module__", None) in homes):
            return value
    raise UnresolvedReference(f"{module.__name__} defines no {qualname} here")


# Modules


def import_checked(name: str, digest: str) -> types.ModuleType:
    """Import a module whose functions a peer names; if a digest is given, its file must have it.

    Raise UnresolvedReference if it is of another version here; MisuseError, before importing it, if peers may not name
    its contents. Errors of the import itself come through.
    """
    if not chosen_policy().pickles:
        _check_may_name(name)
        if digest and name not in sys.modules:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.origin is not None:
                _compare(name, Path(spec.origin), digest)
    module = importlib.import_module(name)
    if digest:
        _compare(name, source_of(module), digest)
    return module


def _compare(name: str, path: Path | None, digest: str) -> None:
    if path is None or digest_of(path) != digest:
        raise UnresolvedReference(f"module {name} is another version here, at {path}")


def _check_may_name(name: str) -> None:
    top = name.partition(".")[0]
    if top == "pscluster":
        if not names_of_ours(name, on_worker=chosen_policy().is_worker):
            raise not_nameable(f"what is in {name[:200]}")
        return
    location = _location_of(top)
    if top in sys.stdlib_module_names or top == MAIN or (location is not None and in_library(str(location))):
        chosen_policy().check_module(name)
    elif location is not None and not chosen_policy().owns(location):
        folders = ", ".join(map(str, chosen_policy().folders)) or "none"
        raise MisuseError(
            f"the module {top} lies at {location}, outside the folders whose functions peers may name here, which are "
            f"{folders}: name its folder with --functions-from"
        )


def _location_of(top: str) -> Path | None:
    """Return the file or folder of a top-level module; None if there is none, which the import will report."""
    with contextlib.suppress(ImportError, ValueError):
        if (spec := importlib.util.find_spec(top)) is not None:
            locations = [spec.origin] if spec.origin is not None else spec.submodule_search_locations or ()
            return next(map(Path, locations), None)
    return None


# Scripts


_scripts: dict[str, types.ModuleType] = {}
_loading = threading.RLock()


def load_script(source_path: str, digest: str) -> types.ModuleType:
    """Return the script with this digest as a module: from its path, this process' own, or this role's folders.

    Where pickles are off, only from folders whose files peers may name. Raise UnresolvedReference if there is no such
    file here, or it can't be loaded.
    """
    with _loading:
        module = _scripts.get(digest)
        if module is None:
            module = _scripts[digest] = _load(_find(source_path, digest), digest)
        return module


def loaded_scripts() -> list[types.ModuleType]:
    """Return the scripts loaded here, latest first."""
    with _loading:
        return list(_scripts.values())[::-1]


def _find(source_path: str, digest: str) -> Path:
    own = getattr(sys.modules.get(MAIN), "__file__", None)
    candidates = [Path(source_path), Path.cwd() / Path(source_path).name]
    if isinstance(own, str):
        candidates.insert(1, Path(own).absolute())
    candidates += chosen_policy().candidate_paths(source_path)
    candidates = [path for path in candidates if chosen_policy().owns(path)]
    for path in candidates:
        try:
            if digest_of(path) == digest:
                return path
        except (OSError, ValueError):
            continue
    tried = ", ".join(dict.fromkeys(map(str, candidates))) or "no path: it lies in none of this role's folders"
    raise UnresolvedReference(
        f"the script {source_path[:1000]} is missing here, or of another version; looked at {tried}. Copy it unchanged "
        "from the coordinator's machine into the folder where the role was started, or one given with --functions-from"
    )


def _load(path: Path, digest: str) -> types.ModuleType:
    name = f"_pscluster_script_{digest[:12]}"
    module = types.ModuleType(name)
    vars(module).update({"__file__": str(path), MODULE_MARK: MAIN})
    try:
        source = path.read_bytes()
        if hashlib.sha256(source).hexdigest() != digest:
            raise OSError("it was changed")
        code = compile(source, str(path), "exec", dont_inherit=True)
        # As when the script is run, modules beside it are found first.
        if (folder := str(path.parent)) not in sys.path:
            sys.path.insert(0, folder)
        sys.modules[name] = module
        exec(code, vars(module))  # noqa: S102  (a file of this role's own, with that digest)  # nosec B102
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        reason = f"{type(error).__name__}: {error}"
        raise UnresolvedReference(f"the script {path} can't be loaded here: {reason}") from error
    return module
