"""compose.yaml, read as text and, if there is a Docker engine, brought up."""

import json
import os
import re
import signal
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.waiting import until

ROOT = Path(__file__).resolve().parent.parent.parent
JOINING, NAMED = ROOT / "compose.yaml", ROOT / "compose.tf_config.yaml"
SERVICES = {
    JOINING: ["ps-0", "ps-1", "worker", "coordinator"],
    NAMED: ["ps-0", "ps-1", "worker-0", "worker-1", "worker-2", "coordinator"],
}


@pytest.mark.parametrize("file", SERVICES, ids=lambda file: file.name)
def test_each_role_has_its_own_task(file: Path) -> None:
    """The TF_CONFIGs agree about the cluster, and each names the task at its service's address; workers may join."""
    text = file.read_text()
    services = re.findall(r"^  ([\w-]+):\n(?:    .*\n)+?      TF_CONFIG: >-\n((?: {8}.*\n)+)", text, re.MULTILINE)
    configs = {name: json.loads(config) for name, config in services}
    assert sorted(configs) == sorted(set(SERVICES[file]) - {"worker"})
    if file is JOINING:
        assert '[worker, --join, "coordinator:2222", ' in text
        assert "worker" not in configs["coordinator"]["cluster"]
    for name, config in configs.items():
        assert config["cluster"] == configs["coordinator"]["cluster"]
        address = config["cluster"][config["task"]["type"]][config["task"]["index"]]
        assert address == f"{name}:2222"


def reason_to_skip() -> str | None:
    """Why `docker compose` cannot be used here, or None."""
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        shown = f"`{' '.join(command)}`"
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        except FileNotFoundError:
            return "docker is not installed"
        except subprocess.TimeoutExpired:
            return f"{shown} did not answer within 30 s"
        if done.returncode != 0:
            said = " ".join((done.stderr or done.stdout).split())
            return f"{shown} failed: {said or f'exit code {done.returncode}'}"
    return None


@pytest.fixture
def project() -> Iterator[str]:
    """The name of a compose project that is removed completely afterwards."""
    if reason := reason_to_skip():
        pytest.skip(f"no Docker engine with compose: {reason}")
    name = f"pscluster-test-{uuid.uuid4().hex[:8]}"
    try:
        yield name
    finally:
        compose(name, "down", "-v", "--remove-orphans", timeout=90)


def compose(
    project: str, *arguments: str, timeout: float, files: Sequence[Path] = ()
) -> subprocess.CompletedProcess[str]:
    """Run `docker compose`; return its exit code and output. A run that is interrupted shows its output too."""
    named = [word for file in files for word in ("-f", str(file))]
    command = ["docker", "compose", *named, "-p", project, *arguments]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"COMPOSE_HTTP_TIMEOUT": "300"},  # of one call of the engine, on a busy machine
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            pytest.fail(f"{' '.join(command)} did not end within {timeout:.0f} s:\n{output}")
    return subprocess.CompletedProcess(command, process.returncode, output)


@pytest.mark.compose
@pytest.mark.timeout(900)  # the first build fetches the base image and the dependencies
@pytest.mark.parametrize("file", SERVICES, ids=lambda file: file.name)
def test_compose_trains_the_digits_and_ends(file: Path, project: str) -> None:
    """`docker compose up` builds the image, trains the example and ends by itself, each role with code 0. Workers that
    join can be as many as one likes."""
    scale = ["--scale", "worker=5"] if file is JOINING else []
    up = compose(project, "up", "--build", *scale, "--exit-code-from", "coordinator", timeout=720, files=[file])
    assert up.returncode == 0, up.stdout
    match = re.search(r"test accuracy (\d\.\d+)", up.stdout)
    assert match is not None, up.stdout
    assert float(match[1]) >= 0.96

    label = f"label=com.docker.compose.project={project}"
    listed = subprocess.run(
        [
            "docker",
            "ps",
            "--all",
            "--filter",
            label,
            "--format",
            '{{.Label "com.docker.compose.service"}} {{.Status}}',
        ],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    states = [line.split(" ", 1) for line in listed.stdout.splitlines()]
    more = ["worker"] * 4 if file is JOINING else []
    assert sorted(service for service, _ in states) == sorted([*SERVICES[file], *more])
    assert all(state.startswith("Exited (0)") for _, state in states), f"{states}\n{up.stdout}"


# The example, but it goes on until it is told that all kills are over.
LOOP = "        for start in range(begin, options.steps, BLOCK):\n"
UNTIL_TOLD = """\
            if start >= 4000 and Path("/tmp/enough").exists():
                break
"""
OVERRIDE = """
services:
  coordinator:
    command: [coordinator, --bind, "0.0.0.0:2222", --create-token, --create-tls, examples/digits.py, --steps, "1000000"]
    volumes:
      - {script}:/app/examples/digits.py:ro
"""


@pytest.mark.compose
@pytest.mark.timeout(1200)
def test_compose_survives_kills_from_the_host(project: str, tmp_path: Path) -> None:
    """A server, a worker and the coordinator are killed during the run, one after the other; it trains on after each,
    and ends normally."""
    source = (ROOT / "examples" / "digits.py").read_text()
    assert source.count(LOOP) == 1
    script = tmp_path / "digits.py"
    script.write_text(source.replace(LOOP, LOOP + UNTIL_TOLD))
    script.chmod(0o644)  # for the image's user
    override = tmp_path / "override.yaml"
    override.write_text(OVERRIDE.format(script=script))
    files = [JOINING, override]
    up = compose(project, "up", "--build", "-d", timeout=720, files=files)
    assert up.returncode == 0, up.stdout

    def output() -> str:
        return compose(project, "logs", "--no-color", timeout=60, files=files).stdout

    def until_it_trains() -> None:
        """Wait for two more lines about its progress: the first may be of steps before a death."""
        wanted = reports() + 2
        until(lambda: reports() >= wanted, "it trains", output, 240)

    def reports() -> int:
        return len(re.findall(r"^step \d+/\d+ ", docker("logs", containers["coordinator"]), re.MULTILINE))

    services = ("ps-1", "worker", "coordinator")
    containers = {
        service: compose(project, "ps", "-q", service, timeout=60, files=files).stdout.split()[0]
        for service in services
    }
    until_it_trains()
    for service in services:
        before = pid_in(containers[service])
        assert before, f"{service} has ended:\n{output()}"
        os.kill(before, signal.SIGKILL)

        def is_back(service: str = service, before: int = before) -> bool:
            return pid_in(containers[service]) not in (0, before)

        until(is_back, f"{service} is back", output, 240)
        until_it_trains()
    docker("exec", containers["coordinator"], "touch", "/tmp/enough")
    until(lambda: "test accuracy" in docker("logs", containers["coordinator"]), "it ends", output, 240)
    text = output()
    match = re.search(r"test accuracy (\d\.\d+)", text)
    assert match is not None
    assert float(match[1]) >= 0.96, text
    assert "resuming a job with" in text, text


def docker(*arguments: str) -> str:
    """What `docker` prints on both streams."""
    done = subprocess.run(
        ["docker", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def pid_in(container: str) -> int:
    """The pid of the role's process on the host: the child of the container's init. 0 while there is none."""
    init = int(docker("inspect", "--format", "{{.State.Pid}}", container))
    try:
        children = Path(f"/proc/{init}/task/{init}/children").read_text().split()
    except OSError:
        return 0
    return int(children[0]) if init and children else 0
