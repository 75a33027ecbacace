"""`vapo rollouts`: sample and score rollouts of the policy, as a file that critics train on.

With `--value_truth` prefixes of the responses are continued, to measure their true values.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from vapo.advantages.credit import critic_rewards
from vapo.commands.filter import ResumableParts, chunk_prompts, settings_of
from vapo.commands.sampling import command_recorder, read_inputs
from vapo.config import FitConfig, resolve
from vapo.config.written import config_hash
from vapo.diagnostics.oracle import oracle_of
from vapo.diagnostics.value_truth.choice import expected_tokens
from vapo.errors import UserError
from vapo.errors.shown_text import say
from vapo.networks.saved_tokenizers import tokenizer_fingerprint
from vapo.prompts.load import PromptSplit
from vapo.prompts.training_set import group_sampling
from vapo.rollouts.collection import sample_and_score
from vapo.rollouts.continuations import ContinuationSampler, MeasuredState, Place, group_by_state
from vapo.rollouts.engines.contract import sampling_settings
from vapo.rollouts.player import RolloutRunner
from vapo.rollouts.rollout_file import (
    SCHEMA_VERSION,
    concatenate_tables,
    read_metadata,
    rollout_table,
    stored_truth,
    write_plain,
    write_table,
)
from vapo.rollouts.segments import step_starts
from vapo.rollouts.stored_columns import returns_settings
from vapo.system.process import derive_seed
from vapo.system.progress import Progress
from vapo.types import Rollout

_SPENT = "continuation_tokens"
_NO_SETTINGS = ("config_hash", "schema_version", _SPENT)


def run(
    config: FitConfig,
    *,
    num: int,
    output: str | None = None,
    value_truth: int | None = None,
    truth_share: float | None = None,
    format: str = "parquet",
) -> Path:
    """Sample and score rollouts and write them to a file, unless it exists. Return the file.

    With `format` plain, a JSON Lines file is made from the Parquet file in `output_dir`, which
    stays.

    Args:
        num: how many rollouts, rounded up to whole groups.
        value_truth: how many continuations are sampled from the start of each step of a response.
        truth_share: the share of the groups whose responses are continued.
    """
    if format == "plain":
        stored = run(config, num=num, value_truth=value_truth, truth_share=truth_share)
        plain = stored.with_suffix(".jsonl") if output is None else Path(output)
        write_plain(stored, plain)
        say(plain)
        return plain
    measuring = None
    if value_truth is not None:
        measuring = Measuring(value_truth, 1.0 if truth_share is None else truth_share)
    tokenizer, prompts = read_inputs(config)
    num_groups = -(-num // resolve(config).group_size)
    metadata = metadata_of(config, prompts, tokenizer, num_groups)
    if measuring is not None:
        metadata["value_truth"] = measuring.settings(config)
    key = hashlib.sha256(_settings_text(metadata).encode()).hexdigest()[:12]
    path = Path(output or Path(config.output_dir) / "rollouts" / f"{key}.parquet")
    if path.exists():
        if _settings_text(read_metadata(path, key="--output")) != _settings_text(metadata):
            raise UserError(
                f"--output {path}: there is a file of other settings; give another name, or "
                "remove it"
            )
        say(f"all {num_groups} groups are there already\n{path}")
        return path
    with command_recorder(config, "rollouts", prompts) as (progress, logger):
        started = time.monotonic()
        metrics = sample_file(config, prompts, tokenizer, path, metadata, progress, measuring)
        metrics["rollouts/sampling_s"] = time.monotonic() - started
        logger.log_metrics(metrics, step=0)
        where = logger.describe()
    truth_text = ""
    if measuring is not None:
        truth_text = (
            f"\n{metrics['rollouts/num_prefixes']:.0f} prefixes were continued, in "
            f"{metrics['rollouts/num_continuation_tokens']:.0f} tokens; the variance of a mean is "
            f"{metrics['rollouts/truth_noise']:.3f}"
        )
    say(
        f"{metrics['rollouts/num_rollouts']:.0f} rollouts in {num_groups} groups, accuracy "
        f"{metrics['rollouts/accuracy']:.3f}, mean reward {metrics['rollouts/reward_mean']:.3f}; "
        f"{metrics['rollouts/num_response_tokens']:.0f} response tokens in "
        f"{metrics['rollouts/sampling_s']:.1f} s{truth_text}\n"
        f"train a critic on them with components.value_pretraining.data={path}\n{where}\n{path}"
    )
    return path


def metadata_of(
    config: FitConfig, prompts: PromptSplit, tokenizer: PreTrainedTokenizerBase, num_groups: int
) -> dict[str, Any]:
    """Return the metadata of a file of rollouts.

    All but `config_hash` are settings that decide its rollouts.
    """
    size = resolve(config).group_size
    settings = settings_of(config, prompts.train, size)
    return {
        "schema_version": SCHEMA_VERSION,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "policy": settings.pop("weights"),
        "group_size": size,
        "num_groups": num_groups,
        "reward": [config.rewards.correct, config.rewards.incorrect],
        "config_hash": config_hash(config),
        "sampling": settings,
    }


def sample_file(
    config: FitConfig,
    prompts: PromptSplit,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    metadata: dict[str, Any],
    progress: Progress,
    measuring: Measuring | None,
) -> dict[str, float]:
    """Sample and score a file's rollouts chunk by chunk, and write it. Return their metrics.

    What is sampled for a chunk depends on the seed and the chunk's number alone. If `measuring` is
    None, no prefixes are continued.
    """
    size, num_groups = int(metadata["group_size"]), int(metadata["num_groups"])
    settings = sampling_settings(config.rollouts)
    chunk = min(chunk_prompts(config, size), num_groups)
    with closing(ResumableParts(path, _settings_text(metadata), -(-num_groups // chunk))) as parts:
        progress.note(
            f"{path}: {num_groups} groups of {size}; {len(parts.files) - len(parts.missing)} of "
            f"{len(parts.files)} parts are there, each of up to {chunk} groups"
        )
        if measuring is not None:
            progress.note(measuring.cost_text(config, num_groups, size))

        oracle = oracle_of(config, tokenizer)

        def write(number: int, player: RolloutRunner) -> None:
            sampled_prompts = group_sampling(
                prompts.training, num_prompts=chunk, seed=config.seed, iteration=number
            )
            groups = range(number * chunk, min((number + 1) * chunk, num_groups))
            rollouts = sample_and_score(
                sampled_prompts[: len(groups)],
                player,
                progress.stage,
                group_size=size,
                settings=settings,
                seed=derive_seed(config.seed, "stored rollouts", number),
            )
            of_rows = [group for group in groups for _ in range(size)]
            states = list(map(oracle, rollouts))
            measured, num_continuation_tokens = measure_step_starts(
                rollouts,
                of_rows,
                measuring,
                ContinuationSampler(config, settings, player, progress.stage),
                seed=derive_seed(config.seed, "stored continuations", number),
                note=progress.note,
            )
            other_columns = [
                {"oracle_state": row_states, **stored_truth(row_truth)}
                for row_states, row_truth in zip(states, measured, strict=True)
            ]
            table = rollout_table(rollouts, of_rows, other_columns)
            write_table(parts.files[number], table, metadata | {_SPENT: num_continuation_tokens})

        parts.fill("rollouts", config, tokenizer, progress, write)
        metrics = join_parts(parts.files, path, metadata)
        parts.remove()
    return metrics


def join_parts(parts: Sequence[Path], path: Path, metadata: dict[str, Any]) -> dict[str, float]:
    """Write the rows of all parts to one file.

    Returns: metrics of the rollouts and, if values were measured, of the measured states.
    """
    table = concatenate_tables(parts, key="--output")
    metrics = summary_metrics(table)
    if "value_truth" in metadata:
        num_tokens = sum(int(read_metadata(part, key="--output").get(_SPENT, 0)) for part in parts)
        metadata = metadata | {_SPENT: num_tokens}
        metrics |= stored_truth_metrics(table, num_tokens)
    write_table(path, table, metadata)
    return metrics


def _settings_text(metadata: dict[str, Any]) -> str:
    """Return those metadata that decide the rollouts, as JSON.

    The config's hash is left out, because it also depends on other keys, as those of the critic.
    """
    settings = {name: value for name, value in metadata.items() if name not in _NO_SETTINGS}
    return json.dumps(settings, indent=1, sort_keys=True) + "\n"


def summary_metrics(table: pa.Table) -> dict[str, float]:
    """Return metrics of the rollouts in a table, under the keys of docs/metrics.md."""
    columns = (table.column(name).to_pylist() for name in ("response_ids", "turn_sampled"))
    lengths = [
        len(ids) if sampled is None else sum(sampled) for ids, sampled in zip(*columns, strict=True)
    ]
    correct, rewards = (table.column(name).to_pylist() for name in ("is_correct", "reward"))
    return {
        "rollouts/num_rollouts": float(table.num_rows),
        "rollouts/accuracy": sum(correct) / table.num_rows,
        "rollouts/reward_mean": sum(rewards) / table.num_rows,
        "rollouts/num_response_tokens": float(sum(lengths)),
    }


@dataclass(frozen=True)
class Measuring:
    """How many continuations measure the value at the start of each step of a response.

    `share` is the share of the groups whose responses are measured.
    """

    num_continuations: int
    share: float

    def settings(self, config: FitConfig) -> dict[str, Any]:
        """Return the settings that decide the measured values, for the file's metadata."""
        return {
            "num_continuations": self.num_continuations,
            "share": self.share,
            "segments": asdict(config.value_truth.segments),
            **returns_settings(config),
        }

    def is_measured(self, group: int) -> bool:
        """Whether the responses of a group, given by its number, are measured.

        Measured groups are spread evenly over all groups.
        """
        return int((group + 1) * self.share + 1e-9) > int(group * self.share + 1e-9)

    def cost_text(self, config: FitConfig, num_groups: int, group_size: int) -> str:
        """Return a sentence on the cost of measuring.

        It has the most prefixes, continuations and tokens that this can take.
        """
        groups = sum(map(self.is_measured, range(num_groups)))
        segments = config.value_truth.segments.max_segments
        prefixes = groups * group_size * segments
        total = prefixes * self.num_continuations
        tokens = total * config.rollouts.max_response_tokens
        return (
            f"--value_truth {self.num_continuations}: {groups} of {num_groups} groups, at most "
            f"{segments} prefixes of each of {groups * group_size:,} responses, so at most "
            f"{prefixes:,} prefixes, {total:,} continuations and {tokens:,} tokens"
        )


