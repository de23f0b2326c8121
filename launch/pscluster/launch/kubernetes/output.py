"""Writes manifests: to a stream, or to a folder for `kubectl apply -k`, which also has the token and certificates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pscluster.core.errors import ConfigurationError
from pscluster.core.security.certificates import hosts_in, hosts_of, make_certificates, renew_certificates
from pscluster.core.security.tokens import create_token_file
from pscluster.launch.kubernetes.manifests import manifests
from pscluster.launch.kubernetes.pods import TLS_KEYS, TOKEN_KEY, Object, cluster_of, labels
from pscluster.launch.kubernetes.spec import ROLES, ClusterOptions

HEADER = "# Made by `pscluster k8s render`, which overwrites it.\n"
KUSTOMIZATION = "kustomization.yaml"
SECRETS = "secrets"

# What every YAML parser takes for a string. Others read 1e3 as a number, and n as false.
_PLAIN = re.compile(r"[A-Za-z/][\w./-]+")


def dump(documents: Sequence[Object]) -> str:
    """Return the documents as YAML. Raise ConfigurationError without PyYAML."""
    try:
        import yaml
    except ImportError:
        raise ConfigurationError(
            'writing YAML needs PyYAML, which is not installed: pip install "pscluster[kubernetes]"'
        ) from None

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]  # it has no types
        """Quotes strings that another parser could misread, and repeats what occurs twice."""

        def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002  (PyYAML's signature)
            return True

        def represent_text(self, text: str) -> Any:
            style = "|" if "\n" in text else None if _PLAIN.fullmatch(text) else '"'
            return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, Dumper.represent_text)
    return str(yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=4096, explicit_start=True))


def to_text(spec: ClusterOptions) -> str:
    """Return all objects as YAML, without the Secrets that they refer to."""
    return HEADER + dump([document for documents in manifests(spec).values() for document in documents])


def secret_names(spec: ClusterOptions) -> list[str]:
    """Return the names of the Secrets that the pods mount."""
    return [spec.secret("token"), *(spec.secret(f"{role}-tls") for role in ROLES)]


def write_folder(spec: ClusterOptions, folder: Path) -> list[str]:
    """Write the manifests and a kustomization.yaml; make the token and the certificates, unless Secrets exist for them.

    Credentials that are there stay; certificates are renewed if the servers' names have changed. Return the names of
    the files that were written, without the credentials. Raise ConfigurationError if the folder has other files of
    these names, or can't be written.
    """
    files = {name: dump(documents) for name, documents in manifests(spec).items()}
    files[KUSTOMIZATION] = dump([_kustomization(spec, list(files))])
    try:
        for name in files:
            path = folder / name
            if path.exists() and not path.read_text(encoding="utf-8").startswith(HEADER):
                raise ConfigurationError(
                    f"{path} exists, and `pscluster k8s render` has not made it: name another folder with --output, "
                    "and keep files of your own in an overlay that lists that folder as a resource"
                )
        folder.mkdir(parents=True, exist_ok=True)
        if spec.secrets is None:
            _make_credentials(spec, folder / SECRETS)
        for name, text in files.items():
            (folder / name).write_text(HEADER + text, encoding="utf-8")
        if "script.yaml" not in files:
            (folder / "script.yaml").unlink(missing_ok=True)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text"
        raise ConfigurationError(f"can't write to {folder}: {reason}; name another folder with --output") from None
    return sorted(files)


def _make_credentials(spec: ClusterOptions, folder: Path) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    create_token_file(folder / TOKEN_KEY)
    by_role, tls = hosts_of(cluster_of(spec)), folder / "tls"
    if not make_certificates(tls, by_role=by_role) and any(hosts - hosts_in(tls, of) for of, hosts in by_role.items()):
        renew_certificates(tls, by_role=by_role)


def _kustomization(spec: ClusterOptions, resources: list[str]) -> Object:
    kustomization: Object = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    if spec.namespace is not None:
        kustomization["namespace"] = spec.namespace
    kustomization["resources"] = resources
    if spec.secrets is None:
        made = [_generator(spec.secret("token"), "Opaque", [f"{TOKEN_KEY}={SECRETS}/{TOKEN_KEY}"])]
        for role in ROLES:
            files = [f"{key}={SECRETS}/tls/{role}/{key}" for key in TLS_KEYS]
            made.append(_generator(spec.secret(f"{role}-tls"), "kubernetes.io/tls", files))
        # Without a suffix, so that new certificates reach the running pods: those reload them.
        kustomization["generatorOptions"] = {"disableNameSuffixHash": True, "labels": labels(spec)}
        kustomization["secretGenerator"] = made
    return kustomization


def _generator(name: str, kind: str, files: list[str]) -> Object:
    return {"name": name, "type": kind, "files": files}
