"""The simulated step: against a real one, by hand on ranks, and against the arithmetic."""

from __future__ import annotations

import copy
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig

from tests.studies.estimate.memory_measurement import (
    LAYERS,
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    VOCAB,
    measure,
    mid_size_config,
)
from tests.systems import CRITIC_FREE, WITH_CRITIC, system_config
from vapo.commands.estimate import run
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.errors import UserError
from vapo.networks.model_configs import keep_first_layers
from vapo.networks.token_inputs import Layout
from vapo.studies.estimate.cut_minibatch import cut_minibatch, fake_rows
from vapo.studies.estimate.memory import MemoryEstimate, estimate_memory
from vapo.studies.estimate.simulated_step import Simulation, simulate
from vapo.studies.estimate.simulation_report import (
    Rates,
    policy_works,
    simulation_lines,
    stage_bytes,
    step_seconds,
)
from vapo.studies.estimate.sizes import worst_microbatch
from vapo.studies.estimate.step_counts import StepCounts
from vapo.training.minibatches import make_minibatches
from vapo.types import FinishReason, Phase, Prompt, Rollout

ROOT = Path(__file__).parents[3]
CHECKPOINTING = ("actor.gradient_checkpointing=true", "critic.gradient_checkpointing=true")
TWO_RANKS = (
    *("trainer.strategy=fsdp", "trainer.devices=2", "trainer.precision=bf16-mixed"),
    "training.microbatch_tokens=128",  # one response: four micro-batches on each rank
)
EVERY = "trainer.reduce_every_microbatch=true"
POLICY_ALONE = "components.value_pretraining.enabled=false"
PRETRAINING, POLICY = Phase.VALUE_PRETRAINING.value, Phase.POLICY_OPTIMIZATION.value


@pytest.fixture(scope="module")
def sharded(folder: Path) -> Simulation:
    return simulate(mid_size_config(folder, *TWO_RANKS, *CHECKPOINTING, EVERY))


@pytest.fixture(scope="module")
def arithmetic(folder: Path) -> MemoryEstimate:
    return estimated(mid_size_config(folder, *TWO_RANKS, *CHECKPOINTING, EVERY))


def layers_of(folder: Path) -> tuple[int, int]:
    """Parameters of a decoder layer, and of the actor's part outside of the layers."""
    config = AutoConfig.from_pretrained(folder)
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = 3 * hidden * inner + 2 * hidden**2 + 2 * hidden * 128 + hidden + 2 * 128 + 2 * hidden
    return layer, 2 * VOCAB * hidden + hidden


def estimated(config: FitConfig) -> MemoryEstimate:
    actor = AutoConfig.from_pretrained(config.actor.path)
    critic = copy.deepcopy(actor)
    keep_first_layers(critic, config.actor.path, config.critic)
    return estimate_memory(config, actor=actor, critic=critic)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), marks=pytest.mark.slow),
        pytest.param((*CHECKPOINTING, "trainer.precision=bf16-mixed"), marks=pytest.mark.night),
        pytest.param(
            ("critic.frozen=[self_attn.]", "training.packing=padded"), marks=pytest.mark.night
        ),
        pytest.param(("algorithm.kl.coef=0.01",), marks=pytest.mark.night),
        pytest.param(("critic.count=2",), marks=pytest.mark.night),
    ],
)
def test_as_much_as_a_real_step_on_one_process(folder: Path, overrides: tuple[str, ...]) -> None:
    """The same step on real tensors, counted as they are allocated."""
    config = mid_size_config(folder, POLICY_ALONE, *overrides)
    simulated = max(
        sum(parts.values())
        for (phase, stage), parts in simulate(config).peaks.items()
        if phase == POLICY
    )
    measured = measure(config)["update"]
    if config.algorithm.kl.coef > 0:  # what is measured leaves out the reference's weights
        layer, root = layers_of(folder)
        measured += 4 * (LAYERS * layer + root)
    assert simulated == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(
    ("packing", "budget", "sizes"),
    [
        # rows of 32 + 96 tokens, four to each of two prompts: (rows, prompts) of each micro-batch
        ("padded", 255, {(1, 1): 8}),  # where the tokens of all, 1024, would fit in five
        ("packed", 400, {(3, 3): 2, (2, 2): 1}),
        ("shared_prompts", 255, {(2, 1): 4}),
        ("shared_prompts", 320, {(3, 1): 2, (2, 2): 1}),
        ("shared_prompts", 832, {(8, 2): 1}),
    ],
)
def test_a_minibatch_is_cut_as_in_training(
    folder: Path, packing: Layout, budget: int, sizes: dict[tuple[int, int], int]
) -> None:
    """Whole responses; and what is run ends with a micro-batch that is as full as may be."""
    config = mid_size_config(folder, f"training.microbatch_tokens={budget}")
    cut = cut_minibatch(config, "actor", packing)
    assert {(s.rows, s.prompts): n for s, n in cut.counted.items()} == sizes
    (minibatch,) = make_minibatches(
        replace(fake_rows(8, 1, has_kl=False), rollouts=full_rollouts()),
        num_minibatches=1,
        max_tokens=budget,
        pad_id=0,
        layout=packing,
        seed=0,
    )
    assert Counter(map(len, minibatch.of("actor").chunks)) == Counter(
        {rows: n for (rows, _), n in sizes.items()}
    )
    shares = packing == "shared_prompts"
    assert cut.run[-1].size == worst_microbatch(config, 8, shares_prompts=shares)
    assert {part.size for part in cut.run} >= cut.counted.keys()


