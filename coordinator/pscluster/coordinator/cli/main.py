"""The command line."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pscluster.coordinator.cli.options import dashboard_options
from pscluster.core.errors import ConfigurationError
from pscluster.core.functions.policy import add_pickle_options
from pscluster.core.role.process import log_options, main_of
from pscluster.core.sanitize import shown

if TYPE_CHECKING:
    from pscluster.core.transport.channels import PeerAddress

# Imports that take long stand in the commands: containers run `pscluster health` every few seconds, and what the
# others need, NumPy first of all, takes four times as long to load as the check takes (0.4 against 0.1 s).


class _Elsewhere(click.Command):
    """Stands for a command of another module, which is imported when the command is used."""

    def __init__(self, name: str, module: str, attribute: str, summary: str) -> None:
        super().__init__(name, help=summary)
        self._place = module, attribute

    def load(self) -> click.Command:
        module, attribute = self._place
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


class _Group(click.Group):
    """A group that imports what stands elsewhere once it is called."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.load() if isinstance(command, _Elsewhere) else command, rest


def credentials_options(command: Callable[..., None]) -> Callable[..., None]:
    """Click options of what asks the roles of a cluster."""
    for option in (
        click.option("--insecure", is_flag=True, help="Allow plain text off loopback. Or $PSCLUSTER_INSECURE=1."),
        click.option(
            "--tls",
            "tls_folder",
            type=click.Path(path_type=Path),
            help="Folder with certificates, the same as for the roles. Or $PSCLUSTER_TLS.",
        ),
        click.option("--token-file", type=click.Path(path_type=Path), help="File that holds the cluster token."),
    ):
        command = option(command)
    return command


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Parameter-server training for any Python framework, over gRPC."""


for _name, _module, _attribute, _summary in (
    ("ps", "pscluster.ps.server.main", "command", "Run a parameter server: the task that TF_CONFIG names."),
    ("worker", "pscluster.worker.main", "command", "Run a worker: the task that TF_CONFIG names."),
    (
        "coordinator",
        "pscluster.coordinator.cli.script",
        "command",
        "Run SCRIPT as the coordinator that TF_CONFIG names.",
    ),
    ("evaluator", "pscluster.coordinator.cli.script", "evaluator_command", "Run SCRIPT as the evaluator of TF_CONFIG."),
):
    cli.add_command(_Elsewhere(_name, _module, _attribute, _summary))


@cli.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--ps", "num_ps", default=1, show_default=True, type=click.IntRange(1), help="Parameter servers.")
@click.option("--workers", "num_workers", default=1, show_default=True, type=click.IntRange(1), help="Workers.")
@click.option(
    "--max-restarts",
    default=10,
    show_default=True,
    type=click.IntRange(0),
    help="Restarts of one role before the run fails.",
)
@dashboard_options(shown=True)
@log_options("WARNING", "Of the servers and workers.")
@click.option(
    "--metrics-port",
    envvar="PSCLUSTER_METRICS_PORT",
    default="0",
    show_default="0: any free one",
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
def run_command(
    num_ps: int,
    num_workers: int,
    max_restarts: int,
    log_level: str,
    metrics_port: str,
    transport: str | None,
    tls: bool,
    allow_pickle: bool | None,
    functions_from: tuple[str, ...],
    data_from: tuple[str, ...],
    log_format: str,
    dashboard: bool,
    dashboard_address: str | None,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Run SCRIPT as the coordinator of a local cluster that lives as long as it."""
    from pscluster.coordinator.cli.run import run_script
    from pscluster.core.role.options import metrics_port_of

    sys.exit(
        run_script(
            script,
            args,
            num_ps=num_ps,
            num_workers=num_workers,
            max_restarts=max_restarts,
            log_level=log_level,
            metrics_port=metrics_port_of(metrics_port),
            allow_pickle=allow_pickle,
            functions_from=functions_from,
            data_from=data_from,
            log_format=log_format,
            dashboard=dashboard,
            dashboard_address=dashboard_address,
            transport=transport,
            tls=tls,
        )
    )


@cli.command("health")
@click.argument("address")
@credentials_options
def health_command(address: str, token_file: Path | None, tls_folder: Path | None, insecure: bool) -> None:
    """Ask the role at ADDRESS (HOST:PORT or unix:PATH) whether it serves. Exit code 0: yes, 1: no."""
    from pscluster.coordinator.cli.health import is_healthy
    from pscluster.core.cluster.spec import parse_address
    from pscluster.core.security.tls import INSECURE_VARIABLE, check_plain, is_set, load_tls, token_for
    from pscluster.core.security.tokens import load_token

    parse_address(address)
    tls, insecure = load_tls("tool", tls_folder), insecure or is_set(INSECURE_VARIABLE)
    token = token_for(load_token(token_file), [address], tls, insecure=insecure, create=False)
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
def status_command(
    token_file: Path | None, tls_folder: Path | None, insecure: bool, watch: bool, every: float, as_json: bool
) -> None:
    """Print the state of every task of the cluster in TF_CONFIG. Exit code 0: all answer."""
    from pscluster.coordinator.cli.status import show_status

    peers = _cluster(token_file, tls_folder, insecure)
    sys.exit(show_status(peers, as_text=not as_json, every=every if watch else None))


