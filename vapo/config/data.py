"""The data block: one source or a mixture, its curriculum, templates. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from vapo.config.fields import option, section


@dataclass
class CurriculumStage:
    """What a generator is asked for from one iteration on."""

    from_iteration: int = option(0, "the first iteration of the stage, counted from 0", ge=0)
    level: int | None = option(None, "reasoning_gym: the level of the dataset's own curriculum")
    options: dict[str, Any] = option({}, "on top of the source's options, and of the level's")


@dataclass
class SourceConfig:
    """Where prompts come from."""

    kind: Literal["jsonl", "parquet", "huggingface", "procedural", "reasoning_gym", "mixture"] = (
        option("jsonl", "the type of source; mixture: those of data.mixture, data.heldout_mixture")
    )
    path: str | None = option(
        None, "file (jsonl, parquet), or dataset id / folder / such a file (huggingface)"
    )
    subset: str | None = option(None, "huggingface: the dataset's configuration name")
    split: str = option("train", "huggingface: the split")
    prompt_column: str = option(
        "prompt", "column of the problem; `a.b` is field b of column a, `a.0` its first item"
    )
    answer_column: str = option("answer", "column of the reference answer, dotted likewise")
    answer_pattern: str | None = option(
        None,
        "regular expression with one group: its last match in the column is the answer; null: all",
    )
    demonstration_column: str | None = option(None, "column of a worked response, for `vapo sft`")
    prompt_template: str | None = option(
        None, "text around this source's problems; null: data.prompt_template"
    )
    deduplicate: bool = option(False, "of rows with the same problem keep the first; counted")
    min_pass_rate: float | None = option(
        None, "leave out rows whose column `pass_rate` (`vapo filter`) is lower", ge=0, le=1
    )
    max_pass_rate: float | None = option(None, "the same for higher ones", ge=0, le=1)
    task: str | None = option(
        None, "procedural: the generator's name; reasoning_gym: the dataset's name"
    )
    options: dict[str, Any] = option(
        {}, "procedural and reasoning_gym: the generator's own parameters"
    )
    curriculum: list[CurriculumStage] = option(
        [],
        "generators, training: stages {from_iteration, options, level} in the order of their "
        "iterations, value pretraining counted",
    )
    num_examples: int | None = option(
        None, "how many rows to take or generate (of each stage); null: all (file sources)", ge=1
    )
    seed: int = option(0, "seed of a generator", ge=0)


@dataclass
class MixtureSource(SourceConfig):
    """One source of a mixture, under its name."""

    weight: int = option(1, "its part: 3 beside 1 is three prompts of four", ge=1, le=10_000)
    verifier: Literal["exact", "regex", "math", "reasoning_gym", "python"] | None = option(
        None, "how its responses are judged; null: as rewards.verifier says"
    )
    pattern: str | None = option(None, "with verifier regex, as rewards.pattern")
    function: str | None = option(None, "with verifier python, as rewards.function")


@dataclass
class DataConfig:
    train: SourceConfig = section(SourceConfig, "prompts to train on")
    mixture: dict[str, MixtureSource] = option(
        {}, "with train.kind mixture: the training sources by name"
    )
    heldout: SourceConfig | None = option(
        None, "prompts to evaluate on; null: split `heldout_size` rows off the training source"
    )
    heldout_mixture: dict[str, MixtureSource] = option(
        {}, "with heldout.kind mixture: the held-out sources by name, each with its own scores"
    )
    heldout_size: int = option(
        256,
        "rows split off the training source if heldout is null; of a mixture, by its weights",
        ge=1,
    )
    chat_template: bool = option(False, "apply the tokenizer's chat template to the problem")
    system_prompt: str | None = option(None, "system message, with chat_template")
    prompt_template: str = option("{prompt}", "text around the problem; must contain {prompt}")
    max_prompt_tokens: int = option(
        1024, "longer prompts are left out, counted and reported, never cut", ge=1
    )
