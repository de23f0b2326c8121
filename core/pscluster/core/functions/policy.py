"""The serialization policy: whether pickles are taken, and, where they are not, which functions peers may name.

A pickle is code: whoever may send one may run anything. So may, nearly, whoever may name any function that is installed
(`subprocess.run`). Where pickles are off a peer therefore names only what is in files of this role's own folders, and
in installed packages that were named to it, and what of pscluster is in a list.

Chosen once, when the process starts, by its options and its environment. Unless these say otherwise, pickles are taken
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
from pscluster.core.functions.nameable import is_nameable
from pscluster.core.functions.sources import in_library

PICKLE_VARIABLE = "PSCLUSTER_ALLOW_PICKLE"
FUNCTIONS_VARIABLE = "PSCLUSTER_FUNCTIONS_FROM"
DATA_VARIABLE = "PSCLUSTER_DATA_FROM"

_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_DEEPEST = 16  # folders of a script's path that are looked for in this role's own


@dataclass(frozen=True, slots=True)
class SerializationPolicy:
    """What is taken from peers.

    Attributes:
        pickles: functions and objects by value.
        why: where they are not, the reason, and how to mend it: part of a sentence.
        folders: whose files may be run where pickles are off.
        packages: installed ones whose functions may be called where pickles are off.
        data: folders whose files peers may have mapped where pickles are off; of a worker, see `is_worker`.
        is_worker: workers run functions on datasets: they take names, and map files, that others don't.
    """

    pickles: bool = True
    why: str = ""
    folders: tuple[Path, ...] = ()
    packages: tuple[str, ...] = ()
    data: tuple[Path, ...] = ()
    is_worker: bool = False

    def check_pickle(self) -> None:
        """MisuseError where pickles are off. Called before one is looked at."""
        if not self.pickles:
            raise MisuseError(f"a function or object came by value, as a pickle, and {self.why}")

    def check_module(self, module: str) -> None:
        """MisuseError if pickles are off, and peers may not name what is in this installed module.

        What they may name of pscluster is told name by name: `check_name`.
        """
        if self.pickles or module.partition(".")[0] == "pscluster":
            return
        if not any(f"{module}.".startswith(f"{package}.") for package in self.packages):
            raise MisuseError(
                f"peers may not name what is in {module}, as pickles are off here: use it in a function of your "
                f"own, or start the roles with --functions-from {module.partition('.')[0]} (or {FUNCTIONS_VARIABLE})"
            )

    def check_name(self, module: str, qualname: str) -> None:
        """MisuseError if pickles are off, and this is pscluster's own and not for peers to name here."""
        if self.pickles or module.partition(".")[0] != "pscluster":
            return
        if not is_nameable(module, qualname, on_worker=self.is_worker):
            raise MisuseError(
                f"peers may not name {module[:200]}.{qualname[:200]}, as pickles are off here: use it in a "
                "function of your own"
            )

    def data_file(self, path: str) -> Path:
        """The real path of a data file that a peer named. MisuseError if it is not for peers to have read here."""
        if self.pickles:
            return Path(path)
        if not self.is_worker:
            raise MisuseError(f"the data file {path[:1000]!r} was named, but only workers read data files for peers")
        try:
            real = Path(path).resolve(strict=True)
        except (OSError, ValueError, RuntimeError) as error:  # no path at all; links that lead to themselves
            raise MisuseError(f"the data file {path[:1000]!r} can't be read here: {error}") from None
        folders = (*self.folders, *self.data)
        if not any(real.is_relative_to(folder) for folder in folders):
            places = ", ".join(map(str, folders)) or "none"
            raise MisuseError(
                f"the data file {path[:1000]!r} lies outside of the folders whose files peers may have read here, "
                f"which are {places}: start the workers with --data-from and its folder (or {DATA_VARIABLE})"
            )
        return real

    def owns(self, file: Path) -> bool:
        """Is it one whose code peers may name? It lies in one of the folders, and is not installed."""
        if self.pickles:
            return True
        try:
            real = file.resolve()
        except (OSError, ValueError, RuntimeError):  # no path at all; links that lead to themselves
            return False
        if in_library(str(real)):
            return False
        return any(real.is_relative_to(folder) for folder in self.folders)

    def places(self, path: str) -> Iterator[Path]:
        """Where a file that has this path elsewhere may lie in the folders: as deep as it does there, or less."""
        parts = [part for part in Path(path).parts if part != os.sep][-_DEEPEST:]
        for folder in self.folders:
            for first in range(len(parts)):
                if self.owns(place := folder.joinpath(*parts[first:])):
                    yield place


_chosen = SerializationPolicy()


