"""The Transformers engine: order, seeds, ends, distribution, and its manners with the module."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.tiny_model import (
    full_forward_logits,
    ragged_prompts,
    sample,
    tiny_model,
    tiny_tokenizer,
)
from vapo.errors import UserError
from vapo.rollouts import SamplingSettings
from vapo.rollouts.transformers import NonFiniteLogitsError, TransformersSampler
from vapo.types import FinishReason, Prompt

EOS = 1


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def ids_of(rollouts):
    return [rollout.response_ids for rollout in rollouts]


def test_responses_do_not_depend_on_how_many_rows_decode_together(model):
    prompts = ragged_prompts(12)
    one, three, all_ = (sample(model, prompts, rows=rows) for rows in (1, 3, 64))
    assert ids_of(one) == ids_of(three) == ids_of(all_)


def test_responses_do_not_depend_on_the_other_prompts(model):
    prompts = ragged_prompts(6)
    alone = sample(model, prompts[:1])
    assert ids_of(sample(model, prompts))[: len(alone)] == ids_of(alone)


def test_the_seed_decides(model):
    prompts = ragged_prompts(6)
    first, again, other = (sample(model, prompts, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert ids_of(first) != ids_of(other)


def test_samples_of_a_group_differ(model):
    group = ids_of(sample(model, ragged_prompts(1), group_size=16))
    assert len(set(group)) > 8


def test_groups_are_contiguous_and_in_the_prompts_order(model):
    prompts = ragged_prompts(7)
    rollouts = sample(model, prompts, group_size=3, rows=4)
    assert [r.prompt for r in rollouts] == [p for p in prompts for _ in range(3)]


def test_stop_holds_the_end_token_and_length_does_not(model):
    rollouts = sample(model, ragged_prompts(16), max_response_tokens=12)
    reasons = Counter(rollout.finish_reason for rollout in rollouts)
    assert reasons[FinishReason.STOP] > 4
    assert reasons[FinishReason.LENGTH] > 4
    for rollout in rollouts:
        ids = rollout.response_ids
        assert EOS not in ids[:-1]
        assert len(ids) == len(rollout.rollout_logprobs) <= 12
        if rollout.finish_reason is FinishReason.STOP:
            assert ids[-1] == EOS
        else:
            assert ids[-1] != EOS
            assert len(ids) == 12


def test_an_end_token_in_the_last_place_is_a_stop(model):
    free = sample(model, ragged_prompts(16))
    stopped = next(r for r in free if r.finish_reason is FinishReason.STOP)
    budget = len(stopped.response_ids)
    cut = sample(model, ragged_prompts(16), max_response_tokens=budget)
    same = cut[free.index(stopped)]
    assert same.response_ids == stopped.response_ids
    assert same.finish_reason is FinishReason.STOP


def test_a_budget_of_one_token(model):
    rollouts = sample(model, ragged_prompts(5), max_response_tokens=1, rows=3)
    assert all(len(rollout.response_ids) == 1 for rollout in rollouts)


def test_end_tokens_of_the_generation_config_also_stop(model):
    other = tiny_tokenizer().convert_tokens_to_ids("7")
    model = tiny_model()
    model.generation_config.eos_token_id = [EOS, other]
    rollouts = sample(model, ragged_prompts(24))
    ends = {r.response_ids[-1] for r in rollouts if r.finish_reason is FinishReason.STOP}
    assert ends == {EOS, other}


def test_response_text_leaves_special_tokens_out(model):
    tokenizer = tiny_tokenizer()
    for rollout in sample(model, ragged_prompts(6)):
        kept = [i for i in rollout.response_ids if i > 1]  # 0 is <pad>, 1 is <eos>
        assert rollout.response_text == "".join(tokenizer.convert_ids_to_tokens(kept))


@pytest.mark.parametrize("rows", [3, 64])
def test_progress_adds_up_to_the_responses(model, rows):
    sampler = TransformersSampler(
        model, tiny_tokenizer(), max_concurrent_sequences=rows, device="cpu"
    )
    steps: list[int] = []
    sampler.sample(
        ragged_prompts(6),
        group_size=4,
        settings=SamplingSettings(32),
        seed=0,
        advance=steps.append,
    )
    assert sum(steps) == 24
    assert min(steps) > 0
    assert len(steps) > 3, "progress must show while it runs, not at the end"


def test_greedy_is_generate_without_sampling(model):
    prompts = ragged_prompts(8)
    rollouts = sample(model, prompts, group_size=1, rows=3, greedy=True)
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        ids = torch.tensor([prompt.prompt_ids])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32
        )
        assert rollout.response_ids == tuple(output[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.5, 0.9)])
def test_frequencies_are_the_models_probabilities(model, temperature, top_p):
    """Chi-square of 20,000 first tokens, bins under 5 expected pooled; bound at p = 1e-4."""
    prompt = ragged_prompts(3)[2]
    num = 20_000
    rollouts = sample(
        model,
        [prompt],
        group_size=num,
        rows=num,
        max_response_tokens=1,
        temperature=temperature,
        top_p=top_p,
    )
    probs = torch.softmax(full_forward_logits(model, rollouts[0])[0].double() / temperature, -1)
    if top_p < 1:
        ordered, ids = probs.sort(descending=True)
        kept = ids[: int((ordered.cumsum(0) < top_p).sum()) + 1]
        assert len(kept) < len(probs)
        probs = torch.zeros_like(probs).index_copy(0, kept, probs[kept] / probs[kept].sum())
    counts = torch.zeros_like(probs)
    for token, count in Counter(r.response_ids[0] for r in rollouts).items():
        counts[token] = count
    assert counts[probs == 0].sum() == 0
    is_big = probs * num >= 5
    observed = torch.cat([counts[is_big], counts[~is_big].sum()[None]])
    expected = torch.cat([probs[is_big], probs[~is_big].sum()[None]]) * num
    observed, expected = observed[expected > 0], expected[expected > 0]
    chi_square = float(((observed - expected).square() / expected).sum())
    degrees = len(expected) - 1
    assert degrees >= 3
    # Wilson-Hilferty: the 1 - 1e-4 quantile of chi-square (z = 3.719)
    bound = degrees * (1 - 2 / (9 * degrees) + 3.719 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert chi_square < bound


def test_later_tokens_follow_their_own_prefix(model):
    """Second tokens, given the commonest first one, have the model's conditional frequencies."""
    rollouts = sample(
        model, ragged_prompts(3)[:1], group_size=8000, rows=500, max_response_tokens=2
    )
    pairs = [r for r in rollouts if len(r.response_ids) == 2]
    first = Counter(r.response_ids[0] for r in pairs).most_common(1)[0][0]
    chosen = [r for r in pairs if r.response_ids[0] == first]
    probs = torch.softmax(full_forward_logits(model, chosen[0])[1], -1)
    counts = torch.zeros_like(probs)
    for rollout in chosen:
        counts[rollout.response_ids[1]] += 1
    distance = 0.5 * (counts / len(chosen) - probs).abs().sum()
    # total variation of a sample: at most ~ 0.5 * sqrt(tokens / n); this seed gives about 0.03
    assert distance < 0.5 * (len(probs) / len(chosen)) ** 0.5


def test_the_module_is_left_as_it_was(model):
    model = tiny_model()
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sample(model, ragged_prompts(3))
    assert model.training
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    loss = model(torch.tensor([[2, 3, 4]]), labels=torch.tensor([[2, 3, 4]])).loss
    loss.backward()  # nothing of the sampling's no-grad mode may be left in the module


def test_new_weights_are_used_at_once(model):
    model = tiny_model()
    before = ids_of(sample(model, ragged_prompts(4)))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(-1.3)
    assert ids_of(sample(model, ragged_prompts(4))) != before


def test_diverged_weights_are_an_error_that_names_the_prompt(model):
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteLogitsError, match="made-up:1"):
        sample(model, ragged_prompts(2)[1:])


def test_no_prompts_no_responses(model):
    assert sample(model, []) == []


def test_too_long_for_the_models_positions(model):
    with pytest.raises(UserError, match=r"made-up:0 .* 128 positions: lower max_response_tokens"):
        sample(model, ragged_prompts(1), max_response_tokens=128)


def test_an_empty_prompt(model):
    with pytest.raises(UserError, match="prompt none has no tokens"):
        sample(model, [Prompt("none", "", (), "")])
