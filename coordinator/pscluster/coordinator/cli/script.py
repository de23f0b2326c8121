"""`pscluster coordinator` and `pscluster evaluator`: run a user's script as the coordinator or the evaluator."""

from __future__ import annotations

import _thread
import logging
import os
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Sequence
from dataclasses import replace

import click

from pscluster.coordinator.cli.main import dashboard_options
from pscluster.coordinator.cli.run import script_at
from pscluster.coordinator.job.context import close_all
from pscluster.coordinator.job.settings import set_process_options
from pscluster.coordinator.strategy import ParameterServerStrategy
from pscluster.core.cluster.tf_config import TFConfig
from pscluster.core.errors import ConfigurationError, PsClusterError
from pscluster.core.role.lifecycle import on_parents_death
from pscluster.core.role.options import RoleOptions, expect_type, joining_options, options_of_environ, role_options
from pscluster.core.role.process import configure_logging, log_options, main_of, print_error, tune_allocator
from pscluster.core.security.tokens import hide_token

logger = logging.getLogger(__name__)


_REPEAT_SECONDS = 0.05  # after which a signal whose exception was dropped is raised once more


class _Stopped(KeyboardInterrupt):
    """SIGTERM or Ctrl-C; a KeyboardInterrupt, which scripts normally do not catch."""


def run_coordinator(
    script: str, args: Sequence[str], options: RoleOptions, role: str = "chief", *, keep_job: bool = False
) -> int:
    """Run the script as `__main__`, then tell the cluster that the job is over. Return the exit code.

    That is 0 at the end of the script, and 128 + n if signal n stopped it before, as for `pscluster run`; but 0 for an
    evaluator, which never ends by itself. `sys.exit` sets its own code. An exception is shown with its traceback, and
    the code is 1. Errors of the cluster rather than the script are shown in one line: the code is 2 if the
    configuration is wrong, 1 if tasks were missing or refused the job.

    With `keep_job`, SIGTERM before the end of the script does not end the job: the next coordinator continues it.
    """
    path = script_at(script)
    name = "coordinator" if role == "chief" else role
    config = TFConfig.from_environ()  # may be empty, or have no task: the script may know its cluster
    if config.task is not None:
        expect_type(config.task, role)
    set_process_options(options)
    configure_logging(name, options.log_level, options.log_format)
    tune_allocator()
    stopped: list[signal.Signals] = []
    in_script, has_ended, again = False, False, False
    unfinished = 0  # the signal that arrived before the script had ended

    def handle(signal_number: int, _frame: object) -> None:
        nonlocal unfinished, again
        if again:
            again = False
            if in_script:
                raise _Stopped
            return
        if stopped:
            os._exit(128 + signal_number)
        stopped.append(signal.Signals(signal_number))
        if not has_ended:
            unfinished = signal_number
        if in_script:
            raise _Stopped

    def repeat() -> None:
        nonlocal again
        time.sleep(_REPEAT_SECONDS)
        again = True
        signal.pthread_kill(threading.main_thread().ident or 0, stopped[0])

    def on_unraisable(dropped: sys.UnraisableHookArgs) -> None:
        if dropped.exc_type is not _Stopped:
            sys.__unraisablehook__(dropped)
        elif in_script:  # it was raised in a finalizer or a callback of C code, which can't end the script
            _thread.start_new_thread(repeat, ())  # not `threading`, of which a finalizer may run with a lock held

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    sys.unraisablehook = on_unraisable
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
            if stopped:  # before the script began
                raise _Stopped
            # Without this file's __future__ imports, as if Python ran the script.
            code_of_script = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
            exec(code_of_script, module.__dict__)  # noqa: S102  (our purpose)  # nosec B102
        finally:
            in_script, has_ended = False, True  # a signal must not interrupt the rest of this function
    except _Stopped:
        reason = f"the {name} was stopped by {stopped[0].name}"
        logger.warning("stopped by %s before the script had ended", stopped[0].name)
    except SystemExit as end:
        code = _exit_code(end)
        if code:
            reason = f"the {name}'s script ended with code {code}"
    except ConfigurationError as error:
        code, reason = print_error(error, 2), f"the {name}'s script failed: {type(error).__name__}"
    except BaseException as error:
        code, reason = 1, f"the {name}'s script failed: {type(error).__name__}"
        if isinstance(error, PsClusterError) and _while_connecting(error):
            print_error(error, 1)
        else:
            trace = error.__traceback__
            error.__traceback__ = trace.tb_next if trace is not None else None  # the first frame is ours
            sys.excepthook(type(error), error, error.__traceback__)
    if keep_job and unfinished == signal.SIGTERM:
        logger.warning("the job is left to the next coordinator (--keep-job)")
    else:
        close_all(reason)
    # A clean stop is a success for a role, but the caller of this command must not take the job for done.
    return 128 + unfinished if unfinished and code == 0 and role == "chief" else code


def _while_connecting(error: BaseException) -> bool:
    """Return whether the error was raised while the strategy was being created: then the script is not at fault."""
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
@joining_options
@click.option(
    "--keep-job",
    is_flag=True,
    help="On SIGTERM leave the job to the next coordinator, as if this one had been killed, instead of ending it.",
)
@role_options
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(script: str, args: tuple[str, ...], options: RoleOptions, keep_job: bool) -> None:
    _end(run_coordinator(script, args, options, keep_job=keep_job))


@click.command("evaluator", context_settings=_SETTINGS, help="Run SCRIPT as the evaluator of TF_CONFIG.")
@log_options()
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def evaluator_command(script: str, args: tuple[str, ...], log_level: str, log_format: str) -> None:
    options = replace(options_of_environ(role="tool"), log_level=log_level, log_format=log_format)
    hide_token()
    _end(run_coordinator(script, args, options, "evaluator"))


def _end(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the script's threads must not keep a finished job alive


def main() -> None:
    main_of(command)
