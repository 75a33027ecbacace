"""A critic that reads more than the policy: what it gains, and that the policy sees none of it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.judged import judged_batch
from tests.systems import system_config, with_columns
from tests.tiny_model import tiny_model
from vapo.environments.contract import Verdict
from vapo.functional.metrics import explained_variance
from vapo.networks.actor_critic import Actor, Critic
from vapo.networks.forward_passes import ForwardNetworks, add_logprobs_and_values
from vapo.networks.layouts import choose_layout
from vapo.networks.token_inputs import Layout
from vapo.training.minibatches import make_minibatches
from vapo.types import FinishReason, Prompt, Rollout, RolloutBatch

RIGHT, WRONG = 5, 6  # what an answer is written with


def rollouts(
    num: int, seed: int, *, shuffled: bool = False, privileged: bool = True
) -> RolloutBatch:
    """The return is 1 or -1 as the answer says, and nothing else tells; or the answers lie."""
    draw = random.Random(seed)
    returns = [draw.choice([1.0, -1.0]) for _ in range(num)]
    told = random.Random(seed + 1).sample(returns, num) if shuffled else returns
    made = []
    for i in range(num):
        problem = tuple(draw.randrange(8, 30) for _ in range(draw.randint(2, 4)))
        answer = (*problem, 7, RIGHT if told[i] > 0 else WRONG, 7)
        own = answer if privileged else None
        prompt = Prompt(f"made-up:{i}", "", problem, "1", critic_prompt_ids=own)
        response = tuple(draw.randrange(8, 30) for _ in range(draw.randint(2, 5)))
        made.append(Rollout(prompt, response, "", (-1.0,) * len(response), FinishReason.STOP))
    return judged_batch(
        made,
        [Verdict(value > 0, value) for value in returns],
        rewards=system_config("vapo").rewards,
        max_response_tokens=5,
    )


def networks(actor: Actor | None, critic: Critic | None, *, layout: Layout) -> ForwardNetworks:
    return ForwardNetworks(
        actor=actor,
        reference=None,
        critic=critic,
        temperature=1.0,
        max_tokens=40,
        pad_id=0,
        layout=layout,
        device=torch.device("cpu"),
    )


def tiny_critic() -> Critic:
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    config.num_labels = 1
    return Critic(Qwen2ForSequenceClassification(config))


def values_of(found: Any) -> Tensor:
    return found if isinstance(found, Tensor) else found.values


@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prompts"])
def test_the_policys_inputs_and_logprobs_do_not_depend_on_it(layout: Layout) -> None:
    """With one privileged text, with another, and with none: bit for bit the same."""
    actor, critic = Actor(tiny_model()), tiny_critic()
    models = [actor.model, critic.model]
    assert choose_layout(layout, models) == layout
    batches = [rollouts(6, 1), rollouts(6, 1, shuffled=True), rollouts(6, 1, privileged=False)]
    longer = [  # so that other rows go together where the cut looks at it
        replace(r, prompt=replace(r.prompt, critic_prompt_ids=(7,) * (9 * i + 1)))
        for i, r in enumerate(batches[1].rollouts)
    ]
    batches[1] = replace(batches[1], rollouts=longer)
    found = [
        add_logprobs_and_values(b, networks(actor, critic, layout=layout)) for b in batches[:2]
    ]
    logprobs, old_values = [b.old_logprobs for b in found], [b.old_values for b in found]
    assert logprobs[0] is not None
    assert logprobs[1] is not None
    assert torch.equal(logprobs[0], logprobs[1])
    assert old_values[0] is not None
    assert old_values[1] is not None
    assert not torch.equal(old_values[0], old_values[1])
    policy = add_logprobs_and_values(batches[2], networks(actor, None, layout=layout))
    assert policy.old_logprobs is not None
    assert torch.equal(policy.old_logprobs, logprobs[0])
    cuts = [
        make_minibatches(
            with_columns(evaluated),
            num_minibatches=2,
            max_tokens=30,
            pad_id=0,
            layout=layout,
            seed=1,
        )
        for evaluated in found
    ]
    for one, other in zip(*cuts, strict=True):
        assert one.of("actor").chunks == other.of("actor").chunks
        assert one.of("critic").chunks != other.of("critic").chunks
        for a, b in zip(one.of("actor"), other.of("actor"), strict=True):
            assert torch.equal(a.inputs.input_ids, b.inputs.input_ids)
        for minibatch in (one, other):
            for micro in minibatch.of("critic"):
                wanted = [t for r in micro.rows.rollouts for t in r.response_ids]
                assert micro.inputs.targets.tolist() == wanted, "values are at the response alone"


def test_a_value_is_that_of_the_state_behind_the_privileged_prompt() -> None:
    """Against a forward of each whole sequence by itself."""
    critic, batch = tiny_critic(), rollouts(4, 2)
    found = add_logprobs_and_values(batch, networks(None, critic, layout="padded")).old_values
    assert found is not None
    for row, rollout in enumerate(batch.rollouts):
        prompt = rollout.prompt.critic_prompt_ids
        assert prompt is not None
        ids = torch.tensor([[*prompt, *rollout.response_ids]])
        with torch.no_grad():
            states = critic.model.base_model(ids).last_hidden_state[0]
            head: Any = critic.model.get_submodule("score")
            wanted = head(states)[len(prompt) - 1 : -1, 0]
        torch.testing.assert_close(found[row, : len(wanted)], wanted, rtol=1e-4, atol=1e-5)


def heldout_explained_variance(*, shuffled: bool, privileged: bool = True) -> float:
    """Of a critic trained for some seconds on made-up rollouts, on others of their kind."""
    critic = tiny_critic()
    optimizer = torch.optim.AdamW(critic.parameters(), lr=5e-3)
    for step in range(40):
        batch = rollouts(32, 100 + step, shuffled=shuffled, privileged=privileged)
        (minibatch,) = make_minibatches(
            with_columns(batch),
            num_minibatches=1,
            max_tokens=10_000,
            pad_id=0,
            seed=step,
        )
        optimizer.zero_grad()
        for micro in minibatch.of("critic"):
            inputs = micro.inputs
            values = inputs.scatter(values_of(critic(inputs)))
            errors = (values - micro.rows.rewards[:, None]) ** 2
            (errors[micro.rows.response_mask].sum() / minibatch.num_tokens).backward()
        optimizer.step()
    batch = rollouts(128, 7, shuffled=shuffled, privileged=privileged)
    found = add_logprobs_and_values(batch, networks(None, critic, layout="padded")).old_values
    assert found is not None
    targets = batch.rewards[:, None].expand_as(found)
    return float(explained_variance(found, targets, batch.response_mask))


@pytest.mark.slow
def test_an_answer_that_tells_the_return_is_used_and_a_shuffled_one_is_worth_nothing() -> None:
    assert heldout_explained_variance(shuffled=False) > 0.9
    assert heldout_explained_variance(shuffled=True) < 0.1
    assert heldout_explained_variance(shuffled=False, privileged=False) < 0.1
