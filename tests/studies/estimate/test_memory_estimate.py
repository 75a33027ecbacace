"""The estimate against real passes of the real module, and its arithmetic over processes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.networks.architectures import HYBRIDS
from tests.networks.windowed_models import windowed_model
from tests.studies.estimate.memory_measurement import (
    LAYERS,
    VOCAB,
    measure,
    mid_size_config,
)
from tests.studies.estimate.remembered_passes import remembered_passes
from tests.systems import system_config
from tests.tiny_model import tiny_model
from vapo.commands.estimate import continuations_line, disk_line, memory_verdict, run, stage_table
from vapo.config import FitConfig
from vapo.config.continuation_rules import most_continuations
from vapo.errors import DoesNotFit, UserError
from vapo.studies.estimate import network_bytes as network_module
from vapo.studies.estimate.memory import MemoryEstimate, estimate_memory
from vapo.studies.estimate.memory_changes import FittingChanges, MemoryChange
from vapo.studies.estimate.memory_tracker import MemoryTracker
from vapo.studies.estimate.passes import FakeNetwork, NetworkPasses
from vapo.studies.estimate.shapes import NetworkShape
from vapo.studies.estimate.sizes import worst_microbatch
from vapo.system.host_memory import GIB

CHECKPOINTING = ("actor.gradient_checkpointing=true", "critic.gradient_checkpointing=true")
FULL_ROWS = "training.microbatch_tokens=512"  # four, padded
EAGER = ("actor.attn_implementation=eager", "critic.attn_implementation=eager")


@pytest.fixture(scope="module")
def config(folder: Path) -> FitConfig:
    return mid_size_config(folder)


@pytest.fixture(autouse=True)
def each_pass_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_module, "NetworkPasses", remembered_passes)


@cache
def estimate(folder: Path, *overrides: str) -> MemoryEstimate:
    """Of the model in the folder; several tests need the same one."""
    config = mid_size_config(folder, *overrides)
    model = AutoConfig.from_pretrained(config.actor.path)
    critic = AutoConfig.from_pretrained(config.actor.path)
    return estimate_memory(config, actor=model, critic=critic)


def totals(folder: Path, *overrides: str) -> dict[str, float]:
    """Without the engine's own copy of the weights: what is measured has no engine."""
    stages = estimate(folder, *overrides).stages
    return {
        stage: sum(size for part, size in parts.items() if part != "engine's weights")
        for stage, parts in stages.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        pytest.param(("training.packing=padded", FULL_ROWS), marks=pytest.mark.night),
        pytest.param(CHECKPOINTING, marks=pytest.mark.night),
        pytest.param((*EAGER, FULL_ROWS), marks=pytest.mark.night),
        pytest.param(("trainer.precision=bf16-mixed",), marks=pytest.mark.night),
        pytest.param(("critic.frozen=[self_attn.,mlp.]",), marks=pytest.mark.night),
        pytest.param(("critic.lora.rank=4",), marks=pytest.mark.night),
    ],
    ids=[
        "shared prompts",
        "padded",
        "activation checkpointing",
        "eager",
        "bf16-mixed",
        "frozen critic",
        "critic's adapters",
    ],
)
def test_within_15_percent_of_a_measured_minibatch(
    folder: Path, overrides: tuple[str, ...]
) -> None:
    expected = totals(folder, *overrides)
    measured = measure(mid_size_config(folder, *overrides))
    update = max(expected["actor update"], expected["critic update"])
    assert update == pytest.approx(measured["update"], rel=0.15)
    assert expected["log-probs"] == pytest.approx(measured["log-probs"], rel=0.15)


# ---- counting ---------------------------------------------------------------------------------


def test_tracker_counts_what_is_alive_at_once() -> None:
    given = torch.zeros(1000)
    with MemoryTracker() as tracker:
        a = torch.zeros(100)  # 400 bytes
        b = a + 1  # 800
        view = b.view(10, 10)  # the same storage
        del a, b
        assert tracker.live == 400
        given.add_(1)  # made before: never counted
        del view
        assert (tracker.live, tracker.peak) == (0, 800)


