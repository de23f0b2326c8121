"""The manifests of `pscluster k8s render`: valid by the API's schemas, consistent, restricted, and without secrets."""

from __future__ import annotations

import base64
import itertools
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import pytest
from click.testing import CliRunner
from tests.launch.kubernetes.kubelet import Object, by_kind, environment, expanded, kustomized, load
from tests.waiting import TIMEOUT

from pscluster.core.cluster.kubernetes import config_of_pod
from pscluster.core.cluster.tf_config import Task, TFConfig
from pscluster.core.errors import ConfigurationError
from pscluster.core.security.certificates import hosts_in
from pscluster.core.security.tls import Tls
from pscluster.core.security.tokens import load_token
from pscluster.launch.kubernetes import output
from pscluster.launch.kubernetes.cli import k8s

VERSIONS = "1.28", kubernetes_validate.latest_version()
"""The oldest and the newest version that the manifests are for."""

OPTIONS = {
    "defaults": ["train.py"],
    "everything": [
        *("--name", "a-1", "--namespace", "ml", "--image", "registry.example.com:5000/team/train@sha256:0a1b"),
        *("--image-pull-secret", "my.registry", "--ps", "3", "--workers", "0", "--max-workers", "7"),
        *("--storage", "500Mi", "--storage-class", "fast-ssd", "--worker-cpu", "500m:2", "--ps-memory", "1Gi:1.5Gi"),
        *("--env", "OMP_NUM_THREADS=3", "--env", "URL=s3://a?b=$(HOME)$$", "--backoff-limit", "0"),
        *("--existing-secrets", "mine", "jobs/train.py", "--lr", "1e-3", "$(PSCLUSTER_POD)", "n", "two\nlines", ""),
    ],
}


