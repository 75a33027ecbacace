"""Old log-probs: who reads them, and that nobody else pays for their forward pass."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from tests.config.fits import STATE_TRACKING
from tests.poisoned import Notebook, fixed_rollouts
from tests.systems import estimated, made_up_batch, system_config
from vapo.config import FitConfig, resolve
from vapo.config.hyperparameters import reads_old_logprobs
from vapo.config.loading import load_config
from vapo.system.progress import Progress
from vapo.training.callbacks.recording import Recording
from vapo.training.minibatches import Microbatch, make_minibatches
from vapo.training.module import VapoModule
from vapo.training.objective import Totals, policy_objective

ONE_STEP = "training.minibatch_size=null"
SEVERAL = "training.minibatch_size=8"
DIS = "algorithm.surrogate=dis"
DPPO = "algorithm.surrogate=dppo_tv"
OWN_RATIO = ("components.clip_higher.enabled=false",)
CISPO = "algorithm.surrogate=cispo"
GSPO = (
    "algorithm.surrogate=gspo",
    "components.token_level_loss.enabled=false",
    *OWN_RATIO,
)
GAP = "rollout/logprob_gap_mean"


def config_of(*overrides: str) -> FitConfig:
    sizes = ["components.group_sampling.num_prompts=4", "components.group_sampling.group_size=4"]
    rest = ["components.value_pretraining.enabled=false", "trainer.accelerator=cpu"]
    more = ["training.num_iterations=2", "training.microbatch_tokens=60"]
    return load_config(FitConfig, STATE_TRACKING, [*sizes, *rest, *more, *overrides])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([SEVERAL], True),
        ([ONE_STEP], False),
        (["training.minibatch_size=16"], False),
        ([*GSPO, SEVERAL], True),
        ([*GSPO, ONE_STEP], False),
        ([CISPO, SEVERAL, *OWN_RATIO], True),
        ([CISPO, ONE_STEP, *OWN_RATIO], False),
        ([DIS, SEVERAL, *OWN_RATIO], False),
        ([DPPO, SEVERAL, *OWN_RATIO], False),
        ([ONE_STEP, "algorithm.surrogate=logprob", *OWN_RATIO], False),
        ([ONE_STEP, "algorithm.mismatch.tis_cap=2"], True),
        ([ONE_STEP, "algorithm.mismatch.icepop=true"], True),
        ([ONE_STEP, "algorithm.mismatch.mask_above=2"], True),
        ([ONE_STEP, "training.max_staleness=1"], True),
        ([ONE_STEP, "algorithm.kl.coef=0.1", "algorithm.kl.placement=reward"], True),
        ([ONE_STEP, "algorithm.kl.coef=0.1", "algorithm.kl.placement=loss"], False),
        ([ONE_STEP, "algorithm.entropy_coef=0.1"], False),
    ],
)
def test_who_reads_them(overrides: list[str], expected: bool) -> None:
    config = config_of(*overrides)
    assert reads_old_logprobs(config) is expected
    assert resolve(config).reads_old_logprobs is expected


class Counting(VapoModule):
    """Counts the actor's passes without gradient, and keeps its gradient."""

    num_passes = 0
    gradients: list[dict[str, Tensor]]

    def configure_model(self) -> None:
        super().configure_model()
        self.gradients = []
        self.actor.register_forward_pre_hook(self._count)

    def _count(self, *args: Any) -> None:
        self.num_passes += not torch.is_grad_enabled()

    def _update(self, name: str, *args: Any, **options: Any) -> dict[str, float]:
        if name == "actor":
            grads = {
                k: p.grad.clone() for k, p in self.actor.named_parameters() if p.grad is not None
            }
            self.gradients.append(grads)
        return super()._update(name, *args, **options)


@cache
def fitted(*overrides: str, reads: bool | None = None) -> tuple[Counting, list[dict[str, float]]]:
    """Two iterations; `reads`: in place of what the config says."""
    config = config_of(*overrides)
    torch.set_num_threads(1)
    module = Counting(config, pad_id=0)
    if reads is not None:
        module.hyperparameters = replace(module.hyperparameters, reads_old_logprobs=reads)
    progress, notebook = Progress(enabled=False), Notebook()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        callbacks=[Recording(notebook, progress)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, fixed_rollouts(config, progress))
    return module, [found for found in notebook.logged if "progress/iteration" in found]