def test_tracker_counts_what_autograd_keeps() -> None:
    x = torch.ones(100, requires_grad=True)
    with MemoryTracker() as tracker:
        y = (x.exp() * 2).sum()  # exp's result is kept for its backward
        assert 400 <= tracker.live <= 400 + 64
        y.backward()
        assert x.grad is not None
        del y
        assert tracker.live == 400  # the gradient


@pytest.mark.night
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_a_deep_network_is_extrapolated_exactly(gradient_checkpointing: bool) -> None:
    config = tiny_model(num_hidden_layers=7).config
    shape = NetworkShape(
        "causal_lm", config, "float32", "sdpa", gradient_checkpointing, False, False
    )
    passes, whole = NetworkPasses(shape), FakeNetwork(shape)
    lengths = {"rows": 3, "prompt_tokens": 5, "response_tokens": 11}
    decoding: dict[str, Any] = {"rows": 3, "width": 20, "top_k": 0, "top_p": 0.7}
    assert passes.run(FakeNetwork.update, **lengths) == whole.update(**lengths)
    assert passes.run(FakeNetwork.evaluation, **lengths) == whole.evaluation(**lengths)
    assert passes.run(FakeNetwork.decode, **decoding) == whole.decode(**decoding)


def test_the_cache_of_a_layer_with_a_window_keeps_all_tokens() -> None:
    """As the sampler's: 2 layers, keys and values, 3 rows, 2 heads, 20 tokens of 8 float32."""
    config = windowed_model("gemma3").config
    network = FakeNetwork(NetworkShape("causal_lm", config, "float32", "sdpa", False, False, False))
    decoded = network.decode(rows=3, width=20, top_k=0, top_p=0.7)
    assert decoded.kept_bytes == 2 * 2 * 3 * 2 * 20 * 8 * 4


def test_the_cache_of_recurrent_layers_has_their_states() -> None:
    """LFM2: 2 layers with keys and values as above, and 2 with 3 tokens of 32 float32 a row."""
    config = next(family for family in HYBRIDS if family.name == "LFM2").config()
    network = FakeNetwork(NetworkShape("causal_lm", config, "float32", "sdpa", False, False, False))
    decoded = network.decode(rows=3, width=20, top_k=0, top_p=0.7)
    assert decoded.kept_bytes == 2 * 2 * 3 * 2 * 20 * 8 * 4 + 2 * 3 * 3 * 32 * 4


# ---- over processes, by hand ------------------------------------------------------------------

PARAMETERS = (
    2 * VOCAB * 256
    + 256
    + LAYERS * (3 * 256 * 1024 + 2 * 256 * 256 + 2 * 256 * 128 + 256 + 2 * 128 + 2 * 256)
)
FSDP = ("trainer.strategy=fsdp", "trainer.devices=2", "trainer.precision=bf16-mixed")


@pytest.mark.slow
def test_parameters_are_counted_on_the_networks(folder: Path) -> None:
    counts = estimate(folder).parameters
    assert counts["actor"] == PARAMETERS
    assert counts["critic"] == PARAMETERS - VOCAB * 256 + 256  # a value head for lm_head


def test_a_head_that_reads_logprobs_counts_as_a_plain_one(folder: Path) -> None:
    assert totals(folder, "critic.sampled_logprobs={}") == totals(folder)


