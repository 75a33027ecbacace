"""The data block: one source or a mixture, its curriculum, templates. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from vapo.config.fields import option, section

FILES = ("jsonl", "parquet", "huggingface")
GENERATED = ("procedural", "reasoning_gym")
USED_BY = {  # every key of a source -> the kinds that read it
    "path": FILES,
    "subset": ("huggingface",),
    "split": ("huggingface",),
    "prompt_column": FILES,
    "answer_column": FILES,
    "answer_pattern": FILES,
    "demonstration_column": FILES,
    "prompt_template": FILES + GENERATED,
    "deduplicate": FILES + GENERATED,
    "min_pass_rate": FILES,
    "max_pass_rate": FILES,
    "task": GENERATED,
    "options": GENERATED,
    "curriculum": GENERATED,
    "num_examples": FILES + GENERATED,
    "seed": FILES + GENERATED,
    "sources": ("mixture",),
}
VERIFIER_OPTIONS = {  # key -> the verifier that reads it
    "pattern": "regex",
    "function": "python",
    "reward_model_path": "reward_model",
    "reward_model_threshold": "reward_model",
}


@dataclass
class CurriculumStage:
    """What a generator is asked for from one iteration on."""

    from_iteration: int = option(0, "the first iteration of the stage, counted from 0", ge=0)
    level: int | None = option(None, "reasoning_gym: the level of the dataset's own curriculum")
    options: dict[str, Any] = option({}, "on top of the source's options, and of the level's")


@dataclass
class PromptSource:
    """Where prompts come from."""

    kind: Literal["jsonl", "parquet", "huggingface", "procedural", "reasoning_gym", "mixture"] = (
        option("jsonl", "the type of source", owns=tuple(USED_BY), alike=FILES)
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
    seed: int = option(
        0, "of a generator; of the prompts that are held out if data.heldout is null", ge=0
    )


@dataclass
class MixtureSource(PromptSource):
    """One source of a mixture, under its name."""

    weight: int = option(1, "its part: 3 beside 1 is three prompts of four", ge=1, le=10_000)
    verifier: Literal["exact", "regex", "math", "reasoning_gym", "python"] | None = option(
        None,
        "how its responses are judged; null: as rewards.verifier says",
        owns=("pattern", "function"),
    )
    pattern: str | None = option(None, "with verifier regex, as rewards.pattern")
    function: str | None = option(None, "with verifier python, as rewards.function")


@dataclass
class SourceConfig(PromptSource):
    """One source, or a mixture of several."""

    sources: dict[str, MixtureSource] = option({}, "of a mixture: its sources by name")


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
    system_prompt: str | None = option(None, "system message, with chat_template")
    prompt_template: str = option("{prompt}", "text around the problem; must contain {prompt}")
    max_prompt_tokens: int = option(
        1024, "longer prompts are left out, counted and reported, never cut", ge=1
    )
