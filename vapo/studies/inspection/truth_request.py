"""The options of `vapo inspect` for measuring values by continuations.

This module does not import torch, so that a wrong option is reported at once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.config.overrides import override_of
from vapo.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vapo.studies.inspection.findings import Findings

_NUM_STEPS = 8  # steps of a response without line ends
_UNUSED_DATA = (  # a config needs prompts; these are never read
    "data.train.path=unused",
    "data.heldout.path=unused",
)


@dataclass(frozen=True)
class TruthRequest:
    """The user's request to measure the true values of some prefixes by continuations.

    Args:
        policy: the Hugging Face folder of the model that sampled the responses and continues them.
        num_continuations: how many continuations each prefix gets.
        verifier: what judges a continuation: `math`, `exact`, `math_verify`, `reasoning_gym`,
            `regex:PATTERN`, or `FILE.py:FUNCTION`, as `rewards.verifier` of a config.
        tokenizer: the policy's. If None, it is loaded from the policy's folder.
        num_responses: how many responses are continued.
        seed: for the choice of prefixes and the bootstraps.
        overrides: settings of a config, as `rollouts.engine=vllm` or `rollouts.temperature=0.7`.

    Raises: UserError: policy or verifier is missing, or there are too few continuations.
    """

    policy: str | None
    num_continuations: int
    verifier: str | None
    tokenizer: PreTrainedTokenizerBase | None = None
    num_responses: int = 16
    seed: int = 0
    overrides: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.policy is None:
            raise UserError("--value_truth needs --policy MODEL: it continues the responses")
        if self.verifier is None:
            raise UserError(
                "--value_truth needs --verifier NAME: it judges the continuations. NAME is math, "
                "exact, math_verify, reasoning_gym, regex:PATTERN or FILE.py:FUNCTION"
            )
        if self.num_continuations < 2:
            raise UserError("--value_truth needs 2 continuations or more of each prefix")

    def config(self, findings: Findings) -> FitConfig:
        """Return the config for sampling and judging.

        Raises: UserError: a key or a value is wrong.
        """
        low, high = findings.outcomes or (0.0, 1.0)
        longest = max(1, findings.sums.longest)
        has_segments = any(key.startswith("value_truth.segments") for key in self.overrides)
        prompt_lengths = [len(x.prompt_ids or ()) for x in findings.responses]
        settings = [
            *_UNUSED_DATA,
            override_of("actor.path", self.policy),
            "critic.init=policy",
            f"rollouts.max_response_tokens={longest}",
            f"data.max_prompt_tokens={max(1, *prompt_lengths)}",
            *(f"rewards.{setting}" for setting in verifier_overrides(str(self.verifier))),
            *(f"rewards.correct={high}", f"rewards.incorrect={low}"),
            f"value_truth.num_continuations={self.num_continuations}",
            f"value_truth.num_responses={self.num_responses}",
            "value_truth.num_prefixes=0",
            *([] if has_segments else _segments(findings)),
            "trainer.num_threads=1",
        ]
        return load_config(FitConfig, [], [*settings, *self.overrides])


def verifier_overrides(verifier: str) -> list[str]:
    """Return the settings of `rewards` for the verifier that the user named.

    >>> verifier_overrides("regex:Answer: (.*)")
    ['verifier=regex', "pattern='Answer: (.*)'"]
    """
    name, _, argument = verifier.partition(":")
    if name == "regex":
        quoted = argument.replace("'", "''")
        return ["verifier=regex", f"pattern='{quoted}'"]
    if argument or name.endswith(".py"):
        return ["verifier=python", f"function={verifier}"]
    return [f"verifier={name}"]


def _segments(findings: Findings) -> list[str]:
    """Return settings that cut responses into steps of about an eighth of their mean length.

    The result is [] if responses have two line breaks or more on average, because by default a step
    ends with its line.
    """
    texts = [response.response.strip() for response in findings.responses]
    if fmean(len(re.findall(r"\n+", text)) for text in texts) >= 2:
        return []
    num = max(1, round(findings.sums.length_mean / _NUM_STEPS))
    return ["value_truth.segments.kind=tokens", f"value_truth.segments.num_tokens={num}"]
