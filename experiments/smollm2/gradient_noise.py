"""How many responses does the policy's gradient need, with a critic and without one?

    vapo rollouts --config conf/worked_sums/vapo.yaml --num 1536 --output runs/noise.parquet
    python experiments/smollm2/gradient_noise.py --rollouts runs/noise.parquet

The gradient of each response is that of its tokens' log-probs times their advantages, by the
policy's adapters as they are before the first step. All advantages here have the same mean gradient
G, or nearly so where lambda is below 1, and differ in their noise. A system needs N responses until
the noise of their mean is as large as G: N = E|g - G|^2 / |G|^2. In groups, g is a group's mean and
N is multiplied by the group's size. |G|^2 is a mean over pairs of groups, and the interval of a
ratio is by resampling groups.

The forecast needs no gradients: it is the sum of (1 - p)^2 A^2 over tokens beside that without a
critic, p the probability with which a token was sampled, as in `critic/gradient_noise_ratio`.

A ridge regression on the log-probs of the tokens before stands for a critic, fitted on rollouts to
other prompts. The oracle (`task_oracle.py`) bounds what any critic could be worth.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from critic_curve import split
from task_oracle import oracle_chances
from torch import Tensor

from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.functional.advantages import gae, length_adaptive_lambda
from vapo.functional.logprob_columns import logprob_columns
from vapo.functional.regression import ridge_of_gram, weighted_gram
from vapo.networks.loading import load_causal_lm, load_tokenizer
from vapo.networks.lora import add_adapters
from vapo.rollouts.rollout_rows import StoredRollout
from vapo.rollouts.stored_rollouts import read_rollouts

NO_CRITIC, VAPO, BASELINE = "no critic", "critic, lambda by length", "critic, lambda 1"
ORACLE = "oracle, lambda 0"
HALF, HALF_ORACLE = "half no critic, half critic", "half no critic, half oracle"
PER_PROMPT = 8  # responses to each prompt in the file
GROUP_SIZES = (2, PER_PROMPT)


def values_from_logprobs(
    training: Sequence[StoredRollout], heldout: Sequence[StoredRollout]
) -> list[np.ndarray]:
    """Return the value before each token of the held-out responses, by a ridge regression.

    It is fitted to the returns of the training tokens, on the columns that a critic with
    `critic.sampled_logprobs` reads.
    """

    def columns(row: StoredRollout) -> Tensor:
        logprobs = torch.tensor([row.rollout.rollout_logprobs])
        return logprob_columns(logprobs, torch.ones_like(logprobs, dtype=torch.bool))[0].double()

    features = [columns(row) for row in training]
    returns = [
        torch.full((len(x),), row.rollout.reward) for row, x in zip(training, features, strict=True)
    ]
    targets = torch.cat(returns).double()
    gram = weighted_gram(torch.cat(features), targets, torch.ones_like(targets))
    weights, intercept, *_ = ridge_of_gram(gram, penalty=0.01)
    return [(columns(row) @ weights + intercept).numpy() for row in heldout]


def token_advantages(
    row: StoredRollout,
    values: np.ndarray,
    chances: Sequence[float],
    baselines: Mapping[str, float],
    alpha: float,
) -> dict[str, Tensor]:
    """Return the advantages of a response's tokens, by what makes them.

    Args:
        values: the critic's value before each token.
        chances: the oracle's chance of a right answer before each token.
        baselines: of each system without a critic, what is taken from the reward.
        alpha: of lambda by length.
    """
    length = len(values)
    mask = torch.ones(1, length, dtype=torch.bool)
    rewards = torch.zeros(1, length, dtype=torch.float64)
    rewards[0, -1] = row.rollout.reward
    by_length = float(length_adaptive_lambda(torch.tensor([length]), alpha=alpha))

    def advantages(state_values: Tensor, lambda_: float) -> Tensor:
        return gae(rewards, state_values[None].double(), mask, gamma=1.0, lambda_=lambda_)[0]

    critic, oracle = torch.from_numpy(values), 2 * torch.tensor(chances, dtype=torch.float64) - 1
    columns = {
        name: torch.full((length,), row.rollout.reward - baseline, dtype=torch.float64)
        for name, baseline in baselines.items()
    }
    columns |= {VAPO: advantages(critic, by_length), BASELINE: advantages(critic, 1.0)}
    columns[ORACLE] = advantages(oracle, 0.0)
    columns[HALF] = (columns[NO_CRITIC] + columns[BASELINE]) / 2
    columns[HALF_ORACLE] = (columns[NO_CRITIC] + columns[ORACLE]) / 2
    return columns


def baselines_of(
    rewards: Sequence[float], index: int, mean: float, group_sizes: Sequence[int]
) -> dict[str, float]:
    """Return a response's baselines: the mean of all, and of the others in groups of each size.

    >>> baselines_of([1.0, 0.0, 0.0, 1.0], 0, 0.25, [2, 4])
    {'no critic': 0.25, 'no critic, groups of 2': 0.0, 'no critic, groups of 4': 0.3333333333333333}
    """
    baselines = {NO_CRITIC: mean}
    for size in group_sizes:
        start = index // size * size
        others = sum(rewards[start : start + size]) - rewards[index]
        baselines[_grouped(size)] = others / (size - 1)
    return baselines


def _grouped(size: int) -> str:
    return f"{NO_CRITIC}, groups of {size}"


def gradients(
    model: torch.nn.Module, row: StoredRollout, advantages: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the gradient of each system's objective for one response, as one vector each.

    Advantages that are the same on all tokens multiply one gradient, and a half of two gradients is
    their mean, so three passes and one for all of these suffice.
    """
    prompt, response = list(row.rollout.prompt.prompt_ids), list(row.rollout.response_ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
    parameters = [p for name, p in model.named_parameters() if "lora_B" in name]

    def gradient(weights: Tensor) -> Tensor:
        objective = (logprobs * weights.float()).sum()
        parts = torch.autograd.grad(objective, parameters, retain_graph=True)
        return torch.cat([part.flatten() for part in parts])

    of_logprobs = gradient(torch.ones(len(response)))
    vectors = {name: gradient(advantages[name]) for name in (VAPO, BASELINE, ORACLE)}
    for name, column in advantages.items():
        if name.startswith(NO_CRITIC):
            vectors[name] = float(column[0]) * of_logprobs
    vectors[HALF] = (vectors[NO_CRITIC] + vectors[BASELINE]) / 2
    vectors[HALF_ORACLE] = (vectors[NO_CRITIC] + vectors[ORACLE]) / 2
    return vectors


class Noise:
    """The moments of a system's gradient over prompts."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self.total: Tensor | None = None
        self.means: list[float] = []  # of each prompt, |the mean gradient of its groups|^2
        self.squares: list[float] = []  # of each prompt, the mean |g|^2 of its groups
        self.forecast = 0.0  # the sum of (1 - p)^2 A^2 over tokens

    def add(self, response_gradients: Tensor) -> None:
        """Add the gradients of one prompt's responses [R, P]; the group's size divides R."""
        group_gradients = response_gradients.unflatten(0, (-1, self.group_size)).mean(dim=1)
        mean = group_gradients.mean(dim=0).double()
        self.total = mean if self.total is None else self.total + mean
        self.means.append(float(mean @ mean))
        self.squares.append(float(group_gradients.double().square().sum(dim=1).mean()))

    def signal(self) -> float:
        """|G|^2 over pairs of different prompts, so that it has no noise in the mean."""
        assert self.total is not None
        count = len(self.means)
        return (float(self.total @ self.total) - sum(self.means)) / (count * (count - 1))

    def variance(self) -> float:
        """E|g - G|^2 of a group, times its size: that of one response."""
        return self.group_size * (float(np.mean(self.squares)) - self.signal())


def share(noise: Noise, control: Noise) -> tuple[float, float, float]:
    """The variance beside the control's, with its 95 % interval by a jackknife over prompts."""
    x = noise.group_size * np.array(noise.squares)
    y = control.group_size * np.array(control.squares)
    count = len(x)
    without_each = (x.sum() - x) / (y.sum() - y)
    error = float(np.sqrt((count - 1) / count * ((without_each - without_each.mean()) ** 2).sum()))
    ratio = float(x.sum() / y.sum())
    return ratio, ratio - 1.96 * error, ratio + 1.96 * error


def measure(config: FitConfig, rows: Sequence[StoredRollout], num_heldout: int) -> dict[str, Noise]:
    """Add up the gradients of the last `num_heldout` rollouts, prompt by prompt."""
    training, heldout = split(rows, num_heldout)
    values = values_from_logprobs(training, heldout)
    mean = float(np.mean([row.rollout.reward for row in training]))
    states = [row.oracle_state or () for row in heldout]
    chances = oracle_chances(states, [bool(row.rollout.is_correct) for row in heldout])
    model = load_causal_lm(config.actor.path, dtype="float32", attn_implementation="sdpa")
    assert config.actor.lora is not None
    add_adapters(model, config.actor.lora, seed=config.seed)
    noises = {name: Noise(1) for name in (NO_CRITIC, BASELINE, HALF, VAPO, ORACLE, HALF_ORACLE)}
    noises |= {_grouped(size): Noise(size) for size in GROUP_SIZES}
    rewards = [row.rollout.reward for row in heldout]
    for start in range(0, len(heldout), PER_PROMPT):
        vectors: dict[str, list[Tensor]] = {name: [] for name in noises}
        for i in range(start, start + PER_PROMPT):
            baselines = baselines_of(rewards, i, mean, GROUP_SIZES)
            alpha = config.components.length_adaptive_gae.alpha
            advantages = token_advantages(heldout[i], values[i], chances[i], baselines, alpha)
            weights = (1 - torch.tensor(heldout[i].rollout.rollout_logprobs).exp()).square()
            for name, vector in gradients(model, heldout[i], advantages).items():
                vectors[name].append(vector)
                noises[name].forecast += float((weights * advantages[name].square()).sum())
        for name, noise in noises.items():
            noise.add(torch.stack(vectors[name]))
        if start % 128 == 0:
            print(f"{start}/{len(heldout)} responses", flush=True)
    return noises


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the records as a table of docs/language_model.md."""
    lines = [
        "| advantages | responses needed | noise, without a critic 1 | forecast |",
        "|---|---|---|---|",
    ]
    for record in records:
        interval = f"[{record['low']:.2f}, {record['high']:.2f}]"
        noise = f"{record['share']:.2f} {interval}" if record["system"] != NO_CRITIC else "1"
        cells = record["system"], f"{record['needed']:.0f}", noise, f"{record['forecast']:.2f}"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rollouts", required=True, type=Path)
    parser.add_argument("--config", default="conf/worked_sums/vapo.yaml")
    parser.add_argument("--heldout", type=int, default=512, help="responses with a gradient")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    config = load_config(FitConfig, [Path(options.config)], [])
    rows, _ = read_rollouts(config, options.rollouts, load_tokenizer(config.actor.path))
    noises = measure(config, rows, options.heldout)
    records = []
    for name, noise in noises.items():
        ratio, low, high = share(noise, noises[NO_CRITIC])
        record = {"system": name, "share": ratio, "low": low, "high": high}
        record["needed"] = noise.variance() / noise.signal()
        records.append(record | {"forecast": noise.forecast / noises[NO_CRITIC].forecast})
    print(table(records))
    if options.output:
        options.output.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
