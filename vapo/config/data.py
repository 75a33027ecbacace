"""The data block: one source or a mixture, its curriculum, templates. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from omegaconf import MISSING

from vapo.config.kinds import FOLDER_DOC, choice, option, section
from vapo.config.rewards import MathVerifier, PythonVerifier, RegexVerifier, verifiers_in


@dataclass
class CurriculumStage:
    """A stage of a curriculum: a generator's level and options from one iteration on."""

    from_iteration: int = option(0, "the first iteration of the stage, counted from 0", ge=0)
    level: int | None = option(None, "reasoning_gym: the level of the dataset's own curriculum")
    options: dict[str, Any] = option({}, "on top of the source's options, and of the level's")


@dataclass
class FileSource:
    """Options of a data source whose rows are in a file or a dataset."""

    path: str = option(
        MISSING, "file (jsonl, parquet), or dataset id / folder / such a file (huggingface)"
    )
    prompt_column: str = option(
        "prompt", "column of the problem; `a.b` is field b of column a, `a.0` its first item"
    )
    answer_column: str = option("answer", "column of the reference answer, dotted likewise")
    answer_pattern: str | None = option(
        None,
        "regular expression with one group: its last match in the column is the answer; null: all",
    )
    demonstration_column: str | None = option(
        None, "column of a worked response, or of a list of the policy's turns, for `vapo sft`"
    )
    prompt_template: str | None = option(
        None, "text around this source's problems; null: data.prompt_template"
    )
    deduplicate: bool = option(False, "of rows with the same problem keep the first; counted")
    min_pass_rate: float | None = option(
        None, "leave out rows whose column `pass_rate` (`vapo filter`) is lower", ge=0, le=1
    )
    max_pass_rate: float | None = option(None, "the same for higher ones", ge=0, le=1)
    num_examples: int | None = option(None, "how many rows to take; null: all", ge=1)
    seed: int = option(0, "of the prompts that are held out if data.heldout is null", ge=0)


@dataclass
class JsonlSource(FileSource):
    """Options of a data source that is a file with one JSON object a line."""


@dataclass
class ParquetSource(FileSource):
    """Options of a data source that is a Parquet file."""


@dataclass
class HuggingfaceSource(FileSource):
    """Options of a data source that is a Hugging Face dataset."""

    subset: str | None = option(None, "the dataset's configuration name")
    split: str = option("train", "the split")


@dataclass
class GeneratedSource:
    """A data source whose rows a program generates from a seed."""

    num_examples: int = option(MISSING, "how many rows to generate, of each stage", ge=1)
    seed: int = option(0, "of the generator", ge=0)
    options: dict[str, Any] = option({}, "the generator's own parameters")
    curriculum: list[CurriculumStage] = option(
        [],
        "training: stages {from_iteration, options, level} in the order of their iterations, "
        "value pretraining counted",
    )
    prompt_template: str | None = option(
        None, "text around this source's problems; null: data.prompt_template"
    )
    deduplicate: bool = option(False, "of rows with the same problem keep the first; counted")

    @property
    def generator_key(self) -> str:
        """The key that says which generator it is."""
        return "generator_function" if isinstance(self, FunctionSource) else "task"

    @property
    def generator(self) -> str:
        """The generator's name, or its path for a function."""
        return str(getattr(self, self.generator_key))


@dataclass
class _NamedGenerator:
    """The generator of a source, by name."""

    task: str = option(MISSING, "the generator's name; reasoning_gym: the dataset's name")


@dataclass
class ProceduralSource(GeneratedSource, _NamedGenerator):
    """Rows of one of the shipped tasks; `task` names it."""


@dataclass
class FunctionSource(GeneratedSource):
    """Rows of a generator function of the user's."""

    generator_function: str = option(
        MISSING,
        "the generator as package.module:function or folder/file.py:function; called with "
        "(num_examples, seed=..., **options), it returns rows like those of a file",
    )
    generator_function_folder: str | None = option(None, FOLDER_DOC)
    options: dict[str, Any] = option({}, "keyword arguments of each call of the function")


@dataclass
class ReasoningGymSource(GeneratedSource, _NamedGenerator):
    """Rows of a dataset that reasoning_gym generates; `task` is the dataset's name."""


