"""What every sampling engine promises; a test class of an engine inherits these.

It gives three fixtures: `make_model`, which makes the tiny policy in a shape that the engine
takes, `model`, one of them, and `sample(model, prompts, ...)`, as `tests.tiny_model.sample`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from tests.tiny_model import full_forward_logits, ragged_prompts, tiny_tokenizer
from vapo.errors import UserError
from vapo.types import FinishReason, Prompt

EOS = 1


def ids_of(rollouts):
    return [rollout.response_ids for rollout in rollouts]


def largest_gap(model, rollouts, temperature=1.0):
    """Between the engine's log-probs and those of one plain forward over each whole sequence."""
    gaps = []
    for rollout in rollouts:
        logprobs = torch.log_softmax(full_forward_logits(model, rollout) / temperature, dim=-1)
        expected = logprobs.gather(1, torch.tensor(rollout.response_ids)[:, None]).squeeze(1)
        gaps.append((expected - torch.tensor(rollout.rollout_logprobs)).abs().max())
    return float(torch.stack(gaps).max())


class SamplerContract:
    num_draws = 5_000
    largest_gap = 2e-5  # of log-probs

    def test_responses_do_not_depend_on_the_other_prompts(self, sample, model):
        prompts = ragged_prompts(6)
        alone = sample(model, prompts[:1])
        assert ids_of(sample(model, prompts))[: len(alone)] == ids_of(alone)

    def test_the_seed_decides(self, sample, model):
        prompts = ragged_prompts(6)
        first, again, other = (sample(model, prompts, rows=24, seed=seed) for seed in (1, 1, 2))
        assert first == again
        assert ids_of(first) != ids_of(other)

    def test_samples_of_a_group_differ(self, sample, model):
        group = ids_of(sample(model, ragged_prompts(1), group_size=16))
        assert len(set(group)) > 8

    def test_groups_are_contiguous_and_in_the_prompts_order(self, sample, model):
        prompts = ragged_prompts(7)
        rollouts = sample(model, prompts, group_size=3, rows=4)
        assert [r.prompt for r in rollouts] == [p for p in prompts for _ in range(3)]

    def test_stop_holds_the_end_token_and_length_does_not(self, sample, model):
        rollouts = sample(model, ragged_prompts(16), rows=64, max_response_tokens=12)
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

    def test_an_end_token_in_the_last_place_is_a_stop(self, sample, model):
        free = sample(model, ragged_prompts(16), rows=64)
        stopped = next(r for r in free if r.finish_reason is FinishReason.STOP)
        budget = len(stopped.response_ids)
        cut = sample(model, ragged_prompts(16), rows=64, max_response_tokens=budget)
        same = cut[free.index(stopped)]
        assert same.response_ids == stopped.response_ids
        assert same.finish_reason is FinishReason.STOP

    def test_a_budget_of_one_token(self, sample, model):
        rollouts = sample(model, ragged_prompts(5), max_response_tokens=1, rows=3)
        assert all(len(rollout.response_ids) == 1 for rollout in rollouts)

    def test_a_prompts_own_budget_cuts_its_responses_and_no_others(self, sample, model):
        prompts = ragged_prompts(8)
        free = sample(model, prompts, group_size=2, rows=3, max_response_tokens=12)
        own = [replace(p, max_response_tokens=1 + 2 * i) for i, p in enumerate(prompts)]
        cut = sample(model, own, group_size=2, rows=3, max_response_tokens=12)
        budgets = [min(1 + 2 * (i // 2), 12) for i in range(16)]
        assert ids_of(cut) == [
            ids[:budget] for ids, budget in zip(ids_of(free), budgets, strict=True)
        ]
        assert len({len(rollout.response_ids) for rollout in cut}) > 4

    def test_end_tokens_of_the_generation_config_also_stop(self, sample, make_model):
        other = tiny_tokenizer().convert_tokens_to_ids("7")
        model = make_model()
        model.generation_config.eos_token_id = [EOS, other]
        rollouts = sample(model, ragged_prompts(24), rows=64)
        ends = {r.response_ids[-1] for r in rollouts if r.finish_reason is FinishReason.STOP}
        assert ends == {EOS, other}

    def test_response_text_leaves_only_the_end_token_out(self, sample, model):
        tokenizer, num_with_special = tiny_tokenizer(), 0
        for rollout in sample(model, ragged_prompts(6), rows=24):
            has_ended = rollout.finish_reason is FinishReason.STOP
            kept = rollout.response_ids[:-1] if has_ended else rollout.response_ids
            assert has_ended == (rollout.response_ids[-1] == EOS)
            assert rollout.response_text == "".join(tokenizer.convert_ids_to_tokens(kept))
            num_with_special += 0 in kept  # <pad>, which this policy samples as any other
        assert num_with_special

    def test_greedy_is_generate_without_sampling(self, sample, model):
        prompts = ragged_prompts(8)
        rollouts = sample(model, prompts, group_size=1, rows=3, greedy=True)
        for prompt, rollout in zip(prompts, rollouts, strict=True):
            ids = torch.tensor([prompt.prompt_ids])
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32
            )
            assert rollout.response_ids == tuple(output[0, ids.shape[1] :].tolist())

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("temperature", "top_p"),
        [(1.5, 0.9), *(pytest.param(t, 1.0, marks=pytest.mark.night) for t in (1.0, 0.5))],
    )
    def test_frequencies_are_the_models_probabilities(self, sample, model, temperature, top_p):
        """Chi-square of first tokens, bins under 5 expected pooled; bound at p = 1e-4."""
        prompt = ragged_prompts(3)[2]
        num = self.num_draws
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

    def test_later_tokens_follow_their_own_prefix(self, sample, model):
        """Second tokens, given the commonest first, have the model's conditional frequencies."""
        rollouts = sample(
            model,
            ragged_prompts(3)[:1],
            group_size=self.num_draws // 2,
            rows=500,
            max_response_tokens=2,
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

    def test_new_weights_are_used_at_once(self, sample, make_model):
        model = make_model()
        before = ids_of(sample(model, ragged_prompts(4)))
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(-1.3)
        assert ids_of(sample(model, ragged_prompts(4))) != before

    def test_no_prompts_no_responses(self, sample, model):
        assert sample(model, []) == []

    def test_too_long_for_the_models_positions(self, sample, model):
        with pytest.raises(
            UserError, match=r"made-up:0 .* 128 positions: lower max_response_tokens"
        ):
            sample(model, ragged_prompts(1), max_response_tokens=128)

    def test_an_empty_prompt(self, sample, model):
        with pytest.raises(UserError, match="prompt none has no tokens"):
            sample(model, [Prompt("none", "", (), "")])

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "temperature", [1.7, *(pytest.param(t, marks=pytest.mark.night) for t in (1.0, 0.6))]
    )
    def test_logprobs_are_those_of_the_plain_forward(self, sample, model, temperature):
        rollouts = sample(model, ragged_prompts(10), rows=5, temperature=temperature)
        assert len({len(rollout.response_ids) for rollout in rollouts}) > 5
        assert largest_gap(model, rollouts, temperature) < self.largest_gap

    @pytest.mark.slow
    def test_filtered_logprobs_are_renormalised(self, sample, model):
        """Under top-k and top-p: the plain forward's probabilities, over the kept set's mass."""
        for rollout in sample(model, ragged_prompts(6), rows=5, top_k=6, top_p=0.8):
            probs = torch.softmax(full_forward_logits(model, rollout), dim=-1)
            steps = zip(probs, rollout.response_ids, rollout.rollout_logprobs, strict=True)
            for p, token, logprob in steps:
                best, ids = p.topk(6)
                best = best / best.sum()
                num_kept = int((best.cumsum(0) < 0.8).sum()) + 1
                kept = dict(zip(ids[:num_kept].tolist(), best[:num_kept].tolist(), strict=True))
                assert token in kept
                assert abs(kept[token] / sum(kept.values()) - torch.tensor(logprob).exp()) < 2e-5
