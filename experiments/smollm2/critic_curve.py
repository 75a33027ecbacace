"""How many rollouts does a language model's critic need? A curve, row by row into a JSON file.

    python experiments/smollm2/critic_curve.py --rollouts ROLLOUTS.parquet --output curve.json \
        [--config conf/worked_sums/vapo.yaml] [--critics policy,reward_model] \
        [--numbers 512,1024,...] [--seeds 0,1,2] [--passes 4] [--step_ends ';.'] [KEY=VALUE ...]

The last groups of the file are held out, the same ones for every row; a row's critic is trained on
the first groups, by the code of value pretraining, with `--passes` passes. After each pass, and in
the first one after 512, 1,024, ... rollouts, the row has what the critic knows of the held-out
ones, beside the oracle of the task's hidden states. A row that is in the file is not trained again,
so a second start goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.callbacks import Callback
from transformers import PreTrainedTokenizerBase

from vapo.config import FitConfig, resolve
from vapo.config.loading import load_config
from vapo.diagnostics.oracle import state_values
from vapo.files.whole_files import write_text
from vapo.networks.loading import load_tokenizer
from vapo.rollouts.rollout_rows import StoredRollout
from vapo.rollouts.stored_rollouts import RolloutDataset, read_rollouts
from vapo.studies.critics.comparison import CriticModule, train_with_callback
from vapo.studies.critics.judging import Judge, KnownResponse, indices_of_steps
from vapo.system.libraries import set_threads
from vapo.training.callbacks.value_pretraining import compute_states, explained_now
from vapo.training.datamodule import iteration_of

CRITICS = {
    "policy": ["critic.init=policy"],
    "reward_model": [
        "critic.init=reward_model",
        "critic.reward_model_path=models/worked_sums/reward_model",
    ],
    "truth": ["critic.init=policy", "components.value_pretraining.targets=truth"],
}
NUMBERS = (512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Knowledge:
    """What a critic knows of the held-out rollouts.

    `explained_variance` is of the returns; `within` of the oracle's values within each response,
    around its mean; `mistakes_named` the share of wrong responses whose largest fall of the value
    from one step's start to the next is at the first wrong step.
    """

    explained_variance: float
    within: float
    mistakes_named: float | None


@dataclass(frozen=True)
class Heldout:
    """The held-out rollouts, and the oracle's values before each token."""

    rows: Sequence[StoredRollout]
    oracle: Sequence[np.ndarray]
    judging: Judge

    @staticmethod
    def of(
        training_rows: Sequence[StoredRollout],
        rows: Sequence[StoredRollout],
        tokenizer: PreTrainedTokenizerBase,
        step_ends: str,
    ) -> Heldout:
        """The oracle's value of a state is the mean return of the known rollouts' tokens in it."""
        table = state_values(
            [row.oracle_state or () for row in training_rows],
            [[row.rollout.reward] * len(row.oracle_state or ()) for row in training_rows],
            [row.oracle_state or () for row in rows],
        )
        oracle = [np.array(values) for values in table]
        vocabulary = tokenizer.get_vocab()
        ends = {vocabulary[end] for end in step_ends}
        responses = [
            KnownResponse(
                str(row.rollout.prompt.prompt_ids),
                row.rollout.reward,
                values,
                indices_of_steps(row.rollout.response_ids, ends),
                row.oracle_state or (),
            )
            for row, values in zip(rows, oracle, strict=True)
        ]
        return Heldout(rows, oracle, Judge(responses))

    def judge(self, values: Sequence[np.ndarray]) -> Knowledge:
        figures = self.judging.measure(values, num_resamples=1)
        named = figures["mistakes_named"]
        return Knowledge(
            figures["explained_variance"].value,
            figures["truth_within_responses"].value,
            None if named.is_unknown else named.value,
        )


