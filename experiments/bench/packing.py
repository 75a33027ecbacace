"""Update on responses of unequal lengths: packed against the same code padded.

    python experiments/bench/packing.py [--device cuda] [--repeats 5]

Response lengths are log-normal with sigma 1. Three layouts of the same minibatch, each by the
trainer's own token budget: packed into rows; padded, sorted by length (what `padded` does); and
padded in random order. All do the same forward and backward of an actor and a critic and one
AdamW step of each, and must come to the same gradient.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import torch
from measuring import Claim, Report, alternate, arguments, setting, start  # beside this file
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from vapo.networks.actor_critic import Actor, Critic
from vapo.networks.forward_passes import cut_by_tokens
from vapo.networks.layouts import choose_layout
from vapo.networks.token_inputs import Layout, Sequences, TokenInputs, token_inputs

# hidden size, layers, heads, responses, median response, longest response, token budget
CPU_CASES = ((96, 3, 4, 64, 60, 500, 4096), (256, 4, 4, 24, 90, 800, 4096))
GPU_CASES = ((1536, 28, 12, 64, 512, 8192, 32768),)
TOY_CASES = ((32, 2, 4, 8, 12, 40, 128),)
TARGET = 2.0


def make_sequences(num: int, median: int, longest: int, vocab_size: int) -> Sequences:
    draw = random.Random(0)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocab_size) for _ in range(length))

    return [
        (
            ids(draw.randint(8, 24)),
            ids(min(longest, max(1, round(draw.lognormvariate(0, 1) * median)))),
        )
        for _ in range(num)
    ]


def cut_in_random_order(lengths: list[int], max_tokens: int) -> list[list[int]]:
    chunks: list[list[int]] = []
    for row in random.Random(1).sample(range(len(lengths)), len(lengths)):
        grown = [*(chunks[-1] if chunks else []), row]
        if chunks and max(lengths[r] for r in grown) * len(grown) <= max_tokens:
            chunks[-1] = grown
        else:
            chunks.append([row])
    return chunks


def make_networks(hidden: int, layers: int, heads: int, device: torch.device) -> list[nn.Module]:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64 if device.type == "cpu" else 151_936,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=32_768,
        pad_token_id=0,
        dtype="float32" if device.type == "cpu" else "bfloat16",
    )
    config.num_labels = 1
    models: list[Any] = [Qwen2ForCausalLM(config), Qwen2ForSequenceClassification(config)]
    for model in models:
        model.to(device, getattr(torch, str(config.dtype).removeprefix("torch."))).train()
    assert choose_layout("packed", models) == "packed"
    return [Actor(models[0]), Critic(models[1])]


def update(networks: list[Any], chunks: list[TokenInputs], device: torch.device) -> float:
    """One minibatch; the norm of both gradients together."""
    squares = 0.0
    for network in networks:
        for chunk in chunks:
            inputs = chunk.to(device)
            if isinstance(network, Actor):
                output = network(inputs, temperature=1.0)
                loss = (output.logprobs - 0.01 * output.entropy).sum()
            else:
                loss = (network(inputs).values - 1.0).square().sum()
            loss.backward()
        squares += float(nn.utils.clip_grad_norm_(network.parameters(), 1.0)) ** 2
        network.optimizer.step()
        network.optimizer.zero_grad(set_to_none=True)
    return squares**0.5


def compare(
    case: tuple[int, ...], device: torch.device, repeats: int
) -> tuple[list[str], list[Claim]]:
    hidden, layers, heads, num, median, longest, budget = case
    networks: list[Any] = make_networks(hidden, layers, heads, device)
    for network in networks:
        # so small a step that every repetition sees the same weights
        network.optimizer = torch.optim.AdamW(network.parameters(), lr=1e-12, weight_decay=0.0)
    sequences = make_sequences(num, median, longest, 64)
    lengths = [len(prompt) + len(response) for prompt, response in sequences]

    def inputs(chunks: list[list[int]], layout: Layout) -> list[TokenInputs]:
        return [token_inputs([sequences[r] for r in c], pad_id=0, layout=layout) for c in chunks]

    def cut(layout: Layout) -> list[TokenInputs]:
        return inputs(cut_by_tokens(lengths, range(num), max_tokens=budget, layout=layout), layout)

    layouts = {
        "packed": cut("packed"),
        "padded, by length": cut("padded"),
        "padded, random order": inputs(cut_in_random_order(lengths, budget), "padded"),
    }
    norms = {name: update(networks, chunks, device) for name, chunks in layouts.items()}
    sides = {
        name: lambda chunks=chunks: update(networks, chunks, device)
        for name, chunks in layouts.items()
    }
    seconds = alternate(sides, repeats=repeats, device=device)
    rows, claims = [], []
    for name, chunks in layouts.items():
        padding = 1 - sum(lengths) / sum(chunk.input_ids.numel() for chunk in chunks)
        error = abs(norms[name] / norms["packed"] - 1)
        ratio = seconds[name] / seconds["packed"]
        rows.append(
            f"| {hidden} x {layers} | {num} / {sum(lengths)} / {max(lengths)} | {name} "
            f"| {len(chunks)} | {padding:.0%} | {sum(lengths) / seconds[name]:,.0f} "
            f"| {ratio:.2f}x | {error:.0e} |"
        )
        if name != "packed":
            claims.append(
                Claim(
                    f"update on log-normal lengths, {hidden} x {layers}",
                    f"the same code {name}",
                    f"at least {TARGET:g}x its tokens/s",
                    f"{ratio:.2f}x",
                    ratio >= TARGET,
                )
            )
    return rows, claims


def measure(options: argparse.Namespace) -> Report:
    device = start(options)
    cases = CPU_CASES if device.type == "cpu" else GPU_CASES
    rows, claims = [], []
    for case in TOY_CASES if options.toy else cases:
        more_rows, more_claims = compare(case, device, options.repeats)
        rows += more_rows
        claims += more_claims
    columns = (
        *("hidden x layers", "responses / tokens / longest", "layout", "micro-batches"),
        *("padding", "tokens/s", "packed is faster by", "gradient norm differs by"),
    )
    title = "An update on unequal lengths, packed and padded"
    return Report(title, setting(options), columns, rows, claims)


def options(arguments_: list[str] | None = None) -> argparse.Namespace:
    return arguments(__doc__).parse_args(arguments_)


if __name__ == "__main__":
    print(measure(options()).text())
