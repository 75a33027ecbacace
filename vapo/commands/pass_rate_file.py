"""The file that `vapo filter` writes: rows as they were read, with the policy's pass rate.

One line for each finished prompt, so a run that was killed resumes where it was. Beside it,
`FILE.settings.json` says what the numbers belong to: the weights, the prompts, how they were
sampled and judged.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vapo.config import FitConfig
from vapo.config.rewards import verifier_settings
from vapo.errors import UserError
from vapo.prompts.columns import PASS_RATE
from vapo.prompts.fingerprint import fingerprint, prompts_digest
from vapo.system.files import try_lock, write_text
from vapo.types import Prompt, Rollout


def settings_of(config: FitConfig, prompts: Sequence[Prompt], k: int) -> dict[str, Any]:
    """All that a pass rate depends on; a function or environment by its name, not by its code."""
    rewards, identify = config.rewards, config.from_environment.identify
    verifier = verifier_settings(rewards)
    sampled = ("engine", "max_response_tokens", "temperature", "top_p", "top_k")
    return {
        "weights": fingerprint(config.actor.path) or identify(config.actor.path),
        "dtype": config.actor.dtype,
        "prompts": prompts_digest(prompts),
        "num_responses": k,
        "seed": config.seed,
        **{name: getattr(config.rollouts, name) for name in sampled},
        "chunk_prompts": chunk_prompts(config, k),
        "verifier": rewards.verifier,
        "pattern": identify(verifier.get("pattern")),
        "function": identify(verifier.get("function")),
        "reward_model": identify(verifier.get("reward_model_path")),
        "reward_model_threshold": verifier.get("reward_model_threshold", 0.0),
        "timeout_s": rewards.timeout_s,
        **_environment_settings(config),
    }


def _environment_settings(config: FitConfig) -> dict[str, Any]:
    """What episodes depend on beside; nothing where responses are none."""
    environment = config.environment
    if not environment.is_used:
        return {}
    identify = config.from_environment.identify
    named = {
        name: identify(value) if isinstance(value, str) else value
        for name, value in vars(environment).items()
        if name not in ("args", "function_folder", "max_processes")
    }
    args = getattr(environment, "args", {})
    written = {name: identify(json.dumps(args[name], default=str)) for name in sorted(args)}
    return {"environment": {**named, "args": written}}


def chunk_prompts(config: FitConfig, k: int) -> int:
    """Prompts that are sampled together: enough to fill the engine twice."""
    return max(1, 2 * config.rollouts.max_concurrent_sequences // k)


def default_path(config: FitConfig, settings: Mapping[str, Any]) -> Path:
    """A file for these settings alone, so that a second run finds the first one's."""
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    return Path(config.output_dir) / "pass_rates" / f"{key}.jsonl"


class PassRateFile:
    """Appends finished prompts; a context manager that holds the file alone.

    Raises:
        UserError: the file belongs to other settings, is no such file, or is being written.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.num_responses = int(settings["num_responses"])
        self.num_correct: dict[int, int] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        except OSError as error:
            raise UserError(f"--output {path}: cannot be written ({error.strerror})") from None
        try:
            if not try_lock(self._file, with_children=True):
                raise UserError(f"--output {path}: another `vapo filter` is writing it")
            self._check(settings)
            self._read_finished()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def append(self, index: int, prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
        """One finished prompt, its responses judged; nothing if it is there already."""
        if index in self.num_correct:
            return
        num_correct = sum(bool(rollout.is_correct) for rollout in rollouts)
        row = {
            **prompt.record,
            PASS_RATE: num_correct / len(rollouts),
            "num_correct": num_correct,
            "num_responses": len(rollouts),
            "prompt_index": index,
        }
        self._file.write(json.dumps(row, default=str).encode() + b"\n")
        self.num_correct[index] = num_correct

    def flush(self) -> None:
        """What was appended survives a kill, and a crash of the machine."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def histogram(self) -> list[int]:
        """How many prompts have 0, 1, ..., k correct responses."""
        bins = [0] * (self.num_responses + 1)
        for number in self.num_correct.values():
            bins[number] += 1
        return bins

    def _check(self, settings: Mapping[str, Any]) -> None:
        beside = self.path.with_name(f"{self.path.name}.settings.json")
        is_empty = self.path.stat().st_size == 0
        if is_empty:
            write_text(beside, json.dumps(settings, indent=1) + "\n")
            return
        try:
            written = json.loads(beside.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise UserError(
                f"--output {self.path}: there is a file without a readable {beside.name}; give "
                "another name, or remove it"
            ) from None
        for name, value in settings.items():
            if written.get(name) != value:
                raise UserError(
                    f"--output {self.path}: its rows belong to other settings ({name} "
                    f"{written.get(name)!r}, now {value!r}); give another name, or remove it"
                )

    def _read_finished(self) -> None:
        """A last line that was cut by a kill is cut off and made again."""
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                self._file.truncate(end)
                break
            try:
                row = json.loads(line)
                self.num_correct[int(row["prompt_index"])] = int(row["num_correct"])
            except (ValueError, KeyError, TypeError):
                raise UserError(
                    f"{self.path}:{number}: not a row that `vapo filter` wrote; remove the file"
                ) from None
            end += len(line)
        self._file.seek(0, os.SEEK_END)
