"""The keys of the block `algorithm` that exist for one advantage estimator alone.

Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from omegaconf import MISSING

from vapo.config.kinds import FOLDER_DOC, option, section
from vapo.config.values import SegmentsConfig


@dataclass
class OwnEstimatorOptions:
    """Options of the user's own estimator: the function, and what it needs (docs/extending.md)."""

    estimator_function: str = option(
        MISSING,
        "your own estimator, as package.module:function or folder/file.py:function "
        "(docs/extending.md)",
    )
    estimator_function_folder: str | None = option(None, FOLDER_DOC)
    estimator_args: dict[str, Any] = option({}, "keyword arguments of each call of your estimator")
    estimator_uses_critic: bool = option(
        False, "whether your estimator reads values and returns value targets to train a critic on"
    )
    estimator_compares_groups: bool = option(
        True,
        "whether your estimator compares the responses to one prompt: then a group comes whole "
        "or not at all, and has two responses or more",
    )
    estimator_uses_greedy_baseline: bool = option(
        False, "whether your estimator reads the reward of one greedy response to each prompt"
    )
    estimator_reads_layers: list[int] = option(
        [],
        "layers of the actor whose hidden states your estimator reads: 0 is the embedding, n the "
        "n-th decoder layer, -1 the last one, after the model's last norm",
    )


@dataclass
class VineOptions:
    """Options of estimator vine, which continues responses to measure their steps' worth."""

    vine_continuations: int = option(
        9, "fresh responses sampled on from the start of each step (VinePPO: 9)", ge=1
    )
    vine_segments: SegmentsConfig = section(
        SegmentsConfig, "the steps of a response, to which advantages belong"
    )


@dataclass
class PoiseConfig:
    layer: int = option(
        -1,
        "whose states are read: 0 is the embedding, n the n-th decoder layer, -1 the last one, "
        "after the model's last norm (the authors' code: the 20th of Qwen3-4B's 36)",
        ge=-1,
    )
    num_states: int = option(
        10, "the mean of so many last states of a response is read (code: 10; 32 of OLMo 3)", ge=1
    )
    prompt_components: int = option(
        32, "principal components of the state of the last prompt token (code: 32)", ge=1
    )
    response_components: int = option(
        64, "principal components of the response's states (code: 64)", ge=1
    )
    ridge: float = option(100.0, "of the regression, on features of variance 1 (code: 100)", gt=0)
    buffer_responses: int = option(
        4096, "the regression is fitted to so many latest responses (code: 4096)", ge=2
    )
    bootstrap_iterations: int = option(
        16,
        "in so many first iterations the baseline is the other responses' mean reward (code: 16)",
        ge=1,
    )


@dataclass
class PoiseOptions:
    """Options of estimator poise, whose baseline is a regression on other responses' states."""

    poise: PoiseConfig = section(PoiseConfig, "what is read of the actor, and the regression on it")


@dataclass
class MilestonesConfig:
    kind: Literal["nth", "all"] = option(
        "nth",
        "when two responses are in the same state: they have as many numbers and the same last "
        "one, or all numbers are the same",
    )
    shrinkage: float = option(
        0.25,
        "the mean of the group's others counts as so many responses that came to the milestone",
        ge=0,
    )


@dataclass
class MilestonesOptions:
    """Options of estimator milestones, which is GAE with values that no network learns.

    A value is the mean reward of the prompt's other responses in which the same numbers occur.
    """

    milestones: MilestonesConfig = section(
        MilestonesConfig, "the numbers in responses, and what states are worth by them"
    )


@dataclass
class OtbConfig:
    alone: Literal["others_mean", "zero"] = option(
        "others_mean",
        "the baseline of tokens that no other response of the group is long enough to have: the "
        "mean return of the others, which have ended, or 0 (the authors' code)",
    )


@dataclass
class OtbOptions:
    """Options of estimator otb, which has a baseline for each token.

    It is the mean of the group's returns, weighted by the responses' gradients so far.
    """

    otb: OtbConfig = section(OtbConfig, "what the baseline is where the formula says nothing")


@dataclass
class OppoConfig:
    template: str = option(
        "The answer is {answer}.\n\n{prompt}",
        "what the policy reads before the response in the pass that the evidence is taken from: "
        "text with {prompt}, and {answer} or any {column} of the row; it is not sampled from",
    )
    smoothing: float = option(
        0.5,
        "so many right and so many wrong responses are added to the group's others, so that a "
        "prompt on which all of them succeed or fail has odds",
        gt=0,
    )
    max_evidence: float | None = option(
        None, "bound on the size of one token's evidence, in nats; null: none", gt=0
    )


@dataclass
class OppoOptions:
    """Options of estimator oppo, which is GAE with values that no network learns.

    They follow from how much likelier each token is with the answer in the prompt.
    """

    oppo: OppoConfig = section(OppoConfig, "the answer's prompt, and how its evidence is counted")
