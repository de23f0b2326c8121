"""Functions by reference, as they are received: found in this machine's own files, by name and the file's digest.

Nothing that comes is believed. Where pickles are off, files must lie in this role's own folders
(`pscluster.core.functions.policy`), and what is named must be defined where it is said to be: a module that has
imported `os` does not lend its name to `os.system`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import sys
import threading
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pscluster.core.errors import MisuseError, ProtocolError, PsClusterError
from pscluster.core.functions.by_reference import INNER, MAIN
from pscluster.core.functions.nameable import EVERYWHERE, ON_WORKERS
from pscluster.core.functions.policy import chosen_policy
from pscluster.core.functions.sources import digest_of, in_library, source_of
from pscluster.core.values import HandleResolver, decode_call
from pscluster.core.values.records import MODULE_MARK
from pscluster.v1 import definition_pb2

_MAX_INNER = 10_000


class UnresolvedReference(PsClusterError):  # noqa: N818  (a reply of the worker, not a fault)
    """What a definition names is not here, or is another version: it has to come by value."""


# Definitions


def found_by(definition: definition_pb2.Definition, arrays: memoryview, resolve_handle: HandleResolver) -> Any:
    """Return what a definition without a pickle names, with its arguments if it has some.

    Raises:
        UnresolvedReference: it names a file, or something in one, that is not here or is another version.
        MisuseError: it names what peers may not name here.
        ProtocolError: it makes no sense.
    """
    if sum(definition.sizes) != len(arrays):
        raise ProtocolError(f"a definition of {sum(definition.sizes)} bytes of arrays, but {len(arrays)} came")
    attachments, at = [], 0
    for size in definition.sizes:
        attachments.append(arrays[at : at + size])
        at += size
    return _found(definition, attachments, resolve_handle)


def _found(
    definition: definition_pb2.Definition, attachments: Sequence[memoryview], resolve_handle: HandleResolver
) -> Any:
    if definition.module == MAIN:
        module = load_script(definition.source_path, definition.source_digest)
    else:
        module = import_checked(definition.module, definition.source_digest)
    found = _found_in(module, definition.qualname)
    if not definition.HasField("arguments"):
        return found
    if len(definition.inner) > _MAX_INNER:
        raise ProtocolError(f"a definition with {len(definition.inner):,} others in it; {_MAX_INNER:,} are the most")
    inner = [_found(each, attachments, resolve_handle) for each in definition.inner]

    def named(key: str) -> Any:
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < len(inner)):
            raise ProtocolError(f"definition {key[:40]!r} inside of another one, of {len(inner)}")
        return inner[int(key)]

    def record_class(key: str, _module: str, _qualname: str) -> type:
        if not isinstance(found := named(key), type):
            raise ProtocolError("a record of something that is no class")
        return found

    args, keywords = decode_call(
        definition.arguments,
        attachments=attachments,
        resolve_handle=lambda kind, key: named(key) if kind == INNER else resolve_handle(kind, key),
        resolve_record=record_class,
    )
    if not callable(found):
        raise UnresolvedReference(f"{definition.module}.{definition.qualname} can't be called here")
    return functools.partial(found, *args, **keywords)


def _found_in(module: types.ModuleType, qualname: str) -> Any:
    """What a module has under this name; where pickles are off, what it defines."""
    chosen_policy().check_name(module.__name__, qualname)
    found: Any = module
    for place, name in enumerate(qualname.split(".")):
        if place and not chosen_policy().pickles and not isinstance(found, type):
            break
        try:
            found = getattr(found, name)
        except AttributeError:
            break
    else:
        homes = (module.__name__, vars(module).get(MODULE_MARK, module.__name__))
        if chosen_policy().pickles or (callable(found) and getattr(found, "__module__", None) in homes):
            return found
    raise UnresolvedReference(f"{module.__name__} defines no {qualname} here")


# Modules


def import_checked(name: str, digest: str) -> types.ModuleType:
    """Import a module, whose functions the peer will name; its file has this digest, if one is given.

    Raises:
        UnresolvedReference: it is another version here.
        MisuseError: peers may not name what is in it. Nothing was imported.
        ImportError: as of any import; whatever the module raises comes through, too.
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
        if name not in EVERYWHERE and not (chosen_policy().is_worker and name in ON_WORKERS):
            raise MisuseError(
                f"peers may not name what is in {name[:200]}, as pickles are off here: use it in a function of your own"
            )
        return
    place = _place_of(top)
    if top in sys.stdlib_module_names or top == MAIN or (place is not None and in_library(str(place))):
        chosen_policy().check_module(name)
    elif place is not None and not chosen_policy().owns(place):
        folders = ", ".join(map(str, chosen_policy().folders)) or "none"
        raise MisuseError(
            f"the module {top} lies at {place}, outside of the folders whose functions peers may name here, which are "
            f"{folders}: name its folder with --functions-from"
        )


def _place_of(top: str) -> Path | None:
    """The file or folder of a module that lies in no other; None if it is not found, which the import will say."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.origin is not None:
        return Path(spec.origin)
    return next((Path(place) for place in spec.submodule_search_locations or ()), None)


# Scripts


class _Loader(importlib.machinery.SourceFileLoader):
    """Runs the very bytes that were compared, whatever is on disk by now."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> types.CodeType:  # noqa: ARG002  (the interface's)
        return compile(self._source, self.path, "exec", dont_inherit=True)


_scripts: dict[str, types.ModuleType] = {}
_loading = threading.RLock()


def load_script(source_path: str, digest: str) -> types.ModuleType:
    """The script with this digest as a module: from its path, this process' own script, or this role's folders.

    Where pickles are off, from the folders that peers may name files of, only.

    Raises:
        UnresolvedReference: no such file is here, or it can't be loaded.
    """
    with _loading:
        module = _scripts.get(digest)
        if module is None:
            module = _scripts[digest] = _load(_find(source_path, digest), digest)
        return module


def loaded_scripts() -> list[types.ModuleType]:
    """The scripts that were loaded here, the latest first."""
    with _loading:
        return list(_scripts.values())[::-1]


def _find(source_path: str, digest: str) -> Path:
    own = getattr(sys.modules.get(MAIN), "__file__", None)
    candidates = [Path(source_path), Path.cwd() / Path(source_path).name]
    if isinstance(own, str):
        candidates.insert(1, Path(own).absolute())
    candidates = [path for path in [*candidates, *chosen_policy().places(source_path)] if chosen_policy().owns(path)]
    for path in candidates:
        try:
            if digest_of(path) == digest:
                return path
        except (OSError, ValueError):
            continue
    tried = ", ".join(dict.fromkeys(str(path) for path in candidates)) or "no place: it lies in none of the own folders"
    raise UnresolvedReference(
        f"the script {source_path[:1000]} is not here, or is another version; looked at {tried}. Copy it, as it is "
        "where the coordinator runs, into a folder that the role was given with --functions-from, or is started in"
    )


def _load(path: Path, digest: str) -> types.ModuleType:
    name = f"_pscluster_script_{digest[:12]}"
    try:
        loader = _Loader(name, str(path), path.read_bytes())
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        assert spec is not None, "the loader was given"
        module = importlib.util.module_from_spec(spec)
        # As when it is run: modules beside the script are found first.
        if (folder := str(path.parent)) not in sys.path:
            sys.path.insert(0, folder)
        vars(module)[MODULE_MARK] = MAIN
        sys.modules[name] = module
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        reason = f"{type(error).__name__}: {error}"
        raise UnresolvedReference(f"the script {path} can't be loaded here: {reason}") from error
    return module
