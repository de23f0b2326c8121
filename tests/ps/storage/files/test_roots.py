"""Where checkpoints are allowed: a server with roots stays inside them, whatever a request names."""

from __future__ import annotations

from pathlib import Path

import pytest

from pscluster.core.errors import CheckpointError
from pscluster.ps.storage.files.roots import Roots
from pscluster.ps.storage.files.tensor_files import write


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Create a directory for checkpoints, with a link that leads out of it."""
    root = tmp_path / "checkpoints"
    root.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (root / "out").symlink_to(tmp_path / "elsewhere")
    (root / "in").symlink_to(root)
    return root


@pytest.mark.parametrize("inside", ["", "/ckpt-000001", "/a/../b", "/in/ckpt-000001", "/not yet/there"])
def test_inside(root: Path, inside: str) -> None:
    """The root, its folders, and links that stay in it. The path that is opened is the one that was checked."""
    for protocol in ("", "file://", "local://", "file:", "local:"):
        assert (
            Roots([str(root)]).path_of(f"{protocol}{root}{inside}", "part")
            == f"{Path(root, inside[1:]).resolve()}/part"
        )


@pytest.mark.parametrize(
    "outside",
    ["/..", "/../elsewhere", "-more", "/out", "/out/ckpt-000001", "/in/../../elsewhere", "/a\0b", "/a::/etc"],
)
def test_outside(root: Path, outside: str) -> None:
    """Dots, links, names that only share a prefix, and file systems within others lead out."""
    for protocol in ("", "file://"):
        with pytest.raises(CheckpointError, match=r"is outside of .*, where this server keeps its checkpoints"):
            Roots([str(root)]).path_of(f"{protocol}{root}{outside}", "part")


@pytest.mark.parametrize("other", ["~", "~root/a", "file:{}", "local:{}", "file://~", "file:~/", "local://~/a"])
@pytest.mark.parametrize("protocol", ["", "file:", "file://"])
def test_a_server_that_works_inside(protocol: str, other: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that fsspec resolves elsewhere, though they look relative to the working directory."""
    elsewhere = root.parent / "elsewhere"
    monkeypatch.chdir(root)
    monkeypatch.setenv("HOME", str(elsewhere))
    for own in (".", str(root)):
        with pytest.raises(CheckpointError, match="is outside of"):
            Roots([f"{protocol}{own}"]).path_of(other.format(elsewhere), "part")


def test_what_is_written_lies_inside(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative to the working directory, and by a name that begins like another protocol's."""
    monkeypatch.chdir(root)
    for name in ("a", "./b", "data:c", "FILE:/d", "a/~"):
        path = Roots(["."]).path_of(name, "part")
        write(path, [], {})
        assert (root / name / "part").is_file()


def test_a_file_that_is_a_link(root: Path) -> None:
    """The file itself is checked, too."""
    (root / "part").symlink_to(root.parent / "elsewhere" / "part")
    with pytest.raises(CheckpointError, match="is outside of"):
        Roots([str(root)]).path_of(str(root), "part")


@pytest.mark.parametrize("other", ["/etc", "s3://other/a", "memory://x", "simplecache::s3://bucket/runs", "", "."])
def test_elsewhere(root: Path, other: str) -> None:
    """Neither another directory nor another protocol is accepted."""
    with pytest.raises(CheckpointError, match="is outside of"):
        Roots([str(root), "s3://bucket/runs"]).path_of(other, "part")


@pytest.mark.parametrize(
    ("url", "fine"),
    [
        *(("s3://bucket/runs/a", True), ("s3://bucket/runs", True), ("s3://bucket/runs2", False)),
        *(("s3://bucket/runs/../secret", False), ("s3://bucket/runs/a/../../secret", False)),
        *(("s3://bucket/runs/%2e%2e/secret", False), ("s3://bucket/runs/a?versionId=1", False)),
    ],
)
def test_urls(url: str, fine: bool) -> None:
    """The path of a URL counts as it is written."""
    roots = Roots(["s3://bucket/runs/"])
    if fine:
        assert roots.path_of(url, "part") == f"{url}/part"
    else:
        with pytest.raises(CheckpointError, match="is outside of"):
            roots.path_of(url, "part")


def test_anywhere(tmp_path: Path) -> None:
    """Without roots every directory is accepted; the file's name still can't lead elsewhere."""
    assert Roots().path_of(str(tmp_path), "part-0.safetensors") == f"{tmp_path}/part-0.safetensors"
    with pytest.raises(CheckpointError, match="is not the name of a file"):
        Roots().path_of(str(tmp_path), "../part")
