"""Several critics in training: each learns from its own prompts, and agreement masks the policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from tests.config.fits import fit_config
from tests.integration.scripted_runs import train, weights, with_values
from tests.networks.test_ensemble import batch_of, config_of, networks, shaken
from tests.systems import system_config, with_columns
from tests.tiny_model import save_tiny_folder
from tests.training.test_value_objective import rows as rows_of
from vapo.advantages.agreement import mask_by_spread
from vapo.config import FitConfig, resolve
from vapo.diagnostics.iteration_metrics import value_metrics
from vapo.networks import actor_critic as ensemble
from vapo.networks.actor_critic import Critic, CriticEnsemble, forward_of_rows, members_of
from vapo.networks.build import make_critic
from vapo.networks.forward_passes import add_logprobs_and_values
from vapo.training.minibatches import Microbatches, Minibatch, make_minibatches
from vapo.training.objective import Totals, policy_objective, value_objective
from vapo.types import Prompt, TrainingBatch

PROMPTS = [Prompt(str(i), "", (12, 2 + i), "1") for i in range(6)]


def training_batch(critic: Critic) -> TrainingBatch:
    evaluated = add_logprobs_and_values(batch_of(PROMPTS), networks(critic))
    torch.manual_seed(2)
    return replace(
        with_columns(evaluated), value_targets=torch.randn(evaluated.response_mask.shape)
    )


def whole_minibatch(batch: TrainingBatch, max_tokens: int = 12) -> Minibatch:
    (minibatch,) = make_minibatches(
        batch, num_minibatches=1, max_tokens=max_tokens, pad_id=0, seed=1
    )
    return minibatch


def accumulate(critic: Critic, minibatch: Minibatch, config: FitConfig) -> Tensor:
    """The loss, and its gradient in the critic, as the module computes them."""
    critic.zero_grad(set_to_none=True)
    total = torch.zeros(())
    for micro in minibatch.of("critic"):
        output = forward_of_rows(critic, micro.inputs, micro.rows.critic_members)._asdict()
        found = {name: micro.inputs.scatter(x) for name, x in output.items() if x is not None}
        loss = value_objective(found, micro.rows, minibatch, config, Totals())
        loss.backward()
        total += loss.detach()
    return total


def gradients(critic: Critic) -> list[Tensor | None]:
    return [parameter.grad for parameter in critic.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("critic.head.kind=categorical", "critic.loss=cross_entropy"),
        ("critic.value_clip=0.1",),
    ],
    ids=["squared error", "cross-entropy", "clipped"],
)
def test_each_members_gradient_is_of_its_own_prompts(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    """As if it were alone, with the others' rows left out and a mean over the tokens of all."""
    config = config_of(tmp_path, *options)
    critic = shaken(make_critic(config, None))
    batch = training_batch(critic)
    assert batch.critic_members is not None
    num_tokens = int(batch.response_mask.sum())
    minibatch = whole_minibatch(batch)
    for micro in minibatch.of("critic"):
        assert len(cast(Tensor, micro.rows.critic_members).unique()) == 1
    assert minibatch.num_value_tokens == num_tokens
    total = accumulate(critic, minibatch, config)
    together = [[g.clone() for g in gradients(m) if g is not None] for m in members_of(critic)]
    shares = []
    for number, member in enumerate(members_of(critic)):
        is_own = batch.critic_members == number
        assert 0 < int(is_own.sum()) < len(batch)
        alone = replace(
            training_batch(member),
            value_mask=batch.response_mask & is_own[:, None],
            value_targets=batch.value_targets,
        )
        assert alone.critic_members is None, "one critic"
        of_one = replace(whole_minibatch(alone), num_value_draws=float(num_tokens))
        shares.append(accumulate(member, of_one, config))
        expected = [g for g in gradients(member) if g is not None]
        assert len(expected) == len(together[number]) > 0
        for ours, theirs in zip(together[number], expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(total, shares[0] + shares[1])
    # another prompt's target changes nothing for a member: negative control of the split
    targets = cast(Tensor, batch.value_targets) + 10.0 * (batch.critic_members == 1)[:, None]
    accumulate(critic, whole_minibatch(replace(batch, value_targets=targets)), config)
    first, second = members_of(critic)
    assert all(torch.equal(a, b) for a, b in zip(together[0], grads(first), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(together[1], grads(second), strict=True))


def grads(critic: Critic) -> Iterable[Tensor]:
    return [g for g in gradients(critic) if g is not None]


def test_the_gradient_does_not_depend_on_the_cut(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    critic = shaken(make_critic(config, None))
    batch, found = training_batch(critic), []
    for max_tokens in (5, 1000):
        loss = accumulate(critic, whole_minibatch(batch, max_tokens), config)
        found.append([loss, *(g.clone() for g in grads(critic))])
    for small, large in zip(*found, strict=True):
        torch.testing.assert_close(small, large, rtol=1e-4, atol=1e-6)


def test_a_member_without_loss_gets_no_gradient(tmp_path: Path) -> None:
    """Not one of 0, with which Adam's momentum would move it."""
    config = config_of(tmp_path)
    critic = shaken(make_critic(config, None))
    batch = training_batch(critic)
    has_loss = batch.response_mask & (batch.critic_members == 1)[:, None]  # type: ignore[index]
    accumulate(critic, whole_minibatch(replace(batch, value_mask=has_loss)), config)
    first, second = members_of(critic)
    assert gradients(first) == [None] * len(list(first.parameters()))
    assert None not in gradients(second)


def test_loss_shares_and_the_clip_by_hand(tmp_path: Path) -> None:
    """Two rows of two members: (.5 - .3)^2 / 2 over 2 tokens, clipped at the member's own values.

    The first member's old value is .2 and the mean's 0; with a clip of .1 its value .5 counts as
    .3, but the larger error is taken.
    """
    config = fit_config(tmp_path, "critic.value_clip=0.1", "critic.count=2")
    mask = torch.tensor([[True], [True]])
    batch = replace(
        rows_of(torch.tensor([[0.3], [1.0]]), mask),
        old_member_values=torch.tensor([[0.2], [0.9]]),
    )
    minibatch = Minibatch(
        Microbatches([], lambda rows: pytest.fail("not cut")), 2, 2, 0, 2, 2, 2, 2, 2, 2, 1
    )
    values = {"values": torch.tensor([[0.5], [1.0]])}
    loss = value_objective(values, batch, minibatch, config, Totals())
    assert float(loss) == pytest.approx(((0.5 - 0.3) ** 2 / 2 + 0) / 2, rel=1e-6)
    of_mean = replace(batch, old_member_values=None)  # clipped at .1 around 0: 1 counts as .1
    loss = value_objective(values, of_mean, minibatch, config, Totals())
    assert float(loss) == pytest.approx((0.02 + 0.9**2 / 2) / 2, rel=1e-6)


SPREAD = torch.tensor([[0.1, 0.4, 0.2], [0.3, 0.0, 9.0]])
MASK = torch.tensor([[True, True, True], [True, True, False]])


def spread_batch() -> TrainingBatch:
    zeros = torch.zeros(MASK.shape)
    return replace(
        rows_of(zeros, MASK),
        old_logprobs=zeros,
        advantages=torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 0.0]]),
        value_spread=SPREAD,
    )