def full_rollouts() -> list[Rollout]:
    prompts = [Prompt(str(i), "", (i,) * PROMPT_TOKENS, "") for i in range(2)]
    ids = (0,) * RESPONSE_TOKENS
    return [Rollout(prompts[i // 4], ids, "", (), FinishReason.STOP) for i in range(8)]


@pytest.mark.night
def test_uneven_microbatches_have_the_flops_of_their_rows(folder: Path) -> None:
    """Of 3, 3 and 2 rows, of which two sizes and a full one are run, as of one row each."""
    few, many = (
        simulate(
            mid_size_config(
                folder,
                "training.packing=packed",
                f"training.microbatch_tokens={n}",
                POLICY_ALONE,
            )
        )
        for n in (400, 128)
    )
    assert (few.microbatches["actor"], many.microbatches["actor"]) == (3, 8)
    for network, work in policy_works(few).items():
        assert work.flops == pytest.approx(policy_works(many)[network].flops, rel=1e-9)


@pytest.mark.slow
def test_a_collective_that_is_not_known_is_counted_and_named(
    sharded: Simulation, arithmetic: MemoryEstimate
) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with StepCounts() as counts:
            counts.begin("actor update")
            dist.all_to_all_single(torch.zeros(8), torch.zeros(8))
            dist.all_gather([torch.zeros(8), torch.zeros(8)], torch.zeros(8))
            dist.barrier()
    finally:
        dist.destroy_process_group()
    ((_, work),) = counts.parts
    assert work.numbers == {"c10d.alltoall_base_": 1, "all-gather": 1}
    assert work.bytes == {"c10d.alltoall_base_": 32, "all-gather": 64}
    strange = replace(sharded, work={(POLICY, "actor"): work})
    text = simulation_lines(strange, arithmetic, None)
    assert "1 x c10d.alltoall_base_ 0.0 GiB" in text
    assert "not known here: c10d.alltoall_base_; counted by the largest" in text
    assert "not known here" not in simulation_lines(sharded, arithmetic, None)


@pytest.mark.slow
def test_what_two_ranks_gather_and_reduce(folder: Path, sharded: Simulation) -> None:
    """Each of 4 micro-batches gathers every layer for both of its passes, and the root once."""
    layer, root = layers_of(folder)
    actor = sharded.work[POLICY, "actor"]
    assert sharded.microbatches == {"actor": 4, "critic": 4}
    assert actor.numbers["all-gather"] == 4 * (2 * LAYERS + 1)
    assert actor.numbers["reduce-scatter"] == 4 * (LAYERS + 1)
    assert actor.bytes["all-gather"] == 4 * 2 * (2 * LAYERS * layer + root)  # bf16
    assert actor.bytes["reduce-scatter"] == 4 * 4 * (LAYERS * layer + root)  # float32
    # The critic's head is gathered as a layer is, in float32; its one row is padded to one a rank.
    critic, own, head = sharded.work[POLICY, "critic"], root - VOCAB * 256, 2 * 256
    assert critic.numbers["all-gather"] == 4 * (2 * (LAYERS + 1) + 1)
    assert critic.numbers["reduce-scatter"] == 4 * (LAYERS + 2)
    assert critic.bytes["all-gather"] == 4 * (2 * (2 * LAYERS * layer + own) + 4 * 2 * head)
    assert critic.bytes["reduce-scatter"] == 4 * 4 * (LAYERS * layer + own + head)
    assert not dist.is_initialized()


@pytest.mark.slow
def test_the_flops_are_those_of_four_passes(folder: Path, sharded: Simulation) -> None:
    """Forward, the same once more for the backward, and twice as much there: but for the head."""
    layer, _ = layers_of(folder)
    tokens = 4 * 128
    matrices = 8 * tokens * LAYERS * layer
    assert sharded.work[POLICY, "critic"].flops == pytest.approx(matrices, rel=0.05)
    logits = 8 * 4 * 96 * VOCAB * 256  # computed again in the backward
    assert sharded.work[POLICY, "actor"].flops == pytest.approx(matrices + logits, rel=0.05)


@pytest.mark.slow
def test_both_phases_and_what_lies_there_at_rest(folder: Path, sharded: Simulation) -> None:
    layer, root = layers_of(folder)
    parameters = 2 * LAYERS * layer + root + root - VOCAB * 256 + 256
    rest = sharded.peaks[POLICY, "at rest"]
    assert rest["weights"] == pytest.approx(4 * parameters / 2, rel=1e-3)
    assert rest["optimizer states"] == pytest.approx(8 * parameters / 2, rel=1e-3)
    assert sharded.checkpoint == pytest.approx(12 * parameters, rel=1e-3)  # one file of all
    assert (PRETRAINING, "actor update") not in sharded.peaks
    updates = [sharded.peaks[phase, "critic update"] for phase in (PRETRAINING, POLICY)]
    assert sum(updates[0].values()) == pytest.approx(sum(updates[1].values()), rel=0.01)


@pytest.mark.night
def test_whole_gradients_until_the_last_microbatch(folder: Path, sharded: Simulation) -> None:
    """The negative control of trainer.reduce_every_microbatch."""
    layer, root = layers_of(folder)
    late = simulate(mid_size_config(folder, *TWO_RANKS, *CHECKPOINTING, POLICY_ALONE))
    assert late.work[POLICY, "actor"].numbers["reduce-scatter"] == LAYERS + 1
    assert late.work[POLICY, "actor"].flops == sharded.work[POLICY, "actor"].flops
    early, all_of_them = (
        sum(one.peaks[POLICY, "actor update"].values()) for one in (sharded, late)
    )
    assert all_of_them - early > 4 * (LAYERS * layer + root) / 3


@pytest.mark.slow
def test_what_is_printed(sharded: Simulation, arithmetic: MemoryEstimate) -> None:
    text = simulation_lines(sharded, arithmetic, Rates(1e-3, 10.0))
    assert "bound by computing" in text.splitlines()[-2]
    ratio = float(text.split()[-1])
    assert text.splitlines()[-1].startswith("simulated peak 0.")
    assert ratio == pytest.approx(1, abs=0.15)  # within 0.03 at the recipes' sizes
    # two ranks send each other half of what a collective carries
    assert step_seconds(policy_works(sharded), 2, Rates(1.0, 10.0)).sending == pytest.approx(
        sum(size for work in policy_works(sharded).values() for size in work.bytes.values())
        / (2 * 10e9),
        rel=1e-3,
    )
    assert "bound by sending" in simulation_lines(sharded, arithmetic, Rates(1e6, 0.1))


@pytest.mark.night  # what it prints: test_what_is_printed
def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On another number of ranks than the config's, and with the step's rates alone: no hours."""
    config = mid_size_config(folder, *TWO_RANKS, POLICY_ALONE)
    run(config, simulate_ranks=1, sustained_tflops=1.0, interconnect_gb_s=10.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("simulated peak 0.")
    assert "as one of 1 ranks" in "".join(lines)
    assert "bound by computing" in lines[-2]
    assert not any(line.startswith("hours") for line in lines)


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        ((), {"simulate_ranks": 0}, "at least 1"),
        ((), {"simulate_ranks": 2}, "2 processes need trainer.strategy=fsdp"),
        (TWO_RANKS, {"simulate_ranks": 3}, "make it a multiple of 3"),
        ((), {"simulate_ranks": 1, "interconnect_gb_s": 50.0}, "needs --sustained_tflops"),
        ((), {"interconnect_gb_s": 50.0}, "give --simulate_ranks N"),
        (
            (*TWO_RANKS, "trainer.accelerator=gpu", "trainer.cpu_offload=true"),
            {"simulate_ranks": 2},
            "set trainer.cpu_offload=false",
        ),
        (
            ("critic.attn_implementation=flash_attention_2",),
            {"simulate_ranks": 1},
            "set critic.attn_implementation=sdpa",
        ),
    ],
)
def test_what_is_refused(
    folder: Path, overrides: tuple[str, ...], options: dict[str, float], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run(mid_size_config(folder, *overrides), **options)  # type: ignore[arg-type]


@pytest.mark.night
@pytest.mark.parametrize("budget", [128, 10_000], ids=["many", "one each"])
def test_several_critics_beside_the_arithmetic(folder: Path, budget: int) -> None:
    """Each has micro-batches and a gradient of its own, and all lie there to the last."""
    config = mid_size_config(folder, "critic.count=2", f"training.microbatch_tokens={budget}")
    simulation, estimate = simulate(config), estimated(config)
    assert simulation.microbatches == (
        {"actor": 8, "critic": 8} if budget == 128 else {"actor": 1, "critic": 2}
    )
    found = stage_bytes(simulation, estimate)
    assert {s: a / b for s, (b, a) in found.items()} == {
        stage: pytest.approx(1, abs=0.05) for stage in found
    }
    one = simulate(mid_size_config(folder, f"training.microbatch_tokens={budget}"))
    more = {  # of each part of a critic update, beyond that of one critic
        part: size - one.peaks[POLICY, "critic update"][part]
        for part, size in simulation.peaks[POLICY, "critic update"].items()
    }
    layer, root = layers_of(folder)
    critic = 4 * (LAYERS * layer + root - VOCAB * 256 + 256)
    assert more["weights"] == pytest.approx(critic, rel=0.01)
    assert more["optimizer states"] == pytest.approx(2 * critic, rel=0.01)
    assert more["gradients"] == pytest.approx(critic, rel=0.01)


# ---- the recipes at their real sizes ----------------------------------------------------------

RECIPES = {
    "smollm2_cpu": "smollm2_135m",
    "smollm2_gpu": "smollm2_135m",
    "gsm8k_qwen2.5_0.5b": "qwen2.5_0.5b",
    "sao_environment_qwen2.5_0.5b": "qwen2.5_0.5b",
    "dapo_math_qwen2.5_7b": "qwen2.5_7b",
    "dapo_math_qwen2.5_7b_lora": "qwen2.5_7b",
    "dapo_math_qwen2.5_7b_instruct": "qwen2.5_7b",
    "gsm8k_qwen3_0.6b": "qwen3_0.6b",
    "gsm8k_qwen3_1.7b": "qwen3_1.7b",
    "dapo_math_qwen3_4b": "qwen3_4b",
    "paper_qwen2.5_32b": "qwen2.5_32b",
}
SCALES = {  # overlays of conf/scale, over GSM8K
    "own_model_cpu": "smollm2_135m",
    "own_model_gpu": "qwen2.5_0.5b",
    "one_gpu": "qwen2.5_1.5b",
    "fsdp_8gpu": "qwen2.5_7b",
}


def recipe(name: str, folder: Path, num_layers: int | None = None, *overrides: str) -> FitConfig:
    """A recipe with the shape of its model, of fewer layers if so many are given."""
    shapes = RECIPES | SCALES
    shape = json.loads((ROOT / f"models/shapes/{shapes[name]}/config.json").read_text())
    if num_layers is not None:
        shape["num_hidden_layers"] = num_layers
        if shape.get("layer_types"):
            shape["layer_types"] = shape["layer_types"][:num_layers]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape))
    paths = (f"actor.path={folder}", "critic.init=policy")
    files = (
        [f"recipes/{name}.yaml"] if name in RECIPES else ["data/gsm8k.yaml", f"scale/{name}.yaml"]
    )
    config = load_config(FitConfig, [ROOT / "conf" / one for one in files], [*paths, *overrides])
    if config.trainer.precision == "auto":
        config = replace(config, trainer=replace(config.trainer, precision="bf16-mixed"))
    return config


def ratios(config: FitConfig) -> dict[str, float]:
    """Of every stage of a policy step, the arithmetic's bytes to the simulation's."""
    found = stage_bytes(simulate(config), estimated(config))
    return {stage: arithmetic / simulated for stage, (simulated, arithmetic) in found.items()}


@pytest.mark.night
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [*RECIPES, *SCALES])
def test_every_recipe_at_its_real_size(name: str, tmp_path: Path) -> None:
    """All layers, all ranks: the arithmetic is within 10 % in every stage of the step."""
    found = ratios(recipe(name, tmp_path / "shape"))
    assert found.keys() >= {"actor update", "critic update", "optimizer step"}
    assert found == {stage: pytest.approx(1, abs=0.1) for stage in found}


@pytest.mark.night
def test_work_is_linear_in_layers(tmp_path: Path) -> None:
    """What lets few layers stand for many, of FLOPs and collectives; memory has other peaks."""
    works = [
        policy_works(simulate(recipe("paper_qwen2.5_32b", tmp_path / str(n), n))) for n in (2, 4, 7)
    ]
    for name in ("actor", "critic"):
        two, four, seven = (found[name] for found in works)
        assert seven.flops == pytest.approx(four.flops + 1.5 * (four.flops - two.flops), rel=1e-9)
        for kind, size in seven.bytes.items():
            assert size == four.bytes[kind] + 3 * (four.bytes[kind] - two.bytes[kind]) // 2
            assert seven.numbers[kind] == (
                four.numbers[kind] + 3 * (four.numbers[kind] - two.numbers[kind]) // 2
            )


@pytest.mark.night
def test_adapters_of_32b_on_64_ranks(tmp_path: Path) -> None:
    """They alone are reduced and have moments; the arithmetic is within 10 % of their step."""
    adapters = ("actor.lora.rank=32", "critic.lora.rank=32")
    config = recipe("paper_qwen2.5_32b", tmp_path / "shape", 4, *adapters)
    simulation = simulate(config)
    actor = policy_works(simulation)["actor"]
    hidden, inner, keys = 5120, 27648, 1024
    # of seven modules in each of 4 layers
    of_a = 4 * 32 * (6 * hidden + inner)
    of_b = 4 * 32 * (3 * hidden + 2 * keys + 2 * inner)
    # the 32 rows of A lie on every second rank, and are padded on their way to them
    assert actor.bytes["reduce-scatter"] == 8 * 4 * (2 * of_a + of_b)
    states = simulation.peaks[POLICY, "at rest"]["optimizer states"]
    assert states == pytest.approx(2 * 2 * 4 * (of_a / 32 + of_b / 64), rel=0.01)
    found = stage_bytes(simulation, estimated(config))
    update = [arithmetic / simulated for simulated, arithmetic in found.values()][:2]
    assert update == [pytest.approx(1, abs=0.1)] * 2


@pytest.mark.night
@pytest.mark.parametrize("system", [*CRITIC_FREE, *WITH_CRITIC])
def test_every_system_has_a_step_without_values(system: str) -> None:
    """No loss reads a number that fakes do not have."""
    simulation = simulate(system_config(system))
    assert (POLICY, "actor update") in simulation.peaks
