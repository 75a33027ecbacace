"""Train by a config, and write every rollout of the run in the plain form of `vapo inspect`.

    python experiments/inspect/record.py --config conf/vapo.yaml --output rollouts.jsonl seed=0

`step` is the iteration. Values, log-probs and advantages are those before its update, so no
critic has seen the returns of the rows that it is judged by.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from transformers import PreTrainedTokenizerBase

import vapo
from vapo.networks.loading import load_tokenizer
from vapo.rollouts.rollout_file import plain_row, rollout_row
from vapo.training.datamodule import iteration_of
from vapo.types import TrainingBatch


@dataclass(eq=False)
class Recorder(Callback):
    """Appends each iteration's rollouts to a file of JSON lines."""

    path: Path
    tokenizer: PreTrainedTokenizerBase

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        iteration = iteration_of(trainer)
        with self.path.open("a", encoding="utf-8") as file:
            for row in plain_rows(iteration.batch, self.tokenizer):
                file.write(json.dumps({"step": iteration.number} | row) + "\n")


def plain_rows(
    batch: TrainingBatch, tokenizer: PreTrainedTokenizerBase
) -> Iterator[dict[str, Any]]:
    """A row for each response; columns that the phase lacks are left out."""
    columns = {"values": batch.old_values, "advantages": batch.advantages}
    for row, rollout in enumerate(batch.rollouts):
        own = {"group": rollout.prompt.prompt_id, "reward": float(batch.rewards[row])}
        plain = plain_row(rollout_row(rollout) | own)
        plain["tokens"] = [str(tokenizer.decode([i])) for i in rollout.response_ids]
        plain["logprobs"] = [round(x, 4) for x in rollout.rollout_logprobs]
        yield plain | {
            name: [round(x, 4) for x in column[row, : len(rollout.response_ids)].tolist()]
            for name, column in columns.items()
            if column is not None
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", action="append", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    config = vapo.load_config(*args.config, overrides=args.overrides)
    args.output.unlink(missing_ok=True)
    recorder = Recorder(args.output, load_tokenizer(config.actor.path, key="actor.path"))
    run = vapo.fit(config, callbacks=[recorder])
    print(f"{args.output}: {run.score_before} -> {run.score_after}")


if __name__ == "__main__":
    main()