def test_the_tokens_of_the_lowest_spread_carry_no_policy_loss() -> None:
    """.4 of five tokens are the two of spreads 0 and .1; the loss is of the other three."""
    batch = spread_batch()
    masked, metrics = mask_by_spread(batch, agreement=0.4)
    assert masked.policy_mask.tolist() == [[False, True, True], [True, False, False]]
    assert metrics == {"critic/agreement_masked_share": 0.4}
    assert masked.loss_mask is batch.loss_mask, "the policy's other losses"
    assert torch.equal(masked.value_mask, MASK)
    minibatch = Minibatch(
        Microbatches([], lambda rows: pytest.fail("not cut")), 5, 2, 0, 3, 2, 3, 5, 5, 5, 3
    )
    config = system_config("vapo")
    args = (torch.zeros(MASK.shape), torch.zeros(MASK.shape), masked, minibatch)
    totals = Totals()
    policy_objective(*args, resolve(config), config.algorithm, totals)
    assert float(totals.sums["actor/policy_loss"]) == pytest.approx(-(2 + 3 + 4) / 3)


def test_what_the_policy_does_not_train_on_is_not_counted() -> None:
    """Without the second row the three tokens of the first are all: a third is .1's."""
    batch = replace(spread_batch(), policy_mask=MASK & torch.tensor([[True], [False]]))
    masked, _ = mask_by_spread(batch, agreement=0.34)
    assert masked.policy_mask.tolist() == [[False, True, True], [False, False, False]]