@pytest.mark.slow
def test_a_wide_head_counts_with_its_logits(folder: Path) -> None:
    """Weights and biases of K outputs, and K float32 numbers a token, kept for the backward."""
    head = ("critic.head.kind=categorical", "critic.loss=cross_entropy")
    plain, wide = estimate(folder), estimate(folder, *head)
    hidden, bins = AutoConfig.from_pretrained(folder).hidden_size, 101
    more = wide.parameters["critic"] - plain.parameters["critic"]
    assert more == (bins - 1) * hidden + bins
    config = mid_size_config(folder, *head)
    lengths = worst_microbatch(config, 10**6)
    tokens = lengths.rows * lengths.response_tokens
    kept = [e.stages["critic update"]["activations"] for e in (plain, wide)]
    assert kept[1] - kept[0] > 4 * bins * tokens
    assert wide.stages["actor update"]["activations"] == plain.stages["actor update"]["activations"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "copies"),
    [
        pytest.param((), 1, marks=pytest.mark.night),
        (FSDP, 1),
        ((*FSDP, "trainer.sharded_checkpoints=true"), 0.5),
    ],
    ids=["one process", "one file of two", "shards of two"],
)
def test_the_copy_of_a_checkpoint_is_in_host_memory(
    folder: Path, overrides: tuple[str, ...], copies: float
) -> None:
    """Weights and two moments in float32, of both networks."""
    numbers = estimate(folder, *overrides, "checkpoints.save_in_background=true")
    total = numbers.parameters["actor"] + numbers.parameters["critic"]
    assert list(numbers.host.values()) == [12 * total * copies]
    assert numbers.checkpoint == 12 * total
    assert ("first process only" in stage_table(numbers)) == (copies == 1 and bool(overrides))
    assert not estimate(folder, *overrides).host
    by_default = estimate(folder, *overrides, "trainer.accelerator=gpu")
    assert by_default.host == numbers.host


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        (("kind=tokens", "num_tokens=4"), (3, 18, 54, 252)),  # after 4 and 8 of 10 tokens
        (("max_segments=4",), (4, 26, 78, 444)),  # after 2, 5 and 7
        (("max_segments=1",), (1, 2, 6, 60)),  # the prompts alone
    ],
)
def test_how_much_vine_samples_beside_the_responses(
    segments: tuple[str, ...], expected: tuple[int, ...]
) -> None:
    """Of 2 prompts with 4 responses of 10 tokens, 3 times."""
    sizes = ("num_prompts=2", "group_size=4")
    config = system_config(
        "vineppo",
        *(f"components.group_sampling.{size}" for size in sizes),
        *("training.minibatch_size=8", "rollouts.max_response_tokens=10"),
        "algorithm.vine_continuations=3",
        *(f"algorithm.vine_segments.{segment}" for segment in segments),
    )
    continued = most_continuations(config)
    assert continued == expected
    assert continued is not None
    line = continuations_line(config, continued)
    assert f"{expected[3]} more sampled tokens" in line
    assert f"{expected[3] / 80:.1f} times the responses' own 80," in line
    assert most_continuations(system_config("grpo")) is None


VINE = (
    "algorithm.advantage_estimator=vine",
    *(f"components.{name}.enabled=false" for name in ("value_pretraining", "decoupled_gae")),
    "components.length_adaptive_gae.enabled=false",
)


@pytest.mark.slow
def test_continuations_are_decoded_as_responses_are(folder: Path) -> None:
    """More rows at once, up to the engine's; of no more tokens each than responses have."""
    few = ("evaluation.num_prompts=1", "evaluation.k=1")
    plain, vine = (estimate(folder, *few, *own).stages["sampling"] for own in ((), VINE))
    assert vine["KV cache"] > 10 * plain["KV cache"]
    own = (*few, "rollouts.max_concurrent_sequences=8")
    plain, vine = (estimate(folder, *own, *more).stages["sampling"] for more in ((), VINE))
    assert vine["KV cache"] == plain["KV cache"]
    assert vine["logits, temporaries"] > plain["logits, temporaries"]  # a prefix is prefilled


