"""Tracebacks without the library's own frames, and short ones of our errors for notebooks."""

from __future__ import annotations

import itertools
import os
import re
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import pscluster
from pscluster.core.display.sanitize import shown

_LIBRARY = "pscluster"
_OWN = tuple(str(folder) + os.sep for folder in pscluster.__path__)
_CALLED_BY_US = (
    *(f"{os.sep}{name}{os.sep}" for name in ("grpc", "tenacity", "concurrent")),
    f"{os.sep}threading.py",
)
# Which call the user's functions.
_FRAMEWORKS = re.compile(r"[\\/]site-packages[\\/](torch|keras|jax|flax|equinox)[\\/]")
_SHELLS = tuple(f"{os.sep}{name}{os.sep}" for name in ("IPython", "ipykernel"))
_FILE = re.compile(r'^( *)File "(.+)", (?=line \d)', re.MULTILINE)


class FoldedStack(traceback.StackSummary):
    """Frames to show without those of the library, and of frameworks that have only passed the error on."""

    def format(self, **kwargs: Any) -> list[str]:
        """Return the lines to show. The library's frames before the first of the user's are left out."""
        lines, folded = list[str](), ""
        places = zip(map(_inside, are_ours(self), self), self, strict=True)
        groups = [(name, [frame for _, frame in group]) for name, group in itertools.groupby(places, lambda at: at[0])]
        for number, (name, frames) in enumerate(groups):
            if not name or (name != _LIBRARY and number == len(groups) - 1):
                lines += traceback.StackSummary.from_list(frames).format(**kwargs)
                continue
            folded = f"  [{len(frames)} frame{'s' * (len(frames) > 1)} inside {name}]\n"
            lines += [folded] if lines else []
        return lines or [folded]


def _inside(ours: bool, frame: traceback.FrameSummary) -> str:
    """Return the name of what a frame belongs to; "" if that is the user's own code, or any other package."""
    if ours:
        return _LIBRARY
    framework = _FRAMEWORKS.search(frame.filename)
    return "" if framework is None else framework[1]


def are_ours(frames: Iterable[traceback.FrameSummary]) -> list[bool]:
    """Return for each frame whether it is the library's, or that of a package which it calls."""
    flags, ours = [], False
    for frame in frames:
        ours = frame.filename.startswith(_OWN) or (ours and any(folder in frame.filename for folder in _CALLED_BY_US))
        flags.append(ours)
    return flags


def short_traceback(error: BaseException, name_of: Callable[[str], str]) -> list[str]:
    """Return the lines of a traceback with the user's frames and the error's own words, without its context.

    `name_of` returns what people call a file, such as that of a notebook's cell.
    """
    stack = traceback.extract_tb(error.__traceback__)
    frames = list(itertools.dropwhile(lambda frame: any(shell in frame.filename for shell in _SHELLS), stack))
    said = str(error)
    parts = [
        *(FoldedStack(frames).format() if frames else ()),
        f"{type(error).__qualname__}{said and ': '}{said}",
        *getattr(error, "__notes__", ()),
    ]
    if (cause := error.__cause__) is not None:
        parts.append(f"The cause was {type(cause).__qualname__}: {cause}")
    text = "\n".join(part.rstrip("\n") for part in parts)
    text = _FILE.sub(lambda match: f"{match[1]}{name_of(match[2])}, ", text)  # of the function's traceback, too
    return shown(text, lines=True).split("\n")
