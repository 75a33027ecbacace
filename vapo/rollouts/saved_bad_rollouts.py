"""The rollouts with numbers that are not finite, as lines of JSON in the run's folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from vapo.types import Rollout

FOLDER = "bad_rollouts"
_MAX_BYTES = 64 * 2**20


class BadRollouts:
    """Writes `bad_rollouts/rank0.jsonl`: a limited number of rollouts, and 64 MiB, a process.

    JSON has no nan: a number that is not finite is written as the text "nan", "inf" or "-inf".
    Nothing is written before `open`.
    """

    def __init__(self, max_rollouts: int) -> None:
        self._left, self._left_bytes = max_rollouts, _MAX_BYTES
        self._path: Path | None = None

    def open(self, run_dir: Path, rank: int) -> None:
        """Start writing into the run's folder. Rollouts from before a resume count."""
        self._path = run_dir / FOLDER / f"rank{rank}.jsonl"
        if self._path.exists():
            self._left_bytes -= self._path.stat().st_size
            with self._path.open() as file:
                self._left -= sum(1 for _ in file)

    def save(self, rollouts: Sequence[tuple[Rollout, Mapping[str, Any]]]) -> None:
        """Save each rollout with its known numbers, tensors of its response tokens included."""
        if self._path is None or self._left <= 0 or not rollouts:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            for rollout, known in rollouts[: self._left]:
                line = json.dumps(_as_json(_record(rollout, known)), allow_nan=False) + "\n"
                self._left_bytes -= len(line.encode())
                if self._left_bytes < 0:
                    self._left = 0
                    return
                file.write(line)
                self._left -= 1

    def describe(self) -> str:
        """Where the saved rollouts are, as the end of a sentence."""
        return "" if self._path is None else f"; rollouts: {self._path.parent}"


def _record(rollout: Rollout, known: Mapping[str, Any]) -> dict[str, Any]:
    length = len(rollout.response_ids)
    per_token = {
        name: value[:length].tolist() if isinstance(value, Tensor) and value.dim() else value
        for name, value in known.items()
        if value is not None
    }
    return {
        "prompt_id": rollout.prompt.prompt_id,
        "prompt": rollout.prompt.text,
        "answer": rollout.prompt.answer,
        "response": rollout.response_text,
        "finish_reason": rollout.finish_reason.value,
        "prompt_ids": list(rollout.prompt.prompt_ids),
        "response_ids": list(rollout.response_ids),
        "rollout_logprobs": list(rollout.rollout_logprobs),
        "turns": [asdict(turn) for turn in rollout.turns],
        **per_token,
    }


def _as_json(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.item()
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