def chosen_policy() -> SerializationPolicy:
    """Return that of this process."""
    return _chosen


def choose(policy: SerializationPolicy) -> None:
    """Set that of this process, when it starts."""
    global _chosen
    _chosen = policy


def asked_for(flag: bool | None = None, environ: Mapping[str, str] = os.environ) -> bool | None:
    """Return whether pickles are allowed, as the option says, else the environment; None: neither says anything.

    Raises:
        ConfigurationError: the environment says something else than yes or no.
    """
    word = environ.get(PICKLE_VARIABLE, "").strip().lower()
    if flag is not None or not word:
        return flag
    if word not in _WORDS:
        raise ConfigurationError(f"{PICKLE_VARIABLE} is {word[:40]!r}; it must be 1 or 0")
    return _WORDS[word]


def policy_of(
    asked: bool | None,
    exposed: str = "",
    functions_from: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    *,
    data_from: Sequence[str] = (),
    is_worker: bool = False,
) -> SerializationPolicy:
    """Make the policy of a role.

    Args:
        asked: see `asked_for`.
        exposed: who could send a pickle, where anybody can; part of a sentence.
        functions_from: folders and packages; default: as the environment says, else the current folder and those of
            PYTHONPATH.
        environ: the environment.
        data_from: folders; default: as the environment says.
        is_worker: see `SerializationPolicy`.

    Raises:
        ConfigurationError: a folder that is not there, or what can be no package's name.
    """
    if asked is None and exposed:
        why = (
            f"pickles are off here, since {exposed}: give all roles a token (PSCLUSTER_TOKEN_FILE), or allow them with "
            f"{PICKLE_VARIABLE}=1"
        )
    else:
        why = f"pickles are off here (--no-pickle, or {PICKLE_VARIABLE}=0)"
    pickles = asked if asked is not None else not exposed
    folders, packages = _split(functions_from or default_functions_from(environ))
    data = _folders(data_from or [each for each in environ.get(DATA_VARIABLE, "").split(os.pathsep) if each])
    return SerializationPolicy(pickles, "" if pickles else why, folders, packages, data, is_worker)


def default_functions_from(environ: Mapping[str, str] = os.environ) -> list[str]:
    """As the environment says, else the current folder and those of PYTHONPATH."""
    if said := environ.get(FUNCTIONS_VARIABLE, ""):
        return [entry for entry in said.split(os.pathsep) if entry]
    paths = [os.path.abspath(entry) for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    found = dict.fromkeys([os.getcwd(), *(path for path in paths if os.path.isdir(path))])
    return [path for path in found if os.path.dirname(path) != path]  # not the root: that would be everything


def functions_from_also(*folders: str | os.PathLike[str] | None, given: Sequence[str] = ()) -> str:
    """For the environment of roles on this machine: what is given, or the default, and these folders, too."""
    entries = [*(given or default_functions_from()), *(os.path.abspath(folder) for folder in folders if folder)]
    return os.pathsep.join(dict.fromkeys(entries))


def _split(entries: Sequence[str]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    folders, packages = [], []
    for entry in entries:
        if os.path.isdir(entry):
            folders.append(Path(entry).resolve())
        elif all(part.isidentifier() for part in entry.split(".")) and os.sep not in entry:
            packages.append(entry)
        else:
            raise ConfigurationError(
                f"--functions-from (or {FUNCTIONS_VARIABLE}) names {entry!r}, which is neither a folder here nor a "
                "package's name"
            )
    return tuple(folders), tuple(packages)


def _folders(entries: Sequence[str]) -> tuple[Path, ...]:
    for entry in entries:
        if not os.path.isdir(entry):
            raise ConfigurationError(f"--data-from (or {DATA_VARIABLE}) names {entry!r}, which is no folder here")
    return tuple(Path(entry).resolve() for entry in entries)


def find_modules(found: SerializationPolicy) -> None:
    """Let Python import what is in the folders, after all else."""
    sys.path.extend(str(folder) for folder in found.folders if str(folder) not in sys.path)


def add_pickle_options(command: Callable[..., None]) -> Callable[..., None]:
    """Click options that say what peers may have run; what the environment says is looked up later, see `asked_for`."""
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
            help="Without pickles, peers name functions of files in this folder or of this installed package; may be "
            f"repeated. Default: the current folder and those of PYTHONPATH. Or ${FUNCTIONS_VARIABLE}.",
        ),
        click.option(
            "--data-from",
            multiple=True,
            metavar="FOLDER",
            help="Without pickles, workers map arrays of files in this folder and those of --functions-from, but no "
            f"others; may be repeated. Or ${DATA_VARIABLE}.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command
