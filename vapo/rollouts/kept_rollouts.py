"""An iteration's rollouts, saved until its checkpoint is written, so that none is sampled twice.

Each process has a file of rollouts for each iteration, as `vapo rollouts` writes them, and beside
it the file's SHA-256. The tensors of the batch are computed from the rollouts again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import torch
from transformers import PreTrainedTokenizerBase

from vapo.config import FitConfig
from vapo.files.whole_files import read_inside, sha256, write_text
from vapo.functional.columns import with_loss_on
from vapo.rollouts.batch import configured_batch
from vapo.rollouts.rollout_file import (
    BATCH_COLUMNS,
    SCHEMA,
    SCHEMA_VERSION,
    read_table,
    rollout_table,
    write_table,
)
from vapo.rollouts.stored_rollouts import row_reader
from vapo.system.distributed import rank, world_size
from vapo.types import Phase, Prompt, PromptScore, Rollout, RolloutBatch
from vapo.user_code.process_protocol import printable

_FILE = re.compile(r"iteration_([0-9]{6,})_rank_[0-9]+\.(parquet|sha256|safetensors)")
# columns of the file that are fields of a rollout, and not read by `RowReader`
_ROLLOUT_COLUMNS = ("prompt_id", "extracted", "by_verifier", "versions", "updates")
# bytes of a response token with its log-prob, text and value; bytes of a response of one turn
_TOKEN_BYTES, _RESPONSE_BYTES = 20, 512


@dataclass(frozen=True)
class IterationRollouts:
    """An iteration's rollouts as a batch, the phase that they were sampled for, and metrics of
    sampling."""

    phase: Phase
    batch: RolloutBatch
    metrics: dict[str, float]


@dataclass(frozen=True)
class Origin:
    """What identifies saved rollouts: their iteration, process, config and the actor's weights.

    Saved rollouts of any other origin are not used. `identity` is a text that identifies the
    config, and `weights` names the actor's weights when the iteration begins (`Lineage`).
    """

    iteration: int
    rank: int
    world_size: int
    identity: str
    weights: str


class RunFolder(Protocol):
    """What `ResumeCache` needs of a run's folder: its path, and the identity of the config."""

    path: Path
    identity: str