class Watching(Callback):
    """The critic's knowledge before training, on the way in the first pass and after each pass,
    and what it fits meanwhile."""

    def __init__(self, stored: RolloutDataset, heldout: Heldout, note: Any) -> None:
        self.stored, self.heldout, self.note = stored, heldout, note
        self.points: list[dict[str, float | None]] = []
        self.fitted: list[float] = []
        self.num_seen = 0
        self.started = time.monotonic()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, CriticModule)
        compute_states(pl_module, self.stored)
        self.measure(pl_module, 0)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        iteration = iteration_of(trainer)
        self.fitted.append(iteration.metrics.get("critic/explained_variance", math.nan))
        self.num_seen += len(iteration.batch)
        passes = self.stored.passes(iteration.number)
        is_on_the_way = passes == 0 and self.num_seen in NUMBERS
        if is_on_the_way or passes > self.stored.passes(iteration.number - 1):
            self.measure(pl_module, passes)

    def measure(self, module: L.LightningModule, passes: int) -> None:
        assert isinstance(module, CriticModule)
        batch, _ = explained_now(module, self.stored.heldout_batch())
        assert batch.old_values is not None
        lengths = [len(row.rollout.response_ids) for row in self.heldout.rows]
        values = [v[:n].double().numpy() for v, n in zip(batch.old_values, lengths, strict=True)]
        fitted = float(np.nanmean(self.fitted)) if self.fitted else None
        self.points.append(
            {
                "passes": passes,
                "rollouts_seen": self.num_seen,
                "seconds": round(time.monotonic() - self.started),
                "explained_variance_in_training": fitted,  # before each batch's update
                **asdict(self.heldout.judge(values)),
            }
        )
        self.fitted = []
        self.note(self.points[-1])


def split(
    rows: Sequence[StoredRollout], num_heldout: int
) -> tuple[list[StoredRollout], list[StoredRollout]]:
    """The known rollouts and the held-out ones, which are of the last groups and other prompts."""
    ordered = sorted(rows, key=lambda row: int(row.group))
    heldout = ordered[-num_heldout:]
    prompts = {row.rollout.prompt.prompt_ids for row in heldout}
    return [row for row in ordered if row.rollout.prompt.prompt_ids not in prompts], heldout


def cells(options: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    for number in map(int, options.numbers.split(",")):
        for critic in options.critics.split(","):
            for seed in map(int, options.seeds.split(",")):
                yield critic, number, seed


def train(
    options: argparse.Namespace, critic: str, number: int, seed: int, note: Any
) -> dict[str, Any]:
    """One row of the curve."""
    data = f"components.value_pretraining.data={options.rollouts}"
    overrides = [*CRITICS[critic], data, *options.overrides]
    config = load_config(FitConfig, [Path(options.config)], overrides)
    set_threads(config.trainer)
    tokenizer = load_tokenizer(config.actor.path, key="actor.path")
    rows, _ = read_rollouts(config, Path(options.rollouts), tokenizer)
    training_rows, heldout_rows = split(rows, options.heldout)
    if len(training_rows) < number:
        raise SystemExit(f"{number} rollouts: the file has {len(training_rows)} to train on")
    numbers = resolve(config)
    responses = numbers.num_prompts * numbers.group_size
    num_iterations = math.ceil(options.passes * number / responses)
    pretraining = replace(config.components.value_pretraining, num_iterations=num_iterations)
    config = replace(
        config, seed=seed, components=replace(config.components, value_pretraining=pretraining)
    )
    stored = RolloutDataset(
        config,
        training_rows[:number],
        tokenizer,
        name=options.rollouts,
        heldout_rows=heldout_rows,
    )
    heldout = Heldout.of(training_rows, heldout_rows, tokenizer, options.step_ends)
    watching = Watching(stored, heldout, note)
    train_with_callback(config, stored, watching, tokenizer=tokenizer)
    return {"oracle": asdict(heldout.judge(heldout.oracle)), "points": watching.points}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", required=True)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--config", default="conf/worked_sums/vapo.yaml")
    parser.add_argument("--critics", default="policy")
    parser.add_argument("--numbers", default=",".join(map(str, NUMBERS)))
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--step_ends", default=";.", help="tokens that end a step of a response")
    parser.add_argument("--heldout", type=int, default=512, help="rollouts held out")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    results = json.loads(options.output.read_text()) if options.output.exists() else []
    for critic, number, seed in cells(options):
        about = {
            "critic": critic,
            "num_rollouts": number,
            "seed": seed,
            "num_passes": options.passes,
            "num_heldout": options.heldout,
            "overrides": options.overrides,
        }
        if any(about.items() <= row.items() for row in results):
            continue
        print(about, flush=True)
        row = train(options, critic, number, seed, lambda point: print(" ", point, flush=True))
        results.append({**about, **row})
        write_text(options.output, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
