"""How an update's time grows with its tokens, attention left out: it should be in proportion.

    python experiments/bench/growth.py [--device cpu] [--repeats 5]

One response of T tokens, T from 512 to 16 times that and on to 32k: forward and backward of an
actor and a critic whose attention hands the values through, the chunked log-probs, decoupled GAE,
and the policy and value losses. The sizes alternate; each row is the time for each token, and that
as a multiple of the time for each token at 512. On CPU the seconds are those of the process, on one
thread.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from vapo.functional.advantages import decoupled_gae
from vapo.functional.losses import aggregate, clipped_surrogate, value_loss
from vapo.policies import Actor
from vapo.token_inputs import token_inputs
from vapo.values import Critic

LENGTHS = (512, 2048, 8192, 32_768)
PROMPT = tuple(range(2, 18))


def hand_values_through(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    return value.transpose(1, 2).contiguous(), None


AttentionInterface.register("no_attention", hand_values_through)


def make_networks(device: torch.device) -> tuple[Actor, Critic]:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512 if device.type == "cpu" else 151_936,
        hidden_size=64 if device.type == "cpu" else 1536,
        intermediate_size=176 if device.type == "cpu" else 8960,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=65_536,
        pad_token_id=0,
    )
    config.num_labels = 1
    models = [Qwen2ForCausalLM(config), Qwen2ForSequenceClassification(config)]
    for model in models:
        model.to(device).train().set_attn_implementation("no_attention")
    return Actor(models[0]), Critic(models[1])


def update(actor: Actor, critic: Critic, num_tokens: int, device: torch.device) -> None:
    response = tuple(2 + i % 500 for i in range(num_tokens))
    inputs = token_inputs([(PROMPT, response)], pad_id=0).to(device)
    logprobs = inputs.scatter(actor(inputs, temperature=1.0)[0])
    values = inputs.scatter(critic(inputs))
    mask = inputs.response_mask
    rewards = torch.zeros_like(values)
    rewards[:, -1] = 1.0
    advantages, targets = decoupled_gae(
        rewards, values.detach(), mask, gamma=1.0, lambda_policy=0.95, lambda_critic=1.0
    )
    surrogate = clipped_surrogate(
        logprobs, logprobs.detach(), advantages, eps_low=0.2, eps_high=0.28
    )
    loss = aggregate(surrogate, mask, reduction="token_mean", denominator=num_tokens)
    (loss + value_loss(values, targets, mask, denominator=num_tokens)).backward()
    for network in (actor, critic):
        network.zero_grad(set_to_none=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    networks = make_networks(device)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    seconds: dict[int, list[float]] = {length: [] for length in LENGTHS}
    for round_ in range(options.repeats + 1):
        for length in LENGTHS:
            times = max(1, 8192 // length)  # short ones often, so that the clock sees them
            start = clock()
            for _ in range(times):
                update(*networks, length, device)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if round_:
                seconds[length].append((clock() - start) / times)
    print(f"torch {torch.__version__}, {platform.machine()}, {device.type}, one CPU thread,")
    print(f"median of {options.repeats}, sizes alternating\n")
    print("| T | ms | us a token | against T = 512 |")
    print("|---|---|---|---|")
    base = statistics.median(seconds[LENGTHS[0]]) / LENGTHS[0]
    for length in LENGTHS:
        took = statistics.median(seconds[length])
        per_token = took / length
        print(f"| {length} | {took * 1e3:.1f} | {per_token * 1e6:.1f} | {per_token / base:.2f}x |")


if __name__ == "__main__":
    main()