def render(*arguments: str) -> str:
    """What the command prints to standard output."""
    done = CliRunner().invoke(k8s, ["render", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(params=[*OPTIONS, "folder"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> list[Object]:
    """All objects of a cluster, with each set of options; of a folder with its Secrets."""
    if request.param != "folder":
        return load(render(*OPTIONS[request.param]))
    script = tmp_path / "train.py"
    script.write_text("print('é', \"\\t\")\t\n# " + "x" * 200)
    render("--ps", "2", "--output", str(tmp_path / "out"), "--script-from-file", str(script))
    return kustomized(tmp_path / "out")


def templates(objects: list[Object]) -> Iterator[Object]:
    """The templates of all pods."""
    return (found["spec"]["template"] for found in objects if "template" in found.get("spec", {}))


def test_valid_by_the_schemas(objects: list[Object]) -> None:
    """Each object has only fields that the API knows, of the right types, in the oldest and the newest version."""
    for version, found in itertools.product(VERSIONS, objects):
        kubernetes_validate.validate(found, version, strict=True)
    assert len(objects) in (10, 15), "with a ConfigMap and four Secrets, or without"


def test_what_is_referred_to_exists(objects: list[Object]) -> None:
    """Selectors find their pods, ports have one number, and each Secret, claim, Service and ConfigMap is there."""
    labels = {
        template["metadata"]["labels"]["app.kubernetes.io/component"]: template for template in templates(objects)
    }
    assert sorted(labels) == ["coordinator", "ps", "worker"]

    def roles(selector: dict[str, str]) -> list[str]:
        return sorted(role for role, pod in labels.items() if selector.items() <= pod["metadata"]["labels"].items())

    numbers = {}
    for role, template in labels.items():
        (container,) = template["spec"]["containers"]
        numbers[role] = {port["name"]: port["containerPort"] for port in container["ports"]}
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        if role == "ps":
            (server,) = by_kind(objects, "StatefulSet").values()
            volumes |= {claim["metadata"]["name"] for claim in server["spec"]["volumeClaimTemplates"]}
            assert server["spec"]["serviceName"] in by_kind(objects, "Service")
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        used = {
            source["secret"]["name"]: {item["key"] for item in source["secret"]["items"]}
            for volume in template["spec"]["volumes"]
            for source in volume.get("projected", {}).get("sources", [])
        }
        prefix = template["metadata"]["labels"]["app.kubernetes.io/instance"].replace("a-1", "mine")
        assert sorted(used) == sorted([f"{prefix}-token", f"{prefix}-{role}-tls"])  # no other role's key
        if secrets := by_kind(objects, "Secret"):
            assert all(keys == secrets[name]["data"].keys() for name, keys in used.items())
    for kind, suffix in (("StatefulSet", "ps"), ("Deployment", "worker"), ("PodDisruptionBudget", "worker")):
        found = next(found for name, found in by_kind(objects, kind).items() if name.endswith(suffix))
        assert roles(found["spec"]["selector"]["matchLabels"]) == [suffix]
    assert len({found["metadata"].get("namespace") for found in objects}) == 1
    for found in by_kind(objects, "Service").values():
        (role,) = roles(found["spec"]["selector"])
        assert all(port["port"] == numbers[role][port["targetPort"]] for port in found["spec"]["ports"])
    allowed = {}
    for policy in by_kind(objects, "NetworkPolicy").values():
        (role,) = roles(policy["spec"]["podSelector"]["matchLabels"])
        (rule,) = policy["spec"]["ingress"]
        allowed[role] = [name for peer in rule["from"] for name in roles(peer["podSelector"]["matchLabels"])]
        assert {port["port"] for port in rule["ports"]} == {*numbers[role].values()}
    callers = ["worker", "coordinator"]
    assert allowed == {"ps": callers, "worker": callers, "coordinator": ["worker"]}


def test_restricted(objects: list[Object]) -> None:
    """Pods meet the Pod Security Standard `restricted`, have no access to the API, limits for all, and probes."""
    for template in templates(objects):
        pod, (container,) = template["spec"], template["spec"]["containers"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not pod["automountServiceAccountToken"]
        assert not pod["enableServiceLinks"]
        assert {kind for volume in pod["volumes"] for kind in volume} <= {"name", "projected", "emptyDir", "configMap"}
        for amounts in container["resources"].values():
            assert sorted(amounts) == ["cpu", "memory"]
        probes = {"startupProbe", "readinessProbe", "livenessProbe"} & container.keys()
        assert probes == ({"readinessProbe"} if pod.get("restartPolicy") else probes) != set()
        assert pod["terminationGracePeriodSeconds"] > 10  # what a role takes for running work


def test_tasks_and_arguments(objects: list[Object]) -> None:
    """Each server's pod has its own task, the coordinator's TF_CONFIG names the same cluster, and the script's
    arguments arrive as they were given, whatever a YAML parser or Kubernetes could make of them."""
    (servers,) = by_kind(objects, "StatefulSet").values()
    (container,) = servers["spec"]["template"]["spec"]["containers"]
    name = servers["metadata"]["name"]
    configs = [config_of_pod(environment(container, f"{name}-{n}")) for n in range(servers["spec"]["replicas"])]
    assert [config.task for config in configs] == [Task("ps", n) for n in range(len(configs))]
    assert configs[0].cluster.task_address("ps", 0) == f"{name}-0.{name}:2222"
    (job,) = by_kind(objects, "Job").values()
    (container,) = job["spec"]["template"]["spec"]["containers"]
    variables = environment(container, "pod")
    config = TFConfig.from_environ(variables)
    assert config.task == Task("chief", 0)
    assert {config.cluster, config_of_pod(variables).cluster} == {configs[0].cluster}
    assert "TF_CONFIG" not in environment(servers["spec"]["template"]["spec"]["containers"][0], "pod")
    words = [expanded(word, variables) for word in container["args"]]
    if name == "a-1-ps":
        assert (
            words[words.index("--keep-job") + 1 :]
            == OPTIONS["everything"][OPTIONS["everything"].index("jobs/train.py") :]
        )
        assert variables["URL"] == "s3://a?b=$(HOME)$$"
        assert variables["OMP_NUM_THREADS"] == "3"
        assert '"1e-3"' in render(*OPTIONS["everything"])
    elif scripts := by_kind(objects, "ConfigMap"):
        (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == "script")
        assert words[-1] == mount["mountPath"] == "/job/train.py"
        assert mount["subPath"] == "train.py"  # the same path in every pod, without links
        (data,) = (found["data"] for found in scripts.values())
        assert data == {"train.py": "print('é', \"\\t\")\t\n# " + "x" * 200}


def test_the_folder(tmp_path: Path) -> None:
    """Credentials are made once, for their owner alone, and stay; a new server's name is added to the certificates;
    they are printed nowhere. kubectl makes the same of the folder as these tests do."""
    folder = tmp_path / "deploy" / "train"
    arguments = ["--output", str(folder), "train.py"]
    printed = render("--ps", "1", *arguments)
    secrets = folder / "secrets"
    token = (secrets / "token").read_text()
    key = (secrets / "tls" / "ps" / "tls.key").read_text()
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in secrets.rglob("t*.*") if path.is_file())
    assert (secrets / ".gitignore").read_text() == "*\n"
    assert load_token(secrets / "token", {}) == token.strip()
    printed += render("--ps", "2", *arguments)
    assert (token, key) == ((secrets / "token").read_text(), (secrets / "tls" / "ps" / "tls.key").read_text())
    assert {"train-ps-0.train-ps", "train-ps-1.train-ps"} <= hosts_in(secrets / "tls", "ps")
    assert "train-ps-0.train-ps" not in hosts_in(secrets / "tls", "worker")
    assert Tls(secrets / "tls" / "coordinator").is_mutual
    before = {path.name: path.read_text() for path in folder.glob("*.yaml")}
    render("--ps", "2", *arguments)
    assert before == {path.name: path.read_text() for path in folder.glob("*.yaml")}
    shown = printed + "".join(before.values()) + render("train.py")
    assert not any(secret in shown for secret in (token.strip(), base64.b64encode(token.encode()).decode(), "PRIVATE"))
    if shutil.which("kubectl"):
        done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=TIMEOUT)
        assert done.returncode == 0, done.stderr
        for secret in by_kind(made_by_kubectl := load(done.stdout), "Secret").values():
            secret["data"] = {key: "".join(value.split()) for key, value in secret["data"].items()}  # it wraps lines
        made, ours = (
            {(x["kind"], x["metadata"]["name"]): x for x in found} for found in (made_by_kubectl, kustomized(folder))
        )
        assert made == ours
    (folder / "services.yaml").write_text("mine: true\n")
    with pytest.raises(ConfigurationError, match=r"services.yaml exists, and .* name another folder"):
        render("--ps", "3", *arguments)
    assert "train-ps-2.train-ps" not in hosts_in(secrets / "tls", "ps")


WRONG = [
    (["--name", "Train", "t.py"], "--name is 'Train'; give at most 40 lower-case"),
    (["--name", "x" * 41, "t.py"], "at most 40"),
    (["_.py"], "give --name NAME"),
    (["--namespace", "a.b", "t.py"], "--namespace is 'a.b'"),
    (["--image", "http://a/b", "t.py"], "--image is 'http://a/b'; give REGISTRY/NAME:TAG"),
    (["--storage", "10GB", "t.py"], "--storage is '10GB'; give an amount above 0"),
    (["--ps-cpu", "0", "t.py"], "--ps-cpu is '0'; .* 500m"),
    (["--worker-memory", "2Gi:1Gi", "t.py"], "--worker-memory is '2Gi:1Gi'; a request, 2Gi, may not exceed"),
    (["--storage-class", "Fast SSD", "t.py"], "--storage-class is 'Fast SSD'"),
    (["--workers", "8", "--max-workers", "7", "t.py"], "--workers is 8; at most --max-workers, 7, can join"),
    (["--env", "A", "t.py"], "--env is 'A'; give NAME=VALUE"),
    (["--env", "A B=1", "t.py"], "--env is 'A B'"),
    (["--env", "PSCLUSTER_TOKEN=1", "t.py"], "--env is 'PSCLUSTER_TOKEN'; the manifests set"),
    (["--existing-secrets", "Mine", "t.py"], "--existing-secrets is 'Mine'"),
    (["--script-from-file", "missing.py"], "can't read the script missing.py: No such file"),
    (["--output", "/dev/null/x", "t.py"], "can't write to /dev/null/x: Not a directory"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_options(arguments: list[str], message: str) -> None:
    """A wrong option is an error that names the option, the value, and what to give instead."""
    with pytest.raises(ConfigurationError, match=message):
        render(*arguments)


def test_an_unknown_option_is_not_the_script() -> None:
    """Options before SCRIPT are this command's, those after it the script's."""
    done = CliRunner().invoke(k8s, ["render", "--lr", "1", "train.py"])
    assert (done.exit_code, "No such option" in done.output) == (2, True)


def test_scripts_that_no_config_map_can_hold(tmp_path: Path) -> None:
    """A script that is too large, or that workers would need as a file, belongs in the image: the error says so."""
    script = tmp_path / "train.py"
    script.write_text("#" * 900_001)
    with pytest.raises(ConfigurationError, match="has 900,001 bytes, and a ConfigMap takes a script of 900,000"):
        render("--script-from-file", str(script))
    script.write_text("")
    with pytest.raises(ConfigurationError, match="PSCLUSTER_ALLOW_PICKLE is 0, so workers need the script's file"):
        render("--env", "PSCLUSTER_ALLOW_PICKLE=0", "--script-from-file", str(script))


def test_without_pyyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the library that writes YAML, the error says how to install it."""
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigurationError, match=r'pip install "pscluster\[kubernetes\]"'):
        output.dump([{}])
