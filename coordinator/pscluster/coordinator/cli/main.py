"""The command line."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pscluster.core.cluster.addresses import parse_address
from pscluster.core.cluster.tf_config import TFConfig
from pscluster.core.display.sanitize import shown
from pscluster.core.errors import ConfigurationError
from pscluster.core.functions.policy import add_pickle_options
from pscluster.core.ids import VERSION
from pscluster.core.importing import without_collections
from pscluster.core.role.options import insecure_option, metrics_port_of, tls_option
from pscluster.core.role.process import log_options, main_of
from pscluster.core.security.tls import INSECURE_VARIABLE, Tls, check_plain, is_set, load_tls, token_for
from pscluster.core.security.tokens import create_token_file, load_token, new_token

if TYPE_CHECKING:
    from pscluster.coordinator.moves.plan import Measure
    from pscluster.core.transport.channels import PeerAddress

# The commands import slow modules themselves: containers run `pscluster health` every few seconds, and the imports of
# the other commands, above all NumPy, take four times as long as the check (0.4 against 0.1 s).


class _LazyCommand(click.Command):
    """A stand-in for a command of another module, which is imported when the command is used."""

    def __init__(self, name: str, module: str, attribute: str, summary: str) -> None:
        super().__init__(name, help=summary)
        self._module, self._attribute = module, attribute

    def load(self) -> click.Command:
        if self._module not in sys.modules:
            with without_collections():
                importlib.import_module(self._module)
        command: click.Command = getattr(sys.modules[self._module], self._attribute)
        return command


class _Group(click.Group):
    """A group that loads lazy commands when they are called."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.load() if isinstance(command, _LazyCommand) else command, rest


def credentials_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of commands that query the roles of a cluster; see `_credentials`."""
    token_option = click.option(
        "--token-file", type=click.Path(path_type=Path), help="File that holds the cluster token."
    )
    return insecure_option(tls_option(token_option(command)))


def _credentials(
    addresses: Iterable[str], token_file: Path | None, tls_folder: Path | None, insecure: bool
) -> tuple[str | None, Tls | None, bool]:
    """Return the token and certificates for these addresses, and whether plain text is allowed off loopback."""
    tls, insecure = load_tls("tool", tls_folder), insecure or is_set(INSECURE_VARIABLE)
    return token_for(load_token(token_file), addresses, tls, insecure=insecure, create=False), tls, insecure


def dashboard_options(shown: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options of the live page; `shown` is the default."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        command = click.option(
            "--dashboard-address",
            envvar="PSCLUSTER_DASHBOARD_ADDRESS",
            metavar="HOST:PORT",
            help="Address of the live page. Default: 127.0.0.1:8477, or a free port. Or $PSCLUSTER_DASHBOARD_ADDRESS.",
        )(command)
        return click.option(
            "--dashboard/--no-dashboard", default=shown, show_default=True, help="Serve a live page about the job."
        )(command)

    return decorate


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Parameter-server training for any Python framework, over gRPC."""


_SCRIPT = "pscluster.coordinator.cli.script"
for _name, _module, _attribute, _summary in (
    ("ps", "pscluster.ps.server.main", "command", "Run a parameter server."),
    ("worker", "pscluster.worker.main", "command", "Run a worker."),
    ("coordinator", _SCRIPT, "command", "Run SCRIPT as the coordinator that TF_CONFIG names."),
    ("evaluator", _SCRIPT, "evaluator_command", "Run SCRIPT as the evaluator of TF_CONFIG."),
    ("runs", "pscluster.launch.cli", "runs", "List the runs of a Trainer."),
    ("scale", "pscluster.launch.cli", "scale", "Change the number of workers of a Trainer's run."),
    ("k8s", "pscluster.launch.kubernetes.cli", "k8s", "Render the manifests of a cluster on Kubernetes."),
    ("slurm", "pscluster.launch.slurm.cli", "slurm", "Run SCRIPT on a cluster that is a Slurm job."),
):
    cli.add_command(_LazyCommand(_name, _module, _attribute, _summary))


