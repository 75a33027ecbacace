"""POISE's baseline, by hand: what it reads, what it is fitted to, what it does not depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.advantages.two_ranks import batch_of
from tests.config.test_validation import problem
from tests.systems import system_config
from tests.tiny_model import save_tiny_folder, tiny_model
from vapo.advantages.estimators import estimate_advantages
from vapo.advantages.poise import PoiseBaseline, baseline_of, response_features
from vapo.config import FitConfig
from vapo.config.hyperparameters import reads_old_logprobs
from vapo.errors import UserError
from vapo.functional.columns import bad_inputs
from vapo.functional.regression import principal_components, ridge_predictions
from vapo.networks.actor_critic import Actor, Critic, CriticOutput
from vapo.networks.build import check_critic
from vapo.networks.forward_passes import ForwardNetworks, add_logprobs_and_values
from vapo.networks.layouts import choose_layout
from vapo.networks.token_inputs import Layout, TokenInputs
from vapo.studies.estimate.waiting_states import read_layers
from vapo.types import EvaluatedBatch, Phase, RolloutBatch

PAIRS = (
    "components.group_sampling.group_size=2",
    "algorithm.poise.bootstrap_iterations=1",
    "algorithm.poise.ridge=4",
    "algorithm.poise.buffer_responses=4",
)
RIGHT = [True, False, True, True]


def config_of(*overrides: str) -> FitConfig:
    return system_config("poise", *PAIRS, *overrides)


def poise_of(config: FitConfig) -> PoiseBaseline:
    baseline = baseline_of(config.algorithm)
    assert isinstance(baseline, PoiseBaseline)
    return baseline


def with_states(batch: EvaluatedBatch, ends: Sequence[float]) -> EvaluatedBatch:
    """One channel: the prompt's state is 0 and the response's three last ones have this mean."""
    states = [torch.tensor([0.0, x - 1, x, x + 1]).reshape(4, 1, 1) for x in ends]
    entropy = torch.full(batch.response_mask.shape, 0.5)
    return replace(batch, actor_states=states, old_entropy=entropy, old_values=None)


def pairs(config: FitConfig, ends: Sequence[float], right: Sequence[bool]) -> EvaluatedBatch:
    return with_states(batch_of(config, right, [[0.0, 0.0]] * len(right)), ends)


def advantages(config: FitConfig, baseline: PoiseBaseline, batch: EvaluatedBatch) -> Tensor:
    made = estimate_advantages(batch, Phase.POLICY_OPTIMIZATION, config, baseline)
    assert made.advantages is not None
    assert made.actor_states is None, "minibatches would carry them"
    assert (made.advantages[:, 0] == made.advantages[:, -1]).all()
    return made.advantages[:, 0]


def test_features_by_hand() -> None:
    """The prompt's last state, the mean of the response's last ones, the mean entropy."""
    config = config_of()
    batch = pairs(config, [1.0, 2.0], [True, False])
    states = [torch.tensor([[3.0, 4.0], [1.0, 0.0], [5.0, 2.0]])[:, None], torch.zeros(0, 1, 2)]
    entropy = torch.tensor([[0.5, 1.5], [9.0, 9.0]])
    mask = torch.tensor([[True, True], [False, False]])
    batch = replace(batch, actor_states=states, old_entropy=entropy, response_mask=mask)
    assert response_features(batch).tolist() == [[3, 4, 3, 1, 1], [0, 0, 0, 0, 0]]


def test_components_and_ridge_by_hand() -> None:
    """On the line (0, 0), (4, 3), (8, 6) places are -5, 0, 5; of 3 wide rows as of many."""
    for more in (0, 9):
        known = torch.tensor([[0.0, 0.0], [4.0, 3.0], [8.0, 6.0]], dtype=torch.float64)
        known = torch.nn.functional.pad(known, (0, more))
        found, new = principal_components(known, known[2:] * 2, count=2)
        assert found.shape == (3, 1), "the rows vary in one direction"
        sign = found[2, 0].sign()
        torch.testing.assert_close(sign * found[:, 0], torch.tensor([-5.0, 0.0, 5.0]).double())
        torch.testing.assert_close(sign * new, torch.tensor([[15.0]]).double())
    # x = -1, 1 of targets 0, 1: w = (2 * 0.5) / (2 + 2) = 1/4; a constant column says nothing
    known, targets = torch.tensor([[0.0, 7.0], [2.0, 7.0]]), torch.tensor([0.0, 1.0])
    rows = torch.tensor([[2.0, 7.0], [1.0, 99.0], [9.0, 7.0]])
    assert ridge_predictions(known, targets, rows, ridge=2.0).tolist() == [0.75, 0.5, 1.0]


def test_it_begins_with_the_other_responses_and_goes_on_with_their_states() -> None:
    """The ends 1, 3 | 1, 3 of rewards 1, 0 | 1, 1: x = -1, 1, -1, 1 of targets 0, 1 | 1, 1.

    So w = (3 + 1 - 1 + 1) / 4 / (4 + 4) = 1/8, and the ends 2 and 3 predict 3/4 and 3/4 + 1/8; an
    end of 9 predicts no more than 1.
    """
    config = config_of()
    baseline = poise_of(config)
    first = advantages(config, baseline, pairs(config, [1, 3, 1, 3], RIGHT))
    assert first.tolist() == [1, -1, 0, 0], "as RLOO"
    assert baseline.metrics["baseline/num_fitted_responses"] == 0
    assert baseline.targets.tolist() == [0, 1, 1, 1]
    second = advantages(config, baseline, pairs(config, [2, 3], [True, False]))
    torch.testing.assert_close(second, torch.tensor([1 - 0.875, 0 - 0.75]))
    assert baseline.metrics["baseline/num_fitted_responses"] == 4
    explained = 1 - 0.4375**2 / 0.5**2  # of rewards 1, 0 by baselines 7/8, 3/4
    assert baseline.metrics["baseline/explained_variance"] == pytest.approx(explained)
    assert baseline.features[:, 1].tolist() == [1, 3, 2, 3], "the oldest have made room"
    assert baseline.targets.tolist() == [1, 1, 0, 1]


def test_of_several_others_the_mean_prediction_is_the_baseline() -> None:
    config = config_of("components.group_sampling.group_size=4")
    baseline = poise_of(config)
    advantages(config_of(), baseline, pairs(config, [1, 3, 1, 3], RIGHT))
    four = replace(pairs(config, [1, 3, 3, 3], RIGHT), group_size=4)
    found = advantages(config, baseline, four)
    low, high = 0.75 - 1 / 8, 0.75 + 1 / 8
    expected = torch.tensor(RIGHT).float() - torch.tensor([high, *[(low + 2 * high) / 3] * 3])
    torch.testing.assert_close(found, expected)


def test_no_reward_of_the_prompt_moves_its_baseline_in_the_same_iteration() -> None:
    """Nor do a response's own states: another's alone do. The bootstrap's baseline is different."""
    config = config_of()
    base = poise_of(config)
    advantages(config, base, pairs(config, [1, 3, 1, 3], RIGHT))
    state = base.state_dict()

    def baselines(ends: Sequence[float], right: Sequence[bool]) -> list[float]:
        again = poise_of(config)
        again.load_state_dict(state)
        found = advantages(config, again, pairs(config, ends, right))
        return (torch.tensor(right).float() - found).tolist()

    before = baselines([2, 3, 2, 1], [True, False, True, True])
    assert baselines([2, 3, 2, 1], [False, True, True, True]) == pytest.approx(before)
    changed = baselines([2.5, 3, 2, 1], [True, False, True, True])
    assert [a != pytest.approx(b) for a, b in zip(before, changed, strict=True)] == [
        *(False, True),
        *(False, False),
    ]


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    config = config_of()
    whole, resumed = poise_of(config), poise_of(config)
    draw = torch.Generator().manual_seed(0)
    batches = [pairs(config, torch.randn(4, generator=draw).tolist(), RIGHT) for _ in range(4)]
    for batch in batches[:2]:
        advantages(config, whole, batch)
    resumed.load_state_dict(whole.state_dict())
    for batch in batches[2:]:
        ours, theirs = advantages(config, whole, batch), advantages(config, resumed, batch)
        assert torch.equal(ours, theirs)
        assert whole.metrics == resumed.metrics