@cli.command("top")
@credentials_options
@click.option("--every", default=2.0, show_default=True, type=_EVERY, help="Seconds between updates.")
@click.option(
    "--rounds", default=0, show_default="until Ctrl-C", type=click.IntRange(0), help="Updates to show before exiting."
)
@click.option("--rows", default=10, show_default=True, type=click.IntRange(1), help="Maximum rows per table.")
def top_command(
    token_file: Path | None, tls_folder: Path | None, insecure: bool, every: float, rounds: int, rows: int
) -> None:
    """Show the busiest servers, variables and workers of the cluster in TF_CONFIG, live."""
    from pscluster.coordinator.cli.status import show_top

    peers = _cluster(token_file, tls_folder, insecure)
    sys.exit(show_top(peers, every=every, rounds=rounds, rows=rows))


def _cluster(token_file: Path | None, tls_folder: Path | None, insecure: bool) -> list[PeerAddress]:
    """Return the tasks to ask. ConfigurationError if TF_CONFIG names none."""
    from pscluster.coordinator.cli.status import peers_of
    from pscluster.core.cluster.spec import TFConfig
    from pscluster.core.security.tls import INSECURE_VARIABLE, is_set, load_tls, token_for
    from pscluster.core.security.tokens import load_token

    cluster = TFConfig.from_environ().cluster
    if not cluster:
        raise ConfigurationError(
            "TF_CONFIG names no cluster to ask; set it to the one the roles were started with, such as "
            '{"cluster": {"ps": ["127.0.0.1:2222"], "worker": ["127.0.0.1:2223"]}}'
        )
    tls, insecure = load_tls("tool", tls_folder), insecure or is_set(INSECURE_VARIABLE)
    token = token_for(
        load_token(token_file), [peer.address for peer in peers_of(cluster)], tls, insecure=insecure, create=False
    )
    peers = peers_of(cluster, tls, token)
    for peer in peers:
        peer.check_plain(insecure=insecure)
    return peers


@cli.command("token")
@click.option("--file", "path", type=click.Path(path_type=Path), help="Create this file if it is missing.")
def token_command(path: Path | None) -> None:
    """Make a cluster token: print it, or with --file put it into a file that only you can read."""
    from pscluster.core.security.tokens import create_token_file, new_token

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
    """Make a CA in DIR, and a folder with a certificate and a key for each role: DIR/ps, worker, coordinator and tool.

    They are valid for localhost, the hosts of the cluster in TF_CONFIG, if it is set, and each --host.
    """
    from pscluster.core.cluster.spec import TFConfig
    from pscluster.core.security.certificates import hosts_of, make_certificates, renew_certificates

    if renew:
        renew_certificates(folder, hosts, days)
    elif not make_certificates(folder, hosts, hosts_of(TFConfig.from_environ().cluster), days):
        raise ConfigurationError(
            f"{folder} already has certificates, which are kept: give --renew for new ones from the same CA, or "
            "name another folder"
        )


@cli.group("checkpoint")
def checkpoint_group() -> None:
    """Inspect checkpoints. DIRECTORY is one, or holds several (the newest is used); it may be an fsspec URL."""


@checkpoint_group.command("inspect")
@click.argument("directory")
def inspect_command(directory: str) -> None:
    """Print what is in a checkpoint."""
    from pscluster.coordinator.checkpoints import folder, tools

    click.echo(tools.inspect(folder.where(directory)))


@checkpoint_group.command("verify")
@click.argument("directory")
def verify_command(directory: str) -> None:
    """Compare every byte with what was written. Exit code 0: it is whole."""
    from pscluster.coordinator.checkpoints import folder, tools

    path = folder.where(directory)
    index = tools.verify(path)
    what = f"{len(index.variables)} variables, {index.nbytes:,} bytes in {len(index.files)} files"
    click.echo(shown(f"{path} is whole: {what}"))


@checkpoint_group.command("merge")
@click.argument("directory")
@click.argument("out")
def merge_command(directory: str, out: str) -> None:
    """Write the variables whole to the directory OUT, as sharded safetensors with the usual index."""
    from pscluster.coordinator.checkpoints import folder, tools

    for name in tools.merge(folder.where(directory), out):
        click.echo(shown(f"{out.rstrip('/')}/{name}"))


@cli.command("version")
def version_command() -> None:
    """Print the version."""
    from pscluster.core.ids import VERSION

    click.echo(f"pscluster {VERSION}")


def main() -> None:
    """Entry point."""
    main_of(cli)