@pytest.mark.slow
def test_shards_share_weights_and_states_and_gather_what_they_compute(folder: Path) -> None:
    each = ("trainer.reduce_every_microbatch=true", "training.microbatch_tokens=128")
    stages = estimate(folder, *FSDP, *each).stages
    update = stages["actor update"]
    assert update["actor weights"] == 4 * PARAMETERS / 2
    assert update["optimizer states"] == 2 * (update["actor weights"] + update["critic weights"])
    assert update["gradients"] == update["actor weights"]  # the critic's are gone by then
    assert stages["sampling"]["gathered weights"] == 2 * PARAMETERS  # the whole actor, in bf16
    layer = (PARAMETERS - 2 * VOCAB * 256 - 256) / LAYERS
    head = VOCAB * 256 + 256
    assert update["gathered weights"] == 2 * (head + VOCAB * 256 + 2 * layer)
    # the head's in bf16 wait for the embedding's; the layer's are reduced in float32
    assert update["gradients in reduction"] == 2 * (head + layer) + 4 * layer


@pytest.mark.slow
def test_offloaded_shards_lie_in_host_memory(folder: Path) -> None:
    offload = (
        *FSDP,
        "trainer.accelerator=gpu",
        "trainer.cpu_offload=true",
        "checkpoints.save_in_background=false",
    )
    one_reduction = "trainer.reduce_every_microbatch=true"
    found = estimate(folder, *offload, one_reduction)
    critic = PARAMETERS - VOCAB * 256 + 256
    shards = 4 * (PARAMETERS + critic) / 2
    assert sum(found.host.values()) == 4 * shards  # weights, gradients, two states
    assert found.host["gradients"] == shards
    update = found.stages["actor update"]
    assert not {"actor weights", "optimizer states"} & update.keys()
    assert update["gradients"] == 0
    assert sum(found.stages["optimizer step"].values()) == 0
    kept = estimate(folder, *FSDP, one_reduction).stages["actor update"]
    shard_of_a_layer = 4 * (PARAMETERS - 2 * VOCAB * 256 - 256) / LAYERS / 2
    assert update["gathered weights"] == kept["gathered weights"] + shard_of_a_layer
    # without a reduction each micro-batch the whole gradients stay on the GPU
    whole = estimate(folder, *offload, "training.microbatch_tokens=128").stages
    assert whole["actor update"]["gradients"] == 4 * PARAMETERS
    assert whole["critic update"]["gradients"] == 4 * critic
    assert "host memory, GiB of each process: 0.0751 (actor weights 0.0113" in stage_table(found)
    assert "host memory" not in stage_table(estimate(folder, *FSDP))


@pytest.mark.slow
def test_gradients_are_whole_until_the_last_microbatch(folder: Path) -> None:
    whole = estimate(folder, *FSDP, "training.microbatch_tokens=128").stages
    assert whole["actor update"]["gradients"] == 4 * PARAMETERS
    # of one micro-batch they come as its activations go: together they are never more
    one = estimate(folder, *FSDP, "training.microbatch_tokens=100000").stages["actor update"]
    passing = one["activations"] + one["logits, temporaries"]
    assert one["gradients"] == max(4 * PARAMETERS / 2 - passing, 0)


def test_cache_has_two_tensors_a_layer(folder: Path) -> None:
    sampling = estimate(folder).stages["sampling"]
    rows, width = 512, 32 + 96 + 64  # state tracking evaluates 128 x 8 responses, 512 at a time
    assert sampling["KV cache"] == rows * width * LAYERS * 2 * (2 * 64) * 4


FEW_ROWS = ("evaluation.num_prompts=1", "evaluation.k=1")
AHEAD = "training.max_staleness=2"