def test_agreement_off_or_without_a_policy_changes_nothing() -> None:
    batch = spread_batch()
    assert mask_by_spread(batch, agreement=0.0) == (batch, {})
    pretraining = replace(batch, advantages=None)
    assert mask_by_spread(pretraining, agreement=0.4) == (pretraining, {})
    same = replace(batch, value_spread=torch.zeros(MASK.shape))
    masked, metrics = mask_by_spread(same, agreement=0.4)
    assert torch.equal(masked.policy_mask, MASK), "critics that agree everywhere mask nothing"
    assert metrics == {"critic/agreement_masked_share": 0.0}


def test_the_spread_is_logged_as_a_mean_over_tokens(tmp_path: Path) -> None:
    numbers = resolve(config_of(tmp_path))
    batch = training_batch(shaken(make_critic(config_of(tmp_path), None)))
    assert batch.response_lengths.tolist() == [1, 2, 3, 1, 2, 3]
    spread = torch.tensor([[6.0, 9.0, 9.0], [6.0, 0.0, 9.0], *[[0.0, 0.0, 0.0]] * 4])
    found = value_metrics(replace(batch, value_spread=spread), numbers)
    assert found["critic/value_spread"] == 1.0, "12 over 12 tokens, the padding's 9 left out"
    assert "critic/value_spread" not in value_metrics(replace(batch, value_spread=None), numbers)


@pytest.fixture
def base(tmp_path: Path) -> FitConfig:
    return system_config(
        "vapo",
        f"actor.path={save_tiny_folder(tmp_path / 'policy')}",
        "critic.init=policy",
        "critic.optimizer.weight_decay=0.1",
        "components.value_pretraining.num_iterations=1",
        "components.value_pretraining.min_iterations=1",
        "components.group_sampling.num_prompts=4",
        "components.group_sampling.group_size=4",
        "rollouts.max_response_tokens=12",
        "training.num_iterations=2",
        "training.minibatch_size=8",
        "trainer.num_threads=1",
        "trainer.accelerator=cpu",
    )


@pytest.mark.slow
def test_the_mask_is_for_the_policy_alone(base: FitConfig, tmp_path: Path) -> None:
    """In one policy iteration the critics learn the same, to the last bit.

    In one minibatch: rows without policy loss are dealt evenly to several.
    """
    values = {"critic.count": 2, "training.num_iterations": 1, "training.minibatch_size": 16}
    one = with_values(base, values)
    masked = with_values(one, {"algorithm.agreement_mask_share": 0.5})
    found = [weights(train(config, tmp_path / "run")) for config in (one, masked)]
    differ = {name for name in found[0] if not torch.equal(found[0][name], found[1][name])}
    assert differ
    assert all(name.startswith("actor.") for name in differ)


@pytest.mark.slow
def test_members_diverge_and_one_without_prompts_stays(
    base: FitConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_values(base, {"critic.count": 2})
    start = dict(cast(CriticEnsemble, make_critic(config, None)).named_parameters())

    def moved(number: int) -> set[bool]:
        module = train(config, tmp_path / "run")
        assert isinstance(module.critic, CriticEnsemble)
        names = [name for name in start if name.startswith(f"members.{number}.")]
        found = dict(module.critic.named_parameters())
        return {not torch.equal(found[name], start[name]) for name in names}

    assert moved(0) == moved(1) == {True}
    monkeypatch.setattr(ensemble, "member_of_prompt", lambda prompt_ids, count: 0)
    assert moved(0) == {True}
    assert moved(1) == {False}