class ResumeCache:
    """Saves each iteration's rollouts in the run's folder, for a run that is stopped and resumes.

    Every process has one, and writes and reads a file of its own for each iteration.

    Args:
        prompts: the run's prompts, as the files have only their ids.
    """

    def __init__(self, run_dir: RunFolder, prompts: Sequence[Prompt]) -> None:
        self._run_dir = run_dir  # the other processes know its path only later
        self.prompts = {printable(prompt.prompt_id): prompt for prompt in prompts}

    @property
    def folder(self) -> Path:
        return self._run_dir.path / "rollouts"

    def path(self, iteration: int, rank: int) -> Path:
        return self.folder / f"iteration_{iteration:06d}_rank_{rank}.parquet"

    def origin(self, iteration: int, weights: str) -> Origin:
        """Return the origin of this process's rollouts of an iteration with these weights."""
        return Origin(iteration, rank(), world_size(), self._run_dir.identity, weights)

    def has(self, iteration: int, rank: int) -> bool:
        """Whether there is a file of these rollouts, even an earlier one that `read` refuses."""
        path = self.path(iteration, rank)
        return path.is_file() or path.with_suffix(".safetensors").is_file()

    def write(self, origin: Origin, sampled: IterationRollouts) -> None:
        """Write an iteration's rollouts to the file of this origin.

        Raises: OSError: the file cannot be written.
        """
        batch, path = sampled.batch, self.path(origin.iteration, origin.rank)
        metadata = {
            "schema_version": SCHEMA_VERSION,
            "group_size": batch.group_size,
            "origin": asdict(origin),
            "phase": sampled.phase.value,
            "metrics": sampled.metrics,
            "sampled_groups": batch.sampled_groups,
        }
        groups = [row // batch.group_size for row in range(len(batch))]
        self.folder.mkdir(exist_ok=True)
        write_table(path, rollout_table(batch.rollouts, groups, _other_columns(batch)), metadata)
        write_text(path.with_suffix(".sha256"), sha256(path))

    def read(
        self, origin: Origin, config: FitConfig, tokenizer: PreTrainedTokenizerBase
    ) -> IterationRollouts | None:
        """Load the rollouts that were saved for exactly this origin.

        None: there are none, the file is damaged, or a prompt has changed since.

        Args:
            config: the run's config, which says how a batch is made of rollouts.
        """
        path = self.path(origin.iteration, origin.rank)
        try:
            digest = read_inside(self.folder, path.with_suffix(".sha256").name, 64)
            if digest is None or digest.decode() != sha256(path):
                return None
            table, metadata = read_table(path, key="rollouts/")
            if metadata["origin"] != asdict(origin):
                return None
            table = table.cast(SCHEMA)
            stored = row_reader(config, path, tokenizer, needs_logprobs=True).read(table, {})
            records = table.select(_ROLLOUT_COLUMNS).to_pylist()
            rollouts = [
                self._rollout(row.rollout, record)
                for row, record in zip(stored, records, strict=True)
            ]
            batch = configured_batch(rollouts, config, group_size=int(metadata["group_size"]))
            batch = _with_other_columns(batch, table)
            scores = tuple(PromptScore(*score) for score in metadata["sampled_groups"])
            return IterationRollouts(
                Phase(metadata["phase"]),
                replace(batch, sampled_groups=scores),
                {name: float(value) for name, value in metadata["metrics"].items()},
            )
        except Exception:  # a folder that was received may hold anything; sampling again is right
            return None

    def forget(self, *, first_kept: int) -> None:
        """Remove the files that all processes have saved for the iterations before `first_kept`."""
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            match = _FILE.fullmatch(path.name)  # what a user keeps beside them stays
            if match is not None and int(match[1]) < first_kept:
                path.unlink(missing_ok=True)

    def _rollout(self, rollout: Rollout, record: Mapping[str, Any]) -> Rollout:
        """Return a stored rollout with the run's prompt and with what `RowReader` does not read.

        Raises: KeyError, ValueError: the run has no such prompt, because its data has changed.
        """
        prompt, stored = self.prompts[record["prompt_id"]], rollout.prompt
        texts = printable(prompt.text), printable(prompt.answer)
        if (*texts, prompt.prompt_ids) != (stored.text, stored.answer, stored.prompt_ids):
            raise ValueError("another prompt has this name now")
        by_verifier = json.loads(record["by_verifier"])
        if not all(math.isfinite(verdict["reward"]) for verdict in by_verifier.values()):
            raise ValueError("a verifier's reward is not finite")
        columns = rollout.turns, record["versions"], record["updates"]
        turns = [
            replace(turn, version=version, updates=tuple((n, tokens) for n, tokens in updates))
            for turn, version, updates in zip(*columns, strict=True)
        ]
        return replace(
            rollout,
            prompt=prompt,
            turns=tuple(turns),
            extracted=record["extracted"],
            by_verifier=by_verifier,
        )


def max_cache_bytes(num_responses: int, max_response_tokens: int) -> int:
    """Estimate how many bytes an iteration's files have at most.

    The estimate is for responses of one turn and of full length.
    """
    return num_responses * (_RESPONSE_BYTES + max_response_tokens * _TOKEN_BYTES)


def _other_columns(batch: RolloutBatch) -> list[dict[str, Any]]:
    """Return for each row of a batch the columns that do not follow from its rollout."""
    tensors = {name: getattr(batch, name) for name in BATCH_COLUMNS}
    columns = {name: values.tolist() for name, values in tensors.items() if values is not None}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _with_other_columns(batch: RolloutBatch, table: pa.Table) -> RolloutBatch:
    """Add the columns of a table that do not follow from the rollouts to their batch.

    Raises: KeyError, ValueError: a column is absent, or has another shape than the batch.
    """
    present = [name for name in BATCH_COLUMNS if table[name].null_count == 0]
    tensors: dict[str, Any] = {name: torch.tensor(table[name].to_pylist()) for name in present}
    if any(x.shape != batch.response_ids.shape[: x.dim()] for x in tensors.values()):
        raise ValueError("the columns belong to another batch")
    carries_loss = ~tensors.pop("is_filler")
    return with_loss_on(replace(batch, **tensors), carries_loss)