def test_responses_without_loss_are_not_learned_from() -> None:
    config = config_of()
    baseline = poise_of(config)
    batch = pairs(config, [1, 3, 1, 3], RIGHT)
    kept = batch.loss_mask & torch.tensor([[True], [True], [False], [False]])
    advantages(config, baseline, replace(batch, loss_mask=kept))
    assert baseline.targets.tolist() == [0, 1]


def test_a_response_whose_entropy_is_not_finite_is_left_out() -> None:
    """A nan would stay in the regression; where a page alone shows entropies they do not count."""
    assert config_of().algorithm.reads_entropies
    assert not system_config("vapo").algorithm.reads_entropies
    config = config_of()
    batch = pairs(config, [1, 3], [True, False])
    assert batch.old_entropy is not None
    batch.old_entropy[1, 0] = torch.nan
    found = bad_inputs(batch, reads_entropies=True)
    assert found["old_entropy"].tolist() == [False, True]
    assert "old_entropy" not in bad_inputs(batch)


@pytest.mark.parametrize("what", ["reward", "entropy", "state"])
def test_a_batch_that_trains_nothing_leaves_no_nan_behind(what: str) -> None:
    """Where most rows are bad the whole batch comes, and its update is skipped."""
    config = config_of()
    baseline = poise_of(config)
    advantages(config, baseline, pairs(config, [1, 3, 1, 3], RIGHT))
    bad = pairs(config, [1, 3, 1, 3], RIGHT)
    assert bad.old_entropy is not None
    assert bad.actor_states is not None
    {"reward": bad.rewards, "entropy": bad.old_entropy, "state": bad.actor_states[0]}[what][:] = (
        torch.nan
    )
    estimate_advantages(bad, Phase.POLICY_OPTIMIZATION, config, baseline)
    assert baseline.features.isfinite().all()
    assert baseline.targets.isfinite().all()
    assert advantages(config, baseline, pairs(config, [2, 3], [True, False])).isfinite().all()


