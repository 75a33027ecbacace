"""GAE against the plain loop over T that most PPO code for language models uses.

    python experiments/bench/gae.py [--threads 2] [--repeats 7] [--verl]

`--verl` takes verl 0.9.1's `core_algos` instead of our own loop, from its wheel (see peers.py). It
whitens the advantages, so our side does that too; its variance is the unbiased one, which is what
the error then shows. Prints one table: per shape and setting, the median time of both sides, their
ratio, and the largest error of our float32 result against the other side in float64. The two sides
alternate, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
from peers import verl_gae  # beside this file
from torch import Tensor

from vapo.functional.advantages import decoupled_gae, gae, length_adaptive_lambda, whiten

Estimates = tuple[Tensor, ...]
SHAPES = ((32, 512), (64, 2048), (64, 8192), (256, 4096))


def loop_gae(
    token_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lambda_: float | Tensor
) -> Tensor:
    """One step per column, from the right; the state is carried over masked-out tokens."""
    keep = mask.to(values.dtype)
    next_value = torch.zeros_like(values[:, 0])
    advantage = torch.zeros_like(values[:, 0])
    decay = gamma * (lambda_.flatten() if isinstance(lambda_, Tensor) else lambda_)
    columns = []
    for t in reversed(range(values.shape[1])):
        delta = token_rewards[:, t] + gamma * next_value - values[:, t]
        candidate = delta + decay * advantage
        next_value = keep[:, t] * values[:, t] + (1 - keep[:, t]) * next_value
        advantage = keep[:, t] * candidate + (1 - keep[:, t]) * advantage
        columns.append(advantage)
    return torch.stack(columns[::-1], dim=1) * keep


def verl_side(rewards: Tensor, values: Tensor, mask: Tensor, adaptive: Tensor | None) -> Estimates:
    """One call, or two for a lambda of the critic's own: verl has one lambda, but broadcasts it."""
    gae_of_verl, keep = verl_gae(), mask.float()
    if adaptive is None:
        return (gae_of_verl(rewards, values, keep, 1.0, 0.95)[0],)
    _, targets = gae_of_verl(rewards, values, keep, 1.0, 1.0)
    return gae_of_verl(rewards, values, keep, 1.0, adaptive.flatten())[0], targets


def make_batch(num_rows: int, num_columns: int, *, gaps: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Responses of 1/4 to all of the width, noisy values, one reward of +-1 at the end."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(num_columns // 4, num_columns + 1, (num_rows,), generator=generator)
    lengths[0] = num_columns
    mask = torch.arange(num_columns) < lengths[:, None]
    values = torch.randn(num_rows, num_columns, generator=generator)
    rewards = torch.zeros(num_rows, num_columns)
    rewards[torch.arange(num_rows), lengths - 1] = torch.randn(num_rows, generator=generator).sign()
    if gaps:
        mask &= torch.rand(num_rows, num_columns, generator=generator) > 0.1
        mask[torch.arange(num_rows), lengths - 1] = True
    return rewards, values, mask


def alternate(
    loop: Callable[[], object], ours: Callable[[], object], repeats: int
) -> tuple[float, float]:
    """Median seconds of each side, after one warm-up call of each.

    On one thread they are the process's own, so that others do not count.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: tuple[list[float], list[float]] = ([], [])
    for round_ in range(repeats + 1):
        for side, call in enumerate((loop, ours)):
            start = clock()
            call()
            if round_:
                times[side].append(clock() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def compare(shape: tuple[int, int], setting: str, repeats: int, *, against_verl: bool) -> str:
    rewards, values, mask = make_batch(*shape, gaps=setting.endswith("gaps"))
    adaptive = length_adaptive_lambda(mask.sum(dim=1), alpha=0.05)
    is_decoupled = setting.startswith("decoupled")

    def loop(rewards: Tensor, values: Tensor, lambda_: Tensor) -> Estimates:
        if not is_decoupled:
            return (loop_gae(rewards, values, mask, 1.0, 0.95),)
        targets = loop_gae(rewards, values, mask, 1.0, 1.0) + values
        return loop_gae(rewards, values, mask, 1.0, lambda_), targets

    def ours() -> Estimates:
        if is_decoupled:
            estimates: Estimates = decoupled_gae(
                rewards, values, mask, gamma=1.0, lambda_policy=adaptive, lambda_critic=1.0
            )
        else:
            estimates = (gae(rewards, values, mask, gamma=1.0, lambda_=0.95),)
        return (whiten(estimates[0], mask), *estimates[1:]) if against_verl else estimates

    def theirs(rewards: Tensor, values: Tensor, lambda_: Tensor) -> Estimates:
        if against_verl:
            return verl_side(rewards, values, mask, lambda_ if is_decoupled else None)
        return loop(rewards, values, lambda_)

    exact = theirs(rewards.double(), values.double(), adaptive.double())
    error = max(
        torch.where(mask, a - b, 0.0).abs().max().item() for a, b in zip(ours(), exact, strict=True)
    )
    loop_s, ours_s = alternate(lambda: theirs(rewards, values, adaptive), ours, repeats)
    return (
        f"| {shape[0]} x {shape[1]} | {setting} | {loop_s * 1e3:.1f} | {ours_s * 1e3:.2f} "
        f"| {loop_s / ours_s:.0f}x | {error:.1e} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--verl", action="store_true", help="against verl 0.9.1")
    parser.add_argument("--shape", type=int, nargs=2, metavar=("B", "T"), help="only this one")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {platform.machine()}, {options.threads} CPU threads,")
    print(f"median of {options.repeats}, sides alternating, float32 in and out\n")
    side = "verl" if options.verl else "loop"
    print(f"| B x T | setting | {side} ms | ours ms | ratio | max error vs float64 |")
    print("|---|---|---|---|---|---|")
    settings = ("one lambda", "one lambda, gaps", "decoupled + adaptive")
    for shape in [tuple(options.shape)] if options.shape else SHAPES:
        for setting in (*settings, "decoupled + adaptive, gaps"):
            print(compare(shape, setting, options.repeats, against_verl=options.verl), flush=True)


if __name__ == "__main__":
    main()
