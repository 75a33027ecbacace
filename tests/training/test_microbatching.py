"""Micro-batches and recomputation by the memory that there is: the choice, what is measured for it,
and that no gradient depends on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.config.fits import STATE_TRACKING
from tests.invariance.gradients import compute
from tests.judged import judged_batch
from tests.rollout_fixtures import make_rollouts
from tests.tiny_model import save_tiny_folder
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.errors import UserError
from vapo.networks.actor_critic import Actor, Critic
from vapo.networks.build import make_actor, make_critic
from vapo.networks.layouts import choose_layout
from vapo.networks.model_configs import read_model_config
from vapo.studies.estimate.memory_tracker import MemoryTracker
from vapo.studies.estimate.passes import FakeNetwork
from vapo.studies.estimate.shapes import NetworkShape
from vapo.training import microbatching
from vapo.training.microbatching import (
    KeptBytes,
    Measurement,
    MicrobatchChoice,
    Microbatching,
    choose_microbatching,
    gradients,
    has_auto,
    may_choose,
)
from vapo.types import RolloutBatch, Turn

GPU, CPU = torch.device("cuda"), torch.device("cpu")
# of n tokens 100 + 10.5 n bytes; with recomputation 50 + 2 n
KEPT = KeptBytes(100, 10, 50, 1, 0.5)
BOTH = {"actor": None, "critic": None}
AUTO = (
    "training.microbatch_tokens=auto",
    "actor.gradient_checkpointing=auto",
    "critic.gradient_checkpointing=auto",
)

SERVER = ("rollouts.engine=vllm_server", "rollouts.servers.urls=http://somewhere:8100")


def loaded(*overrides: str) -> FitConfig:
    return load_config(FitConfig, STATE_TRACKING, list(overrides))


def choice(actor: float, critic: float, **more: Any) -> Microbatching:
    """By the room of each update."""
    room = {"actor": actor, "critic": critic}
    options: dict[str, Any] = {"tokens": None, "recomputes": BOTH} | more
    return choose_microbatching({"actor": KEPT, "critic": KEPT}, room, **options)


# ---- the choice ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (688_229, (65_536, ())),  # 100 + 65,536 * 10.5 = 688,228
        (688_227, (32_768, ())),
        (172_132, (16_384, ())),
        (172_131, (65_536, ("actor", "critic"))),  # 50 + 65,536 * 2 = 131,122
        (131_121, (32_768, ("actor", "critic"))),
        (8_242, (4_096, ("actor", "critic"))),
        (10, (1_024, ("actor", "critic"))),  # the smallest, though it does not fit
    ],
)
def test_no_recomputation_from_16384_tokens_on_else_the_largest_that_fit(
    room: float, expected: tuple[int, tuple[str, ...]]
) -> None:
    assert choice(room, room) == expected


def test_one_network_may_recompute_and_the_other_not() -> None:
    assert choice(140_000, 400_000) == (32_768, ("actor",))


def test_what_the_config_names_stays() -> None:
    assert choice(1e9, 1e9, tokens=512) == (512, ())
    assert choice(43_107, 43_108, tokens=4_096) == (4_096, ("actor",))
    always: Any = {"actor": True, "critic": False}
    assert choice(1e9, 1e9, recomputes=always) == (65_536, ("actor",))
    assert choice(50_000, 50_000, recomputes={"actor": False, "critic": False}) == (4_096, ())


def test_a_resumed_run_takes_what_it_had_while_that_fits() -> None:
    saved = Microbatching(16_384, ())
    assert choice(1e9, 1e9) == (65_536, ())
    assert choice(1e9, 1e9, saved=saved) == saved
    assert choice(172_131, 1e9, saved=saved) != saved
    assert choice(1e9, 1e9, saved=saved, tokens=2_048) == (2_048, ())
    assert choice(1e9, 1e9, saved=saved, recomputes={"actor": True, "critic": None}) != saved


def test_it_is_made_once_and_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    config, seen = loaded(*AUTO), []
    made = MicrobatchChoice(config)
    assert made.is_open
    assert made.tokens == 16_384, "until there are rollouts"
    assert made.recomputing == ("actor", "critic")
    assert made.state_dict() == {}
    measurement: Any = Measurement(config, {}, "padded", 0, GPU)

    def chosen(self: Any, batch: Any, saved: Any) -> tuple[Microbatching, str]:
        seen.append(saved)
        return Microbatching(32_768, ("critic",)), "a line"

    monkeypatch.setattr(Measurement, "chosen", chosen)
    batch: Any = made_up_batch()
    assert made.choose(batch, measurement) == "a line"
    assert not made.is_open
    assert (made.tokens, made.recomputing) == (32_768, ("critic",))
    resumed = MicrobatchChoice(config)
    resumed.load_state_dict(made.state_dict())
    assert resumed.tokens == 16_384
    resumed.choose(batch, measurement)
    assert seen == [None, (32_768, ("critic",))]


@pytest.mark.parametrize(
    ("overrides", "device", "num_processes", "expected"),
    [
        ((), GPU, 1, True),
        ((), CPU, 1, False),
        ((), GPU, 2, False),
        (("trainer.strategy=fsdp",), GPU, 1, False),
        (("training.max_staleness=1",), GPU, 1, False),
        (("training.max_staleness=1", *SERVER), GPU, 1, True),
    ],
)
def test_where_anything_is_chosen(
    overrides: tuple[str, ...], device: torch.device, num_processes: int, expected: bool
) -> None:
    found = may_choose(loaded(*AUTO, *overrides), device, num_processes=num_processes)
    assert found is expected


def test_what_is_left_open() -> None:
    assert [has_auto(loaded(one)) for one in AUTO] == [True] * 3
    assert not has_auto(loaded())
    assert not MicrobatchChoice(loaded()).is_open


def test_the_config_takes_a_number_or_the_word() -> None:
    auto = loaded(*AUTO)
    assert auto.training.microbatch_tokens == "auto"
    assert auto.training.first_microbatch_tokens == 16_384
    assert auto.actor.gradient_checkpointing == "auto"
    plain = loaded("training.microbatch_tokens=77", "actor.gradient_checkpointing=true")
    assert (plain.training.microbatch_tokens, plain.actor.gradient_checkpointing) == (77, True)
    assert plain.training.first_microbatch_tokens == 77
    for wrong, reason in (
        ("training.microbatch_tokens=outo", r"expects int\|auto, got 'outo'; did you mean auto\?"),
        ("training.microbatch_tokens=0", r"must be >= 1, got 0"),
        ("training.microbatch_tokens=1.5", r"expects int\|auto, got 1.5"),
        ("training.microbatch_tokens=null", r"expects int\|auto, got null"),
        ("actor.gradient_checkpointing=1", r"expects true\|false\|auto, got 1"),
    ):
        with pytest.raises(UserError, match=reason):
            loaded(wrong)


# ---- what is measured ---------------------------------------------------------------------------


def made_up_batch() -> RolloutBatch:
    """All prompts of 6 tokens, and all responses of 12."""
    drawn, verdicts = make_rollouts(8, vocab_size=30)
    same: Any = {
        "response_ids": (3,) * 12,
        "rollout_logprobs": (-1.0,) * 12,
        "turns": (Turn(0, 12),),
    }
    rollouts = [
        replace(r, prompt=replace(r.prompt, prompt_ids=(2, 3, 4, 5, 6, 7)), **same) for r in drawn
    ]
    batch: RolloutBatch = judged_batch(
        rollouts, verdicts, rewards=loaded().rewards, max_response_tokens=32
    )
    return batch


def test_bytes_a_token_are_those_of_the_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of `vapo estimate`, which runs the same passes on tensors without values."""
    path = str(save_tiny_folder(tmp_path / "policy"))
    config = loaded(f"actor.path={path}", "critic.init=policy")
    networks: dict[str, Actor | Critic] = {
        "actor": make_actor(config, None),
        "critic": make_critic(config, None),
    }
    layout = choose_layout("packed", [network.model for network in networks.values()])
    measurement = Measurement(config, networks, layout, 0, CPU)
    with MemoryTracker() as tracker:  # in the place of CUDA's count
        monkeypatch.setattr(microbatching, "allocated_bytes", lambda device: tracker.live)
        found = measurement.kept_bytes("actor", made_up_batch())
    for recomputes in (False, True):
        shape = NetworkShape(
            "causal_lm", read_model_config(path), "float32", "sdpa", recomputes, False, False
        )
        fake = FakeNetwork(shape)
        assert choose_layout("packed", [fake.backbone]) == "packed"
        sizes: dict[str, Any] = {"prompt_tokens": 6, "response_tokens": 12}
        few, more = (fake.update(rows=rows, **sizes).kept_bytes for rows in (64, 128))
        expected = (more - few) / (64 * 18)
        own = found.per_token_recomputing if recomputes else found.per_token
        assert own == pytest.approx(expected, rel=0.01)
    assert found.per_token > 3 * found.per_token_recomputing
    assert found.layer_per_token == found.per_token / 2
    weights = sum(p.numel() for p in networks["actor"].parameters())
    assert gradients(networks["actor"]) == 4 * weights


