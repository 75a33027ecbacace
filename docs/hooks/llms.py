"""The site's texts for language models: `llms.txt`, `llms-full.txt`, and each page as Markdown.

`llms.txt` lists the pages of the navigation with their first sentence (llmstxt.org). The Markdown
of `critics.html` is `critics.md` beside it, as the site's links make it; `llms-full.txt` has all of
them, one after the other. Pages that mkdocstrings makes from code are left out: their Markdown
has no text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.nav import Section as NavSection
from mkdocs.structure.pages import Page

_FROM_CODE = re.compile(r"^::: ", re.MULTILINE)
_SENTENCE = re.compile(r".+?[.!?](?= |$)")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_texts: dict[str, str] = {}  # of the build that is under way: src_uri -> Markdown
_nav: list[Navigation] = []


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Keep the page's Markdown as the hooks before this one left it."""
    if not page.file.src_uri.startswith("repository/") and not _FROM_CODE.search(markdown):
        _texts[page.file.src_uri] = markdown.strip()


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> None:
    _nav[:] = [nav]


def on_post_build(config: MkDocsConfig) -> None:
    site, (nav,) = Path(config.site_dir), _nav
    sections = list(_sections(nav.items))
    pages = [page for _, pages in sections for page in pages]
    for page in pages:
        path = site / page.file.src_uri
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_texts[page.file.src_uri] + "\n", encoding="utf-8")
    (site / "llms.txt").write_text(_index(config, sections), encoding="utf-8")
    full = "\n\n".join(_texts[page.file.src_uri] for page in pages)
    (site / "llms-full.txt").write_text(full + "\n", encoding="utf-8")


def _sections(items: Iterable[object], title: str = "Start") -> Iterator[tuple[str, list[Page]]]:
    """The pages that have a text, by the section of the navigation that they are in."""
    own = [item for item in items if isinstance(item, Page) and item.file.src_uri in _texts]
    if own:
        yield title, own
    for item in items:
        if isinstance(item, NavSection):
            yield from _sections(item.children, str(item.title))


def _index(config: MkDocsConfig, sections: Iterable[tuple[str, list[Page]]]) -> str:
    parts = [f"# {config.site_name}", f"> {config.site_description}"]
    for title, pages in sections:
        lines = [
            f"- [{page.title}]({page.file.src_uri}): {first_sentence(_texts[page.file.src_uri])}"
            for page in pages
        ]
        parts.append("\n".join([f"## {title}", "", *lines]))
    return "\n\n".join(parts) + "\n"


def first_sentence(markdown: str) -> str:
    """Of the first paragraph, without links.

    >>> first_sentence("# Title\\n\\nOne [line](a.md)\\ngoes on. Another.")
    'One line goes on.'
    """
    for paragraph in re.split(r"\n\s*\n", markdown):
        if paragraph.lstrip().startswith(("#", "!", "|", "```", "-", "<")):
            continue
        text = _LINK.sub(r"\1", " ".join(paragraph.split()))
        found = _SENTENCE.match(text)
        return found[0] if found else text
    return ""
