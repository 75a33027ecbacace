"""Pages of made-up rollouts."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from tests.diagnostics.value_page.reading import page_json
from tests.diagnostics.value_truth.made_up_figures import figures
from tests.systems import MAX_RESPONSE_TOKENS, estimated, made_up_batch
from tests.tiny_model import tiny_tokenizer
from vapo.config import FitConfig, resolve
from vapo.diagnostics.position_profiles import position_profile
from vapo.diagnostics.value_page.contents import PageContents, page_contents
from vapo.diagnostics.value_page.rendering import render_page
from vapo.diagnostics.value_page.token_text import TokenText
from vapo.diagnostics.value_truth.measure import ValueTruth
from vapo.diagnostics.value_truth.points import TruthPoint
from vapo.functional.columns import float_columns
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


def made_up_truth(
    batch: TrainingBatch, rows: Collection[int], *, every: int = 3, seed: int = 0
) -> ValueTruth:
    """Eight continuations from every third token of these rows: 1 or -1, the rarer the further."""
    draw, points = random.Random(seed), []
    for row in rows:
        length = int(batch.response_lengths[row])
        for num in range(0, length, every):
            share = 0.9 - 0.6 * num / length
            returns = tuple(1.0 if draw.random() < share else -1.0 for _ in range(8))
            value = None if batch.old_values is None else float(batch.old_values[row, num])
            prompt_id = batch.rollouts[row].prompt.prompt_id
            points.append(TruthPoint(row, num, returns, prompt_id, length, value))
    return ValueTruth(points, figures(), (-1.0, 1.0))


def contents_of(
    batch: TrainingBatch, config: FitConfig, truth: ValueTruth | None = None
) -> PageContents:
    positions = position_profile(batch, resolve(config), max_response_tokens=MAX_RESPONSE_TOKENS)
    return page_contents(batch, config, positions, iteration=3, truth=truth)


def rendered(
    batch: TrainingBatch, config: FitConfig, truth: ValueTruth | None = None
) -> tuple[str, dict[str, Any]]:
    page = render_page(contents_of(batch, config, truth), TokenText(tiny_tokenizer()), ABOUT)
    return page, page_json(page)