def measured_with_room_for(
    tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Microbatching, str, list[int]]:
    """The choice where a forward pass of more tokens has no room unless it recomputes; and the
    tokens of all passes. A token keeps 10 bytes, or 1."""
    path = str(save_tiny_folder(tmp_path / "policy"))
    config = loaded(f"actor.path={path}", *AUTO)
    measurement = Measurement(config, {"actor": make_actor(config, None)}, "padded", 0, CPU)
    passes: list[int] = []
    state = {"recomputes": True, "bytes": 0}

    def forward(self: Any, name: str, inputs: Any) -> torch.Tensor:
        passes.append(inputs.num_tokens)
        if not state["recomputes"] and inputs.num_tokens > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        state["bytes"] += inputs.num_tokens * (1 if state["recomputes"] else 10)
        return torch.zeros(())

    def recompute(network: Any, name: str, recomputes: bool) -> None:
        state["recomputes"] = recomputes

    monkeypatch.setattr(Measurement, "forward", forward)
    monkeypatch.setattr(microbatching, "set_recomputation", recompute)
    monkeypatch.setattr(microbatching, "allocated_bytes", lambda device: state["bytes"])
    monkeypatch.setattr(microbatching, "free_bytes", lambda device: (1e12, 1.0))
    batch = made_up_batch()
    shortest = replace(batch.rollouts[0], response_ids=(3,) * 4)  # 10 tokens of 18
    batch = replace(batch, rollouts=[*batch.rollouts[1:], shortest])
    chosen, line = measurement.chosen(batch, None)
    return chosen, line, passes


