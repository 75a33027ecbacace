"""The block `rewards`: verifiers, rewards of verdicts, overlong handling. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from omegaconf import MISSING

from vapo.config.kinds import FOLDER_DOC, choice, kind_options, make, option, section

REWARD_RANGE = {"ge": -1e12, "le": 1e12}  # that of every reward: MAX_REWARD in vapo.system


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


@dataclass
class RewardModelVerifier:
    reward_model_path: str = option(MISSING, "the reward model's Hugging Face folder")
    reward_model_threshold: float = option(0.0, "scores above it count as correct")


@dataclass
class OverlongConfig:
    """DAPO (2503.14476, section 3.4). Both off in VAPO."""

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
        """The ramp's length, in tokens."""
        return self.cache_tokens or max(1, max_response_tokens // 5)


@dataclass
class RewardConfig:
    verifier: Literal[
        "exact", "regex", "math", "math_verify", "reasoning_gym", "python", "reward_model"
    ] = choice(
        "math",
        "how a response is judged",
        math=MathVerifier,
        regex=RegexVerifier,
        python=PythonVerifier,
        reward_model=RewardModelVerifier,
    )
    correct: float = option(
        1.0, "reward of a correct response (paper: +1, inferred)", **REWARD_RANGE
    )
    incorrect: float = option(
        -1.0, "reward of an incorrect response (paper: -1, inferred)", **REWARD_RANGE
    )
    timeout_s: float = option(10.0, "time limit of one verdict; then it is a failure", gt=0)
    num_workers: int = option(2, "verifier processes", ge=1)
    shuffle: bool = option(
        False, "negative control: permute the verdicts over the batch; nothing can be learnt"
    )
    overlong: OverlongConfig = section(OverlongConfig, "DAPO's overlong handling")


def verifier_settings(block: Any) -> dict[str, Any]:
    """The verifier of `rewards` or of a source, with its options, by their keys."""
    return kind_options(block, "verifier")


def with_verifier(rewards: RewardConfig, block: Any) -> RewardConfig:
    """The rewards with the verifier of another block."""
    names = [field.name for field in fields(RewardConfig)]
    common = {name: getattr(rewards, name) for name in names if name != "verifier"}
    return make(RewardConfig, **common, **verifier_settings(block))
