"""What adapters on the actor's base need, in the arithmetic and in the simulated step."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.studies.estimate.memory_measurement import mid_size_config
from vapo.commands.estimate import estimate_config
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.studies.estimate.memory import MemoryEstimate
from vapo.studies.estimate.simulated_step import simulate

ROOT = Path(__file__).parents[3]
LORA = ("actor.lora.rank=4", "critic.lora.rank=2", "critic.init=policy")
ADAPTERS = ("critic.kind=adapters", *LORA)
PADDED = "training.packing=padded"
FSDP = ("trainer.strategy=fsdp", "trainer.devices=2")


@cache
def estimate(folder: Path, *overrides: str) -> MemoryEstimate:
    return estimate_config(
        mid_size_config(folder, PADDED, "trainer.precision=bf16-mixed", *overrides)
    )[1]


@pytest.mark.slow
def test_it_has_adapters_and_a_head_and_the_passes_of_a_network(folder: Path) -> None:
    network, adapters = estimate(folder, *LORA), estimate(folder, *ADAPTERS)
    model = AutoConfig.from_pretrained(folder)
    hidden, inner = model.hidden_size, model.intermediate_size
    kv = hidden * model.num_key_value_heads // model.num_attention_heads
    square, narrow, mlp = 2 * (hidden + hidden), 2 * (hidden + kv), 3 * (hidden + inner)
    own = 2 * 2 * (square + narrow + mlp) + hidden
    assert adapters.parameters["critic"] == own
    mine, theirs = adapters.stages["critic update"], network.stages["critic update"]
    assert mine["critic weights"] == 4 * own
    assert mine["optimizer states"] == theirs["optimizer states"]
    assert mine["gradients"] == pytest.approx(theirs["gradients"])
    assert theirs["critic weights"] > 20 * mine["critic weights"]
    for part in ("activations", "logits, temporaries"):
        assert mine[part] == pytest.approx(theirs[part], rel=0.02)


@pytest.mark.night
def test_shards_gather_the_base_and_the_adapters_whole(folder: Path) -> None:
    network, adapters = (estimate(folder, *kind, *FSDP) for kind in (LORA, ADAPTERS))
    own = 2 * adapters.parameters["critic"]  # bytes in bfloat16; the shard of one of two is float32
    assert adapters.stages["critic update"]["critic weights"] == own
    actor = adapters.stages["actor update"]["gathered weights"]
    assert adapters.stages["critic update"]["gathered weights"] == actor + own
    assert adapters.stages["actor update"]["gathered weights"] == actor
    forward = adapters.stages["log-probs"]["gathered weights"]
    assert forward < network.stages["log-probs"]["gathered weights"]
    assert forward == adapters.stages["actor update"]["gathered weights"] + own


RECIPE = (
    *("actor.dtype=bfloat16", "actor.lora.rank=16", "actor.gradient_checkpointing=true"),
    *("trainer.accelerator=gpu", "training.packing=padded", "training.microbatch_tokens=1024"),
)


@pytest.mark.night
@pytest.mark.parametrize("shape", ["smollm2_135m", "qwen2.5_7b"])
def test_a_run_needs_at_most_1_15_times_the_memory_of_grpo(shape: str) -> None:
    """The most at any time, and in the updates, which no cache of the sampler hides."""
    path = str(ROOT / "models/shapes" / shape)
    peaks = []
    for system, more in (("grpo", ()), ("adapters", ("critic.gradient_checkpointing=true",))):
        files = [ROOT / "conf/vapo.yaml", ROOT / f"conf/algorithm/{system}.yaml"]
        found = estimate_config(load_config(FitConfig, files, [*RECIPE, *more]), path)[1].stages
        sums = {stage: sum(parts.values()) for stage, parts in found.items()}
        peaks.append((max(sums.values()), max(sums[s] for s in sums if s != "sampling")))
    for grpo, adapters in zip(*peaks, strict=True):
        assert 1 < adapters / grpo < 1.15


@pytest.mark.slow
def test_a_reference_of_frozen_weights_costs_nothing(folder: Path) -> None:
    kl = ("algorithm.kl.coef=0.1", "algorithm.kl.placement=loss")
    found, without = estimate(folder, *ADAPTERS, *kl), estimate(folder, *ADAPTERS)
    assert found.stages["actor update"] == without.stages["actor update"]
    assert "reference weights" in estimate(folder, *kl).stages["actor update"]


@pytest.mark.night
@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_the_simulated_step_is_that_of_the_arithmetic(folder: Path, strategy: str) -> None:
    ranks = (f"trainer.strategy={strategy}", f"trainer.devices={1 + (strategy == 'fsdp')}")
    policy_alone = "components.value_pretraining.enabled=false"
    options = (*ADAPTERS, *ranks, PADDED, "trainer.precision=32-true", policy_alone)
    config = mid_size_config(folder, *options)
    found, expected = simulate(config), estimate_config(config)[1]
    ratios = {
        stage: sum(parts.values()) / sum(expected.stages[stage].values())
        for (_, stage), parts in found.peaks.items()
        if stage != "at rest"
    }
    stages = ("actor update", "critic update", "optimizer step")
    assert ratios == {stage: pytest.approx(1, abs=0.1) for stage in stages}
