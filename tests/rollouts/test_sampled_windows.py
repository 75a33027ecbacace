"""The Transformers engine on models with sliding windows: its log-probs are the trainer's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.networks.windowed_models import CONFIGS, WINDOW, windowed_model
from tests.rollouts.turns_contract import first_requests, play
from tests.tiny_model import ragged_prompts, sample, tiny_tokenizer
from vapo.networks.actor_critic import Actor
from vapo.networks.layouts import choose_layout
from vapo.networks.token_inputs import token_inputs
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.transformers.sampler import TransformersSampler
from vapo.rollouts.engines.transformers.token_sampling import filtered_logprobs
from vapo.types import Rollout

# 5 prompts of 1 to 24 tokens, two responses each, three rows at a time: rows join and leave
NUM_ROWS, LONGEST = 3, 20
BY_DAY = ("gemma3", "gemma2", "gpt_oss")
FAMILIES = [
    family if family in BY_DAY else pytest.param(family, marks=pytest.mark.slow)
    for family in CONFIGS
]


def sampled(model: PreTrainedModel, **settings: Any) -> list[Rollout]:
    options: dict[str, Any] = {"max_response_tokens": LONGEST, **settings}
    rollouts = sample(model, ragged_prompts(5), group_size=2, rows=NUM_ROWS, **options)
    lengths = [len(r.prompt.prompt_ids) + len(r.response_ids) for r in rollouts]
    assert max(lengths) > 2 * WINDOW
    return rollouts


@torch.no_grad()
def whole_forward(model: PreTrainedModel, prompt: tuple[int, ...], ids: tuple[int, ...]) -> Tensor:
    """[T, V] logits before each token, by one forward of transformers without a cache."""
    logits: Tensor = model(torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0].float()
    return logits[len(prompt) - 1 : -1]


def gap(model: PreTrainedModel, rollouts: list[Rollout], top_p: float = 1.0) -> float:
    """The largest difference of a sampled token's log-prob from that of the whole forward."""
    largest = 0.0
    for rollout in rollouts:
        logits = whole_forward(model, rollout.prompt.prompt_ids, rollout.response_ids)
        expected = filtered_logprobs(logits, temperature=1.0, top_k=0, top_p=top_p)
        taken = expected.gather(1, torch.tensor(rollout.response_ids)[:, None])[:, 0]
        found = torch.tensor(rollout.rollout_logprobs)
        largest = max(largest, float((found - taken).abs().max()))
    return largest


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_and_the_trainer_agree(family: str) -> None:
    model = windowed_model(family)
    rollouts = sampled(model)
    assert gap(model, rollouts) < 1e-4
    layout = choose_layout("auto", [model])
    pairs = [(r.prompt.prompt_ids, r.response_ids) for r in rollouts]
    with torch.no_grad():
        output = Actor(model)(token_inputs(pairs, pad_id=0, layout=layout), temperature=1.0)
    found = torch.cat([torch.tensor(r.rollout_logprobs) for r in rollouts])
    assert float((found - output.logprobs).abs().max()) < 1e-4


def test_negative_control_a_model_without_the_window() -> None:
    rollouts = sampled(windowed_model("gemma3"))
    assert gap(windowed_model("gemma3", sliding_window=128), rollouts) > 1e-2


def test_top_p_and_the_likeliest_token() -> None:
    model = windowed_model("gemma3")
    assert gap(model, sampled(model, top_p=0.8), top_p=0.8) < 1e-4
    for rollout in sampled(model, greedy=True):
        logits = whole_forward(model, rollout.prompt.prompt_ids, rollout.response_ids)
        assert logits.argmax(dim=1).tolist() == list(rollout.response_ids)


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_turns_on_a_kept_cache(family: str) -> None:
    model = windowed_model(family)
    sampler = TransformersSampler(
        model, tiny_tokenizer(), max_concurrent_sequences=NUM_ROWS, device="cpu"
    )
    with sampler.turns(SamplingSettings(max_response_tokens=8), seed=3) as stream:
        turns = play(stream, first_requests(4))
        num_prefilled = stream.num_prefilled
    longest = 0
    for turn in turns.values():
        logits = whole_forward(model, turn.request.ids, turn.ids).log_softmax(dim=1)
        taken = logits.gather(1, torch.tensor(turn.ids)[:, None])[:, 0]
        assert float((torch.tensor(turn.logprobs) - taken).abs().max()) < 1e-4
        longest = max(longest, len(turn.request.ids))
    assert longest > 2 * WINDOW
    assert num_prefilled < sum(len(turn.request.ids) for turn in turns.values()), "caches are kept"