def measure_step_starts(
    rollouts: Sequence[Rollout],
    groups: Sequence[int],
    measuring: Measuring | None,
    continuation_sampler: ContinuationSampler,
    *,
    seed: int,
    note: Callable[[str], None],
) -> tuple[list[list[MeasuredState]], int]:
    """Measure what responses are worth at the start of each step, by continuations from there.

    Only responses of the groups that `measuring` chooses are measured; none if it is None. `groups`
    has the group's number of each rollout. `note` gets the expected cost before.

    Returns: the measured states of each response, and the number of tokens that were sampled.
    """
    config = continuation_sampler.config
    states_by_row: list[list[MeasuredState]] = [[] for _ in rollouts]
    places = [
        Place(row, start)
        for row, (rollout, group) in enumerate(zip(rollouts, groups, strict=True))
        if measuring is not None and measuring.is_measured(group) and not rollout.is_lost
        for start in step_starts(
            rollout, config.value_truth.segments, continuation_sampler.player.tokenizer
        )
    ]
    if measuring is None or not places:  # perhaps all episodes were lost to their environment
        return states_by_row, 0
    k, num_states = measuring.num_continuations, len(group_by_state(rollouts, places))
    about = expected_tokens(rollouts, places, k)
    note(
        f"{num_states:,} prefixes of {len({place.row for place in places}):,} responses, "
        f"{k * num_states:,} continuations, about {about:,} tokens"
    )
    continuations = continuation_sampler.sample(rollouts, places, num_continuations=k, seed=seed)
    measured = continuations.measured(
        critic_rewards(continuations.batch, config), gamma=config.algorithm.gamma
    )
    for place in places:
        if place in measured:  # else a continuation was lost to the environment
            states_by_row[place.row].append(measured[place])
    return states_by_row, continuations.num_sampled_tokens


def stored_truth_metrics(table: pa.Table, num_sampled_tokens: int) -> dict[str, float]:
    """Return metrics of a table's measured states, under the keys of docs/metrics.md."""
    lists = (table.column(name).to_pylist() for name in ("truth_rows", "truth_noise"))
    sharing, noise = ([x for row in rows if row for x in row] for rows in lists)
    return {
        "rollouts/num_prefixes": float(round(sum(1 / rows for rows in sharing))),
        "rollouts/truth_noise": sum(noise) / max(len(noise), 1),
        "rollouts/num_continuation_tokens": float(num_sampled_tokens),
    }
