"""The serialization policy: whether pickles are accepted and, where they are not, which functions peers may name.

A pickle is code: a peer that may send one may run anything. So, nearly, may one that may name any installed function
(`subprocess.run`). Where pickles are off, a peer may therefore name only what is in files of this role's own folders,
in installed packages listed by its options, and in a list of pscluster's own names.

The policy is chosen once, when the process starts, by its options and its environment. By default, pickles are accepted
from peers that have proved that they know the token.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from pscluster.core.errors import ConfigurationError, MisuseError
from pscluster.core.functions.nameable import names_of_ours
from pscluster.core.functions.sources import in_library

PICKLE_VARIABLE = "PSCLUSTER_ALLOW_PICKLE"
FUNCTIONS_VARIABLE = "PSCLUSTER_FUNCTIONS_FROM"
DATA_VARIABLE = "PSCLUSTER_DATA_FROM"

_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_DEEPEST = 16  # trailing components of a script's path that are tried below this role's folders


@dataclass(frozen=True, slots=True)
class SerializationPolicy:
    """What is accepted from peers."""

    pickles: bool = True  # functions and objects by value. The other fields count only where this is False
    why: str = ""  # the reason, and how to fix it: part of a sentence
    folders: tuple[Path, ...] = ()  # whose files may be run
    packages: tuple[str, ...] = ()  # installed ones whose functions may be called
    data: tuple[Path, ...] = ()  # folders whose files peers may have mapped by a worker
    is_worker: bool = False  # workers run functions on datasets: they accept more names, and map files

    def check_pickle(self) -> None:
        """Raise MisuseError where pickles are off. Called before a pickle is read."""
        if not self.pickles:
            raise MisuseError(f"a function or object came by value, as a pickle, and {self.why}")

    def check_module(self, module: str) -> None:
        """Raise MisuseError if, without pickles, peers may not name what is in this installed module."""
        if not any(f"{module}.".startswith(f"{package}.") for package in self.packages):
            top = module.partition(".")[0]
            advice = f", or start the roles with --functions-from {top} (or {FUNCTIONS_VARIABLE})"
            # Not for the standard library: that would let peers run any command.
            raise not_nameable(f"what is in {module}", "" if top in sys.stdlib_module_names else advice)

    def check_name(self, module: str, qualname: str) -> None:
        """Raise MisuseError if pickles are off, and this is a name of pscluster's own that peers may not use here."""
        if self.pickles or module.partition(".")[0] != "pscluster":
            return
        if qualname not in names_of_ours(module, on_worker=self.is_worker):
            raise not_nameable(f"{module[:200]}.{qualname[:200]}")

    def data_file(self, path: str) -> Path:
        """Return the real path of a data file that a peer named. Raise MisuseError if peers may not have it read."""
        if self.pickles:
            return Path(path)
        if not self.is_worker:
            raise MisuseError(f"the data file {path[:1000]!r} was named, but only workers read data files for peers")
        try:
            real = Path(path).resolve(strict=True)
        except (OSError, ValueError, RuntimeError) as error:  # an invalid path; a loop of links
            raise MisuseError(f"the data file {path[:1000]!r} can't be read here: {error}") from None
        folders = (*self.folders, *self.data)
        if not any(real.is_relative_to(folder) for folder in folders):
            allowed = ", ".join(map(str, folders)) or "none"
            raise MisuseError(
                f"the data file {path[:1000]!r} lies outside the folders whose files peers may have read here, which "
                f"are {allowed}: start the workers with --data-from and its folder (or {DATA_VARIABLE})"
            )
        return real

    def owns(self, file: Path) -> bool:
        """Return whether peers may name the code of a file: it lies in one of the folders, and is not installed."""
        if self.pickles:
            return True
        try:
            real = file.resolve()
        except (OSError, ValueError, RuntimeError):  # an invalid path; a loop of links
            return False
        if in_library(str(real)):
            return False
        return any(real.is_relative_to(folder) for folder in self.folders)

    def candidate_paths(self, path: str) -> Iterator[Path]:
        """Yield the paths in the folders where a file that has this path elsewhere may lie, deepest first."""
        names = [name for name in Path(path).parts if name != os.sep][-_DEEPEST:]
        for folder in self.folders:
            for first in range(len(names)):
                if self.owns(candidate := folder.joinpath(*names[first:])):
                    yield candidate


def not_nameable(names: str, otherwise: str = "") -> MisuseError:
    return MisuseError(
        f"peers may not name {names}, as pickles are off here: use it in a function of your own{otherwise}"
    )


_chosen = SerializationPolicy()


