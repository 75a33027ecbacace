"""A critic whose linear weights are a regression on the last batches, in place of an optimizer."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.forked import Ranks
from tests.runs.comparing import assert_same
from tests.training.fitted_critics import PROBE, RIDGE, Run, run, weights_and_metrics
from vapo.errors import UserError
from vapo.functional.logprob_columns import logprob_columns
from vapo.functional.value_heads import probe_features
from vapo.training.module import VapoModule
from vapo.types import TrainingBatch

NETWORK = ("critic.kind=network", "critic.init=policy", "critic.sampled_logprobs={}")
STILL = ("critic.optimizer.lr=1e-12", "critic.optimizer.weight_decay=0")


@cache
def probe(*overrides: str) -> Run:
    return run(*PROBE, *RIDGE, *overrides)


def columns_of(batch: TrainingBatch) -> Tensor:
    columns = logprob_columns(batch.rollout_logprobs, batch.response_mask)
    return columns[batch.response_mask].double()


def read_by_a_probe(batch: TrainingBatch) -> Tensor:
    """What each sampled token's value is linear in, and a 1."""
    assert batch.actor_states is not None
    states = probe_features(torch.cat(batch.actor_states)).double()
    return torch.cat([states, columns_of(batch), torch.ones(len(states), 1)], dim=1)


def regression(rows: Tensor, targets: Tensor, weights: Tensor, penalty: float) -> Tensor:
    """By the normal equations with the intercept among the unknowns, each feature as it is."""
    share = weights / weights.sum()
    variances = share @ (rows - share @ rows) ** 2  # of the last column, the 1, it is 0
    gram = rows.T @ (rows * share[:, None]) + penalty * torch.diag(variances)
    return torch.linalg.pinv(gram, rtol=1e-13) @ (rows.T @ (share * targets))


def predicted_alike(found: Tensor, expected: Tensor, rows: Tensor) -> None:
    torch.testing.assert_close(rows @ found, rows @ expected, rtol=1e-4, atol=1e-5)


def of_tokens(batch: TrainingBatch) -> tuple[Tensor, Tensor]:
    """Value targets and the weights of the value loss, of each sampled token."""
    assert batch.value_targets is not None
    weights = batch.value_weights[:, None] * batch.value_draws * batch.value_mask
    mask = batch.response_mask
    return batch.value_targets[mask].double(), weights[mask].double()


def test_a_probe_is_the_regression_on_the_last_two_batches() -> None:
    """The first of three is forgotten."""
    found = probe()
    parts = [(read_by_a_probe(batch), *of_tokens(batch)) for batch in found.seen.batches]
    for last, first in ((0, 0), (1, 0), (2, 1)):
        rows, targets, weights = (torch.cat(x) for x in zip(*parts[first : last + 1], strict=True))
        expected = regression(rows, targets, weights, 0.01)
        predicted_alike(found.seen.weights[last], expected, rows)
        metrics = found.seen.metrics[last]
        assert metrics["critic/ridge_num_tokens"] == len(rows)
        residuals = targets - rows @ expected
        explained = 1 - float(residuals.var(correction=0) / targets.var(correction=0))
        assert metrics["critic/ridge_explained_variance"] == pytest.approx(explained, abs=1e-4)
    without_first = regression(*parts[2], 0.01)
    with pytest.raises(AssertionError):
        predicted_alike(found.seen.weights[2], without_first, parts[2][0])


def test_no_response_is_in_the_fit_of_its_own_value() -> None:
    """A batch's values are those of the weights that the iteration before ended with."""
    found = probe()
    assert not found.seen.batches[0].values.any()
    for weights, batch in zip(found.seen.weights, found.seen.batches[1:], strict=False):
        expected = (read_by_a_probe(batch) @ weights).float()
        torch.testing.assert_close(
            batch.values[batch.response_mask], expected, rtol=1e-4, atol=1e-5
        )


def test_no_optimizer_steps_a_fitted_probe() -> None:
    found = probe()
    _, optimizer = found.trainer.optimizers
    assert not any(group["params"] for group in optimizer.param_groups)
    assert not optimizer.state
    assert not any(p.requires_grad for p in found.critic.parameters())
    assert not any("critic/lr" in m or "critic/grad_norm" in m for m in found.seen.metrics)
    assert all(math.isfinite(m["critic/value_loss"]) for m in found.seen.metrics)
    assert found.trainer.global_step == 6


def test_tokens_count_as_in_the_value_loss() -> None:
    """With weights of responses, and on the anchors alone."""
    found = probe("critic.weights=prompt_noise", "critic.anchors=[0.5,1.0]")
    batch = found.seen.batches[0]
    targets, weights = of_tokens(batch)
    assert len(set(weights.tolist())) > 2
    rows = read_by_a_probe(batch)
    counted = weights > 0
    assert 0 < int(counted.sum()) < len(rows)
    some = (rows[counted], targets[counted], weights[counted])
    predicted_alike(found.seen.weights[0], regression(*some, 0.01), rows)
    unweighted = (rows[counted], targets[counted], torch.ones_like(weights[counted]))
    with pytest.raises(AssertionError):
        predicted_alike(found.seen.weights[0], regression(*unweighted, 0.01), rows)


