"""Facts and notes on a page: how its numbers were computed, and what is missing."""

from __future__ import annotations

from collections.abc import Iterator

from vapo.config import FitConfig, resolve
from vapo.diagnostics.value_page.contents import PageContents
from vapo.system.distributed import world_size
from vapo.types import Phase


def responses_fact(contents: PageContents) -> str:
    return f"{contents.num_responses}, {contents.accuracy:.0%} correct"


def estimator_facts(config: FitConfig) -> dict[str, str]:
    """The estimator's settings: gamma, and with a critic both lambdas."""
    hp = resolve(config)
    facts = {"gamma": f"{hp.gamma:g}"}
    if config.algorithm.has_critic:
        alpha = f"1 - 1 / ({hp.alpha or 0:g} length)"
        critic = "as the policy's" if hp.lambda_critic is None else f"{hp.lambda_critic:g}"
        facts["lambda of the policy"] = f"{hp.lambda_policy:g}" if hp.alpha is None else alpha
        facts["lambda of the critic"] = critic
    return facts


def notes(config: FitConfig, phase: Phase) -> Iterator[str]:
    """Notes on what the page lacks, and why."""
    if not config.algorithm.has_critic:
        yield (
            f"No critic (algorithm.advantage_estimator: {config.algorithm.advantage_estimator}): "
            "no values, value errors, TD errors or calibration."
        )
    if phase is Phase.VALUE_PRETRAINING:
        yield (
            "Value pretraining: the policy is fixed, so there are no advantages, and log-probs "
            "are the engine's."
        )
    elif config.algorithm.whiten_advantages:
        yield (
            "The tokens' advantages are whitened over the batch, as the loss uses them; their "
            "details have them before, too. The chart of the mean advantage is before whitening."
        )
    if world_size() > 1:
        yield "The groups are of the first process; the charts are of the rollouts of all."
