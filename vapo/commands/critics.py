"""`vapo critics`: train every critic of a grid on the same rollouts, and compare them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from matplotlib import pyplot
from pyarrow import parquet
from transformers import PreTrainedTokenizerBase

from vapo.commands.file_checks import DATA_KEY
from vapo.commands.sampling import command_recorder
from vapo.config import FitConfig, resolve
from vapo.config.overrides import override_of
from vapo.diagnostics.oracle import oracle_explained_variance
from vapo.errors import about
from vapo.errors.shown_text import say
from vapo.files.made_folders import make_folders, taken_back_if_refused
from vapo.files.whole_files import sha256, write_text, write_whole
from vapo.networks.build import check_critic, check_head_is_kept, check_tokenizers
from vapo.networks.loading import load_tokenizer
from vapo.networks.precision import resolve_precision
from vapo.rollouts.rollout_file import read_metadata
from vapo.rollouts.rollout_rows import StoredRollout
from vapo.rollouts.stored_columns import check_truth
from vapo.rollouts.stored_rollouts import RolloutDataset, read_rollouts
from vapo.studies.critics.comparison import HeldoutValues, train_critic
from vapo.studies.critics.report import (
    Curve,
    as_csv,
    figure,
    markdown,
    mean_curves,
    summarize,
)
from vapo.sweep.grid import Grid, choose_rows, read_grid
from vapo.sweep.identity import task_identity
from vapo.sweep.plan import compose_rows
from vapo.system.libraries import quiet_libraries, set_threads
from vapo.system.progress import Progress
from vapo.tracking.logger import RunLogger


@dataclass(frozen=True)
class RolloutSides:
    """The rollouts that critics are trained on (`rows`) and those that they are measured on.

    `heldout_rows`, the latter, come from a separate file. If they are None, a share of `rows` is
    held out instead (`components.value_pretraining.heldout_share`). `name` is the file of `rows`.
    """

    rows: list[StoredRollout]
    heldout_rows: list[StoredRollout] | None
    tokenizer: PreTrainedTokenizerBase
    name: str

    def dataset(self, config: FitConfig) -> RolloutDataset:
        """Return the rollouts as a dataset for the value pretraining of this config."""
        return RolloutDataset(
            config, self.rows, self.tokenizer, name=self.name, heldout_rows=self.heldout_rows
        )


@dataclass(frozen=True)
class CriticTraining:
    """The training of one critic of the grid with one seed.

    `path` is its result file, whose name is a digest of all that decides the result.
    """

    critic: str
    config: FitConfig
    path: Path

    @property
    def values_path(self) -> Path:
        return self.path.with_suffix(".parquet")

    def values_table(self, values: HeldoutValues) -> pa.Table:
        """Return a table with the critic's values of each held-out rollout.

        `row` is the rollout's row in its file.
        """
        num = len(values.rows)
        return pa.table(
            {
                "critic": pa.array([self.critic] * num, pa.string()),
                "seed": pa.array([self.config.seed] * num, pa.int64()),
                "row": pa.array(values.rows, pa.int64()),
                "values": pa.array(values.values, pa.list_(pa.float32())),
                "processor_s": pa.array([values.processor_s] * num, pa.float64()),
            }
        )

    def result(self) -> Curve | None:
        """Return the curve in the result file, or None if the file is missing or damaged."""
        try:
            record = json.loads(self.path.read_text(encoding="utf-8"))
            points = tuple((int(s), int(t), float(u), float(v)) for s, t, u, v in record["points"])
            return Curve(self.critic, self.config.seed, points, record["oracle"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def run(
    *,
    config: Sequence[Path],
    rollouts: Path,
    grid: Path,
    seeds: Sequence[int],
    overrides: Sequence[str] = (),
    rows: Sequence[str] = (),
    heldout: Path | None = None,
    every_n_iterations: int | None = None,
    output_dir: Path | None = None,
) -> Path:
    """Train each critic of a grid with each seed on the same rollouts; write a table and a figure.

    A critic that has a result already is not trained again.

    Args:
        rows: the names of the grid's rows to train; without names, all.
        heldout: a file of rollouts on which the critics are measured, in place of
            `components.value_pretraining.heldout_share` of `rollouts`.

    Returns: the folder of the results.
    """
    quiet_libraries()
    parsed_grid = choose_rows(read_grid(grid), rows)
    base, configs = compose_rows(
        parsed_grid, config, [*overrides, override_of(DATA_KEY, str(rollouts))]
    )
    set_threads(base.trainer)
    for row_config in (base, *configs.values()):
        resolve_precision(row_config)
    folder = output_dir or Path(base.output_dir) / f"critics_{parsed_grid.name}"
    tokenizer = load_tokenizer(base.actor.path, key="actor.path")
    digest = sha256(rollouts)[:12] if rollouts.is_file() else ""
    needs_logprobs = any(
        row_config.critic.sampled_logprobs is not None for row_config in configs.values()
    )
    stored, other = read_rollouts(base, rollouts, tokenizer, needs_logprobs=needs_logprobs)
    heldout_rows, digests = None, [digest]
    if heldout is not None:
        heldout_rows, _ = read_rollouts(base, heldout, tokenizer, needs_logprobs=needs_logprobs)
        digests.append(sha256(heldout)[:12])
    sides = RolloutSides(stored, heldout_rows, tokenizer, str(rollouts))
    every_n = every_n_iterations or max(1, resolve(base).value_pretraining_iterations // 20)
    trainings = [
        _training_of(name, replace(row_config, seed=seed), folder, [*digests, every_n])
        for name, row_config in configs.items()
        for seed in seeds
    ]
    metadata = read_metadata(rollouts, key=DATA_KEY)
    for name, row_config in configs.items():  # before the first critic is trained
        with about(f"row '{name}' of the grid"):
            check_truth(row_config, (row.truth for row in stored), metadata, rollouts)
            check_tokenizers(row_config, tokenizer)
            check_critic(row_config)
            check_head_is_kept(row_config)
            sides.dataset(row_config)
    name, tags = f"critics-{parsed_grid.name}", {DATA_KEY: f"{rollouts} ({digest})"}
    if heldout is not None:
        tags["heldout"] = f"{heldout} ({digests[-1]})"
    with (
        taken_back_if_refused(make_folders(folder / "cells")),
        command_recorder(base, "critics", None, name=name, tags=tags) as (progress, logger),
    ):
        if other:
            progress.note(f"{rollouts}: another policy than actor.path's sampled them ({other})")
        progress.note(critics_cost(trainings, stored))
        curves = train_missing(trainings, sides, every_n, progress)
        write_values(folder / "values.parquet", trainings)
        text = write_comparison(folder, curves, parsed_grid, logger)
        where = logger.describe()
    say(f"{text}\n{where}\n{folder}")
    return folder


def _training_of(name: str, config: FitConfig, folder: Path, more: Sequence[Any]) -> CriticTraining:
    """Return the training of a critic with the config's seed. A digest names its result file.

    The digest depends on what the rollout files contain (`more` has their digests), not on their
    paths.
    """
    pretraining = replace(config.components.value_pretraining, data=None)
    plain = replace(config, components=replace(config.components, value_pretraining=pretraining))
    text = json.dumps([task_identity(plain), *more])
    key = hashlib.sha256(text.encode()).hexdigest()[:12]
    return CriticTraining(name, config, folder / "cells" / f"{key}.json")


def critics_cost(trainings: Sequence[CriticTraining], rows: Sequence[StoredRollout]) -> str:
    """Return a sentence on how many trainings are done, and what the missing ones will cost."""
    missing_trainings = [training for training in trainings if training.result() is None]
    mean_tokens = sum(row.rollout.num_sampled for row in rows) / len(rows)
    names, seeds = {c.critic for c in trainings}, {c.config.seed for c in trainings}
    numbers = [resolve(training.config) for training in missing_trainings]
    num_rollouts = sum(
        n.value_pretraining_iterations * n.num_prompts * n.group_size for n in numbers
    )
    return (
        f"{len(names)} critics x {len(seeds)} seeds: {len(trainings)} trainings, "
        f"{len(trainings) - len(missing_trainings)} done, {len(missing_trainings)} to do with "
        f"{num_rollouts:,} rollouts or about "
        f"{num_rollouts * mean_tokens:,.0f} response tokens in all"
    )


def train_missing(
    trainings: Sequence[CriticTraining],
    sides: RolloutSides,
    every_n: int,
    progress: Progress,
) -> list[Curve]:
    """Return the learning curve of each training.

    A critic without a result file is trained, and measured after every n-th iteration.
    """
    curves, started, num_trained = [], time.monotonic(), 0
    num_missing = sum(training.result() is None for training in trainings)
    for training in trainings:
        curve = training.result()
        if curve is None:
            stored = sides.dataset(training.config)
            total = resolve(training.config).value_pretraining_iterations
            name = f"{training.critic}, seed {training.config.seed}"
            with progress.stage(name, total=total, unit="iterations") as advance:
                points, values = train_critic(
                    training.config,
                    stored,
                    tokenizer=sides.tokenizer,
                    every_n=every_n,
                    advance=advance,
                )
            oracle = oracle_explained_variance(stored)
            curve = Curve(
                training.critic, training.config.seed, tuple(map(astuple, points)), oracle
            )
            write_whole(
                training.values_path, partial(parquet.write_table, training.values_table(values))
            )
            write_text(training.path, json.dumps(vars(curve)) + "\n")
            num_trained += 1
            each = (time.monotonic() - started) / num_trained
            progress.note(
                f"{name}: held-out explained variance {curve.points[-1][3]:.3f} "
                f"({num_trained}/{num_missing}, about "
                f"{each * (num_missing - num_trained):.0f} s left)"
            )
        curves.append(curve)
    return curves


def write_values(path: Path, trainings: Sequence[CriticTraining]) -> None:
    """Write all critics' values of the held-out rollouts as one Parquet file.

    A training that an earlier version of vapo trained has no file of values, and is left out.
    """
    tables = [parquet.read_table(c.values_path) for c in trainings if c.values_path.is_file()]
    if tables:
        write_whole(path, partial(parquet.write_table, pa.concat_tables(tables)))


def write_comparison(folder: Path, curves: Sequence[Curve], grid: Grid, logger: RunLogger) -> str:
    """Write the curves' table and figure into the folder and to MLflow. Return the table's text."""
    reference = grid.full_system or grid.rows[0].name
    table = summarize(curves, reference=reference)
    texts = {
        "table.md": markdown(table, reference=reference),
        "table.csv": as_csv(table),
        "curves.json": json.dumps([vars(curve) for curve in curves]) + "\n",
    }
    for name, text in texts.items():
        write_text(folder / name, text)
        logger.log_text(text, name)
    curves_figure = figure(curves, reference=reference)
    for suffix in ("png", "svg"):
        logger.log_figure(curves_figure, f"curves.{suffix}")
        save = partial(curves_figure.savefig, format=suffix, bbox_inches="tight")
        write_whole(folder / f"curves.{suffix}", save)
    pyplot.close(curves_figure)
    for name, points in mean_curves(curves).items():
        for step, mean, _ in points:
            key = f"critic_{name}/heldout_explained_variance"
            logger.log_metrics({key: mean}, step=step)
    return texts["table.md"]
