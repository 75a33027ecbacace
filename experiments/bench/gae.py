"""GAE against the plain loop over T that most PPO code for language models uses.

    python experiments/bench/gae.py [--repeats 5] [--verl]

`--verl` takes verl 0.9.1's `core_algos` instead of our own loop, from its wheel (see peers.py). It
whitens the advantages, so our side does that too; its variance is the unbiased one, which is what
the error then shows. The error is the largest one of our float32 result against the other side in
float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from measuring import Claim, Report, alternate, arguments, setting, start  # beside this file
from peers import verl_gae
from torch import Tensor

from vapo.functional.advantages import decoupled_gae, gae, length_adaptive_lambda, whiten

Estimates = tuple[Tensor, ...]
SHAPES = ((32, 512), (64, 2048), (64, 8192), (256, 4096))
# the shapes and the setting of the target: 4x
CLAIMED, CLAIMED_SETTING, TARGET = ((64, 8192), (256, 4096)), "decoupled + adaptive", 4.0


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


def compare(
    shape: tuple[int, int], setting_: str, options: argparse.Namespace
) -> tuple[str, float]:
    """The row of a table, and by how much ours is faster."""
    rewards, values, mask = make_batch(*shape, gaps=setting_.endswith("gaps"))
    adaptive = length_adaptive_lambda(mask.sum(dim=1), alpha=0.05)
    is_decoupled = setting_.startswith("decoupled")

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
        return (whiten(estimates[0], mask), *estimates[1:]) if options.verl else estimates

    def theirs(rewards: Tensor, values: Tensor, lambda_: Tensor) -> Estimates:
        if options.verl:
            return verl_side(rewards, values, mask, lambda_ if is_decoupled else None)
        return loop(rewards, values, lambda_)

    exact = theirs(rewards.double(), values.double(), adaptive.double())
    error = max(
        torch.where(mask, a - b, 0.0).abs().max().item() for a, b in zip(ours(), exact, strict=True)
    )
    seconds = alternate(
        {"theirs": lambda: theirs(rewards, values, adaptive), "ours": ours},
        repeats=options.repeats,
        device=torch.device("cpu"),
    )
    ratio = seconds["theirs"] / seconds["ours"]
    row = (
        f"| {shape[0]} x {shape[1]} | {setting_} | {seconds['theirs'] * 1e3:.1f} "
        f"| {seconds['ours'] * 1e3:.2f} | {ratio:.0f}x | {error:.1e} |"
    )
    return row, ratio


def measure(options: argparse.Namespace) -> Report:
    start(options)
    shapes: Sequence[tuple[Any, ...]] = [tuple(options.shape)] if options.shape else SHAPES
    settings = ["one lambda", "one lambda, gaps", CLAIMED_SETTING, f"{CLAIMED_SETTING}, gaps"]
    if options.claims:
        shapes, settings = CLAIMED, settings[2:]
    if options.toy:
        shapes = ((4, 64),)
    side = "verl 0.9.1" if options.verl else "loop over T"
    rows, claims = [], []
    for shape in shapes:
        for setting_ in settings:
            row, ratio = compare(shape, setting_, options)
            rows.append(row)
            if setting_ == CLAIMED_SETTING and shape in CLAIMED:
                claims.append(
                    Claim(
                        f"decoupled, length-adaptive GAE [{shape[0]}, {shape[1]}]",
                        side,
                        f"at least {TARGET:g}x as fast",
                        f"{ratio:.0f}x",
                        ratio >= TARGET,
                    )
                )
    columns = ("B x T", "setting", f"{side} ms", "ours ms", "ratio", "max error vs float64")
    return Report(f"GAE against {side}", setting(options, "float32"), columns, rows, claims)


def options(arguments_: list[str] | None = None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--verl", action="store_true", help="against verl 0.9.1")
    parser.add_argument("--shape", type=int, nargs=2, metavar=("B", "T"), help="only this one")
    parser.add_argument("--claims", action="store_true", help="only what has a target")
    return parser.parse_args(arguments_)


if __name__ == "__main__":
    print(measure(options()).text())
