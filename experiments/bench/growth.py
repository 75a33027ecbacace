"""How an update's time grows with its tokens: it should be in proportion.

    python experiments/bench/growth.py [--device cuda] [--repeats 5]

*responses*: a minibatch of 1 to 16 times as many responses of one length, whole networks with their
attention. *T*: one response of 512 to 32k tokens, with attention left out (it hands the values
through), since attention alone grows faster. Each is forward and backward of an actor and a
critic, the chunked log-probs, decoupled GAE, and the policy and value losses. Each row is the time
for each token, and that as a multiple of the first row's.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from measuring import Claim, Report, alternate, arguments, setting, start  # beside this file
from torch import Tensor
from transformers import (
    AttentionInterface,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from vapo.functional.advantages import decoupled_gae
from vapo.functional.losses import aggregate, clipped_surrogate, value_loss
from vapo.networks.actor_critic import Actor, Critic
from vapo.networks.forward_passes import cut_by_tokens
from vapo.networks.layouts import enable_packing
from vapo.networks.token_inputs import token_inputs

LENGTHS = (512, 2048, 8192, 32_768)
COUNTS = (8, 16, 32, 64, 128)  # responses, 1 to 16 times the first
RESPONSE_TOKENS, MICROBATCH_TOKENS = 112, 2048
TARGET = 0.1
PROMPT = tuple(range(2, 18))


def hand_values_through(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    return value.transpose(1, 2).contiguous(), None


AttentionInterface.register("no_attention", hand_values_through)


def make_networks(device: torch.device, *, attends: bool) -> tuple[Actor, Critic]:
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
    models: list[Any] = [Qwen2ForCausalLM(config), Qwen2ForSequenceClassification(config)]
    for model in models:
        model.to(device).train()
        if attends:
            enable_packing(model)
        else:
            model.set_attn_implementation("no_attention")
    return Actor(models[0]), Critic(models[1])


def update(
    networks: tuple[Actor, Critic], num_responses: int, num_tokens: int, device: torch.device
) -> None:
    """Gradients of a minibatch of equal responses, by the trainer's own token budget."""
    actor, critic = networks
    sequence = (PROMPT, tuple(2 + i % 500 for i in range(num_tokens)))
    length = len(PROMPT) + num_tokens
    chunks = cut_by_tokens(
        [length] * num_responses,
        range(num_responses),
        max_tokens=max(MICROBATCH_TOKENS, length),
        layout="packed",
    )
    denominator = num_responses * num_tokens
    for chunk in chunks:
        rows = [sequence] * len(chunk)
        inputs = token_inputs(rows, pad_id=0, layout="packed" if len(rows) > 1 else "padded").to(
            device
        )
        logprobs = inputs.scatter(actor(inputs, temperature=1.0).logprobs)
        values = inputs.scatter(critic(inputs).values)
        mask = inputs.response_mask
        rewards = torch.zeros_like(values)
        rewards[:, -1] = 1.0
        advantages, targets = decoupled_gae(
            rewards, values.detach(), mask, gamma=1.0, lambda_policy=0.95, lambda_critic=1.0
        )
        surrogate = clipped_surrogate(
            logprobs, logprobs.detach(), advantages, eps_low=0.2, eps_high=0.28
        )
        loss = aggregate(surrogate, mask, reduction="token_mean", denominator=denominator)
        (loss + value_loss(values, targets, mask, denominator=denominator)).backward()
    for network in networks:
        network.zero_grad(set_to_none=True)


def grow(
    label: str, sizes: dict[int, tuple[int, int]], networks: tuple[Actor, Critic], repeats: int
) -> tuple[list[str], Claim]:
    """`sizes`: responses and tokens of each, by what the row is called."""
    device = next(networks[0].parameters()).device
    fewest = min(count * length for count, length in sizes.values())
    # small ones often, so that the clock sees them
    times = {size: max(1, 8 * fewest // (n * length)) for size, (n, length) in sizes.items()}

    def run(size: int) -> None:
        for _ in range(times[size]):
            update(networks, *sizes[size], device)

    sides = {str(size): lambda size=size: run(size) for size in sizes}
    seconds = alternate(sides, repeats=repeats, device=device)
    per_token = {
        size: seconds[str(size)] / times[size] / (count * length)
        for size, (count, length) in sizes.items()
    }
    base = next(iter(per_token.values()))
    rows = [
        f"| {label} {size} | {count * length} | {per_token[size] * count * length * 1e3:.1f} "
        f"| {per_token[size] * 1e6:.1f} | {per_token[size] / base:.2f}x |"
        for size, (count, length) in sizes.items()
    ]
    worst = max(took / base for took in per_token.values())
    claim = Claim(
        f"growth over {label}",
        "linear",
        "time a token at most 10 % above the smallest's",
        f"{worst:.2f}x at most",
        worst <= 1 + TARGET,
    )
    return rows, claim


def measure(options: argparse.Namespace) -> Report:
    device = start(options)
    counts: tuple[int, ...] = COUNTS
    lengths: tuple[int, ...] = LENGTHS
    if options.toy:
        counts, lengths = (1, 2), (16, 32)
    kinds = {
        "responses": ({n: (n, RESPONSE_TOKENS) for n in counts}, True),
        "T (no attention)": ({length: (1, length) for length in lengths}, False),
    }
    rows, claims = [], []
    for label, (sizes, attends) in kinds.items():
        networks = make_networks(device, attends=attends)
        more_rows, claim = grow(label, sizes, networks, options.repeats)
        rows += more_rows
        claims.append(claim)
    columns = ("size", "response tokens", "ms", "us a token", "against the first")
    return Report("Growth with the tokens", setting(options), columns, rows, claims)


def options(arguments_: list[str] | None = None) -> argparse.Namespace:
    return arguments(__doc__).parse_args(arguments_)


if __name__ == "__main__":
    print(measure(options()).text())