def test_a_regression_on_other_states_does_not_go_on() -> None:
    config = config_of()
    other = config_of("algorithm.poise.num_states=3")
    state = poise_of(other).state_dict()
    with pytest.raises(UserError, match=r"num_states are .* set them as they were"):
        poise_of(config).load_state_dict(state)


def test_without_states_it_says_so() -> None:
    config = config_of()
    batch = batch_of(config, RIGHT, [[0.0]] * 4)
    with pytest.raises(ValueError, match="states and entropies"):
        estimate_advantages(batch, Phase.POLICY_OPTIMIZATION, config, poise_of(config))


@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prompts"])
def test_the_states_are_those_of_transformers_in_every_layout(layout: Layout) -> None:
    """Of a response of five tokens the one before the first and those before the last two."""
    config = config_of()
    made = batch_of(config, RIGHT, [[0.0] * n for n in (5, 1, 2, 3)])
    batch = RolloutBatch(**{f.name: getattr(made, f.name) for f in fields(RolloutBatch)})
    actor = Actor(tiny_model())
    assert choose_layout(layout, [actor.model]) == layout
    networks = ForwardNetworks(
        actor, None, None, 1.0, 30, 0, layout, torch.device("cpu"), layers=(1,), num_states=2
    )
    found = add_logprobs_and_values(batch, networks, with_entropy=True)
    assert found.old_values is None
    assert found.actor_states is not None
    assert [len(states) for states in found.actor_states] == [3, 2, 3, 3]
    ids = [*batch.rollouts[0].prompt.prompt_ids, *batch.rollouts[0].response_ids]
    with torch.no_grad():
        output = actor.model(torch.tensor([ids]), output_hidden_states=True)
    hidden = output.hidden_states[1][0]
    torch.testing.assert_close(found.actor_states[0][:, 0], hidden[[0, 3, 4]])
    entropies = torch.distributions.Categorical(logits=output.logits[0, :5]).entropy()
    mean = torch.stack([hidden[3], hidden[4]]).mean(dim=0)
    expected = torch.cat([hidden[0], mean, entropies.mean()[None]])
    torch.testing.assert_close(response_features(found)[0], expected)


def test_states_of_an_estimator_are_not_a_networks_input() -> None:
    """They would be moved to its device for nothing."""
    made = batch_of(config_of(), RIGHT, [[0.0] * n for n in (5, 1, 2, 3)])
    batch = RolloutBatch(**{f.name: getattr(made, f.name) for f in fields(RolloutBatch)})
    seen: list[object] = []

    class Values(Critic):
        layers = ()

        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

        def forward(self, inputs: TokenInputs) -> CriticOutput:
            seen.append(inputs.actor_states)
            return CriticOutput(torch.zeros(len(inputs.targets)))

    networks = ForwardNetworks(
        Actor(tiny_model()), None, Values(), 1.0, 30, 0, "padded", torch.device("cpu"), layers=(0,)
    )
    found = add_logprobs_and_values(batch, networks)
    assert found.actor_states is not None
    assert [len(states) for states in found.actor_states] == [5, 1, 2, 3]
    assert set(seen) == {None}


def test_what_it_needs(tmp_path: Path) -> None:
    config = config_of("training.minibatch_size=null")
    assert config.algorithm.compares_groups
    assert not config.algorithm.has_critic
    assert reads_old_logprobs(config), "the states and entropies come out of that pass"
    assert read_layers(config) == (-1,), "whose memory is counted"
    off = [f"components.{name}.enabled=false" for name in ("value_pretraining", "decoupled_gae")]
    poise = ["algorithm.advantage_estimator=poise", *off]
    poise.append("components.length_adaptive_gae.enabled=false")
    one = problem(tmp_path, *poise, "components.group_sampling.group_size=1")
    assert "poise compares the responses of a group" in one
    assert "algorithm.poise.ridge" in problem(tmp_path, *poise, "algorithm.poise.ridge=0")
    assert "algorithm.poise.rigde" in problem(tmp_path, *poise, "algorithm.poise.rigde=1")
    assert "it is a key of poise" in problem(tmp_path, "algorithm.poise.ridge=1")


def test_a_layer_that_the_actor_lacks_is_refused(tmp_path: Path) -> None:
    path = f"actor.path={save_tiny_folder(tmp_path / 'policy')}"
    check_critic(config_of(path, "algorithm.poise.layer=1"))
    with pytest.raises(UserError, match=r"algorithm\.poise\.layer: .*policy has no layer 9"):
        check_critic(config_of(path, "algorithm.poise.layer=9"))
