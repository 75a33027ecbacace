"""The Transformers engine on weights of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.rollouts.playing import sample_all
from tests.tiny_model import ragged_prompts, tiny_model, tiny_tokenizer
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.transformers.detached import DetachedTransformersSampler
from vapo.rollouts.engines.transformers.sampler import TransformersSampler


def engines() -> tuple[torch.nn.Module, TransformersSampler, DetachedTransformersSampler]:
    model = tiny_model()
    options: dict[str, Any] = {"max_concurrent_sequences": 8, "device": "cpu"}
    return (
        model,
        TransformersSampler(model, tiny_tokenizer(), **options),
        DetachedTransformersSampler(model, tiny_tokenizer(), **options),
    )


def tokens(sampler: TransformersSampler) -> list[tuple[int, ...]]:
    rollouts = sample_all(
        sampler,
        ragged_prompts(6),
        group_size=4,
        settings=SamplingSettings(max_response_tokens=16),
        seed=3,
    )
    return [rollout.response_ids for rollout in rollouts]


def test_the_detached_engine_keeps_its_weights_until_the_sync() -> None:
    model, live, detached = engines()
    before = tokens(live)
    assert tokens(detached) == before
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    after = tokens(live)
    assert after != before
    assert tokens(detached) == before
    detached.sync(model.state_dict().items())
    assert tokens(detached) == after
    assert not any(p.requires_grad for p in detached._model.parameters())
    assert all(p.requires_grad for p in model.parameters())


def test_a_partial_sync_is_an_error() -> None:
    model, _, detached = engines()
    name, *others = model.state_dict().items()
    with pytest.raises(ValueError, match=f"not synced: {name[0]}"):
        detached.sync(others)
    with pytest.raises(ValueError, match="no weight surplus"):
        detached.sync([*others, name, ("surplus", torch.zeros(1))])
    with pytest.raises(ValueError, match="twice"):
        detached.sync([*others, name, name])
