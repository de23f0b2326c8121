"""What `pscluster k8s render` was asked for, checked: errors name the option, the value, the limit and a hint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from pscluster.core.cluster.kubernetes import POD_VARIABLE, REPLICAS_VARIABLE, ROLE_VARIABLE, SERVICE_VARIABLE
from pscluster.core.cluster.spec import COORDINATOR_VARIABLE, VARIABLE
from pscluster.core.errors import ConfigurationError
from pscluster.core.functions.policy import PICKLE_VARIABLE
from pscluster.core.role.options import DATA_PORT_VARIABLE, MAX_WORKERS_VARIABLE
from pscluster.core.security.tls import TLS_VARIABLE
from pscluster.core.security.tokens import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from pscluster.ps.storage.options import STATE_VARIABLE

PS, WORKER, COORDINATOR = ROLES = "ps", "worker", "coordinator"

MAX_NAME = 40
"""A pod's name is the longest that is made of it, and labels have at most 63 characters."""

MAX_SCRIPT_BYTES = 900_000
"""Of a ConfigMap, which may have 1 MiB in all."""

OURS = frozenset(
    {
        *(VARIABLE, POD_VARIABLE, ROLE_VARIABLE, SERVICE_VARIABLE, REPLICAS_VARIABLE, COORDINATOR_VARIABLE),
        *(DATA_PORT_VARIABLE, MAX_WORKERS_VARIABLE, STATE_VARIABLE, TLS_VARIABLE, TOKEN_FILE_VARIABLE, TOKEN_VARIABLE),
    }
)
"""Variables that the manifests set themselves."""

_LABEL = re.compile("[a-z]([-a-z0-9]*[a-z0-9])?")
_DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
_UNITS = {"": Decimal(1), "m": Decimal("0.001")} | {
    unit + suffix: Decimal(base) ** power
    for power, unit in enumerate("kMGTP", start=1)
    for suffix, base in (("", 1000), ("i", 1024))
}
_UNITS["Ki"] = Decimal(1024)


def _wrong(option: str, value: object, limit: str) -> ConfigurationError:
    return ConfigurationError(f"{option} is {value!r}; {limit}")


def check_name(option: str, value: str, longest: int = 63) -> str:
    """Return a name that may be one of a Service. Raise ConfigurationError otherwise."""
    if not _LABEL.fullmatch(value) or len(value) > longest:
        limit = f"give at most {longest} lower-case letters, digits and hyphens, beginning with a letter, such as train"
        raise _wrong(option, value, limit)
    return value


def check_dns_name(option: str, value: str) -> str:
    """Return a name of dot-separated parts. Raise ConfigurationError otherwise."""
    if not _DNS_NAME.fullmatch(value) or len(value) > 253:
        raise _wrong(option, value, "give a name of lower-case letters, digits, hyphens and dots, such as fast-ssd")
    return value


