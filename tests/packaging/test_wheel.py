"""The wheel, installed where the checkout can't be seen, is all that a user needs."""

import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PORTIONS = ["v1", "core", "ps", "worker", "coordinator", "launch", "spmd", "torch", "jax", "keras"]

# Building and installing fetch packages, over the network the first time.
pytestmark = [pytest.mark.packaging, pytest.mark.timeout(600)]


def run(*command: str | Path, cwd: Path, timeout: float) -> str:
    """Run a command as a user without our checkout would, and return its output. Leaves no process behind."""
    hidden = ("PYTHON", "PSCLUSTER", "TF_CONFIG", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    with subprocess.Popen(
        [str(argument) for argument in command],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            pytest.fail(f"{command[0]} did not end within {timeout:.0f} s:\n{output}")
    assert process.returncode == 0, f"{command} ended with {process.returncode}:\n{output}"
    return output


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the checkout."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder, timeout=240)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that holds the wheel, its dependencies, and nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder, timeout=120)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python")
    run(*pip, "install", "--quiet", "--no-compile", wheel, cwd=folder, timeout=300)  # modules are compiled on import
    return folder / "bin"


def test_wheel_holds_the_six_portions_and_nothing_else(wheel: Path) -> None:
    """All six portions with py.typed, the stubs and the licence; no tests, examples or other package."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"pscluster"}
    assert {name.split("/")[1] for name in names if name.startswith("pscluster/")} == set(PORTIONS)
    assert {f"pscluster/{portion}/py.typed" for portion in PORTIONS} <= names
    assert {f"pscluster/v1/{stub}_pb2.py" for stub in ("node", "ps", "value", "worker")} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    pages = {"index.html", "page.css", "page.js", "uPlot.LICENSE", "uPlot.iife.min.js", "uPlot.min.css"}
    assert {f"pscluster/coordinator/dashboard/assets/{name}" for name in pages} <= names
    assert not [name for name in names if Path(name).name.startswith(("test_", "conftest"))]


def test_version_is_that_of_the_project(installed: Path, tmp_path: Path) -> None:
    """`pscluster version` runs from the wheel alone and prints the version of the wheel."""
    (name,) = (installed.parent / "lib").glob("python*/site-packages/pscluster-*.dist-info")
    _, version = name.stem.split("-", 1)
    assert run(installed / "pscluster", "version", cwd=tmp_path, timeout=60).split() == ["pscluster", version]


def test_modules_come_from_the_environment(installed: Path, tmp_path: Path) -> None:
    """Every portion is imported from the environment, not from the checkout."""
    code = "import importlib, sys; [print(importlib.import_module(n).__file__) for n in sys.argv[1:]]"
    names = [f"pscluster.{portion}" for portion in (*PORTIONS[1:], "v1.node_pb2")]
    files = run(installed / "python", "-c", code, *names, cwd=tmp_path, timeout=60).splitlines()
    assert len(files) == len(names)
    for file in files:
        assert Path(file).is_relative_to(installed.parent)


def test_digits_run_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    """The digits job trains on a local cluster, from a copy of the script, started in another folder."""
    job, elsewhere = tmp_path / "job", tmp_path / "elsewhere"
    (job / "data").mkdir(parents=True)
    elsewhere.mkdir()
    shutil.copy(ROOT / "examples" / "digits.py", job)
    shutil.copy(ROOT / "examples" / "data" / "digits.npz", job / "data")
    output = run(
        installed / "pscluster",
        "run",
        "--ps",
        "2",
        "--workers",
        "2",
        job / "digits.py",
        cwd=elsewhere,
        timeout=240,
    )
    match = re.search(r"test accuracy (\d\.\d+)", output)
    assert match is not None, output
    assert float(match[1]) >= 0.96
    assert not list(elsewhere.iterdir())
