"""What a cluster of Kubernetes would do with rendered manifests, done on this machine: as far as our processes see it.

Each pod gets a network namespace with an address of its own (`tests/faults/namespaces.py`), names for the others, its
volumes where its container mounts them, the rest of the file system read-only, and the user and the rights that its
security contexts say. Its container's command, arguments and environment are run as they are, in this checkout in
place of the image. No part of Kubernetes takes part: nothing schedules, restarts or probes by itself, and no network
policy is enforced.
"""

from __future__ import annotations

import base64
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from tests.faults.namespaces import Network
from tests.roles.processes import Process
from tests.waiting import TIMEOUT

ROOT = Path(__file__).resolve().parents[3]
Object = dict[str, Any]


def load(text: str) -> list[Object]:
    """The objects of a YAML stream."""
    return [document for document in yaml.safe_load_all(text) if document]


def kustomized(folder: Path) -> list[Object]:
    """What `kubectl kustomize` makes of a rendered folder."""
    (kustomization,) = load((folder / "kustomization.yaml").read_text())
    objects = [document for name in kustomization["resources"] for document in load((folder / name).read_text())]
    for made in kustomization.get("secretGenerator", []):
        files = dict(entry.split("=") for entry in made["files"])
        data = {key: base64.b64encode((folder / path).read_bytes()).decode() for key, path in files.items()}
        metadata: Object = {"name": made["name"], "labels": kustomization["generatorOptions"]["labels"]}
        if "namespace" in kustomization:
            metadata["namespace"] = kustomization["namespace"]
        objects.append({"apiVersion": "v1", "kind": "Secret", "type": made["type"], "metadata": metadata, "data": data})
    return objects


def by_kind(objects: Iterable[Object], kind: str) -> dict[str, Object]:
    """The objects of a kind, by name."""
    return {found["metadata"]["name"]: found for found in objects if found["kind"] == kind}


def cores(quantity: str) -> float:
    """The cores of an amount of CPU."""
    return int(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)


def environment(container: Object, pod: str) -> dict[str, str]:
    """The environment of a container, as the kubelet makes it."""
    variables: dict[str, str] = {}
    for entry in container["env"]:
        if "value" in entry:
            value = expanded(entry["value"], variables)
        elif "fieldRef" in entry["valueFrom"]:
            assert entry["valueFrom"]["fieldRef"] == {"fieldPath": "metadata.name"}
            value = pod
        else:
            assert entry["valueFrom"]["resourceFieldRef"]["resource"] == "limits.cpu"
            value = str(math.ceil(cores(container["resources"]["limits"]["cpu"])))
        variables[entry["name"]] = value
    return variables


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """The text with $(NAME) replaced, where there is such a variable, and $$ by $."""

    def replace(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replace, text)


@cache
def can_read_all(user: int) -> bool:
    """Whether this user can run our commands: a checkout in root's home is for root alone."""
    command = ["setpriv", f"--reuid={user}", "--clear-groups", sys.executable, "-c", "import pscluster.coordinator.api"]
    return subprocess.run(command, cwd="/", capture_output=True, timeout=TIMEOUT).returncode == 0


@dataclass
class Pod:
    """A pod that has been started: its process, and how to run another in it."""

    name: str
    container: Object
    process: Process
    prefix: list[str]
    env: dict[str, str]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in it, as `kubectl exec` does."""
        whole = [*self.prefix, *command]
        return subprocess.run(whole, env=self.env, capture_output=True, text=True, timeout=TIMEOUT, cwd=ROOT)

    def probe(self, kind: str) -> bool:
        """Run a probe of its container, and say whether it succeeds."""
        return self.run(*self.container[kind]["exec"]["command"]).returncode == 0


class Node:
    """Runs pods, each at a place in the network."""

    def __init__(self, objects: Iterable[Object], network: Network, names: Mapping[str, str], folder: Path) -> None:
        """`names` says at which place each DNS name is."""
        self.secrets = by_kind(objects, "Secret")
        self.network, self.folder = network, folder
        self.hosts = folder / "hosts"
        lines = [f"{network.address(place)} {name}\n" for name, place in names.items()]
        self.hosts.write_text("".join(["127.0.0.1 localhost\n", *lines]))
        folder.chmod(0o755)

    def start(self, template: Object, name: str, place: str, claims: Iterable[str] = ()) -> Pod:
        """Start a pod of this template. A claim outlives it, under the pod's name."""
        spec = template["spec"]
        (container,) = spec["containers"]
        context, own = spec["securityContext"], container["securityContext"]
        assert own == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        user, group = context["runAsUser"], context["fsGroup"]
        if not can_read_all(user):
            user = 0
        sources = {claim: self._claim(f"{claim}-{name}", group) for claim in claims}
        sources |= {volume["name"]: self._volume(volume, name, group) for volume in spec["volumes"]}
        steps = ["set -e", f"mount --bind {self.hosts} /etc/hosts"]
        # /tmp last: the volumes' sources are in it.
        for mount in sorted(container["volumeMounts"], key=lambda mount: str(mount["mountPath"]) == "/tmp"):
            path, source = Path(mount["mountPath"]), sources[mount["name"]]
            if path != Path("/tmp"):
                steps += [f"mount -t tmpfs tmpfs {path.parent}", f"mkdir {path}"]
            steps.append(f"mount --bind {source} {path}")
            if mount.get("readOnly"):
                steps.append(f"mount -o remount,bind,ro {path}")
        steps.append("mount -o remount,bind,ro /")
        rights = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
        users = [f"--reuid={user}", f"--regid={context['runAsGroup']}", f"--groups={group}"]
        as_user = shlex.join(["setpriv", *users, *rights])
        steps.append(f'exec {as_user} "$@"')
        prefix = [*self.network.command(place), "unshare", "--mount", "sh", "-c", "; ".join(steps), "sh"]
        variables = environment(container, name)
        # As in the image: where the command is, and how it is run.
        search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {"PATH": search, "PYTHONUNBUFFERED": "1", **variables}
        command = [expanded(word, variables) for word in [*container["command"], *container["args"]]]
        return Pod(name, container, Process([*prefix, *command], env, ROOT), prefix, env)

    def _claim(self, name: str, group: int) -> Path:
        path = self.folder / name
        path.mkdir(exist_ok=True)
        os.chown(path, 0, group)
        path.chmod(0o2770)
        return path

    def _volume(self, volume: Object, pod: str, group: int) -> Path:
        path = self.folder / f"{pod}-{volume['name']}"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        if "emptyDir" in volume:
            path.chmod(0o1777)
            return path
        for source in volume["projected"]["sources"]:
            data = self.secrets[source["secret"]["name"]]["data"]
            for item in source["secret"]["items"]:
                file = path / item["path"]
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(base64.b64decode(data[item["key"]]))
                os.chown(file, 0, group)
                file.chmod(volume["projected"]["defaultMode"])
        return path
