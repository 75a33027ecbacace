"""Milestones as credit, by hand: where they are, what states are worth by them, and advantages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.config.test_validation import CRITIC_FREE, problem
from tests.judged import judged_batch
from tests.systems import system_config
from tests.tiny_model import ALPHABET, tiny_tokenizer
from vapo.advantages.estimators import estimate_advantages
from vapo.config import FitConfig
from vapo.config.estimators import MilestonesConfig
from vapo.diagnostics.reward_weight import reward_weight_notes
from vapo.environments.contract import Verdict
from vapo.functional.advantages import gae
from vapo.functional.milestones import milestone_values
from vapo.rollouts.milestones import milestones_of, token_texts, with_milestone_values
from vapo.types import EvaluatedBatch, FinishReason, Phase, Prompt, Rollout, RolloutBatch

EOS = 1
OFF = ("components.length_adaptive_gae.enabled=false", "algorithm.whiten_advantages=false")
TEXTS, RIGHT = ("1a3.", "1a4.", "2b3."), (True, False, True)


def batch_of(config: FitConfig, texts: Sequence[str], right: Sequence[bool]) -> RolloutBatch:
    """Groups of three; `.` is the end token."""
    rollouts = [
        Rollout(
            Prompt(f"p:{i // 3}", "", (2,), "1"),
            tuple(EOS if c == "." else ALPHABET.index(c) + 2 for c in text),
            text[:-1],
            (-1.0,) * len(text),
            FinishReason.STOP,
        )
        for i, text in enumerate(texts)
    ]
    verdicts = [Verdict(c, 1.0 if c else -1.0) for c in right]
    return judged_batch(
        rollouts, verdicts, group_size=3, rewards=config.rewards, max_response_tokens=8
    )


def valued(batch: RolloutBatch, kind: str = "nth") -> tuple[RolloutBatch, dict[str, float]]:
    options = MilestonesConfig(kind=kind, shrinkage=1.0)  # type: ignore[arg-type]
    return with_milestone_values(batch, options, tiny_tokenizer())


def test_values_by_hand() -> None:
    """Rewards 1, -1, 1. Of the first row the others' mean is 0, the second came to `1` with it and
    the third to a second number 3; so -1 / (1 + 1) after the 1, and 1 / (1 + 1) after the 3."""
    batch, metrics = valued(batch_of(system_config("milestones"), TEXTS, RIGHT))
    assert batch.step_values is not None
    assert batch.step_values.tolist() == [[0, -0.5, -0.5, 0.5], [1, 1, 1, 1], [0, 0, 0, 0.5]]
    squares = (1 + 1.5**2 + 1.5**2 + 0.5**2) + 4 * 2**2 + (1 + 1 + 1 + 0.5**2)
    assert metrics == {
        "milestones/explained_variance": pytest.approx(1 - squares / 12 / (8 / 9)),
        "milestones/number_share": 9 / 12,
        "milestones/shared_share": 6 / 12,
    }
    of_all, metrics = valued(batch, "all")  # nobody else wrote 1 and 3
    assert of_all.step_values is not None
    assert of_all.step_values.tolist() == [[0, -0.5, -0.5, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    assert metrics["milestones/shared_share"] == 4 / 12


def advantages(batch: RolloutBatch, *overrides: str) -> Tensor:
    config = system_config("milestones", *OFF, *overrides)
    evaluated = EvaluatedBatch(**vars(batch), old_logprobs=batch.rollout_logprobs)
    made = estimate_advantages(evaluated, Phase.POLICY_OPTIMIZATION, config)
    assert made.value_targets is None
    assert made.advantages is not None
    return made.advantages


def test_advantages_by_hand() -> None:
    """TD errors -0.5, 0, 1, 0.5 of the first row; a step's credit is where its number is."""
    batch, _ = valued(batch_of(system_config("milestones"), TEXTS, RIGHT))
    found = advantages(batch, "algorithm.lambda_policy=0.5")
    expected = [[-0.1875, 0.625, 1.25, 0.5], [-0.25, -0.5, -1, -2], [0.1875, 0.375, 0.75, 0.5]]
    assert found.tolist() == expected
    steps = advantages(batch, "algorithm.lambda_policy=0")
    assert steps[0].tolist() == [-0.5, 0, 1, 0.5]
    adaptive = ["components.length_adaptive_gae.enabled=true"]
    adaptive += ["components.length_adaptive_gae.alpha=0.5"]  # lambda is 1 - 1 / (0.5 * 4)
    assert advantages(batch, *adaptive).tolist() == expected


def test_where_milestones_are() -> None:
    """A number may end in a later token, and a token may have several."""
    found = milestones_of(["12", "", "3", " 4", "5x6"], kind="nth")
    assert [(*mark[:2], num) for mark, num in found.items()] == [
        *((0, "", 0), (1, "12", 1), (1, "123", 3)),
        *((2, "4", 4), (3, "6", 5)),
    ]
    assert list(milestones_of(["x", "y"], kind="all").values()) == [0]


