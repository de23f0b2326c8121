"""Runs a user's script as the coordinator, or as the evaluator: `pscluster coordinator` and `pscluster evaluator`."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
import types
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from pscluster.coordinator.cli.options import dashboard_options
from pscluster.coordinator.job.context import close_all
from pscluster.coordinator.job.settings import set_process_options
from pscluster.coordinator.strategy import ParameterServerStrategy
from pscluster.core.cluster.spec import TFConfig
from pscluster.core.errors import ConfigurationError, PsClusterError
from pscluster.core.role.lifecycle import on_parents_death
from pscluster.core.role.options import RoleOptions, expect_type, options_of_environ, role_options
from pscluster.core.role.process import complain, configure_logging, log_options, main_of, tune_allocator
from pscluster.core.security.tokens import hide_token

logger = logging.getLogger(__name__)


class _Stopped(KeyboardInterrupt):
    """SIGTERM or Ctrl-C: a KeyboardInterrupt, which scripts know how to let pass."""


def run_coordinator(script: str, args: Sequence[str], options: RoleOptions, role: str = "chief") -> int:
    """Run the script as `__main__`, then tell the cluster that the job is over. Returns the exit code.

    A script that ends gives 0, and one that signal n has stopped before its end 128 + n, as `pscluster run` has it; an
    evaluator, which has no end of its own, gives 0 then, too. Its `sys.exit` gives its own code. An exception is shown
    and gives 1; but our own, where the cluster is at fault and not the script, is shown in one line: 2 if the
    configuration is wrong, 1 if tasks were missing or refused.
    """
    path = Path(script)
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise ConfigurationError(f"the script {script} {what}; give a Python file")
    name = "coordinator" if role == "chief" else role
    config = TFConfig.from_environ()  # without a task, or at all: the script may know its cluster by itself
    if config.task is not None:
        expect_type(config.task, role)
    set_process_options(options)
    configure_logging(name, options.log_level, options.log_format)
    tune_allocator()
    stopped: list[signal.Signals] = []
    in_script, has_ended = False, False
    unfinished = 0  # the signal that came before the script had ended

    def handle(number: int, _frame: object) -> None:
        nonlocal unfinished
        if stopped:
            os._exit(128 + number)
        stopped.append(signal.Signals(number))
        if not has_ended:
            unfinished = number
        if in_script:
            raise _Stopped

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    if options.exit_with_parent:
        on_parents_death(lambda: None if stopped else os.kill(os.getpid(), signal.SIGTERM))
    sys.argv = [script, *args]
    sys.path[0:0] = [str(path.resolve().parent)]
    module = types.ModuleType("__main__")
    module.__file__ = str(path.resolve())
    sys.modules["__main__"] = module
    code, reason = 0, f"the {name}'s script has ended"
    try:
        try:
            in_script = True
            if stopped:  # before there was a script to stop
                raise _Stopped
            # Not with this file's __future__ imports: the script is as it would be if Python ran it.
            code_of_script = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
            exec(code_of_script, module.__dict__)  # noqa: S102  (what we are for)  # nosec B102
        finally:
            in_script, has_ended = False, True  # a signal during what follows must not break it off
    except _Stopped:
        reason = f"the {name} was stopped by {stopped[0].name}"
        logger.warning("stopped by %s before the script had ended", stopped[0].name)
    except SystemExit as end:
        code = _exit_code(end)
        if code:
            reason = f"the {name}'s script ended with code {code}"
    except ConfigurationError as error:
        code, reason = complain(error, 2), f"the {name}'s script failed: {type(error).__name__}"
    except BaseException as error:
        code, reason = 1, f"the {name}'s script failed: {type(error).__name__}"
        if isinstance(error, PsClusterError) and _while_connecting(error):
            complain(error, 1)
        else:
            trace = error.__traceback__
            error.__traceback__ = trace.tb_next if trace is not None else None  # the first frame is ours
            sys.excepthook(type(error), error, error.__traceback__)
    close_all(reason)
    # Stopped in order is a good end for a role, but whoever started this must not take the job for done.
    return 128 + unfinished if unfinished and code == 0 and role == "chief" else code


def _while_connecting(error: BaseException) -> bool:
    """Was it raised while the strategy was made? Then nothing in the script went wrong."""
    making = ParameterServerStrategy.__init__.__code__
    return any(frame.f_code is making for frame, _ in traceback.walk_tb(error.__traceback__))


def _exit_code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code
    print(end.code, file=sys.stderr)
    return 1


_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.command("coordinator", context_settings=_SETTINGS, help="Run SCRIPT as the coordinator that TF_CONFIG names.")
@dashboard_options(shown=False)
@role_options
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(script: str, args: tuple[str, ...], options: RoleOptions) -> None:
    """Run this process' task."""
    _end(run_coordinator(script, args, options))


@click.command("evaluator", context_settings=_SETTINGS, help="Run SCRIPT as the evaluator of TF_CONFIG.")
@log_options()
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def evaluator_command(script: str, args: tuple[str, ...], log_level: str, log_format: str) -> None:
    """Run this process' task."""
    options = replace(options_of_environ(role="tool"), log_level=log_level, log_format=log_format)
    hide_token()
    _end(run_coordinator(script, args, options, "evaluator"))


def _end(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread of the script's must not keep a finished job alive


def main() -> None:
    """Entry point."""
    main_of(command)
