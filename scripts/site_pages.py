"""Hooks of MkDocs for `make docs`: pages of what lies outside docs/, and links to them.

The README is the site's first page. CONTRIBUTING.md and CHANGELOG.md get pages, and so does each other file or folder
of the repository that a page links to, such as an example: its text is shown. The links in the documents are those that
hold in the repository, and are rewritten here.
"""

from __future__ import annotations

import functools
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
"""Documents outside docs/, by their path in the repository, and their pages."""

# Of Markdown: [text](target), also over a line's end; of HTML: src="target".
_LINK = re.compile(r'(?P<before>\]\(|<img\s+src=")(?P<target>[^)"\s]+)(?=[)"])')


def page_of(path: str) -> str:
    """Return the page of the site, relative to docs/, that shows a file or folder of the repository."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"files/{path.removesuffix('.md')}.md"


def targets(text: str) -> Iterator[str]:
    """Return the targets of a document's links that name files, as they are written, without anchors."""
    for match in _LINK.finditer(text):
        target = match["target"].partition("#")[0]
        if target and ":" not in target:
            yield target


def in_repository(source: str, target: str) -> str:
    """Return the path in the repository of what a document at `source` calls `target`."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def rewritten(text: str, source: str) -> str:
    """Return a document's text with links between pages of the site; `source` is its path in the repository."""
    here = posixpath.dirname(page_of(source))

    def link(match: re.Match[str]) -> str:
        target, mark, anchor = match["target"].partition("#")
        if not target or ":" in target:
            return match[0]
        page = page_of(in_repository(source, target))
        if match["before"].startswith("<"):  # HTML is left as it is, so the image is named as the page will be
            return match["before"] + posixpath.relpath(page, here or ".")
        return match["before"] + posixpath.relpath(page, here or ".") + mark + anchor

    return _LINK.sub(link, text)


def shown(path: Path) -> str:
    """Return a page with the text of a file, or of all files in a folder that are not generated."""
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    files = [path] if path.is_file() else sorted(path.glob("*.proto"))
    language = {".py": "python", ".proto": "protobuf", ".yaml": "yaml"}
    blocks = [f"`````{language.get(file.suffix, 'text')}\n{file.read_text(encoding='utf-8')}`````\n" for file in files]
    if path.is_file():
        return f"# {path.name}\n\nThis is `{name}` in the repository.\n\n{blocks[0]}"
    sections = [f"## {file.name}\n\n{block}" for file, block in zip(files, blocks, strict=True)]
    return f"# {name}\n\n" + "\n".join(sections)


@functools.cache
def outside_docs() -> dict[str, str]:
    """Return the paths in the repository of all that is shown but lies outside docs/, and their pages."""
    found: dict[str, str] = {}
    seen: set[str] = set()
    waiting = [*PAGES, *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))]
    while waiting:
        source = waiting.pop()
        path = ROOT / source
        if source in seen or not path.exists():  # links that are broken are MkDocs' to report
            continue
        seen.add(source)
        if not source.startswith("docs/"):
            found[source] = page_of(source)
        if path.suffix == ".md":
            waiting += [in_repository(source, target) for target in targets(path.read_text(encoding="utf-8"))]
    return found


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages of what lies outside docs/."""
    from mkdocs.structure.files import File, InclusionLevel

    for source, page in outside_docs().items():
        file = File.generated(config, page, content=shown(ROOT / source))
        if source not in PAGES:
            file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Have links lead to pages of the site."""
    del config, files
    sources = {shown: source for source, shown in outside_docs().items()} if page.file.generated_by else {}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return rewritten(markdown, source) if source.endswith(".md") else markdown