def test_a_pass_that_has_no_room_is_measured_on_the_shortest_responses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(microbatching, "_PROBE_TOKENS", 10)
    chosen, line, passes = measured_with_room_for(28, tmp_path, monkeypatch)
    assert passes == [18, 36, 18, 36, 10, 28, 10, 28]
    assert chosen == (65_536, ())
    assert "the actor keeps its activations" in line


def test_a_run_goes_on_where_there_is_no_room_to_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(microbatching, "_PROBE_TOKENS", 10)
    chosen, line, _ = measured_with_room_for(5, tmp_path, monkeypatch)
    assert chosen == (16_384, ("actor",))
    assert "no room to measure" in line


# ---- the gradient -------------------------------------------------------------------------------


@pytest.mark.parametrize(("gib", "tokens", "recomputes"), [(80.0, 1_000, False), (3.0, 40, True)])
def test_no_gradient_depends_on_it(
    monkeypatch: pytest.MonkeyPatch, gib: float, tokens: int, recomputes: bool
) -> None:
    """A large GPU and one without room, played by the CPU; through the module and the Trainer."""
    named = compute(1, 200)
    lines: list[str] = []
    describe = microbatching.describe_choice

    def noting(chosen: Microbatching, *args: Any) -> str:
        assert chosen == Microbatching(tokens, ("actor", "critic") if recomputes else ())
        lines.append(describe(chosen, *args))
        return lines[-1]

    monkeypatch.setattr(microbatching, "describe_choice", noting)
    monkeypatch.setattr(microbatching, "may_choose", lambda *args, **options: True)
    monkeypatch.setattr(microbatching, "free_bytes", lambda device: (gib * 2**30, 2**30))
    monkeypatch.setattr(microbatching, "_SPARE_BYTES", 3.4 * 2**30)
    monkeypatch.setattr(microbatching, "SIZES", (1_000, 40))
    chosen = compute(1, "auto", *AUTO[1:])
    assert len(lines) == 1
    how = "computes its layers again" if recomputes else "keeps its activations"
    assert lines[0].startswith(f"micro-batches of {tokens:,} tokens: the actor {how}, ")
    for key, gradient in named["gradients"].items():
        error = float((chosen["gradients"][key] - gradient).norm() / gradient.norm())
        assert error < 1e-5, key
