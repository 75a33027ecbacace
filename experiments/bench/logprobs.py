"""Token log-prob and entropy at a vocabulary of 152k: time and peak memory, forward and backward.

    python experiments/bench/logprobs.py [--device cpu] [--repeats 5]

Three ways from hidden states to log-probs, each with the output layer's product, since that is
what makes the logits: ours (chunked, logits never whole); `log_softmax` of the whole logits; and
a re-implementation, in this file, of TRL's `selective_log_softmax` on the whole logits (row by row
`gather - logsumexp`) with its row-wise entropy. The sides alternate. Memory on CPU is the peak of
what torch's allocator held above its start, by the profiler; on a GPU torch's own counter. Times on
CPU are those of the process, on one thread.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from vapo.functional.logprobs import token_logprobs

VOCABULARY = 151_936
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
    logits = hidden @ weight.T
    if logits.dtype in (torch.float32, torch.float64):
        chosen = logits.gather(1, targets[:, None]).squeeze(1)
        logprobs = chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    else:
        rows = [row.log_softmax(-1)[target] for row, target in zip(logits, targets, strict=True)]
        logprobs = torch.stack(rows)
    entropies = []
    for part in logits.split(128):
        log_softmax = part.log_softmax(-1)
        entropies.append(-(log_softmax.exp() * log_softmax).sum(-1))
    return logprobs, torch.cat(entropies)


SIDES: dict[str, Callable[[Tensor, Tensor, Tensor], Outputs]] = {
    "ours": chunked,
    "whole logits, log_softmax": full_log_softmax,
    "whole logits, selective_log_softmax (own copy)": selective_log_softmax,
}


def forward_backward(
    side: Callable[..., Outputs], inputs: tuple[Tensor, ...], entropy: float
) -> None:
    logprobs, entropies = side(*inputs)
    (logprobs.sum() + entropy * entropies.sum()).backward()


def peak_bytes(side: Callable[..., Outputs], inputs: tuple[Tensor, ...], entropy: float) -> int:
    """The most that was allocated at one time above what was before."""
    if inputs[0].is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        forward_backward(side, inputs, entropy)
        return int(torch.cuda.max_memory_allocated() - before)
    with torch.profiler.profile(profile_memory=True) as profiler:
        forward_backward(side, inputs, entropy)
    held = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def compare(num_tokens: int, hidden_size: int, device: torch.device, repeats: int) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    hidden = torch.randn(num_tokens, hidden_size, generator=generator).to(device, dtype)
    weight = torch.randn(VOCABULARY, hidden_size, generator=generator).mul_(0.05).to(device, dtype)
    targets = torch.randint(VOCABULARY, (num_tokens,), generator=generator).to(device)
    inputs = (hidden.requires_grad_(), weight.requires_grad_(), targets)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    rows = []
    for entropy, what in ((0.01, "log-probs and entropy"), (0.0, "log-probs")):
        seconds: dict[str, list[float]] = {name: [] for name in SIDES}
        peaks = {}
        for round_ in range(repeats + 1):
            for name, side in SIDES.items():
                hidden.grad = weight.grad = None
                if round_ == 0:
                    peaks[name] = peak_bytes(side, inputs, entropy)
                    continue
                start = clock()
                forward_backward(side, inputs, entropy)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                seconds[name].append(clock() - start)
        ours = statistics.median(seconds["ours"])
        for name in SIDES:
            took = statistics.median(seconds[name])
            memory = f"{peaks[name] / 2**20:,.0f} | {peaks['ours'] / peaks[name]:.2f}"
            rows.append(
                f"| {num_tokens} x {hidden_size} | {what} | {name} | {took:.2f} "
                f"| {ours / took:.2f} | {memory} |"
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, help="one size instead of the usual ones")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    cases = CPU_CASES if device.type == "cpu" else GPU_CASES
    if options.tokens:
        cases = ((options.tokens, cases[0][1]),)
    print(f"torch {torch.__version__}, {platform.machine()}, {device.type}, one CPU thread,")
    print(f"V = {VOCABULARY}, median of {options.repeats}, sides alternating\n")
    print("| tokens x hidden | gradient of | side | s | ours / it | peak MiB | ours / it |")
    print("|---|---|---|---|---|---|---|")
    for case in cases:
        for row in compare(*case, device, options.repeats):
            print(row, flush=True)


if __name__ == "__main__":
    main()
