"""The page of the pure tensor functions, made from their docstrings when the site is built."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

URI = "reference/math.md"
FOLDER = Path(__file__).parents[2] / "vapo" / "functional"
INTRODUCTION = """\
# Functions of the math

The package `vapo.functional` holds the formulas as pure functions of tensors. They read no config
and log nothing, so they can be called on their own. Shapes stand in the annotations: `B` counts
rollouts, `T` response tokens, `S` prompt and response tokens, `V` the vocabulary, `N` prompts and
`G` the responses of a group. [From the paper to the code](../paper_map.md) leads from each formula
of the paper to its function.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, URI, content=page()))
    return files


def page() -> str:
    """One entry of mkdocstrings for each module."""
    names = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
    return "\n\n".join([INTRODUCTION, *(f"::: vapo.functional.{name}" for name in names)]) + "\n"