@cli.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--ps", "num_ps", default=1, show_default=True, type=click.IntRange(1), help="Number of parameter servers."
)
@click.option(
    "--workers", "num_workers", default=1, show_default=True, type=click.IntRange(1), help="Number of workers."
)
@click.option(
    "--max-restarts",
    default=10,
    show_default=True,
    type=click.IntRange(0),
    help="Restarts in a row of one server or worker before the run fails.",
)
@dashboard_options(shown=True)
@log_options("WARNING", "Log level of the servers and workers.")
@click.option(
    "--metrics-port",
    envvar="PSCLUSTER_METRICS_PORT",
    default="0",
    show_default="0: any free port",
    metavar="PORT|off",
    help="Where the coordinator serves /metrics; the roles take free ports. Or $PSCLUSTER_METRICS_PORT.",
)
@click.option(
    "--transport",
    type=click.Choice(["unix", "tcp"]),
    show_default="unix; tcp with --tls",
    help="Transport between processes: Unix sockets, which no other user can open, or ports of 127.0.0.1.",
)
@click.option("--tls", is_flag=True, help="Use TCP with mutual TLS, with certificates made for this run.")
@add_pickle_options
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run_command(script: str, args: tuple[str, ...], metrics_port: str, **options: Any) -> None:
    """Run SCRIPT on a local cluster.

    SCRIPT is its coordinator; the cluster is started before it, and stopped when it ends.
    """
    from pscluster.coordinator.cli.run import run_script

    sys.exit(run_script(script, args, metrics_port=metrics_port_of(metrics_port), **options))


@cli.command("health")
@click.argument("address")
@credentials_options
def health_command(address: str, **credentials: Any) -> None:
    """Check whether the role at ADDRESS is serving.

    ADDRESS is HOST:PORT or unix:PATH. Exit code 0: yes, 1: no.
    """
    from pscluster.coordinator.cli.health import is_healthy

    parse_address(address)
    token, tls, insecure = _credentials([address], **credentials)
    check_plain(address, address, token, tls, insecure=insecure)
    healthy, sentence = is_healthy(address, token, tls=tls)
    click.echo(shown(sentence))
    sys.exit(0 if healthy else 1)


_EVERY = click.FloatRange(0.1, 3600)


@cli.command("status")
@credentials_options
@click.option("--watch", is_flag=True, help="Repeat until Ctrl-C.")
@click.option("--every", default=2.0, show_default=True, type=_EVERY, help="Seconds between updates.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per update, on one line.")
def status_command(watch: bool, every: float, as_json: bool, **credentials: Any) -> None:
    """Print the state of every task of the cluster in TF_CONFIG. Exit code 0: all answered, 1: not all."""
    from pscluster.coordinator.cli.status import show_status

    sys.exit(show_status(_cluster(**credentials), as_text=not as_json, every=every if watch else None))


@cli.command("plan")
@credentials_options
@click.option(
    "--by",
    type=click.Choice(["load", "bytes"]),
    default="load",
    show_default=True,
    help="What to balance between the servers: bytes recently read and updated, or bytes held.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as a JSON object, on one line.")
def plan_command(by: Measure, as_json: bool, **credentials: Any) -> None:
    """Propose how to balance the servers.

    Prints which shards of the cluster in TF_CONFIG should move, and which variables should be resharded. Changes
    nothing: strategy.apply(strategy.plan()) in the script makes it live. Exit code 1: a server does not answer.
    """
    from pscluster.coordinator.cli.plan import show_plan

    sys.exit(show_plan(_cluster(**credentials), by, as_text=not as_json))


@cli.command("top")
@credentials_options
@click.option("--every", default=2.0, show_default=True, type=_EVERY, help="Seconds between updates.")
@click.option(
    "--rounds", default=0, show_default="until Ctrl-C", type=click.IntRange(0), help="Updates to show before exiting."
)
@click.option("--rows", default=10, show_default=True, type=click.IntRange(1), help="Maximum rows per table.")
def top_command(every: float, rounds: int, rows: int, **credentials: Any) -> None:
    """Show the busiest tasks and variables, live.

    Those of the cluster in TF_CONFIG: its servers, its workers, and what is on the servers.
    """
    from pscluster.coordinator.cli.status import show_top

    sys.exit(show_top(_cluster(**credentials), every=every, rounds=rounds, rows=rows))


