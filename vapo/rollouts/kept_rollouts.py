"""An iteration's rollouts, saved until its checkpoint is written, so that none is sampled twice.

One safetensors file for each process, with texts and verdicts in it as JSON.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vapo.files.whole_files import write_whole
from vapo.system.distributed import rank, world_size
from vapo.types import FinishReason, Phase, Prompt, PromptScore, Rollout, RolloutBatch, Turn

_FILE = re.compile(r"iteration_([0-9]{6,})_rank_[0-9]+\.safetensors")
_FORMAT = 8  # of the file; rollouts in another format are sampled again
# bytes of a padded response token, with its log-prob and text; bytes of a response of one turn
_TOKEN_BYTES, _RESPONSE_BYTES = 40, 512
# fields of a rollout that JSON holds as they are
_PLAIN_FIELDS = ("is_correct", "extracted", "failure", "by_verifier", "in_environment", "is_lost")


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
        self.prompts = {prompt.prompt_id: prompt for prompt in prompts}

    @property
    def folder(self) -> Path:
        return self._run_dir.path / "rollouts"

    def path(self, iteration: int, rank: int) -> Path:
        return self.folder / f"iteration_{iteration:06d}_rank_{rank}.safetensors"

    def origin(self, iteration: int, weights: str) -> Origin:
        """Return the origin of this process's rollouts of an iteration with these weights."""
        return Origin(iteration, rank(), world_size(), self._run_dir.identity, weights)

    def has(self, iteration: int, rank: int) -> bool:
        return self.path(iteration, rank).is_file()

    def write(self, origin: Origin, sampled: IterationRollouts) -> None:
        """Write an iteration's rollouts to the file of this origin.

        Raises: OSError: the file cannot be written.
        """
        batch = sampled.batch
        columns = {item.name: getattr(batch, item.name) for item in fields(batch)}
        tensors = {
            name: value.clone().contiguous()  # safetensors refuses tensors that share memory
            for name, value in columns.items()
            if isinstance(value, Tensor)
        }
        tensors["logprobs_exact"] = torch.tensor(
            [p for r in batch.rollouts for p in r.rollout_logprobs], dtype=torch.float64
        )
        tensors["json"] = torch.frombuffer(bytearray(_to_json(sampled)), dtype=torch.uint8)
        metadata = {"origin": _origin_text(origin), "digest": _digest(tensors)}
        self.folder.mkdir(exist_ok=True)
        write_whole(
            self.path(origin.iteration, origin.rank),
            lambda aside: _save(tensors, aside, metadata),
        )

    def read(self, origin: Origin) -> IterationRollouts | None:
        """Load the rollouts that were saved for exactly this origin.

        None: there are none, the file is damaged, or a prompt has changed since.
        """
        path = self.path(origin.iteration, origin.rank)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("origin") != _origin_text(origin):
                    return None
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except Exception:  # safetensors raises its own kinds
            return None
        if metadata.get("digest") != _digest(tensors):
            return None
        return self._from_json(tensors["json"].numpy().tobytes(), tensors)

    def forget(self, *, first_kept: int) -> None:
        """Remove the files that all processes have saved for the iterations before `first_kept`."""
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            match = _FILE.fullmatch(path.name)  # what a user keeps beside them stays
            if match is not None and int(match[1]) < first_kept:
                path.unlink(missing_ok=True)

    def _from_json(self, text: bytes, tensors: dict[str, Tensor]) -> IterationRollouts | None:
        contents = json.loads(text)
        rows = contents["rollouts"]
        prompts = [self.prompts[r["prompt_id"]] for r in rows if r["prompt_id"] in self.prompts]
        if len(prompts) < len(rows) or _prompts_digest(prompts) != contents["prompts"]:
            return None  # the data has changed
        lengths = [row["num_tokens"] for row in rows]
        logprobs = tensors["logprobs_exact"].split(lengths)
        rollouts = [
            Rollout(
                prompt=prompt,
                response_ids=tuple(tensors["response_ids"][i, : lengths[i]].tolist()),
                response_text=row["text"],
                rollout_logprobs=tuple(logprobs[i].tolist()),
                finish_reason=FinishReason(row["finish_reason"]),
                turns=tuple(
                    Turn(**turn | {"updates": tuple(map(tuple, turn["updates"]))})
                    for turn in row["turns"]
                ),
                **{name: row[name] for name in _PLAIN_FIELDS},
            )
            for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True))
        ]
        names = {f.name for f in fields(RolloutBatch)}
        columns: dict[str, Any] = {n: tensors[n] for n in tensors.keys() & names}
        batch = RolloutBatch(
            rollouts=rollouts,
            group_size=contents["group_size"],
            max_response_tokens=contents["max_response_tokens"],
            sampled_groups=tuple(PromptScore(*score) for score in contents["sampled_groups"]),
            **columns,
        )
        return IterationRollouts(Phase(contents["phase"]), batch, contents["metrics"])


def max_cache_bytes(num_responses: int, max_response_tokens: int) -> int:
    """Estimate how many bytes an iteration's files have at most.

    The estimate is for responses of one turn and of full length.
    """
    return num_responses * (_RESPONSE_BYTES + max_response_tokens * _TOKEN_BYTES)


def _origin_text(origin: Origin) -> str:
    return json.dumps({"format": _FORMAT, **asdict(origin)})


def _to_json(sampled: IterationRollouts) -> bytes:
    batch = sampled.batch
    contents: dict[str, Any] = {
        "phase": sampled.phase.value,
        "metrics": sampled.metrics,
        "group_size": batch.group_size,
        "max_response_tokens": batch.max_response_tokens,
        "prompts": _prompts_digest([rollout.prompt for rollout in batch.rollouts]),
        "sampled_groups": batch.sampled_groups,
        "rollouts": [
            {
                "prompt_id": rollout.prompt.prompt_id,
                "text": rollout.response_text,
                "finish_reason": rollout.finish_reason.value,
                "num_tokens": len(rollout.response_ids),
                "turns": [asdict(turn) for turn in rollout.turns],
                **{name: getattr(rollout, name) for name in _PLAIN_FIELDS},
            }
            for rollout in batch.rollouts
        ],
    }
    return json.dumps(contents).encode()


def _prompts_digest(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.text, prompt.prompt_ids, prompt.answer]).encode())
    return digest.hexdigest()


def _save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write tensors and metadata to a safetensors file.

    Raises: OSError: the file cannot be written; safetensors itself raises another error.
    """
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\0".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
