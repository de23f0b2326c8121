"""Slurm's short notations: node lists, such as `n[01-03,7],m1`, and numbers of tasks per node, such as `2(x3),1`."""

from __future__ import annotations

import itertools
import json
import re

from pscluster.core.errors import ConfigurationError

MAX_NODES = 65_536
"""Slurm's own limit for one range."""

_MAX_QUOTED = 80
_NODES = "n[01-03,7],m1"
_COUNTS = "2(x3),1"
_ENTRY = re.compile(r"(?:[A-Za-z0-9_.-]|\[[0-9,-]+\])+")
_PIECE = re.compile(r"\[([^]]*)\]|([^[]+)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def wrong_variable(variable: str, value: str | None, limit: str, right: str) -> ConfigurationError:
    """Return the error for a variable: its value (None: it is not set), the limit, and what to write instead."""
    text = "not set" if value is None else json.dumps(value)
    text = text if len(text) <= _MAX_QUOTED else f"{text[: _MAX_QUOTED - 3]}..."
    return ConfigurationError(f"{variable} is {text}, but {limit}; write, for example, {right}")


def expand_nodes(text: str, variable: str = "the node list") -> list[str]:
    """Return the names of a node list in its order: `n[01-03,7],m1` is n01, n02, n03, n7, m1.

    A name may have several brackets. Raise ConfigurationError, which calls the list `variable`, if it is not one, names
    a node twice, or has more than MAX_NODES.
    """
    names: list[str] = []
    for entry in re.split(r",(?![^[]*\])", text):  # at the commas outside brackets
        if not _ENTRY.fullmatch(entry):
            raise wrong_variable(variable, text, "it must be a list of nodes", _NODES)
        pieces = [
            [literal] if literal else _expand_ranges(ranges, text, variable)
            for ranges, literal in _PIECE.findall(entry)
        ]
        made = itertools.islice(map("".join, itertools.product(*pieces)), MAX_NODES + 1 - len(names))
        names.extend(made)
        if len(names) > MAX_NODES:
            raise wrong_variable(variable, text, f"a list has at most {MAX_NODES:,} nodes", _NODES)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise wrong_variable(variable, text, f"{twice} may occur only once", _NODES)
    return names


def _expand_ranges(ranges: str, text: str, variable: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        match = _RANGE.fullmatch(item)
        low, high = (match[1], match[2] or match[1]) if match else ("", "")
        if not match or int(high) < int(low):
            raise wrong_variable(variable, text, f"[{item}] is neither a number nor a rising range", _NODES)
        if int(high) - int(low) >= MAX_NODES - len(numbers):
            raise wrong_variable(variable, text, f"a list has at most {MAX_NODES:,} nodes", _NODES)
        numbers.extend(str(number).zfill(len(low)) for number in range(int(low), int(high) + 1))
    return numbers


def expand_counts(text: str, variable: str = "the tasks per node") -> list[int]:
    """Return the numbers of tasks by node: `2(x3),1` is 2, 2, 2, 1.

    Raise ConfigurationError, which calls the list `variable`, if it is not one, or has more than MAX_NODES entries.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        if not match or int(match[1]) == 0 or match[2] == "0":
            raise wrong_variable(variable, text, "it must be a list of numbers of tasks, from 1", _COUNTS)
        repeats = int(match[2] or 1)
        if repeats > MAX_NODES - len(counts):
            raise wrong_variable(variable, text, f"a list has at most {MAX_NODES:,} nodes", _COUNTS)
        counts.extend([int(match[1])] * repeats)
    return counts
