"""Seconds, shares, tokens and operations a second of an iteration, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from vapo.config.schema import TrainerConfig
from vapo.networks.actor_critic import Actor, Critic, ForwardFlops
from vapo.networks.token_inputs import token_inputs
from vapo.training.callbacks.recording import peak_tflops
from vapo.training.stage_times import StageTimes

TIMES = StageTimes(
    stages={"rollout": 4.0, "training": 5.0},
    updates={"actor_update": 3.0, "critic_update": 1.0},
    total_s=10.0,
    num_response_tokens=300.0,
    num_tokens=400.0,
    flops_per_rank=8e12,
    peak_tflops=10.0,
)


def test_what_is_in_no_stage_is_idle() -> None:
    metrics = TIMES.metrics()
    assert metrics["time/idle_s"] == 1.0
    assert metrics["time/iteration_s"] == 10.0
    assert metrics["time/actor_update_share"] == 0.3
    shares = [metrics[f"time/{stage}_share"] for stage in ("rollout", "training", "idle")]
    assert sum(shares) == pytest.approx(1.0)


def test_throughput() -> None:
    metrics = TIMES.metrics()
    assert {k: v for k, v in metrics.items() if k.startswith("throughput/")} == {
        "throughput/rollout_tokens_per_s": 75.0,
        "throughput/training_tokens_per_s": 60.0,
        "throughput/tokens_per_s": 40.0,
        "throughput/training_tflops_per_s": 2.0,
        "throughput/training_mfu": 0.2,
    }


def test_mfu_is_left_out_where_the_peak_is_not_known() -> None:
    assert "throughput/training_mfu" not in replace(TIMES, peak_tflops=None).metrics()
    cpu = torch.device("cpu")
    assert peak_tflops(TrainerConfig(precision="bf16-mixed"), "bfloat16", cpu) is None
    assert peak_tflops(TrainerConfig(peak_tflops=3.0), "float32", cpu) == 3.0


def test_a_known_gpu_has_a_peak_in_bfloat16_only(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    assert peak_tflops(TrainerConfig(precision="bf16-mixed"), "float32", gpu) == 756.0
    assert peak_tflops(TrainerConfig(), "float32", gpu) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Something 9")
    assert peak_tflops(TrainerConfig(), "bfloat16", gpu) is None


def test_the_profile_of_a_run() -> None:
    profile = StageTimes()
    assert profile.describe() == "no iteration"
    for _ in range(2):
        profile.add(TIMES)
    assert profile.describe() == (
        "training 50% (actor_update 30%, critic_update 10%), rollout 40%, idle 10%; 40 tokens/s; "
        "MFU of the updates 20.0%"
    )


def test_operations_of_a_forward_by_hand() -> None:
    """Two layers of width 8 with 2 heads of 4 channels, 1 of them for keys; MLP 12; V = 10."""
    config = Qwen2Config(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    attention = 8 * 8 + 8 + 2 * (8 * 4 + 4) + 8 * 8  # q with bias, k and v with biases, o
    layer = attention + 3 * 8 * 12 + 2 * 8  # three matrices of the MLP, two norms
    backbone = 2 * layer + 8  # and the last norm
    inputs = token_inputs([((1, 2), (3,)), ((1,), (2, 3, 4))], pad_id=0)  # 3 and 4 tokens
    expected = 2 * backbone * 7 + 2 * (8 * 10) * 4 + 2 * 2 * 8 * (3**2 + 4**2)
    assert Actor(Qwen2ForCausalLM(config)).forward_flops.count(inputs) == expected
    config.tie_word_embeddings = False
    assert Actor(Qwen2ForCausalLM(config)).forward_flops.count(inputs) == expected
    config.num_labels = 1
    critic = Critic(Qwen2ForSequenceClassification(config))
    assert critic.forward_flops.count(inputs) == expected - 2 * (80 - 8) * 4
    assert isinstance(critic.forward_flops, ForwardFlops)
