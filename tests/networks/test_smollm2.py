"""The shipped comparison on a pretrained policy: what each row may sample."""

from __future__ import annotations

from tests.config.fits import ROOT
from vapo.config import FitConfig, resolve
from vapo.config.loading import load_config
from vapo.sweep.grid import read_grid
from vapo.sweep.plan import make_plan


def test_every_row_samples_equally_many_responses() -> None:
    """Value pretraining and further sampling attempts included."""
    planned = make_plan(
        read_grid(ROOT / "experiments/smollm2/grid.yaml"),
        [ROOT / "conf/worked_sums/vapo.yaml"],
        [],
        seeds=[0],
    )
    totals = {}
    for row, config in planned.row_configs.items():
        numbers = resolve(config)
        iterations = numbers.value_pretraining_iterations + config.training.num_iterations
        attempts = max(config.algorithm.dynamic_sampling_attempts, 1)
        totals[row] = iterations * attempts * numbers.num_prompts * numbers.group_size
    assert len(totals) == 11
    assert set(totals.values()) == {20 * 8 * 8}, totals


def test_engines_and_devices() -> None:
    cpu, gpu = (
        load_config(FitConfig, [ROOT / f"conf/recipes/smollm2_{name}.yaml"], [])
        for name in ("cpu", "gpu")
    )
    assert (cpu.rollouts.engine, gpu.rollouts.engine) == ("transformers", "vllm")
    assert cpu.actor.path == gpu.actor.path == "models/smollm2_135m"
    assert cpu.critic.init == gpu.critic.init == "policy", "a reward model reads other token ids"
