"""What `RayCluster` says where Ray is not installed, and of arguments that are wrong."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from pscluster.core.errors import ConfigurationError
from pscluster.core.ids import VERSION
from pscluster.launch import RayCluster
from pscluster.launch.ray.connection import actor_options, reason
from pscluster.launch.ray.role_actor import RoleActor, known_here

without_ray = pytest.mark.skipif(bool(importlib.util.find_spec("ray")), reason="Ray is installed")


@without_ray
def test_ray_is_not_installed() -> None:
    """The error says how to install it."""
    with pytest.raises(ConfigurationError, match=r'No module named \'ray\'\): pip install "pscluster\[ray\]"'):
        RayCluster()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"workers": 0}, "workers is 0"),
        ({"ps": 1.5}, "ps is 1.5"),
        ({"worker_resources": {"CPU": -1}}, r"worker_resources\['CPU'\] is -1"),
        ({"ps_resources": {"CPU": 0}}, "ps_resources is {'CPU': 0}; give a dictionary with an amount above 0"),
        ({"ps_resources": 4}, "ps_resources is 4; give a dictionary"),
        ({"placement": "ROUND"}, "placement is 'ROUND'; give one of SPREAD, PACK, STRICT_SPREAD, STRICT_PACK"),
        ({"timeout": 0}, "timeout is 0"),
        ({"log_level": "LOUD"}, "log_level is 'LOUD'"),
        ({"state_dir": "state"}, "state_dir is 'state'; give an absolute path, the same on all nodes"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], sentence: str) -> None:
    """Each is named with its value, before anything else."""
    with pytest.raises(ConfigurationError, match=sentence):
        RayCluster(**arguments)


def test_resources_of_an_actor() -> None:
    """Those that Ray has options for, and others."""
    assert actor_options({"CPU": 2.0, "GPU": 1.0, "memory": 1e9, "stable": 1.0}) == {
        "num_cpus": 2.0,
        "num_gpus": 1.0,
        "memory": 1e9,
        "resources": {"stable": 1.0},
    }
    assert actor_options({"stable": 1.0})["num_cpus"] == 0


def test_the_reason_in_an_error_of_ray() -> None:
    """One sentence of the many."""
    died = "The actor died.\n\tclass_name: RoleActor\nThe actor is dead because its node has died. Node Id: 4f\n"
    assert reason(RuntimeError(died)) == "The actor is dead because its node has died"
    raised = "ray::RoleActor.__init__()\n  File ...\nRuntimeError: this node has pscluster 0.0"
    assert reason(RuntimeError(raised)) == "RuntimeError: this node has pscluster 0.0"
    assert reason(RuntimeError()) == "RuntimeError"


def test_another_version_on_a_node() -> None:
    """Its actor does not start, and says what to install."""
    with pytest.raises(RuntimeError, match=r"this node has pscluster .*, and the coordinator 9\.9: install the same"):
        RoleActor("worker 0", "9.9")


def test_folders_of_the_script_that_a_node_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no places for functions there; Ray's working_dir, which is the actor's own folder, is one."""
    monkeypatch.chdir(tmp_path)
    given = os.pathsep.join(("/nowhere/at/all", str(Path(__file__).parent), "steps", "."))
    assert known_here(given).split(os.pathsep) == [str(Path(__file__).parent), "steps", str(tmp_path)]


def test_a_folder_that_another_user_could_have_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key is written there, and no role is started."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cluster").mkdir(mode=0o700)
    (tmp_path / "cluster" / "ps-0").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "cluster" / "ps-1").mkdir(mode=0o755)
    for index, why in enumerate(("is a link", "has the mode 0755")):
        with pytest.raises(RuntimeError, match=f"files, among them keys, can't be kept in .*/ps-{index}.* {why}"):
            RoleActor("ps", VERSION).start(["nothing"], {}, "", "t", {"tls.key": b"key"}, f"cluster/ps-{index}")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
