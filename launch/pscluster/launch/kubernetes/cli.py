"""The command `pscluster k8s render`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from pscluster.core.display.sanitize import shown
from pscluster.core.errors import ConfigurationError
from pscluster.launch.kubernetes.output import secret_names, to_text, write_folder
from pscluster.launch.kubernetes.spec import MAX_NAME, ROLES, ClusterOptions, Resources, name_of


@click.group("k8s", help="Render the manifests of a cluster on Kubernetes.")
def k8s() -> None:
    pass


def _resource_options(command: Callable[..., None]) -> Callable[..., None]:
    for role in reversed(ROLES):
        for noun, default, example in (("memory", "2Gi", "1Gi:4Gi"), ("cpu", "1", "500m:2")):
            command = click.option(
                f"--{role}-{noun}",
                default=default,
                show_default=True,
                metavar="AMOUNT",
                help=f"Request and limit of a {role}'s {noun}, or REQUEST:LIMIT, such as {example}.",
            )(command)
    return command


@k8s.command("render", context_settings={"allow_interspersed_args": False})
@click.option("--name", help=f"The cluster's name, at most {MAX_NAME} characters. Default: that of SCRIPT.")
@click.option("--namespace", help="The namespace of all objects. Default: the one that kubectl uses.")
@click.option(
    "--image",
    default="pscluster:latest",
    show_default=True,
    help="An image with pscluster, and with SCRIPT unless --script-from-file is given.",
)
@click.option("--image-pull-secret", "pull_secret", metavar="NAME", help="A Secret for the image's registry.")
@click.option(
    "--ps", default=1, show_default=True, type=click.IntRange(1, 10_000), help="Number of parameter servers; fixed."
)
@click.option(
    "--workers",
    default=1,
    show_default=True,
    type=click.IntRange(0, 100_000),
    help="Initial number of workers; `kubectl scale` changes it.",
)
@click.option(
    "--max-workers", default=1000, show_default=True, type=click.IntRange(1, 100_000), help="Maximum number of workers."
)
@click.option("--storage", default="10Gi", show_default=True, metavar="AMOUNT", help="Disk for each server's state.")
@click.option("--storage-class", metavar="NAME", help="The disks' StorageClass. Default: the one of your Kubernetes.")
@_resource_options
@click.option(
    "--env",
    multiple=True,
    metavar="NAME=VALUE",
    help="An environment variable of all roles, not for secrets; repeatable.",
)
@click.option(
    "--backoff-limit",
    default=6,
    show_default=True,
    type=click.IntRange(0, 1_000_000),
    help="Restarts of the coordinator before its Job fails.",
)
@click.option("--script-from-file", is_flag=True, help="SCRIPT is a file here, to be put into a ConfigMap.")
@click.option(
    "--existing-secrets",
    "secrets",
    metavar="PREFIX",
    help="Use the Secrets PREFIX-token, PREFIX-ps-tls, PREFIX-worker-tls and PREFIX-coordinator-tls; make no new ones.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write to DIR, for `kubectl apply -k DIR`, with a token and certificates in DIR/secrets.",
)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def render(
    script: str,
    args: tuple[str, ...],
    name: str | None,
    env: tuple[str, ...],
    script_from_file: bool,
    output: Path | None,
    **options: Any,
) -> None:
    """Render the manifests of a cluster whose coordinator runs SCRIPT with ARGS.

    SCRIPT is a path in the image, relative to its working directory, unless --script-from-file is given.

    Without --output the manifests are printed. A Secret never is: pods refer to the Secrets NAME-token, NAME-ps-tls,
    NAME-worker-tls and NAME-coordinator-tls, which `kubectl apply -k DIR` creates from the files that --output writes.
    Those are made once and stay when you render again. DIR/secrets is for you alone (mode 0700, and ignored by git):
    anyone who has it can run code on the cluster.
    """
    resources = {role: Resources(role, options.pop(f"{role}_cpu"), options.pop(f"{role}_memory")) for role in ROLES}
    spec = ClusterOptions(
        name=name_of(script) if name is None else name,
        script=script,
        args=args,
        source=_read(script) if script_from_file else None,
        resources=resources,
        env=dict(map(_variable, env)),
        **options,
    )
    if output is None:
        click.echo(to_text(spec), nl=False)
        if spec.secrets is None:
            names = ", ".join(secret_names(spec))
            click.echo(f"the pods need these Secrets, which are not printed: {names}; --output makes them", err=True)
    else:
        written = ", ".join(write_folder(spec, output))
        credentials = "" if spec.secrets else f", and the token and certificates in {output / 'secrets'}"
        click.echo(shown(f"wrote {written} to {output}{credentials}; next: kubectl apply -k {output}"))


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigurationError(f"--env is {text!r}; give NAME=VALUE, such as OMP_NUM_THREADS=1")
    return name, value


def _read(script: str) -> str:
    try:
        return Path(script).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigurationError(
            f"can't read the script {script}: {reason}; name a file here, or leave out --script-from-file if it is in "
            "the image"
        ) from None
