"""The value loss of each kind by hand, and what surrounds a first batch and a head's range."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.config.fits import fit_config
from tests.networks.test_build import INPUTS
from tests.systems import with_columns
from tests.tiny_model import save_tiny_folder
from tests.training.test_iteration import make_runner
from vapo.advantages.value_loss_columns import check_value_targets
from vapo.config import FitConfig
from vapo.errors import UserError
from vapo.functional.losses import value_loss
from vapo.functional.masking import first_tokens
from vapo.functional.value_heads import categorical_value
from vapo.networks.build import make_critic
from vapo.training.iteration import IterationRunner
from vapo.training.minibatches import Microbatches, Minibatch
from vapo.training.module import VapoModule
from vapo.training.objective import Totals, value_objective
from vapo.training.observers import HeadStart, mean_over_ranks
from vapo.types import IterationStart, Phase, RolloutBatch, TrainingBatch

CATEGORICAL = ("critic.head.kind=categorical", "critic.head.low=0", "critic.head.high=1")
UNIT = ("rewards.incorrect=0", "rewards.correct=1")
TWO_BINS = (
    *(*CATEGORICAL, *UNIT, "critic.head.num_bins=2", "critic.head.support=inclusive"),
    *("critic.loss=cross_entropy", "critic.head.targets=two_hot"),
)
TARGETS = torch.tensor([[0.3, 0.3, 9.0], [1.0, 9.0, 9.0]])
MASK = torch.tensor([[True, True, False], [True, False, False]])
LOGITS = torch.zeros(2, 3, 2)
LOGITS[0, 0] = torch.tensor([0.2, 0.8]).log()


def rows(targets: torch.Tensor = TARGETS, mask: torch.Tensor = MASK) -> TrainingBatch:
    zeros = torch.zeros(mask.shape)
    batch = RolloutBatch(
        rollouts=[],
        response_ids=zeros.long(),
        response_mask=mask,
        loss_mask=mask,
        value_mask=mask,
        rollout_logprobs=zeros,
        turn_rewards=zeros,
        turn_starts=first_tokens(mask),
        rewards=zeros[:, 0],
        unshaped_rewards=zeros[:, 0],
        is_correct=mask[:, 0],
        is_lost=torch.zeros(len(mask), dtype=torch.bool),
        is_filler=torch.zeros(len(mask), dtype=torch.bool),
        group_size=1,
        max_response_tokens=3,
    )
    return with_columns(batch, old_values=zeros, value_targets=targets)


def loss_of(config: FitConfig, logits: torch.Tensor | None, values: torch.Tensor) -> Totals:
    """Of half of a minibatch of 6 tokens."""
    minibatch = Minibatch(
        Microbatches([], lambda rows: pytest.fail("not cut")), 6, 2, 0, 6, 2, 6, 6, 6, 6, 3
    )
    output = {"values": values} | ({} if logits is None else {"logits": logits})
    totals = Totals()
    loss = value_objective(output, rows(), minibatch, config, totals)
    assert torch.equal(totals.sums["critic/value_loss"], loss.detach().double())
    return totals


def test_cross_entropy_by_hand(tmp_path: Path) -> None:
    """Le Critique's: -.7 log p0 - .3 log p1 for a target of .3; the padding's 9 is nowhere."""
    values = categorical_value(LOGITS, torch.tensor([0.0, 1.0]))
    metrics = loss_of(fit_config(tmp_path, *TWO_BINS), LOGITS, values).reduce()
    expected = (-0.7 * math.log(0.2) - 0.3 * math.log(0.8) + 2 * math.log(2)) / 6
    assert metrics["critic/value_loss"] == pytest.approx(expected, rel=1e-6)
    squares = ((0.8 - 0.3) ** 2 + (0.5 - 0.3) ** 2 + (0.5 - 1.0) ** 2) / 2 / 6
    assert metrics["critic/squared_error"] == pytest.approx(squares, rel=1e-6)


def test_cross_entropy_is_on_the_critics_tokens_alone(tmp_path: Path) -> None:
    """An anchor on the first token of the first response: its number of tokens is 1, not 6."""
    anchor = torch.zeros_like(MASK)
    anchor[0, 0] = True
    whole = Microbatches([], lambda rows: pytest.fail("not cut"))
    minibatch = Minibatch(whole, 6, 2, 0, 6, 2, 6, 1, 1, 6, 3)
    assert minibatch.num_value_tokens == 1
    values, totals = categorical_value(LOGITS, torch.tensor([0.0, 1.0])), Totals()
    output = {"values": values, "logits": LOGITS.clone().requires_grad_(True)}
    batch = replace(rows(), value_mask=anchor)
    loss = value_objective(output, batch, minibatch, fit_config(tmp_path, *TWO_BINS), totals)
    assert loss.item() == pytest.approx(-0.7 * math.log(0.2) - 0.3 * math.log(0.8), rel=1e-6)
    assert totals.sums["critic/squared_error"] == pytest.approx(0.5**2 / 2, rel=1e-6)
    loss.backward()
    gradient = output["logits"].grad
    assert gradient is not None
    assert gradient.abs().sum(dim=-1).bool().equal(anchor)


def test_hl_gauss_by_hand(tmp_path: Path) -> None:
    """Five bins over [0, 1]: target 1 has [0, .0001, .0076, .1748, .8176] (critic_options.md)."""
    five = (*CATEGORICAL, *UNIT, "critic.head.num_bins=5", "critic.loss=cross_entropy")
    logits = torch.zeros(2, 3, 5)
    logits[1, 0] = torch.tensor([0.0, 0.0, 0.0, 0.0, 2.0])
    metrics = loss_of(fit_config(tmp_path, *five), logits, torch.zeros(2, 3)).reduce()
    last = math.log(4 + math.e**2)  # -log softmax of the four zeros
    expected = (2 * math.log(5) + last - 0.8176 * 2) / 6
    assert metrics["critic/value_loss"] == pytest.approx(expected, abs=1e-4)


def test_the_squared_error_of_an_expectation_and_of_a_scalar_head_are_one(tmp_path: Path) -> None:
    """Off is `value_loss` bit for bit, with no other metric."""
    wide = ("critic.head.kind=categorical",)
    values = torch.tensor([[0.1, 0.2, 5.0], [-0.3, 5.0, 5.0]])
    plain = value_loss(values, TARGETS, MASK, denominator=6)
    for head, logits in (((), None), (wide, LOGITS), (("critic.head.kind=bounded",), None)):
        totals = loss_of(fit_config(tmp_path, *head), logits, values)
        assert totals.sums.keys() == {"critic/value_loss"}
        assert totals.sums["critic/value_loss"] == plain.double()


# ---- the first batch ----------------------------------------------------------------------


def first_batch_runner(folder: Path, *overrides: str) -> tuple[IterationRunner, HeadStart]:
    """With the start of a critic of its own."""
    policy = save_tiny_folder(folder / "policy")
    start = ["critic.head.start=first_batch", "critic.init=policy", f"actor.path={policy}"]
    runner, *_ = make_runner(*start, *overrides)
    module = VapoModule(runner.config, pad_id=0)
    module.critic = make_critic(runner.config, None)
    head_start = HeadStart(module, runner.progress)
    runner.observers = [head_start]
    return runner, head_start


def test_the_critic_starts_at_the_first_batchs_mean_reward_and_only_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, head_start = first_batch_runner(tmp_path)
    notes: list[str] = []
    monkeypatch.setattr(runner.progress, "note", notes.append)
    critic = head_start.module.critic
    assert critic is not None
    iteration = runner.run(IterationStart(1, Phase.VALUE_PRETRAINING))
    mean = float(iteration.batch.rewards.mean())
    assert iteration.metrics["critic/head_start_mean_reward"] == pytest.approx(mean)
    assert iteration.metrics["critic/head_start_value"] == pytest.approx(mean)
    assert critic(INPUTS).values.tolist() == pytest.approx([mean] * 5)
    assert [f"first rollout batch, {mean:.4f}" in note for note in notes] == [True]
    torch.nn.init.constant_(critic.get_parameter("model.score.bias"), 0.125)
    later = runner.run(IterationStart(2, Phase.VALUE_PRETRAINING))
    assert critic(INPUTS).values.tolist() == [0.125] * 5, "nor when a run resumes there"
    assert "critic/head_start_value" not in later.metrics


def test_a_mean_outside_of_the_range_is_held_inside_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, head_start = first_batch_runner(tmp_path, "critic.head.kind=bounded")
    notes: list[str] = []
    monkeypatch.setattr(runner.progress, "note", notes.append)
    batch = replace(rows(), rewards=torch.tensor([-1.0, -1.0]))
    metrics = head_start.sampled(batch, IterationStart(1, Phase.VALUE_PRETRAINING), None)
    assert metrics["critic/head_start_mean_reward"] == -1.0
    assert metrics["critic/head_start_value"] == pytest.approx(-0.98)
    assert "held inside the head's range at -0.9800" in notes[0]


def test_the_mean_is_of_the_rewards_that_the_critic_learns(tmp_path: Path) -> None:
    """Rewards 1 and 0, of which an overlong punishment leaves 1/2 and -1."""
    start = IterationStart(1, Phase.VALUE_PRETRAINING)
    batch = replace(
        rows(), rewards=torch.tensor([0.5, -1.0]), unshaped_rewards=torch.tensor([1.0, 0.0])
    )
    for kind, mean in (("shaped", -0.25), ("unshaped", 0.5)):
        punished = "rewards.overlong.soft_punishment=true"
        _, head_start = first_batch_runner(tmp_path, punished, f"critic.reward={kind}")
        metrics = head_start.sampled(batch, start, None)
        assert metrics["critic/head_start_mean_reward"] == mean
        assert metrics["critic/head_start_value"] == mean


def test_the_mean_leaves_out_what_is_not_finite() -> None:
    assert mean_over_ranks(torch.tensor([1.0, math.nan, 0.0, math.inf])) == 0.5
    assert mean_over_ranks(torch.tensor([math.nan])) == 0.0


# ---- the range ----------------------------------------------------------------------------


def test_targets_beyond_the_heads_range_end_the_run_before_its_update(tmp_path: Path) -> None:
    own = ("rewards.verifier=python", "rewards.function=a:b")
    config = fit_config(tmp_path, "critic.head.kind=bounded", *own)
    inside = torch.tensor([[1.0, -1.0, 9.0], [0.0, 9.0, 9.0]])
    check_value_targets(rows(inside), config.critic)  # its ends included; no padding
    check_value_targets(rows(mask=torch.zeros(2, 3, dtype=torch.bool)), config.critic)
    beyond = inside.clone()
    beyond[1, 0] = 1.5
    with pytest.raises(
        UserError, match=r"from -1 to 1\.5, and the bounded head learns .* -1 to 1:"
    ):
        check_value_targets(rows(beyond), config.critic)
    check_value_targets(rows(beyond), fit_config(tmp_path).critic)


def test_an_iteration_asks_for_it(tmp_path: Path) -> None:
    own = ("rewards.verifier=python", "rewards.function=a:b")
    low = ("critic.head.kind=bounded", "critic.head.low=0.25", "critic.init=policy")
    runner, _, _ = make_runner(*own, *low)
    with pytest.raises(UserError, match="the value targets of this batch reach from -1"):
        runner.run(IterationStart(1, Phase.VALUE_PRETRAINING))