def _cluster(**credentials: Any) -> list[PeerAddress]:
    """Return the tasks to query. ConfigurationError if TF_CONFIG names none."""
    from pscluster.coordinator.cli.status import peers_of

    cluster = TFConfig.from_environ().cluster
    if not cluster:
        raise ConfigurationError(
            "TF_CONFIG names no cluster; set it to the one that the roles were started with, such as "
            '{"cluster": {"ps": ["127.0.0.1:2222"], "worker": ["127.0.0.1:2223"]}}'
        )
    token, tls, insecure = _credentials([peer.address for peer in peers_of(cluster)], **credentials)
    peers = peers_of(cluster, tls, token)
    for peer in peers:
        peer.check_plain(insecure=insecure)
    return peers


@cli.command("token")
@click.option("--file", "path", type=click.Path(path_type=Path), help="Create this file if it is missing.")
def token_command(path: Path | None) -> None:
    """Create a cluster token.

    Prints it, or with --file writes it to a file that only you can read.
    """
    if path is None:
        click.echo(new_token())
    else:
        create_token_file(path)


@cli.command("certs")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--host", "hosts", multiple=True, metavar="NAME|IP", help="Name or address by which roles are reached; repeatable."
)
@click.option(
    "--days",
    default=365.0,
    show_default=True,
    type=click.FloatRange(0, 36_500, min_open=True),
    help="Days for which the certificates are valid.",
)
@click.option("--renew", is_flag=True, help="Renew the certificates in DIR with its CA, for the same keys and hosts.")
def certs_command(folder: Path, hosts: tuple[str, ...], days: float, renew: bool) -> None:
    """Create certificates for all roles in DIR.

    They are a CA, and for each role (DIR/ps, worker, coordinator and tool) a certificate and a key, valid for
    localhost, the hosts of the cluster in TF_CONFIG, if it is set, and each --host.
    """
    from pscluster.core.security.certificates import hosts_of, make_certificates, renew_certificates

    if renew:
        renew_certificates(folder, hosts, days)
    elif not make_certificates(folder, hosts, hosts_of(TFConfig.from_environ().cluster), days):
        raise ConfigurationError(
            f"{folder} already has certificates, and they were not changed: give --renew for new ones from the same "
            "CA, or name another folder"
        )


@cli.group("checkpoint")
def checkpoint_group() -> None:
    """Inspect checkpoints. DIRECTORY is one, or holds several (then the newest is used); it may be an fsspec URL."""


@checkpoint_group.command("inspect")
@click.argument("directory")
def inspect_command(directory: str) -> None:
    """Print the contents of a checkpoint."""
    from pscluster.coordinator.checkpoints import folder, tools

    click.echo(tools.inspect(folder.where(directory)))


@checkpoint_group.command("verify")
@click.argument("directory")
def verify_command(directory: str) -> None:
    """Check that every byte is as it was written. Exit code 0: yes, 1: no."""
    from pscluster.coordinator.checkpoints import folder, tools

    path = folder.where(directory)
    index = tools.verify(path)
    contents = f"{len(index.variables)} variables, {index.nbytes:,} bytes in {len(index.files)} files"
    click.echo(shown(f"{path} is complete: {contents}"))


@checkpoint_group.command("merge")
@click.argument("directory")
@click.argument("out")
def merge_command(directory: str, out: str) -> None:
    """Write complete variables to the directory OUT, as safetensors files with the usual index."""
    from pscluster.coordinator.checkpoints import folder, tools

    for name in tools.merge(folder.where(directory), out):
        click.echo(shown(f"{out.rstrip('/')}/{name}"))


@cli.command("version")
def version_command() -> None:
    """Print the version."""
    click.echo(f"pscluster {VERSION}")


def main() -> None:
    main_of(cli)