PAGES_OFF = "value_pages.every_n_iterations=null"


@pytest.mark.parametrize(
    "overrides",
    [[ONE_STEP], pytest.param([DIS, SEVERAL, *OWN_RATIO], marks=pytest.mark.slow)],
)
def test_the_pass_does_not_run_and_the_gap_arrives(overrides: list[str]) -> None:
    module, logged = fitted(PAGES_OFF, *overrides)
    assert module.num_passes == 0
    with_pass, before = fitted(PAGES_OFF, *overrides, reads=True)
    assert with_pass.num_passes > 0, "the control"
    gaps = {key for key in before[0] if "mismatch" in key or "gap" in key or "effective" in key}
    assert len(gaps) == 13
    assert set(before[0]) == set(logged[0]), "no metric is lost"
    assert GAP in gaps
    if ONE_STEP in overrides:  # the update's log-probs are those from before it
        for key in gaps:
            for now, then in zip(logged, before, strict=True):
                assert now[key] == pytest.approx(then[key], rel=1e-5, abs=1e-7), key


@pytest.mark.slow
def test_several_steps_of_the_clipped_ratio_keep_the_pass() -> None:
    module, _ = fitted(PAGES_OFF, SEVERAL)
    assert module.num_passes > 0


@pytest.mark.parametrize(
    "more",
    [
        [],
        pytest.param(
            ["algorithm.entropy_coef=0.01", "algorithm.kl.coef=0.1"], marks=pytest.mark.slow
        ),
    ],
)
def test_a_single_step_has_the_gradient_that_it_had_with_the_pass(more: list[str]) -> None:
    found, _ = fitted(PAGES_OFF, ONE_STEP, *more)
    expected, _ = fitted(PAGES_OFF, ONE_STEP, *more, reads=True)
    assert len(found.gradients) == len(expected.gradients) == 2
    largest = max(float(grad.abs().max()) for grad in expected.gradients[0].values())
    assert largest > 1e-3
    for ours, theirs in zip(found.gradients, expected.gradients, strict=True):
        for name, grad in theirs.items():
            torch.testing.assert_close(ours[name], grad, rtol=0, atol=1e-6 * max(1, largest))


@pytest.mark.slow
def test_a_page_changes_nothing_of_the_training() -> None:
    paged, logged = fitted(ONE_STEP, "value_pages.every_n_iterations=1")
    plain, expected = fitted(PAGES_OFF, ONE_STEP)
    assert paged.num_passes > 0, "the page shows the log-probs from before the update"
    assert plain.num_passes == 0
    assert logged[1][GAP] == expected[1][GAP]
    for ours, theirs in zip(paged.gradients, plain.gradients, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("system", ["ppo", "gspo", "cispo"])
def test_the_ratio_of_a_single_step_is_one(system: str) -> None:
    """Whatever stands in the place of the old log-probs: not clipped, KL 0, gradient -A pi'."""
    config = system_config(system, ONE_STEP)
    batch, logprobs = made_up_batch(config)
    carrier = replace(estimated(config, batch), old_values=logprobs)
    (minibatch,) = make_minibatches(carrier, num_minibatches=1, max_tokens=9999, pad_id=0, seed=0)
    totals = Totals()
    (micro,) = minibatch.microbatches
    assert isinstance(micro, Microbatch)
    carried = micro.rows.old_values
    assert carried is not None
    settings = (resolve(config), config.algorithm)
    policy_objective(carried, carried, micro.rows, minibatch, *settings, totals)
    metrics = totals.reduce()
    assert metrics["actor/ratio_max"] == 1.0
    assert metrics["actor/approx_kl"] == 0.0
    assert metrics["actor/clip_fraction_high"] == metrics["actor/clip_fraction_low"] == 0.0
