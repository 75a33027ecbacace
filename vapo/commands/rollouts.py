"""`vapo rollouts`: sampled and scored rollouts of the policy, as a file that critics train on."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from vapo.commands.command_rules import check_rollouts
from vapo.commands.measured_rollouts import (
    Measuring,
    describe_stored_truth,
    measure_step_starts,
    measuring_of,
    stored_truth_metrics,
)
from vapo.commands.pass_rate_file import chunk_prompts, settings_of
from vapo.commands.sampling import policy_player, read_inputs, recorded
from vapo.config import FitConfig, resolve
from vapo.config.written import config_hash
from vapo.diagnostics.oracle import oracle_states
from vapo.errors import UserError
from vapo.networks.saved_tokenizers import tokenizer_fingerprint
from vapo.prompts.load import PromptSplit
from vapo.prompts.training_set import group_sampling
from vapo.rollouts.collection import sample_and_score
from vapo.rollouts.continuations import Continuer
from vapo.rollouts.engines.contract import sampling_settings
from vapo.rollouts.rollout_file import (
    SCHEMA_VERSION,
    one_table,
    read_metadata,
    rollout_table,
    write_table,
)
from vapo.system.atomic_files import write_text
from vapo.system.progress import Progress
from vapo.system.quiet import quiet_libraries
from vapo.system.seeding import derive_seed
from vapo.system.shown_text import say
from vapo.types import Prompt

_SPENT = "continuation_tokens"
_NO_SETTINGS = ("config_hash", "schema_version", _SPENT)


def run(
    config: FitConfig,
    *,
    num: int,
    output: str | None = None,
    value_truth: int | None = None,
    truth_share: float | None = None,
) -> Path:
    """Sample, score and write what is not written yet; the file."""
    quiet_libraries()
    check_rollouts(config, output)
    measuring = measuring_of(config, value_truth, truth_share)
    tokenizer, prompts = read_inputs(config)
    num_groups = -(-num // resolve(config).group_size)
    metadata = metadata_of(config, prompts, tokenizer, num_groups)
    if measuring is not None:
        metadata["value_truth"] = measuring.settings(config)
    key = hashlib.sha256(_settings_text(metadata).encode()).hexdigest()[:12]
    name = output or Path(config.output_dir) / "rollouts" / f"{key}.parquet"
    path = Path(name)
    if path.exists():
        if _settings_text(read_metadata(path, key="--output")) != _settings_text(metadata):
            raise UserError(
                f"--output {path}: there is a file of other settings; give another name, or "
                "remove it"
            )
        say(f"all {num_groups} groups are there already\n{path}")
        return path
    with recorded(config, "rollouts", prompts) as (progress, logger):
        started = time.monotonic()
        parts = sample_parts(config, prompts, tokenizer, path, metadata, progress, measuring)
        metrics = join_parts(parts, path, metadata)
        metrics["rollouts/sampling_s"] = time.monotonic() - started
        shutil.rmtree(_folder(path))
        logger.log_metrics(metrics, step=0)
        where = logger.describe()
    said = "" if measuring is None else f"\n{describe_stored_truth(metrics)}"
    say(
        f"{metrics['rollouts/num_rollouts']:.0f} rollouts in {num_groups} groups, pass rate "
        f"{metrics['rollouts/pass_rate']:.3f}, mean reward {metrics['rollouts/reward_mean']:.3f}; "
        f"{metrics['rollouts/num_response_tokens']:.0f} response tokens in "
        f"{metrics['rollouts/sampling_s']:.1f} s{said}\n"
        f"train a critic on them with components.value_pretraining.data={path}\n{where}\n{path}"
    )
    return path


def metadata_of(
    config: FitConfig, prompts: PromptSplit, tokenizer: PreTrainedTokenizerBase, num_groups: int
) -> dict[str, Any]:
    """What the file says of itself; but for `config_hash` equal where the rollouts are."""
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


def sample_parts(
    config: FitConfig,
    prompts: PromptSplit,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    metadata: dict[str, Any],
    progress: Progress,
    measuring: Measuring | None = None,
) -> list[Path]:
    """One file for each chunk of groups, which a run that was killed does not sample again.

    A chunk depends on (seed, chunk) only.
    """
    size, num_groups = int(metadata["group_size"]), int(metadata["num_groups"])
    chunk = min(chunk_prompts(config, size), num_groups)
    parts = [_folder(path) / f"{number:06d}.parquet" for number in range(-(-num_groups // chunk))]
    _open_folder(path, metadata)
    missing = [number for number, part in enumerate(parts) if not part.is_file()]
    progress.note(
        f"{path}: {num_groups} groups of {size}; {len(parts) - len(missing)} of {len(parts)} "
        f"parts are there, each of up to {chunk} groups"
    )
    if measuring is not None:
        progress.note(measuring.most(config, num_groups, size))
    if not missing:
        return parts
    with (
        policy_player(config, tokenizer) as player,
        progress.stage("rollouts", total=len(missing), unit="parts") as advance,
    ):
        settings = sampling_settings(config.rollouts)
        continuer = Continuer(config, settings, player, progress.stage)
        for number in missing:
            chosen = group_sampling(
                prompts.training, num_prompts=chunk, seed=config.seed, iteration=number
            )
            groups = range(number * chunk, min((number + 1) * chunk, num_groups))
            table, spent = sample_part(
                chosen[: len(groups)],
                groups,
                continuer,
                measuring,
                group_size=size,
                number=number,
                note=progress.note,
            )
            write_table(parts[number], table, metadata | {_SPENT: spent})
            advance(1)
    return parts


def sample_part(
    prompts: Sequence[Prompt],
    groups: Sequence[int],
    continuer: Continuer,
    measuring: Measuring | None,
    *,
    group_size: int,
    number: int,
    note: Callable[[str], None],
) -> tuple[pa.Table, int]:
    """The table of a chunk, and the tokens of its continuations.

    Args:
        groups: the number of each prompt's group in the file.
        number: the chunk's, which with the seed decides what is sampled.
    """
    config, tokenizer = continuer.config, continuer.player.tokenizer
    rollouts = sample_and_score(
        prompts,
        continuer.player,
        continuer.stage,
        group_size=group_size,
        settings=continuer.settings,
        seed=derive_seed(config.seed, "stored rollouts", number),
    )
    of_rows = [group for group in groups for _ in range(group_size)]
    states = [oracle_states(config, rollout, tokenizer) for rollout in rollouts]
    measured, num_tokens = measure_step_starts(
        rollouts,
        of_rows,
        measuring,
        continuer,
        seed=derive_seed(config.seed, "stored continuations", number),
        note=note,
    )
    return rollout_table(rollouts, of_rows, states, measured), num_tokens


def join_parts(parts: Sequence[Path], path: Path, metadata: dict[str, Any]) -> dict[str, float]:
    """Write the file of all parts; what it says of the policy, and what its truth has cost."""
    table = one_table(parts, key="--output")
    metrics = summary_metrics(table)
    if "value_truth" in metadata:
        spent = sum(int(read_metadata(part, key="--output").get(_SPENT, 0)) for part in parts)
        metadata = metadata | {_SPENT: spent}
        metrics |= stored_truth_metrics(table, spent)
    write_table(path, table, metadata)
    return metrics


def _settings_text(metadata: dict[str, Any]) -> str:
    """What decides the rollouts; the config's hash also has what does not, as the critic."""
    kept = {name: value for name, value in metadata.items() if name not in _NO_SETTINGS}
    return json.dumps(kept, indent=1, sort_keys=True) + "\n"


