"""A notebook of docs/ is a page of the site, too, and links to the notebook lead to the page."""

from __future__ import annotations

import json
import posixpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ENDING = ".ipynb"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for file in list(files):
        if file.src_uri.endswith(ENDING):
            text = as_markdown(json.loads(file.content_string), posixpath.basename(file.src_uri))
            files.append(File.generated(config, _page(file.src_uri), content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    is_notebook = files.get_file_from_path(page.file.src_uri.removesuffix(".md") + ENDING)
    return markdown if is_notebook else markdown.replace(f"{ENDING})", ".md)")


def as_markdown(notebook: dict[str, Any], name: str) -> str:
    """The texts of a notebook and its code, without outputs; a link to the notebook at the end."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"]).strip()
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join([*parts, f"This page is the notebook [{name}]({name})."]) + "\n"


def _page(uri: str) -> str:
    return uri.removesuffix(ENDING) + ".md"
