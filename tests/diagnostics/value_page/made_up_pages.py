"""Pages of made-up rollouts."""

from __future__ import annotations

from typing import Any

from tests.diagnostics.value_page.reading import page_json
from tests.systems import MAX_RESPONSE_TOKENS, made_up_batch
from tests.tiny_model import tiny_tokenizer
from vapo.advantages.estimators import set_advantages, token_rewards
from vapo.config import FitConfig, resolve
from vapo.diagnostics.position_profiles import position_profile
from vapo.diagnostics.value_page.contents import PageContents, page_contents
from vapo.diagnostics.value_page.rendering import render_page
from vapo.diagnostics.value_page.token_text import TokenText
from vapo.types import RolloutBatch

ABOUT: dict[str, Any] = {"title": "a run </title><b>", "facts": {"run": "<i>1</i>"}, "notes": []}


def evaluated(config: FitConfig) -> RolloutBatch:
    """Made-up rollouts after the advantage stage, in float32."""
    batch, _ = made_up_batch(config)
    for name in ("old_logprobs", "old_values", "ref_logprobs", "rewards", "baseline_rewards"):
        setattr(batch, name, getattr(batch, name).float())
    if not config.algorithm.has_critic:
        batch.old_values = None
    if config.algorithm.kl.coef == 0:
        batch.ref_logprobs = None
    assert batch.old_logprobs is not None
    batch.old_entropy = batch.old_logprobs.abs()
    batch.token_rewards = token_rewards(batch, config.algorithm)
    set_advantages(batch, resolve(config), config.algorithm)
    return batch


def contents_of(batch: RolloutBatch, config: FitConfig) -> PageContents:
    positions = position_profile(batch, resolve(config), max_response_tokens=MAX_RESPONSE_TOKENS)
    return page_contents(batch, config, positions, iteration=3)


def rendered(batch: RolloutBatch, config: FitConfig) -> tuple[str, dict[str, Any]]:
    page = render_page(contents_of(batch, config), TokenText(tiny_tokenizer()), ABOUT)
    return page, page_json(page)