@pytest.mark.slow
def test_what_samples_ahead_stays_while_the_networks_train(folder: Path) -> None:
    """A second actor, and the caches of the iterations that are under way together."""
    plain, ahead = (estimate(folder, *FEW_ROWS, *own).stages for own in ((), (AHEAD,)))
    cache = 3 * 8 * (32 + 96 + 64) * LAYERS * 2 * (2 * 64) * 4  # 3 iterations of 8 responses
    assert plain["sampling"]["KV cache"] == cache / 3
    assert ahead.keys() == plain.keys()
    for stage, parts in ahead.items():
        assert parts["engine's weights"] == 4 * PARAMETERS, stage
        assert parts["KV cache"] == parts["KV cache, second copy"] == cache, stage
        assert parts["logits, temporaries, sampling ahead"] > 0, stage
    for stage in plain.keys() - {"sampling"}:
        assert {name: ahead[stage][name] for name in plain[stage]} == plain[stage]
    elsewhere = ("rollouts.engine=vllm_server", "rollouts.servers.urls=http://gpu2:8100", AHEAD)
    assert "engine's weights" not in estimate(folder, *elsewhere).stages["actor update"]


def test_caches_of_episodes_that_wait_for_their_environment_count(folder: Path) -> None:
    environment = ("environment.kind=function", "environment.function=m:E")
    plain, episodes = (estimate(folder, *own).stages["sampling"] for own in ((), environment))
    assert episodes["KV cache, between turns"] == 512 * (32 + 96) * LAYERS * 2 * (2 * 64) * 4
    assert episodes["KV cache"] == plain["KV cache"]
    assert plain["KV cache, between turns"] == 0


VLLM = ("rollouts.engine=vllm", "rollouts.vllm.kv_cache_memory_bytes=1000000")


@pytest.mark.slow
def test_a_vllm_engine_holds_the_weights_once_more(folder: Path) -> None:
    stages = estimate(folder, *VLLM).stages
    assert stages["sampling"]["vLLM weights"] == 4 * PARAMETERS
    assert stages["sampling"]["vLLM KV cache"] == 1e6
    assert "vLLM weights" not in stages["actor update"], "it sleeps"
    awake = estimate(folder, *VLLM, "rollouts.vllm.sleep_level=0").stages
    assert awake["actor update"]["vLLM weights"] == 4 * PARAMETERS
    servers = ("rollouts.engine=vllm_server", "rollouts.servers.urls=http://gpu2:8100")
    elsewhere = estimate(folder, *servers).stages["sampling"]
    assert elsewhere.keys() == {"actor weights", "critic weights", "optimizer states"}
    with pytest.raises(UserError, match=r"rollouts\.vllm\.kv_cache_memory_bytes is null"):
        estimate(folder, VLLM[0])


def test_reference_model_counts(folder: Path) -> None:
    kl = ("algorithm.kl.coef=0.1", "algorithm.kl.placement=loss")
    stages = estimate(folder, *kl).stages
    assert stages["actor update"]["reference weights"] == 4 * PARAMETERS


@pytest.mark.parametrize(
    ("budget", "rows", "expected"),
    [
        (100, 16, (1, 32, 96, 1)),
        (512, 2, (2, 32, 96, 2)),
        (512, 16, (4, 32, 96, 4)),
        (300, 16, (3, 25, 75, 3)),
    ],
)
def test_worst_microbatch(
    config: FitConfig, budget: int, rows: int, expected: tuple[int, int, int, int]
) -> None:
    """One response may exceed the budget; shorter ones may fill it."""
    training = replace(config.training, microbatch_tokens=budget)
    assert worst_microbatch(replace(config, training=training), rows) == expected


@pytest.mark.parametrize(
    ("budget", "rows", "expected"),
    [
        (100, 8, (1, 32, 96, 1)),
        (1000, 8, (8, 32, 96, 2)),  # 832 tokens: two prompts, two groups of 4
        (160, 1, (1, 32, 96, 1)),
        (416, 8, (4, 32, 96, 1)),  # a whole group
        (320, 8, (3, 32, 96, 1)),  # most of one
        (600, 8, (8, 23, 69, 2)),  # two groups of shorter ones, 598 tokens
    ],
)
def test_worst_microbatch_where_prompts_are_shared(
    config: FitConfig, budget: int, rows: int, expected: tuple[int, int, int, int]
) -> None:
    training = replace(config.training, microbatch_tokens=budget)
    config = replace(config, training=training)
    assert worst_microbatch(config, rows, shares_prompts=True) == expected


