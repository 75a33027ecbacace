"""The block `rewards`: verifiers, rewards of verdicts, overlong handling. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from omegaconf import MISSING

from vapo.config.kinds import FOLDER_DOC, choice, kind_options, make, option, section

REWARD_RANGE = {"ge": -1e12, "le": 1e12}  # that of every reward: MAX_REWARD in vapo.user_code


@dataclass
class MathVerifier:
    percent: Literal["either", "hundredth"] = option(
        "either",
        "what `25%` is for the reference 25: `either` right, as for 0.25 (references above 1 may "
        "count percent, as GSM8K's and MATH's do), or `hundredth`: wrong, 0.25 alone is right",
    )


@dataclass
class RegexVerifier:
    pattern: str = option(MISSING, "the last match's first group is compared with the answer")


@dataclass
class PythonVerifier:
    function: str = option(
        MISSING,
        "`package.module:function` or `folder/file.py:function`, called as "
        "f(response_text, answer, metadata)",
    )
    function_folder: str | None = option(None, FOLDER_DOC)
    function_variables: list[str] = option(
        [],
        "environment variables with credentials that the function gets, as OPENAI_API_KEY; others "
        "with credentials are withheld",
    )
    function_calls: int = option(
        1,
        "how many responses each worker gives to the function at a time; more than 1 is for a "
        "function that waits, as a judge over HTTP: coroutines share an event loop, plain "
        "functions run in threads",
        ge=1,
        le=128,
    )


@dataclass
class RewardModelVerifier:
    reward_model_path: str = option(MISSING, "the reward model's Hugging Face folder")
    reward_model_threshold: float = option(0.0, "scores above it count as correct")


_Single = Literal[
    "exact", "regex", "math", "math_verify", "reasoning_gym", "python", "reward_model"
]
_KINDS: dict[str, type] = {
    "math": MathVerifier,
    "regex": RegexVerifier,
    "python": PythonVerifier,
    "reward_model": RewardModelVerifier,
}


@dataclass
class WeightedVerifier:
    """One of several verifiers: how it judges a response, and the weight of its reward."""

    verifier: _Single = choice("math", "how a response is judged", **_KINDS)
    weight: float = option(1.0, "the factor of its reward in the response's reward", **REWARD_RANGE)
    reads_thoughts: bool = option(
        False,
        "give it the whole response where rewards.answer_after is set, as for a verifier of the "
        "form; then a response without that text is judged by it, too",
    )


@dataclass
class SeveralVerifiers:
    verifiers: dict[str, WeightedVerifier] = option(
        {}, "the verifiers by name; the reward is the sum of theirs, each times its weight"
    )
    correct_by: str | None = option(
        None,
        "the verifier whose verdict is the response's, which the accuracies, dynamic "
        "sampling and the positive-example LM loss read; null: the first of `verifiers`",
    )

    @property
    def deciding(self) -> str:
        """The name of the verifier that decides whether a response is correct."""
        return self.correct_by or next(iter(self.verifiers))


@dataclass
class OverlongConfig:
    """Options of DAPO's treatment of too long responses (2503.14476, 3.4). All off in VAPO."""

    filter_truncated: bool = option(
        False, "truncated responses carry no loss (the critic's: if critic.truncated is as_policy)"
    )
    soft_punishment: bool = option(False, "add DAPO's soft overlong punishment to the reward")
    cache_tokens: int | None = option(
        None,
        "length of the ramp from 0 to -1 before max_response_tokens; null: a fifth of "
        "max_response_tokens (DAPO: 4096 of 20480)",
        ge=1,
    )

    def ramp_tokens(self, max_response_tokens: int) -> int:
        """Return over how many tokens the soft punishment falls from 0 to -1."""
        return self.cache_tokens or max(1, max_response_tokens // 5)


@dataclass
class RewardConfig:
    verifier: Literal[_Single, "several"] = choice(
        "math", "how a response is judged", **_KINDS, several=SeveralVerifiers
    )
    correct: float = option(
        1.0, "reward of a correct response (paper: +1, inferred)", **REWARD_RANGE
    )
    incorrect: float = option(
        -1.0, "reward of an incorrect response (paper: -1, inferred)", **REWARD_RANGE
    )
    answer_after: str | None = option(
        None,
        'judge only what follows the last occurrence of this text, as "</think>" after thinking; '
        "null: the whole response",
    )
    without_answer_after: Literal["wrong", "whole"] = option(
        "wrong",
        "what a response without rewards.answer_after is: wrong, or judged as a whole; always the "
        "latter where the prompt ends with that text, as with thinking turned off",
    )
    keep_special_tokens: bool = option(
        True,
        "judge and show responses with the special tokens in them, as <answer> or <tool_call>, all "
        "but the end token and padding at the end; false: without any",
    )
    timeout_s: float = option(10.0, "time limit of one verdict; then it is a failure", gt=0)
    num_workers: int = option(2, "verifier processes", ge=1)
    shuffle: bool = option(
        False, "negative control: permute the verdicts over the batch; nothing can be learnt"
    )
    overlong: OverlongConfig = section(OverlongConfig, "DAPO's overlong handling")


def verifier_settings(block: Any) -> dict[str, Any]:
    """Return the verifier of a block (`rewards` or a data source) and its options, by key."""
    return kind_options(block, "verifier")


def with_verifier(rewards: RewardConfig, block: Any) -> RewardConfig:
    """Return `rewards` with the verifier of another block, and with its options."""
    names = [field.name for field in fields(RewardConfig)]
    common = {name: getattr(rewards, name) for name in names if name != "verifier"}
    return make(RewardConfig, **common, **verifier_settings(block))


def rewards_of_each(rewards: RewardConfig) -> dict[str, RewardConfig]:
    """Return the options of several verifiers, by name, as if each verifier were the only one.

    For a verifier that reads the thoughts, `answer_after` is None, so that it judges whole
    responses.
    """
    assert isinstance(rewards, SeveralVerifiers)
    return {
        name: with_verifier(
            replace(rewards, answer_after=None) if block.reads_thoughts else rewards, block
        )
        for name, block in rewards.verifiers.items()
    }


def verifiers_in(key: str, block: Any) -> list[tuple[str, Any]]:
    """Return pairs of a key and a block that chooses one verifier.

    These are `key` and `block` themselves, or the several verifiers in the block.
    """
    if not isinstance(block, SeveralVerifiers):
        return [(key, block)]
    return [(f"{key}.verifiers.{name}", each) for name, each in block.verifiers.items()]