def chosen_policy() -> SerializationPolicy:
    return _chosen


def choose(policy: SerializationPolicy) -> None:
    """Set the policy of this process, when it starts."""
    global _chosen
    _chosen = policy


def _is_asked_for(environ: Mapping[str, str]) -> bool | None:
    """Return whether the environment allows pickles; None if it does not say."""
    word = environ.get(PICKLE_VARIABLE, "").strip().lower()
    if word and word not in _WORDS:
        raise ConfigurationError(f"{PICKLE_VARIABLE} is {word[:40]!r}; it must be 1 or 0")
    return _WORDS.get(word)


def policy_of(
    asked: bool | None,
    exposed: str = "",
    functions_from: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    *,
    data_from: Sequence[str] = (),
    is_worker: bool = False,
) -> SerializationPolicy:
    """Return the policy of a role. The environment gives what the arguments leave out.

    `asked` says whether pickles are allowed; `exposed` who could send one without a token, if anyone could, as part of
    a sentence. The rest is as in `SerializationPolicy`. Raise ConfigurationError for a missing folder, an invalid
    package name, or a word that is neither yes nor no.
    """
    if asked is None:
        asked = _is_asked_for(environ)
    if asked is None and exposed:
        why = (
            f"pickles are off here, since {exposed}: give all roles a token (PSCLUSTER_TOKEN_FILE), or allow them with "
            f"{PICKLE_VARIABLE}=1"
        )
    else:
        why = f"pickles are off here (--no-pickle, or {PICKLE_VARIABLE}=0)"
    pickles = asked if asked is not None else not exposed
    folders, packages = _split(functions_from or default_functions_from(environ))
    data = _folders(data_from or _entries(environ, DATA_VARIABLE))
    return SerializationPolicy(pickles, "" if pickles else why, folders, packages, data, is_worker)


def _entries(environ: Mapping[str, str], variable: str) -> list[str]:
    return [entry for entry in environ.get(variable, "").split(os.pathsep) if entry]


def default_functions_from(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the folders and packages in the environment, else the current folder and those of PYTHONPATH."""
    if environ.get(FUNCTIONS_VARIABLE):
        return _entries(environ, FUNCTIONS_VARIABLE)
    paths = map(os.path.abspath, _entries(environ, "PYTHONPATH"))
    folders = dict.fromkeys([os.getcwd(), *filter(os.path.isdir, paths)])
    return [folder for folder in folders if os.path.dirname(folder) != folder]  # not the root, which is everything


def functions_from_also(*folders: str | os.PathLike[str] | None, given: Sequence[str] = ()) -> str:
    """Return the value of --functions-from for roles on this machine: what is given, or the default, plus `folders`."""
    entries = [*(given or default_functions_from()), *(os.path.abspath(folder) for folder in folders if folder)]
    return os.pathsep.join(dict.fromkeys(entries))


def _split(entries: Sequence[str]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    folders = [entry for entry in entries if os.path.isdir(entry)]
    packages = [entry for entry in entries if entry not in folders]
    for entry in packages:
        if os.sep in entry or not all(name.isidentifier() for name in entry.split(".")):
            raise ConfigurationError(
                f"--functions-from (or {FUNCTIONS_VARIABLE}) names {entry!r}, which is neither a folder here nor a "
                "package name"
            )
    return tuple(Path(folder).resolve() for folder in folders), tuple(packages)


def _folders(entries: Sequence[str]) -> tuple[Path, ...]:
    for entry in entries:
        if not os.path.isdir(entry):
            raise ConfigurationError(f"--data-from (or {DATA_VARIABLE}) names {entry!r}, which is not a folder here")
    return tuple(Path(entry).resolve() for entry in entries)


def add_pickle_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that say what peers may have run; the environment is read later, by `policy_of`."""
    options = [
        click.option(
            "--pickle/--no-pickle",
            "allow_pickle",
            default=None,
            help="Send and accept functions and objects as pickles, or refuse them. Default: allowed between "
            f"peers with a token. Or ${PICKLE_VARIABLE}=1 or 0.",
        ),
        click.option(
            "--functions-from",
            multiple=True,
            metavar="FOLDER|PACKAGE",
            help="Without pickles, peers name functions of files in this folder or of this installed package; "
            f"repeatable. Default: the current folder and those of PYTHONPATH. Or ${FUNCTIONS_VARIABLE}.",
        ),
        click.option(
            "--data-from",
            multiple=True,
            metavar="FOLDER",
            help="Without pickles, workers map arrays of files only in this folder and those of --functions-from; "
            f"repeatable. Or ${DATA_VARIABLE}.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command