@pytest.mark.slow
def test_a_shared_prompt_takes_its_memory_once(folder: Path) -> None:
    """Of 2 prompts and 8 responses in one micro-batch 832 tokens of 1,024 are computed."""
    whole = "training.microbatch_tokens=100000"
    kept = [
        estimate(folder, whole, f"training.packing={layout}").stages["actor update"]["activations"]
        for layout in ("packed", "shared_prompts")
    ]
    assert 832 / 1024 < kept[1] / kept[0] < 0.9  # a response keeps the keys of its prompt


@pytest.mark.night
def test_where_rows_are_padded_no_prompt_is_shared(folder: Path) -> None:
    whole = "training.microbatch_tokens=100000"
    eager = [
        estimate(folder, whole, *more).stages
        for more in (EAGER, (*EAGER, "training.packing=padded"))
    ]
    assert eager[0] == eager[1]


# ---- the command ------------------------------------------------------------------------------


def test_it_fits_or_not() -> None:
    estimate = MemoryEstimate({"a": {"x": 10.0 * GIB, "y": GIB}, "b": {"x": GIB}}, {"actor": 1}, 1)
    assert estimate.peak == 11 * GIB
    assert memory_verdict(estimate, 80).startswith("fits in 80 GiB, of which 1.5 are left to CUDA")
    assert "67.5 GiB to spare" in memory_verdict(estimate, 80)
    assert memory_verdict(estimate, 12).endswith("0.5 GiB are missing")


@pytest.mark.parametrize(("keep", "kept", "most"), [(None, 1, "6.0"), (3, 3, "10.0")])
def test_what_checkpoints_take_on_the_disk(
    config: FitConfig, keep: int | None, kept: int, most: str
) -> None:
    config = replace(config, checkpoints=replace(config.checkpoints, keep=keep))
    said = disk_line(config, MemoryEstimate({}, {}, 1, checkpoint=2.0 * GIB))
    assert said.startswith(f"disk: 2.0 GiB for a checkpoint, up to {most} GiB in output_dir")
    assert f"the newest {kept} (checkpoints.keep), the best and one" in said


def test_a_config_that_does_not_fit_says_what_would_and_ends_with_code_4(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[float] = []

    def one_change(config: FitConfig, most_bytes: float, peak_of: Any) -> list[FittingChanges]:
        asked.append(most_bytes)
        assert peak_of(config) > most_bytes
        return [FittingChanges([MemoryChange({"seed": 1}, "nothing")], [GIB])]

    monkeypatch.setattr("vapo.commands.estimate.changes_that_fit", one_change)
    with pytest.raises(DoesNotFit) as error:
        run(mid_size_config(folder), gpu_memory_gib=1.5078125)
    assert (error.value.exit_code, str(error.value)) == (4, "")
    assert asked == [GIB / 128], "1.5 GiB are CUDA's"
    printed = capsys.readouterr().out
    assert "does not fit in 1.50781 GiB, of which 1.5 are left to CUDA and its libraries" in printed
    assert printed.endswith("this change alone lets it fit:\n  seed=1    1.0 GiB  nothing\n")


@pytest.mark.slow
def test_a_folder_with_config_json_alone_will_do(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    run(mid_size_config(tmp_path), gpu_memory_gib=80)
    out = capsys.readouterr().out
    assert "parameters: actor 6.1 M, critic 4.0 M; 1 process" in out
    assert out.splitlines()[-1].startswith("fits in 80 GiB")


def test_a_hub_id_that_is_not_here_is_one_clear_error(tmp_path: Path) -> None:
    config = mid_size_config(tmp_path, "actor.path=no-such-owner/model")
    with pytest.raises(UserError, match=r"hub id[^$]*--model_config FILE"):
        run(config)
    with pytest.raises(UserError, match=r"--model_config: no config\.json at"):
        run(config, model_config=tmp_path / "config.json")
