"""Imports of modules that a peer named: where pickles are off, of those only that peers may name."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Set as AbstractSet
from pathlib import Path

from pscluster.core.errors import MisuseError
from pscluster.core.functions.nameable import EVERYWHERE, MODULES, ON_WORKERS
from pscluster.core.functions.policy import trust
from pscluster.core.functions.scripts import UnresolvedReference
from pscluster.core.functions.sources import digest_of, in_library, source_of


def import_checked(name: str, digest: str) -> types.ModuleType:
    """The module, whose functions the peer will name; its file has this digest, if one is given.

    Raises:
        UnresolvedReference: it is another version here.
        MisuseError: peers may not name what is in it. Nothing was imported.
        ImportError: as of any import; whatever the module raises comes through, too.
    """
    if not trust().pickles:
        _check_may_name(name)
        if digest and name not in sys.modules:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.origin is not None:
                _compare(name, Path(spec.origin), digest)
    module = importlib.import_module(name)
    if digest:
        _compare(name, source_of(module), digest)
    return module


def import_object(name: str, imported: AbstractSet[str]) -> types.ModuleType:
    """The module as an object: where pickles are off one that peers may name, or an installed one of these.

    Args:
        imported: what the files of the user's import that the peer's functions are from.
    """
    if not trust().pickles and not (name in imported and _is_installed(name)):
        _check_may_name(name)
        if name.partition(".")[0] == "pscluster" and name not in MODULES:
            raise _not_ours(name)
    return importlib.import_module(name)


def is_own(module: types.ModuleType) -> bool:
    """Is its source a file of the user's, in a folder whose functions peers may name?"""
    path = source_of(module)
    return path is not None and not _is_installed(module.__name__) and trust().owns(path)


def _compare(name: str, path: Path | None, digest: str) -> None:
    if path is None or digest_of(path) != digest:
        raise UnresolvedReference(f"module {name} is another version here, at {path}")


def _not_ours(name: str) -> MisuseError:
    return MisuseError(
        f"peers may not name what is in {name[:200]}, as pickles are off here: use it in a function of your own"
    )


def _check_may_name(name: str) -> None:
    if name.partition(".")[0] == "pscluster":
        if name not in MODULES and name not in EVERYWHERE and not (trust().is_worker and name in ON_WORKERS):
            raise _not_ours(name)
        return
    if _is_installed(name):
        trust().check_module(name)
        return
    top = name.partition(".")[0]
    place = _place_of(top)
    if place is not None and not trust().owns(place):
        folders = ", ".join(map(str, trust().folders)) or "none"
        raise MisuseError(
            f"the module {top} lies at {place}, outside of the folders whose functions peers may name here, which are "
            f"{folders}: name its folder with --functions-from"
        )


def _is_installed(name: str) -> bool:
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top == "pscluster" or top == "__main__":
        return True
    place = _place_of(top)
    return place is not None and in_library(str(place))


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
