"""Pages of made-up rollouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.diagnostics.value_page.reading import page_json
from tests.systems import MAX_RESPONSE_TOKENS, estimated, made_up_batch
from tests.tiny_model import tiny_tokenizer
from vapo.config import FitConfig, resolve
from vapo.diagnostics.position_profiles import position_profile
from vapo.diagnostics.value_page.contents import PageContents, page_contents
from vapo.diagnostics.value_page.rendering import render_page
from vapo.diagnostics.value_page.token_text import TokenText
from vapo.rollouts.batch import float_columns
from vapo.types import EvaluatedBatch, TrainingBatch

ABOUT: dict[str, Any] = {"title": "a run </title><b>", "facts": {"run": "<i>1</i>"}, "notes": []}


def evaluated(config: FitConfig) -> EvaluatedBatch:
    """Made-up rollouts before the advantage stage, in float32."""
    batch, _ = made_up_batch(config)
    columns: dict[str, Any] = {name: value.float() for name, value in float_columns(batch).items()}
    columns["old_entropy"] = columns["old_logprobs"].abs()
    if not config.algorithm.has_critic:
        columns["old_values"] = None
    if config.algorithm.kl.coef == 0:
        columns["ref_logprobs"] = None
    return replace(batch, **columns)


def training_batch(config: FitConfig) -> TrainingBatch:
    """The same after it."""
    return estimated(config, evaluated(config))


def contents_of(batch: TrainingBatch, config: FitConfig) -> PageContents:
    positions = position_profile(batch, resolve(config), max_response_tokens=MAX_RESPONSE_TOKENS)
    return page_contents(batch, config, positions, iteration=3)


def rendered(batch: TrainingBatch, config: FitConfig) -> tuple[str, dict[str, Any]]:
    page = render_page(contents_of(batch, config), TokenText(tiny_tokenizer()), ABOUT)
    return page, page_json(page)