@dataclass
class VerifiersSource(GeneratedSource, _NamedGenerator):
    """Tasks of an environment of the package verifiers; `task` is its id, `options` its args."""


_Kind = Literal[
    "jsonl", "parquet", "huggingface", "procedural", "generated", "reasoning_gym", "verifiers"
]
_Verifier = Literal["exact", "regex", "math", "math_verify", "reasoning_gym", "python"]
_KINDS: dict[str, type] = {
    "jsonl": JsonlSource,
    "parquet": ParquetSource,
    "huggingface": HuggingfaceSource,
    "procedural": ProceduralSource,
    "generated": FunctionSource,
    "reasoning_gym": ReasoningGymSource,
    "verifiers": VerifiersSource,
}


@dataclass
class MixtureSource:
    """One source of a mixture: its kind, its share of the prompts, and a verifier of its own."""

    kind: _Kind = choice("jsonl", "the type of source", **_KINDS)
    weight: int = option(1, "its part: 3 beside 1 is three prompts of four", ge=1, le=10_000)
    verifier: _Verifier | None = choice(
        None,
        "how its responses are judged; null: as rewards.verifier says",
        math=MathVerifier,
        regex=RegexVerifier,
        python=PythonVerifier,
    )


@dataclass
class Mixture:
    """The options of a mixture: its sources by the names that the user gives them."""

    sources: dict[str, MixtureSource] = option({}, "the sources by name")


@dataclass
class SourceConfig:
    """The options of `data.train` or `data.heldout`: one source, or a mixture of several."""

    kind: Literal[_Kind, "mixture"] = choice(
        "jsonl", "the type of source", **_KINDS, mixture=Mixture
    )


PromptSource = FileSource | GeneratedSource
"""A source that is not a mixture."""


@dataclass
class DataConfig:
    train: SourceConfig = section(SourceConfig, "prompts to train on")
    heldout: SourceConfig | None = option(
        None, "prompts to evaluate on; null: split `heldout_size` rows off the training source"
    )
    heldout_size: int = option(
        256,
        "rows split off the training source if heldout is null; of a mixture, by its weights",
        ge=1,
    )
    chat_template: bool = option(False, "apply the tokenizer's chat template to the problem")
    chat_template_kwargs: dict[str, Any] = option(
        {},
        "variables that the chat template reads: {enable_thinking: false} turns Qwen3's thinking "
        "off; one that it does not read is an error, which lists those that it reads",
    )
    system_prompt: str | None = option(
        None,
        "system message, with chat_template; a prompt whose messages begin with one keeps its own",
    )
    prompt_template: str = option("{prompt}", "text around the problem; must contain {prompt}")
    max_prompt_tokens: int = option(
        1024, "longer prompts are left out, counted and reported, never cut", ge=1
    )


def sources_of(data: DataConfig, name: str) -> dict[str, PromptSource]:
    """Return the sources of `data.train` or `data.heldout` (`name`), by dotted key.

    The parts of a mixture are returned in its place. Without held-out sources the result is empty.
    """
    source = getattr(data, name)
    if source is None:
        return {}
    if not isinstance(source, Mixture):
        return {f"data.{name}": source}
    return {f"data.{name}.sources.{part}": s for part, s in source.sources.items()}  # type: ignore[misc]


def source_name(key: str) -> str:
    """Return the name of a mixture's source from its dotted key; empty for any other source."""
    return key.partition(".sources.")[2]


def all_sources(data: DataConfig) -> Iterator[tuple[str, PromptSource]]:
    """Yield the sources of `train` and `heldout`, each with its dotted key."""
    for name in ("train", "heldout"):
        yield from sources_of(data, name).items()


def verifier_blocks(config: Any) -> list[tuple[str, Any]]:
    """Return pairs of a dotted key and a block that chooses one verifier.

    These blocks are `rewards`, or the verifiers of `rewards.verifiers`, and the sources of every
    mixture.
    """
    sources = [item for item in all_sources(config.data) if isinstance(item[1], MixtureSource)]
    return [*verifiers_in("rewards", config.rewards), *sources]
