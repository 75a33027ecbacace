"""The pages of the Python API and of the tensor functions, made from docstrings by mkdocstrings."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

MATH = Path(__file__).parents[2] / "vapo" / "functional"
API_INTRODUCTION = """\
# Functions of the package

These are the functions of `import vapo`, with their arguments and errors.
[From Python](../python.md) is the introduction.
"""
MATH_INTRODUCTION = """\
# Functions of the math

The package `vapo.functional` holds the formulas as pure functions of tensors. They read no config
and log nothing, so they can be called on their own. Shapes stand in the annotations: `B` counts
rollouts, `T` response tokens, `S` prompt and response tokens, `V` the vocabulary, `N` prompts and
`G` the responses of a group. [From the paper to the code](../paper_map.md) leads from each formula
of the paper to its function.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, "reference/api.md", content=api_page()))
    files.append(File.generated(config, "reference/math.md", content=math_page()))
    return files


def api_page() -> str:
    """One entry of mkdocstrings for the module behind `import vapo`."""
    return f"{API_INTRODUCTION}\n::: vapo.api\n"


def math_page() -> str:
    """One entry of mkdocstrings for each module."""
    names = sorted(path.stem for path in MATH.glob("*.py") if path.stem != "__init__")
    return (
        "\n\n".join([MATH_INTRODUCTION, *(f"::: vapo.functional.{name}" for name in names)]) + "\n"
    )