def check_image(value: str) -> str:
    """Return an image's name. Raise ConfigurationError if it can't be one."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.:/@-]*", value, re.ASCII) or "://" in value:
        raise _wrong("--image", value, "give REGISTRY/NAME:TAG, such as registry.example.com/train:1")
    return value


def amount(option: str, text: str) -> Decimal:
    """Return the value of a quantity such as 500m or 2Gi. Raise ConfigurationError unless it is one above 0."""
    match = _QUANTITY.fullmatch(text)
    value = Decimal(match[1]) * _UNITS[match[2] or ""] if match else Decimal(0)
    if not value:
        example = "500m or 2" if option.endswith("-cpu") else "512Mi or 10Gi"
        raise _wrong(option, text, f"give an amount above 0 as Kubernetes writes it, such as {example}")
    return value


@dataclass(frozen=True, slots=True)
class Resources:
    """Requests and limits of a role's container: each `AMOUNT`, which is both, or `REQUEST:LIMIT`."""

    role: str
    cpu: str
    memory: str

    def __post_init__(self) -> None:
        """Raise ConfigurationError for an amount that is none, and a request above its limit."""
        for noun, text in (("cpu", self.cpu), ("memory", self.memory)):
            option = f"--{self.role}-{noun}"
            request, _, limit = text.partition(":")
            least = amount(option, request)
            if ":" in text and least > amount(option, limit):
                raise _wrong(option, text, f"a request, {request}, may not exceed its limit, {limit}")

    def as_dict(self) -> dict[str, Any]:
        """Return the `resources` of a container."""
        pairs = {noun: text.partition(":") for noun, text in (("cpu", self.cpu), ("memory", self.memory))}
        return {
            "requests": {noun: request for noun, (request, _, _) in pairs.items()},
            "limits": {noun: limit or request for noun, (request, _, limit) in pairs.items()},
        }


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """A cluster on Kubernetes, and the script that it runs. Raises ConfigurationError for a value out of its limits."""

    name: str
    script: str
    args: tuple[str, ...] = ()
    source: str | None = None  # of the script, if a ConfigMap is to hold it
    namespace: str | None = None
    image: str = "pscluster:latest"
    pull_secret: str | None = None
    ps: int = 1
    workers: int = 1
    max_workers: int = 1000
    storage: str = "10Gi"
    storage_class: str | None = None
    resources: Mapping[str, Resources] = field(
        default_factory=lambda: {role: Resources(role, "1", "2Gi") for role in ROLES}
    )
    env: Mapping[str, str] = field(default_factory=dict)
    backoff_limit: int = 6
    secrets: str | None = None  # the prefix of Secrets that exist

    def __post_init__(self) -> None:
        """Check all values."""
        check_name("--name", self.name, MAX_NAME)
        if self.namespace is not None:
            check_name("--namespace", self.namespace)
        check_image(self.image)
        if self.pull_secret is not None:
            check_dns_name("--image-pull-secret", self.pull_secret)
        if self.storage_class is not None:
            check_dns_name("--storage-class", self.storage_class)
        if self.secrets is not None:
            check_name("--existing-secrets", self.secrets, MAX_NAME)
        amount("--storage", self.storage)
        if self.workers > self.max_workers:
            limit = f"at most --max-workers, {self.max_workers}, can join: raise that, or give fewer"
            raise _wrong("--workers", self.workers, limit)
        for name in self.env:
            if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
                raise _wrong("--env", name, "give NAME=VALUE, with a name of letters, digits and underscores")
            if name in OURS:
                raise _wrong("--env", name, "the manifests set this variable themselves: leave it out")
        if self.source is not None:
            self._check_source(self.source)

    def _check_source(self, source: str) -> None:
        if len(source.encode()) > MAX_SCRIPT_BYTES:
            raise ConfigurationError(
                f"{self.script} has {len(source.encode()):,} bytes, and a ConfigMap takes a script of "
                f"{MAX_SCRIPT_BYTES:,}: put it into the image, and leave out --script-from-file"
            )
        if not re.fullmatch(r"[\w.-]{1,253}", self.script_name, re.ASCII):
            limit = "a ConfigMap's keys have letters, digits, '-', '_' and '.' only: rename the file"
            raise _wrong("SCRIPT", self.script_name, limit)
        if self.env.get(PICKLE_VARIABLE) == "0":
            raise ConfigurationError(
                f"{PICKLE_VARIABLE} is 0, so workers need the script's file, and --script-from-file gives it to "
                "the coordinator only: put the script into the image, and leave out --script-from-file"
            )

    @property
    def script_name(self) -> str:
        """The script's file name."""
        return self.script.rpartition("/")[2]

    def named(self, suffix: str) -> str:
        """Return the name of one of its objects."""
        return f"{self.name}-{suffix}"

    def secret(self, suffix: str) -> str:
        """Return the name of a Secret."""
        return f"{self.secrets or self.name}-{suffix}"


def name_of(script: str) -> str:
    """Return a cluster's name for the script. Raise ConfigurationError if its own does not give one."""
    stem = re.sub(r"\.py$", "", script.rpartition("/")[2]).lower()
    name = re.sub("[^a-z0-9]+", "-", stem).strip("-")[:MAX_NAME].strip("-")
    if not _LABEL.fullmatch(name):
        raise ConfigurationError(f"no name for the cluster can be made from {script!r}: give --name NAME")
    return name
