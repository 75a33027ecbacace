"""Token log-prob and entropy at a vocabulary of 152k: time and peak memory, forward and backward.

    python experiments/bench/logprobs.py [--device cuda] [--repeats 5]

Three ways from hidden states to log-probs, each with the output layer's product, since that is
what makes the logits: ours (chunked, logits never whole); `log_softmax` of the whole logits; and
TRL 1.16's own `selective_log_softmax_and_entropy` on the whole logits, the path without Triton.
Memory on CPU is the peak of what torch's allocator held above its start, by the profiler; on a GPU
torch's own counter.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from measuring import Claim, Report, alternate, arguments, setting, start  # beside this file
from peers import trl_logprobs
from torch import Tensor

from vapo.functional.logprobs import token_logprobs

VOCABULARY = 151_936
ROWS = 8
MEMORY_TARGET, TIME_TARGET = 1 / 8, 1.15
Outputs = tuple[Tensor, Tensor]
# tokens, hidden size
CPU_CASES = ((512, 64), (2048, 64))
GPU_CASES = ((8192, 1536), (32_768, 1536))


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Outputs:
    return token_logprobs(hidden, weight, targets)


def full_log_softmax(hidden: Tensor, weight: Tensor, targets: Tensor) -> Outputs:
    log_softmax = torch.log_softmax((hidden @ weight.T).float(), dim=-1)
    logprobs = log_softmax.gather(1, targets[:, None]).squeeze(1)
    return logprobs, -(log_softmax.exp() * log_softmax).sum(dim=-1)


def selective_log_softmax(hidden: Tensor, weight: Tensor, targets: Tensor) -> Outputs:
    """Compute log-probs and entropies as TRL's trainer does: row by row over [rows, tokens, V]."""
    logits = (hidden @ weight.T).view(ROWS, -1, weight.shape[0])
    logprobs, entropies = trl_logprobs()(logits, targets.view(ROWS, -1))
    return logprobs.flatten(), entropies.flatten()


TRL = "TRL 1.16.0, selective_log_softmax"
SIDES: dict[str, Callable[[Tensor, Tensor, Tensor], Outputs]] = {
    "ours": chunked,
    "whole logits, log_softmax": full_log_softmax,
    TRL: selective_log_softmax,
}


def forward_backward(
    side: Callable[..., Outputs], inputs: tuple[Tensor, ...], entropy: float
) -> None:
    logprobs, entropies = side(*inputs)
    (logprobs.sum() + entropy * entropies.sum()).backward()


def peak_bytes(side: Callable[..., Outputs], inputs: tuple[Tensor, ...], entropy: float) -> int:
    """The most that was allocated at one time above what was before."""
    if inputs[0].is_cuda:
        start_bytes = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        forward_backward(side, inputs, entropy)
        return int(torch.cuda.max_memory_allocated() - start_bytes)
    with torch.profiler.profile(profile_memory=True) as profiler:
        forward_backward(side, inputs, entropy)
    num_bytes = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            num_bytes += event.nbytes()
            peak = max(peak, num_bytes)
    return peak


def compare(
    num_tokens: int, hidden_size: int, vocabulary: int, options: argparse.Namespace
) -> tuple[list[str], list[Claim]]:
    device = torch.device(options.device)
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    hidden = torch.randn(num_tokens, hidden_size, generator=generator).to(device, dtype)
    weight = torch.randn(vocabulary, hidden_size, generator=generator).mul_(0.05).to(device, dtype)
    targets = torch.randint(vocabulary, (num_tokens,), generator=generator).to(device)
    inputs = (hidden.requires_grad_(), weight.requires_grad_(), targets)
    rows, claims = [], []
    kinds = ((0.01, "log-probs and entropy"), (0.0, "log-probs"))
    for entropy, label in kinds[:1] if options.claims else kinds:

        def run(name: str, entropy: float = entropy) -> None:
            hidden.grad = weight.grad = None
            forward_backward(SIDES[name], inputs, entropy)

        sides = {name: lambda name=name: run(name) for name in SIDES}
        seconds = alternate(sides, repeats=options.repeats, device=device)
        peaks = {}
        for name, side in SIDES.items():
            hidden.grad = weight.grad = None
            peaks[name] = peak_bytes(side, inputs, entropy)
        for name in SIDES:
            time, memory = seconds["ours"] / seconds[name], peaks["ours"] / peaks[name]
            rows.append(
                f"| {num_tokens} x {hidden_size} | {label} | {name} | {seconds[name]:.2f} "
                f"| {time:.2f} | {peaks[name] / 2**20:,.0f} | {memory:.3f} |"
            )
            if name != "ours" and entropy:
                claims.append(
                    Claim(
                        f"log-prob + entropy, V = {vocabulary}, {num_tokens} tokens",
                        name,
                        "memory at most 1/8, time at most 1.15x",
                        f"memory 1/{1 / memory:.0f}, time {time:.2f}x",
                        memory <= MEMORY_TARGET and time <= TIME_TARGET,
                    )
                )
    return rows, claims


def measure(options: argparse.Namespace) -> Report:
    device = start(options)
    cases: tuple[tuple[int, int], ...] = CPU_CASES if device.type == "cpu" else GPU_CASES
    if options.tokens:
        cases = ((options.tokens, cases[0][1]),)
    if options.claims:
        cases = cases[-1:]
    vocabulary = VOCABULARY
    if options.toy:
        cases, vocabulary = ((64, 8),), 512
    rows, claims = [], []
    for case in cases:
        more_rows, more_claims = compare(*case, vocabulary, options)
        rows += more_rows
        claims += more_claims
    columns = (
        *("tokens x hidden", "gradient of", "side", "s", "ours / it"),
        *("peak MiB", "ours / it"),
    )
    title = "Token log-probs and entropy"
    return Report(title, setting(options, f"V = {vocabulary}"), columns, rows, claims)


def options(arguments_: list[str] | None = None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, help="one size instead of the usual ones")
    parser.add_argument("--claims", action="store_true", help="only what has a target")
    return parser.parse_args(arguments_)


if __name__ == "__main__":
    print(measure(options()).text())
