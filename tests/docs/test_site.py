"""The site of the documents, as far as it can be tested without MkDocs, which `make docs` runs."""

from __future__ import annotations

import importlib.util
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


def _hooks() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "scripts" / "site_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site_pages = _hooks()


def settings() -> dict[str, Any]:
    """Return the settings of the site, without what only MkDocs' environment can make."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    loaded: dict[str, Any] = yaml.safe_load(re.sub(r"!!python/\S+", "", text))
    return loaded


def pages(nav: object) -> Iterator[str]:
    """Yield the pages of a navigation, in order."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for entry in nav.values():
            yield from pages(entry)
    elif isinstance(nav, list):
        for entry in nav:
            yield from pages(entry)


def test_every_document_has_its_place() -> None:
    """Each page in docs/ is in the navigation once; what is not there is made from outside docs/."""
    listed = list(pages(settings()["nav"]))
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(set(listed))
    assert there - set(listed) == set()
    assert set(listed) - there <= set(site_pages.PAGES.values())


def test_nothing_comes_from_elsewhere() -> None:
    """Fonts and scripts are part of the site: it can be read without a network."""
    assert settings()["theme"]["font"] is False
    assert "extra_javascript" not in settings()
    assert "extra_css" not in settings()
    assert settings()["strict"] is True


@pytest.mark.parametrize(
    ("source", "link", "page"),
    [
        ("README.md", "[a](docs/security.md#tls)", "[a](security.md#tls)"),
        ("README.md", "[a](CONTRIBUTING.md)", "[a](contributing.md)"),
        ("README.md", "[a](examples/digits.py)", "[a](files/examples/digits.py.md)"),
        ("README.md", "[a](proto/pscluster/v1)", "[a](files/proto/pscluster/v1.md)"),
        ("README.md", '<img\nsrc="docs/dashboard.png" alt', '<img\nsrc="dashboard.png" alt'),
        ("docs/serving.md", "[a](../examples/serve.py)", "[a](files/examples/serve.py.md)"),
        ("docs/serving.md", "![a](dashboard.png)", "![a](dashboard.png)"),
        ("docs/reference/data.md", "[a](../datasets.md#b)", "[a](../datasets.md#b)"),
        ("examples/data/README.md", "[a](../digits.py)", "[a](../digits.py.md)"),
        ("docs/serving.md", "[a](#here) [b](https://a.b/c.md)", "[a](#here) [b](https://a.b/c.md)"),
    ],
)
def test_links(source: str, link: str, page: str) -> None:
    """What a link leads to in the repository has a page, to which the site's link leads."""
    assert site_pages.rewritten(link, source) == page


def test_what_lies_outside_docs_is_shown() -> None:
    """Examples and the wire's contract have pages with their text."""
    outside = site_pages.outside_docs()
    assert outside["README.md"] == "index.md"
    assert outside["examples/digits.py"] == "files/examples/digits.py.md"
    assert not [source for source in outside if source.startswith("docs/")]
    assert "`````python\n" in site_pages.shown(ROOT / "examples" / "digits.py")
    assert "## ps.proto" in site_pages.shown(ROOT / "proto" / "pscluster" / "v1")
