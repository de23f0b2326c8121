"""Setup of every process of ours: the allocator, the log, and errors that end it in one line."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import logging
import sys
from collections.abc import Callable
from typing import Any

import click

from pscluster.core.display.sanitize import shown, shown_json
from pscluster.core.errors import ConfigurationError, PsClusterError


def tune_allocator() -> None:
    """Tell glibc to keep freed pages: fresh pages cost ten times a warm copy (2 against 20 GB/s, measured).

    Call it before threads start. It has no effect without glibc. The price: resident memory stays at its peak.
    """
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-8, 1)  # M_ARENA_MAX
        mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap and return to it
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        mallopt(-2, 64 << 20)  # M_TOP_PAD


LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
LOG_FORMATS = ("text", "json")
LOG_FORMAT_VARIABLE = "PSCLUSTER_LOG_FORMAT"


def log_options(
    level: str = "INFO", help_text: str = "Log to standard error from this level on."
) -> Callable[[Any], Any]:

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        command = click.option(
            "--log-format",
            envvar=LOG_FORMAT_VARIABLE,
            default="text",
            show_default=True,
            type=click.Choice(LOG_FORMATS),
            help=f"Lines of text, or one JSON object a line. Or ${LOG_FORMAT_VARIABLE}.",
        )(command)
        return click.option(
            "--log-level",
            envvar="PSCLUSTER_LOG_LEVEL",
            default=level,
            show_default=True,
            type=click.Choice(LOG_LEVELS, case_sensitive=False),
            help=f"{help_text} Or $PSCLUSTER_LOG_LEVEL.",
        )(command)

    return decorate


def configure_logging(who: str, level: str, form: str = "text") -> None:
    """Log to stderr, one line per event, of the process `who`, such as "ps/0". Never for a library user's process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(who) if form == "json" else _TextFormatter(who))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


_bound: dict[str, str | int] = {}


def bind_log(**values: str | int) -> None:
    """Add these values, which identify the process, to every JSON line of the log from now on."""
    _bound.update(values)


class _TextFormatter(logging.Formatter):
    """Local date and time, process, level and message on one line, followed by the traceback of an exception."""

    def __init__(self, who: str) -> None:
        super().__init__(f"%(asctime)s {who} %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (logging's name)
        # Names that peers have chosen must not look like a line of ours.
        record.message = shown(" | ".join(record.message.splitlines()))
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802  (logging's name)
        return shown(super().formatException(ei), lines=True)


class _JsonFormatter(logging.Formatter):
    """An object per line: time in UTC, level, process, bound values, message, and the traceback, if there is one."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "who": self._who,
            **_bound,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return shown_json(line)


def main_of(command: click.Command) -> None:
    """Run a role's command as a program: our errors are one line, configuration errors exit with 2."""
    try:
        command(standalone_mode=False)
    except ConfigurationError as error:
        sys.exit(print_error(error, 2))
    except PsClusterError as error:
        sys.exit(print_error(error, 1))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)


def print_error(error: Exception, code: int) -> int:
    """Print an error in one line, and return the exit code."""
    print(f"pscluster: {shown(' | '.join(str(error).splitlines()))}", file=sys.stderr)
    return code
