"""What the log-probs of the sampled tokens alone say of a response's value: a ridge regression.

    python experiments/smollm2/logprob_probe.py --rollouts ROLLOUTS.parquet \
        [--config conf/worked_sums/vapo.yaml] [--numbers 64,128,256,512] [--heldout 512]

No network is trained and none is run: the file has the log-prob with which each token was sampled,
and a value may know those of the tokens before it. The measures are those of `critic_curve.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from critic_curve import Heldout, split

from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.functional.logprob_columns import logprob_columns
from vapo.networks.loading import load_tokenizer
from vapo.rollouts.rollout_rows import StoredRollout
from vapo.rollouts.stored_rollouts import read_rollouts

RIDGE = 0.01


def features(row: StoredRollout) -> np.ndarray:
    """[tokens, features]: what a critic with `critic.sampled_logprobs` reads before each token."""
    logprobs = torch.tensor([row.rollout.rollout_logprobs])
    is_sampled = torch.tensor([row.rollout.is_sampled])
    return logprob_columns(logprobs, is_sampled)[0].double().numpy()


def fit_and_value(
    training: Sequence[StoredRollout], heldout: Sequence[StoredRollout]
) -> list[np.ndarray]:
    """The values of the held-out tokens, by a regression of the returns of the training tokens."""
    inputs = [features(row) for row in training]
    returns = np.repeat([row.rollout.reward for row in training], [len(x) for x in inputs])
    x = np.concatenate(inputs)
    center, scale = x.mean(axis=0), x.std(axis=0) + 1e-5
    x = (x - center) / scale
    penalty = RIDGE * np.eye(x.shape[1])
    weights = np.linalg.solve(x.T @ x / len(x) + penalty, x.T @ (returns - returns.mean()) / len(x))
    return [(features(row) - center) / scale @ weights + returns.mean() for row in heldout]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", required=True, type=Path)
    parser.add_argument("--config", default="conf/worked_sums/vapo.yaml")
    parser.add_argument("--numbers", default="64,128,256,512")
    parser.add_argument("--heldout", type=int, default=512, help="rollouts held out")
    parser.add_argument("--step_ends", default=";.", help="tokens that end a step of a response")
    options = parser.parse_args()
    config = load_config(FitConfig, [Path(options.config)], [])
    tokenizer = load_tokenizer(config.actor.path, key="actor.path")
    rows, _ = read_rollouts(config, options.rollouts, tokenizer)
    training_rows, heldout_rows = split(rows, options.heldout)
    heldout = Heldout.of(training_rows, heldout_rows, tokenizer, options.step_ends)
    print("oracle", asdict(heldout.judge(heldout.oracle)))
    for number in map(int, options.numbers.split(",")):
        if number <= len(training_rows):
            values = fit_and_value(training_rows[:number], heldout_rows)
            print(number, "rollouts", asdict(heldout.judge(values)))


if __name__ == "__main__":
    main()
