"""What the pods of `pscluster k8s render` run, run: see `kubelet`."""

from __future__ import annotations

import re
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.faults.namespaces import Network, missing
from tests.launch.kubernetes.kubelet import Node, Object, Pod, by_kind, kustomized
from tests.roles.processes import run
from tests.waiting import until


@pytest.mark.timeout(240)
def test_the_pods_train_the_digits(tmp_path: Path) -> None:
    """Servers find their index in the pod's name, workers join, probes succeed with the pod's own credentials, and a
    coordinator that is evicted is continued by the next pod of its Job."""
    if reason := missing() or next((f"no {tool}" for tool in ("setpriv", "unshare") if not shutil.which(tool)), ""):
        pytest.skip(reason)
    rendered = tmp_path / "rendered"

    def render(steps: str) -> list[Object]:
        sizes = ["--ps", "2", "--workers", "2", "--worker-cpu", "500m", "--output", str(rendered)]
        code, output = run("k8s", "render", *sizes, "examples/digits.py", "--steps", steps)
        assert code == 0, output
        return kustomized(rendered)

    objects = render("1000000")  # which no machine takes before the eviction
    servers = by_kind(objects, "StatefulSet")["digits-ps"]["spec"]
    workers = by_kind(objects, "Deployment")["digits-worker"]["spec"]
    names = {f"digits-ps-{ordinal}.{servers['serviceName']}": f"ps{ordinal}" for ordinal in range(servers["replicas"])}
    names["digits-coordinator"] = "chief"
    claims = [claim["metadata"]["name"] for claim in servers["volumeClaimTemplates"]]
    with ExitStack() as stack:
        network = stack.enter_context(Network(["ps0", "ps1", "chief", "worker0", "worker1"]))
        node = Node(objects, network, names, tmp_path)
        pods: list[Pod] = []

        def start(template: Object, name: str, place: str, *claims: str) -> Pod:
            pods.append(node.start(template, name, place, claims))
            stack.enter_context(pods[-1].process)
            return pods[-1]

        def said() -> str:
            return "\n".join(f"--- {pod.name}\n{pod.process.output}" for pod in pods)

        first = [start(servers["template"], f"digits-ps-{place}", f"ps{place}", *claims) for place in range(2)]
        joined = [start(workers["template"], f"digits-worker-{place}", f"worker{place}") for place in range(2)]
        for server in first:
            until(lambda server=server: server.probe("startupProbe"), f"{server.name} has started", said)  # type: ignore[misc]
        chief = start(
            by_kind(objects, "Job")["digits-coordinator"]["spec"]["template"], "digits-coordinator-a", "chief"
        )
        until(lambda: re.search(r"^step \d+/", chief.process.output, re.MULTILINE), "it trains", said)
        assert chief.probe("readinessProbe"), said()
        assert all(worker.probe("startupProbe") and worker.probe("livenessProbe") for worker in joined), said()
        status = chief.run("pscluster", "status", "--json")
        assert status.returncode == 0, f"{status.stdout}{status.stderr}"
        chief.process.send(signal.SIGTERM)
        assert chief.process.wait() == 143, said()
        last = by_kind(render("2000"), "Job")["digits-coordinator"]["spec"]
        chief = start(last["template"], "digits-coordinator-b", "chief")
        assert chief.process.wait() == 0, said()
        assert "resuming a job with" in chief.process.output, said()
        accuracy = re.search(r"test accuracy (\d\.\d+)", chief.process.output)
        assert accuracy is not None, said()
        assert float(accuracy[1]) >= 0.95
        assert all(pod.probe("livenessProbe") for pod in [*first, *joined]), "they wait for the next job"
        for pod in [*joined, *first]:
            pod.process.send(signal.SIGTERM)
        assert [pod.process.wait() for pod in [*joined, *first]] == [0, 0, 0, 0], said()
        assert "other users can read" not in said()