def test_all_milestones_take_the_same_room() -> None:
    """A tuple of all numbers so far would be quadratic in a long response."""
    sums = [str(n) if n % 2 else "+" for n in range(9)]
    found = [*milestones_of(sums, kind="all")]
    assert len(found) == 5 == len({before for _, _, before in found})
    assert {len(before) for _, _, before in found} == {0, 16}
    other = [*milestones_of(["9", *sums[2:]], kind="all")]
    assert not {*found[1:]} & {*other}, "one number differs, and so does all that comes after it"


def test_a_space_before_a_word_is_not_lost() -> None:
    """Alone the second token is `2`, and one behind the other they would be 12."""
    vocabulary = {"\u25811": 0, "\u25812": 1, "</s>": 2}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    plain.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>")
    assert token_texts([0, 1, 2], tokenizer) == ["1", " 2", "</s>"]
    assert token_texts([], tokenizer) == []


def random_group() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    states = torch.randint(4, (5, 6), generator=draw).cumsum(dim=1)
    states[:, 0] = 0
    mask = torch.arange(6) < torch.tensor([[6], [3], [5], [6], [2]])
    return torch.randn(5, generator=draw), states, mask


def test_order_padding_and_other_groups_do_not_matter() -> None:
    rewards, states, mask = random_group()
    values, counts = milestone_values(rewards, states, mask, group_size=5, shrinkage=0.5)
    assert (counts > 0).float().mean() > 0.3
    order = [3, 0, 4, 1, 2]
    permuted, _ = milestone_values(
        rewards[order], states[order], mask[order], group_size=5, shrinkage=0.5
    )
    torch.testing.assert_close(permuted, values[order])
    twice, _ = milestone_values(
        torch.cat([rewards, 9 - rewards]),
        torch.cat([torch.where(mask, states, 77), states]),
        torch.cat([mask, mask]),
        group_size=5,
        shrinkage=0.5,
    )
    assert torch.equal(twice[:5], values)


def test_no_value_has_the_response_s_own_reward_or_its_future_in_it() -> None:
    rewards, states, mask = random_group()
    values, _ = milestone_values(rewards, states, mask, group_size=5, shrinkage=0.5)
    for row, column in product(range(5), range(5)):
        others, later = rewards.clone(), states.clone()
        others[row], later[row, column + 1 :] = 100.0, 50
        found, _ = milestone_values(others, later, mask, group_size=5, shrinkage=0.5)
        assert torch.equal(found[row, : column + 1], values[row, : column + 1])
    rewards[0] += 1
    moved, _ = milestone_values(rewards, states, mask, group_size=5, shrinkage=0.5)
    assert (moved[1:, 0] > values[1:, 0]).all()


def test_the_expected_gradient_is_the_true_one() -> None:
    """All pairs of responses of two digits, weighed by a policy's probabilities, with lambda 1."""
    logits = torch.tensor([0.4, -0.7, 0.3], dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([1.0, -0.5, 2.0, 0.25], dtype=torch.float64)
    responses = list(product((0, 1), repeat=2))
    signs = 1 - 2 * torch.tensor(responses)
    chosen = torch.stack([logits[[0, 1 + first]] for first, _ in responses])
    logprobs = torch.nn.functional.logsigmoid(chosen * signs)
    chances = logprobs.sum(dim=1).exp()
    (true,) = torch.autograd.grad((chances * rewards).sum(), logits, retain_graph=True)
    states = torch.tensor([[0, 1 + first] for first, _ in responses])
    total, mask = torch.zeros((), dtype=torch.float64), torch.ones(2, 2, dtype=torch.bool)
    for pair in product(range(4), repeat=2):
        rows = list(pair)
        values, _ = milestone_values(rewards[rows], states[rows], mask, group_size=2, shrinkage=0.5)
        placed = torch.stack([torch.zeros(2, dtype=torch.float64), rewards[rows]], dim=1)
        found = gae(placed, values, mask, gamma=1.0, lambda_=1.0)
        total = total + chances[rows].prod().detach() * (found * logprobs[rows]).sum() / 2
    (expected,) = torch.autograd.grad(total, logits)
    torch.testing.assert_close(expected, true)


def test_what_it_needs(tmp_path: Path) -> None:
    config = system_config("milestones")
    needs = config.algorithm.has_critic, config.algorithm.compares_groups
    assert needs == (False, True)
    off = [x for x in CRITIC_FREE if "length_adaptive" not in x]
    chosen = ["algorithm.advantage_estimator=milestones", *off]
    for overrides, message in {
        ("components.group_sampling.group_size=1",): "milestones compares the responses of a group",
        ("algorithm.gamma=0.9",): "not discounted, but algorithm.gamma is 0.9",
        ("algorithm.kl.coef=0.1", "algorithm.kl.placement=reward"): "set algorithm.kl.placement=lo",
        ("algorithm.milestones.shrinkage=-1",): "algorithm.milestones.shrinkage",
        ("environment.kind=function", "environment.function=my_games:Guess"): (
            "milestones values a state by what whole responses earned"
        ),
    }.items():
        assert message in problem(tmp_path, *chosen, *overrides)
    assert "it is a key of milestones" in problem(tmp_path, "algorithm.milestones.kind=all")


def test_the_start_says_how_much_of_the_reward_reaches_the_first_token() -> None:
    (line,) = reward_weight_notes(
        system_config("milestones", "components.length_adaptive_gae.alpha=0.05")
    )
    assert "2.06e-07 %" in line, "and there is no critic to pretrain"