def test_beside_a_network_the_columns_fit_what_it_leaves() -> None:
    """The network's score begins at 0 and hardly moves, so it leaves all; then it does not."""
    found = run(*NETWORK, *RIDGE, *STILL, num_iterations=1)
    (batch,) = found.seen.batches
    targets, weights = of_tokens(batch)
    rows = torch.cat([columns_of(batch), torch.ones(len(targets), 1)], dim=1)
    predicted_alike(found.seen.weights[0], regression(rows, targets, weights, 0.01), rows)
    assert found.critic.get_parameter("model.score.weight").requires_grad
    assert not found.critic.get_parameter("model.score.bias").requires_grad
    assert "critic/grad_norm" in found.seen.metrics[0]


def test_what_a_network_says_is_taken_from_the_targets() -> None:
    """The fit with a network that moves is that on the targets less its own score."""
    moves = ("critic.optimizer.lr=0.05", "training.minibatch_size=16")
    moving = run(*NETWORK, *RIDGE, *moves, num_iterations=2)
    one, two = moving.seen.batches
    parts = []
    for batch, before in ((one, torch.zeros(11)), (two, moving.seen.weights[0])):
        targets, weights = of_tokens(batch)
        rows = torch.cat([columns_of(batch), torch.ones(len(targets), 1)], dim=1)
        score = batch.values[batch.response_mask].double() - rows @ before.double()
        parts.append((rows, targets - score, weights))
    assert float((parts[1][1] - of_tokens(two)[0]).abs().max()) > 0.1, "it has moved"
    rows, targets, weights = (torch.cat(x) for x in zip(*parts, strict=True))
    predicted_alike(moving.seen.weights[1], regression(rows, targets, weights, 0.01), rows)


@pytest.mark.slow
def test_several_probes_are_fitted_to_their_own_prompts() -> None:
    found = run(*PROBE, *RIDGE, "critic.count=2", num_iterations=1)
    (batch,) = found.seen.batches
    assert batch.critic_members is not None
    rows, (targets, weights) = read_by_a_probe(batch), of_tokens(batch)
    member_of_token = batch.critic_members[:, None].expand(batch.response_mask.shape)
    for member in (0, 1):
        own = member_of_token[batch.response_mask] == member
        expected = regression(rows[own], targets[own], weights[own], 0.01)
        predicted_alike(found.seen.weights[member], expected, rows)


def test_numbers_that_are_not_finite_are_not_fitted_to() -> None:
    """Of the first iteration's two minibatches the second has a nan."""
    found = run(*PROBE, *RIDGE, num_iterations=1, plan={(1, 1): ("values", math.nan)})
    assert found.module.faults.totals["critic_updates_skipped"] == 1
    (batch,) = found.seen.batches
    num_tokens = found.seen.metrics[0]["critic/ridge_num_tokens"]
    assert 0 < num_tokens < int(batch.value_mask.sum())
    assert found.seen.weights[0].isfinite().all()


@pytest.mark.parametrize(
    "kind", [PROBE, pytest.param(NETWORK, marks=pytest.mark.slow)], ids=["probe", "network"]
)
def test_a_resumed_run_goes_on_bit_for_bit(kind: tuple[str, ...], tmp_path: Path) -> None:
    whole = probe() if kind is PROBE else run(*kind, *RIDGE)
    checkpoint = tmp_path / "after.ckpt"
    run(*kind, *RIDGE, num_iterations=2).trainer.save_checkpoint(checkpoint)
    resumed = run(*kind, *RIDGE, checkpoint=checkpoint)
    assert_same(resumed.seen.weights[0], whole.seen.weights[2])
    assert_same(dict(resumed.critic.state_dict()), dict(whole.critic.state_dict()))
    assert_same(dict(resumed.actor.state_dict()), dict(whole.actor.state_dict()))
    assert resumed.module.ridge is not None
    assert whole.module.ridge is not None
    assert_same(resumed.module.ridge.grams, whole.module.ridge.grams)
    assert resumed.module.ridge.num_bytes(resumed.critic) == sum(
        gram.nbytes for gram in resumed.module.ridge.grams
    )


def test_a_run_is_not_resumed_with_the_other_kind_of_weights() -> None:
    """Which it would find out from the optimizer's numbers of parameters."""
    module = probe().module
    plain = VapoModule(
        replace(module.config, critic=replace(module.config.critic, ridge=None)), pad_id=0
    )
    with pytest.raises(UserError, match=r"has critic\.ridge, .*: set critic\.ridge=\{\}"):
        plain.on_load_checkpoint({"ridge": {"grams": []}})
    with pytest.raises(UserError, match=r"has no critic\.ridge, .*: set critic\.ridge=null"):
        module.on_load_checkpoint({})
    plain.on_load_checkpoint({})


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [PROBE, NETWORK], ids=["probe", "network"])
def test_two_sharded_processes_fit_as_one(two_ranks: Ranks, kind: tuple[str, ...]) -> None:
    """Whole batches, so that both take the same steps."""
    options = (*kind, *RIDGE, "training.minibatch_size=16")
    one = weights_and_metrics(1, *options)
    for found in two_ranks.run(weights_and_metrics, 2, *options):
        for key in ("weights", "grams"):
            for ours, theirs in zip(found[key], one[key], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
        for ours, theirs in zip(found["metrics"], one["metrics"], strict=True):
            assert ours.keys() == theirs.keys()
            for key in ("critic/ridge_num_tokens", "critic/value_loss"):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-3)
        for name, tensor in one["state"].items():
            torch.testing.assert_close(found["state"][name], tensor, rtol=1e-3, atol=1e-4)
