"""A notebook of docs/ is a page of the site, too, and links to the notebook lead to the page."""

from __future__ import annotations

import base64
import json
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ENDING = ".ipynb"
_STYLE = re.compile(r"<style.*?</style>", re.DOTALL)  # pandas' own, which the site's replaces


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for file in list(files):
        if file.src_uri.endswith(ENDING):
            notebook, name = json.loads(file.content_string), posixpath.basename(file.src_uri)
            pictures = _pictures(notebook, name)
            for picture, content in pictures.items():
                uri = posixpath.join(posixpath.dirname(file.src_uri), picture)
                files.append(File.generated(config, uri, content=content))
            text = as_markdown(notebook, name)
            files.append(File.generated(config, _page(file.src_uri), content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    is_notebook = files.get_file_from_path(page.file.src_uri.removesuffix(".md") + ENDING)
    return markdown if is_notebook else markdown.replace(f"{ENDING})", ".md)")


def as_markdown(notebook: Mapping[str, Any], name: str) -> str:
    """The texts of a notebook, its code and its stored outputs; a link to it at the end."""
    parts = []
    for number, cell in enumerate(notebook["cells"]):
        text = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            parts.append(text)
        else:
            parts += [f"```python\n{text}\n```", *_shown(cell["outputs"], name, number)]
    return "\n\n".join([*parts, f"This page is the notebook [{name}]({name})."]) + "\n"


def _shown(outputs: Sequence[Mapping[str, Any]], name: str, number: int) -> Iterator[str]:
    """What a cell printed as one text; of each result the picture, the table, or else its text."""
    for kind, same in groupby(outputs, key=lambda output: output["output_type"]):
        if kind == "stream":
            yield _text("".join("".join(output["text"]) for output in same))
            continue
        for output in same:
            data = output["data"]
            if "image/png" in data:
                yield f"![What the cell drew]({_picture(name, number)})"
            elif "<table" in (
                html := "".join(data.get("text/html", ""))
            ):  # no frame of a run's file
                yield _STYLE.sub("", html).strip()
            else:
                yield _text("".join(data["text/plain"]))


def _text(text: str) -> str:
    """A block that the site's style keeps short: a run prints a hundred lines."""
    return f"``` {{ .text .output }}\n{text.strip()}\n```"


def _pictures(notebook: Mapping[str, Any], name: str) -> dict[str, bytes]:
    """The stored pictures, one a cell, by where the page looks for them."""
    return {
        _picture(name, number): base64.b64decode("".join(output["data"]["image/png"]))
        for number, cell in enumerate(notebook["cells"])
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    }


def _picture(name: str, number: int) -> str:
    return f"{name.removesuffix(ENDING)}_outputs/cell_{number}.png"


def _page(uri: str) -> str:
    return uri.removesuffix(ENDING) + ".md"
