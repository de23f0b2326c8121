"""The warning about a token file that others can read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pscluster.core.security import tokens
from pscluster.core.security.tokens import load_token, new_token


@pytest.mark.parametrize(
    ("mode", "group", "warned"), [(0o440, 0, False), (0o440, 1, True), (0o460, 0, True), (0o444, 0, True)]
)
def test_a_file_that_root_lets_our_group_read(
    mode: int,
    group: int,
    warned: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """There is no warning if root has given the file to our group, which may only read it, as in a pod."""
    file = tmp_path / "token"
    file.write_text(new_token())
    if file.stat().st_uid != 0:
        pytest.skip("only root can make a file of root's")
    file.chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    monkeypatch.setattr(os, "getegid", lambda: file.stat().st_gid + group)
    monkeypatch.setattr(os, "getgroups", list)
    monkeypatch.setattr(tokens, "_warned", set())
    assert load_token(file) is not None
    assert ("other users can read the token file" in caplog.text) == warned
