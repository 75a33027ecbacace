"""Links that lead out of docs/ work on the site as on a code host.

A page may link to any file of the repository, for instance `../experiments/LOG.md`. The site has
a copy of each such file under `repository/`: Markdown and source code as pages, pictures as they
are.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
FOLDER = "repository"
PICTURES = (".png", ".svg")
_TARGET = re.compile(r"(?<=\]\()(?!\w+://|#)([^)\s#]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the changes, and all files that are linked to from a page, directly or over another."""
    files.append(File.generated(config, "changes.md", content=(ROOT / "CHANGELOG.md").read_text()))
    waiting = [file for file in files if file.is_documentation_page()]
    while waiting:
        file = waiting.pop()
        for path in _linked(file.content_string, _place(file.src_uri)):
            uri = _uri(path)
            if files.get_file_from_path(uri) is None:
                files.append(added := _file(config, path, uri))
                waiting += [added] if path.endswith(".md") else []
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page's links, those to files of the repository leading to the site's copies."""
    place = _place(page.file.src_uri)
    if page.file.src_uri.startswith(f"{FOLDER}/"):
        # who looks for a key wants the page that explains it, not the source that has it most
        is_source = not (ROOT / place).is_file()  # its page has one more ending
        page.meta["search"] = {"exclude": True} if is_source else {"boost": 0.5}
    here = posixpath.dirname(page.file.src_uri)

    def target(match: re.Match[str]) -> str:
        path = _path(match[1], place)
        if path is None:
            return match[0]
        return posixpath.relpath(_uri(path), here or ".") + (match[2] or "")

    return _TARGET.sub(target, markdown)


def _place(uri: str) -> str:
    """The file of the repository whose text a page of the site is."""
    if uri == "changes.md":
        return "CHANGELOG.md"
    inside = uri.removeprefix(f"{FOLDER}/")
    return f"docs/{uri}" if inside == uri else inside


def _linked(markdown: str, place: str) -> set[str]:
    """The repository's files outside docs/ that a page links to."""
    paths = {_path(target, place) for target, _ in _TARGET.findall(markdown)}
    return {path for path in paths if path is not None and not path.startswith("docs/")}


def _path(target: str, place: str) -> str | None:
    """A link's file, from the repository's root; None where it is left to mkdocs as it is."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
    stays = place.startswith("docs/") and path.startswith("docs/")
    return None if stays or not (ROOT / path).is_file() else path


def _uri(path: str) -> str:
    """Where the site has a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path == "CHANGELOG.md":
        return "changes.md"
    as_is = path.endswith((".md", *PICTURES))
    return f"{FOLDER}/{path}" if as_is else f"{FOLDER}/{path}.md"


def _file(config: MkDocsConfig, path: str, uri: str) -> File:
    source = ROOT / path
    if path.endswith((".md", *PICTURES)):
        return File.generated(config, uri, abs_src_path=os.fspath(source))
    language = source.suffix.removeprefix(".") or "text"
    text = f"# {path}\n\n`````{language}\n{source.read_text()}\n`````\n"
    return File.generated(config, uri, content=text)
