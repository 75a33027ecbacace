"""How often each network goes over an iteration's rollouts, in minibatches of which size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.test_algorithms import folder, tiny_fit
from tests.recorded_metrics import metric_values
from tests.runs.comparing import assert_same
from tests.systems import system_config
from tests.training.test_iteration import make_runner
from vapo.runs.checkpoints import read_checkpoint
from vapo.system.process import derive_seed
from vapo.training.minibatches import (
    Minibatch,
    common_minibatches,
    make_minibatches,
    num_steps,
    passes,
)
from vapo.training.optimizers import lr_of_iteration, make_scheduler, set_learning_rate
from vapo.types import IterationStart, Phase

__all__ = ["folder"]
SIZES = [
    "components.group_sampling.num_prompts=16",
    "components.group_sampling.group_size=4",
    "training.minibatch_size=64",
]
POLICY, PRETRAINING = Phase.POLICY_OPTIMIZATION, Phase.VALUE_PRETRAINING
BOTH, ACTOR, CRITIC = ("actor", "critic"), ("actor",), ("critic",)


@pytest.mark.parametrize(
    ("system", "overrides", "policy", "pretraining"),
    [
        ("vapo", [], [(BOTH, 1)], [(CRITIC, 1)]),
        ("vapo", ["training.minibatch_size=16"], [(BOTH, 4)], [(CRITIC, 4)]),
        # SAO: two critic epochs on the batch of one actor step
        ("vapo", ["critic.epochs=2"], [(BOTH, 1), (CRITIC, 1)], [(CRITIC, 1)] * 2),
        # EasyPPO: four critic minibatches of the batch of one actor step
        ("vapo", ["critic.minibatch_size=16"], [(ACTOR, 1), (CRITIC, 4)], [(CRITIC, 4)]),
        (
            "vapo",
            ["training.minibatch_size=32", "critic.minibatch_size=64", "critic.epochs=2"],
            [(ACTOR, 2), (CRITIC, 1), (CRITIC, 1)],
            [(CRITIC, 1)] * 2,
        ),
        # the same number, given: nothing changes
        ("vapo", ["critic.minibatch_size=64"], [(BOTH, 1)], [(CRITIC, 1)]),
        ("grpo", [], [(ACTOR, 1)], None),
    ],
)
def test_passes(system: str, overrides: list[str], policy: object, pretraining: object) -> None:
    config = system_config(system, *SIZES, *overrides)
    found = passes(config, POLICY)
    assert [(p.networks, p.num_minibatches) for p in found] == policy
    assert num_steps(config, POLICY) == sum(p.num_minibatches for p in found)
    if pretraining is not None:
        assert [(p.networks, p.num_minibatches) for p in passes(config, PRETRAINING)] == pretraining


def test_rows_that_are_left_split_into_either_networks_minibatches() -> None:
    sizes = ["training.minibatch_size=16", "critic.minibatch_size=32"]
    assert common_minibatches(system_config("vapo", *SIZES, *sizes)) == 4
    sizes = [
        "components.group_sampling.num_prompts=6",
        "training.minibatch_size=12",
        "critic.minibatch_size=8",
    ]
    assert common_minibatches(system_config("vapo", *SIZES, *sizes)) == 6, "of 2 and 3"


def rows_of(minibatch: Minibatch) -> list[int]:
    return sorted(row for chunk in minibatch.microbatches.chunks for row in chunk)


def test_each_pass_is_shuffled_anew_and_has_each_row_once() -> None:
    start = IterationStart(2, POLICY, policy_iterations=1)
    runner, networks, _ = make_runner("critic.epochs=3")
    iteration = runner.run(start)
    assert [m.networks for m in iteration.minibatches] == [BOTH] * 2 + [CRITIC] * 4
    by_pass = [iteration.minibatches[i : i + 2] for i in (0, 2, 4)]
    orders = [[rows_of(m) for m in part] for part in by_pass]
    for order in orders:
        assert sorted(row for rows in order for row in rows) == list(range(len(iteration.batch)))
    assert len({str(order) for order in orders}) == 3
    # the first is bit for bit the one of a run without further passes
    today = make_minibatches(
        iteration.batch,
        num_minibatches=2,
        max_tokens=networks.microbatching.tokens,
        pad_id=networks.pad_id,
        seed=derive_seed(runner.config.seed, "minibatches", start.index, 0),
    )
    assert [m.microbatches.chunks for m in today] == [m.microbatches.chunks for m in by_pass[0]]
    # a minibatch of any pass has its own denominators, and they add up to the batch's
    for part in by_pass:
        assert sum(m.num_tokens for m in part) == int(iteration.batch.loss_mask.sum())


def test_learning_rate_of_a_phase_has_the_schedules_warmup() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = make_scheduler(optimizer, 4)
    rates = []
    for step in range(6):
        set_learning_rate(optimizer, scheduler, 0.5 if step >= 3 else 2.0)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == [0.5, 1.0, 1.5, 0.5, 0.5, 0.5], "warmup counts steps, whatever the phase"


EASY = [
    "critic.minibatch_size=4",
    "critic.epochs=2",
    "components.value_pretraining.lr=0.004",
    "critic.optimizer.lr=0.001",
    "critic.optimizer.warmup_steps=10",
    "checkpoints.keep=9",
    "training.decay_fraction=1.0",
]


def test_the_actors_rate_falls_over_the_last_iterations() -> None:
    options = ("training.num_iterations=8", "actor.optimizer.lr=0.5")
    for fraction, expected in (
        (0.5, [0.5] * 5 + [0.375, 0.25, 0.125]),
        (0.25, [0.5] * 7 + [0.25]),
        (1.0, [0.5 * left / 8 for left in range(8, 0, -1)]),
        (0.1, [0.5] * 8),  # less than an iteration
    ):
        config = system_config("vapo", *options, f"training.decay_fraction={fraction}")
        starts = [IterationStart(9 + done, POLICY, done) for done in range(8)]
        assert [lr_of_iteration(config, "actor", start) for start in starts] == expected
        assert lr_of_iteration(config, "critic", starts[-1]) is None
    assert lr_of_iteration(system_config("vapo", *options), "actor", starts[-1]) is None


@pytest.mark.kills  # test_composite_resume.py has more steps of the critic among all that resumes
def test_a_run_with_more_steps_of_the_critic_resumes_bit_for_bit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tiny_fit("vapo", folder, monkeypatch, *EASY)
    expected = read_checkpoint(whole / "checkpoints/last.ckpt")
    for iteration in (1, 2):  # before the phase changes, and after it
        checkpoint = whole / f"checkpoints/iteration_{iteration:06d}"
        resumed = tiny_fit("vapo", folder, monkeypatch, *EASY, ckpt_path=checkpoint)
        actual = read_checkpoint(resumed / "checkpoints/last.ckpt")
        for name in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
            assert_same(actual[name], expected[name], f"{iteration}/{name}")


@pytest.mark.slow
def test_a_run_with_more_steps_of_the_critic(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 rollouts: two steps of the actor and eight of the critic; pretraining has the eight."""
    whole = tiny_fit("vapo", folder, monkeypatch, *EASY)
    expected = read_checkpoint(whole / "checkpoints/last.ckpt")
    assert expected["global_step"] == 8 + 10 + 10
    assert int(expected["state_dict"]["policy_steps"]) == 4
    assert [schedule["last_epoch"] for schedule in expected["lr_schedulers"]] == [4, 24]
    factors = [min(1.0, (step + 1) / 10) for step in range(24)]
    rates = [(0.004 if i < 8 else 0.001) * factor for i, factor in enumerate(factors)]
    assert metric_values(whole, "critic/lr") == pytest.approx(rates)
    first, *later = metric_values(whole, "actor/lr")
    # a warmup of 10 steps, and half of it in the second iteration
    assert later == pytest.approx([2 * first, 1.5 * first, 2 * first])
    assert len(metric_values(whole, "actor/policy_loss")) == 4
    assert len(metric_values(whole, "critic/value_loss")) == 24
    assert metric_values(whole, "critic/minibatches_without_loss") == [0.0] * 3