def _folder(path: Path) -> Path:
    return path.with_name(f"{path.name}.parts")


def _open_folder(path: Path, metadata: dict[str, Any]) -> None:
    """The folder of the parts, which belongs to these settings alone."""
    about = _folder(path) / "settings.json"
    text = _settings_text(metadata)
    try:
        about.parent.mkdir(parents=True, exist_ok=True)
        if about.exists() and about.read_text(encoding="utf-8") != text:
            raise UserError(
                f"--output {path}: {about.parent} has rollouts of other settings; give another "
                "name, or remove it"
            )
        write_text(about, text)
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written ({error.strerror})") from None


def summary_metrics(table: pa.Table) -> dict[str, float]:
    """What the file says of the policy; keys as docs/metrics.md has them."""
    columns = (table.column(name).to_pylist() for name in ("response_ids", "turn_sampled"))
    lengths = [
        len(ids) if sampled is None else sum(sampled) for ids, sampled in zip(*columns, strict=True)
    ]
    correct, rewards = (table.column(name).to_pylist() for name in ("is_correct", "reward"))
    return {
        "rollouts/num_rollouts": float(table.num_rows),
        "rollouts/pass_rate": sum(correct) / table.num_rows,
        "rollouts/reward_mean": sum(rewards) / table.num_rows,
        "rollouts/num_response_tokens": float(sum(lengths)),
    }
