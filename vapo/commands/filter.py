"""`vapo filter`: the policy's pass rate of each training prompt, as a file to train on.

The file has the rows as they were read, one line for each finished prompt, so a run that was
killed resumes where it was. Beside it, `FILE.settings.json` says what the numbers belong to: the
weights, the prompts, how they were sampled and judged.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from vapo.commands.sampling import policy_player, read_inputs, recorded
from vapo.config import FitConfig
from vapo.config.rewards import verifier_settings
from vapo.errors import UserError
from vapo.prompts.columns import PASS_RATE
from vapo.prompts.fingerprint import fingerprint, prompts_digest
from vapo.prompts.load import PromptSplit
from vapo.rollouts.engines.contract import sampling_settings
from vapo.system.atomic_files import write_text
from vapo.system.file_locks import try_lock
from vapo.system.progress import Progress
from vapo.system.seeding import derive_seed
from vapo.system.shown_text import say
from vapo.types import Prompt, Rollout


def run(config: FitConfig, *, num_responses: int = 8, output: str | None = None) -> Path:
    """Sample, judge and write what is not written yet; report; the file."""
    tokenizer, prompts = read_inputs(config)
    settings = settings_of(config, prompts.train, num_responses)
    path = default_path(config, settings) if output is None else Path(output)
    with closing(PassRateFile(path, settings)) as file:
        left = len(prompts.train) - len(file.num_correct)
        with recorded(config, "filter", prompts) as (progress, logger):
            progress.note(
                f"{path}: {len(file.num_correct)} prompts are there, {left} are sampled, "
                f"{num_responses} responses each"
            )
            started, num_tokens = time.monotonic(), 0
            if left:
                num_tokens = _sample(config, prompts, tokenizer, file, progress)
            metrics = summary_metrics(file.histogram())
            metrics["filter/num_response_tokens"] = float(num_tokens)
            metrics["filter/sampling_s"] = time.monotonic() - started
            logger.log_metrics(metrics, step=0)
            text = render(file.histogram(), metrics)
            logger.log_text(text + "\n", "pass_rates.txt")
            where = logger.describe()
    say(
        f"{text}\ntrain on it with data.train.kind=jsonl "
        "data.train.min_pass_rate=LOW data.train.max_pass_rate=HIGH data.train.path="
        f"{path}\n{where}\n{path}"
    )
    return path


def _sample(
    config: FitConfig,
    prompts: PromptSplit,
    tokenizer: PreTrainedTokenizerBase,
    file: PassRateFile,
    progress: Progress,
) -> int:
    """Fill the file, chunk by chunk; a chunk's responses depend on (seed, chunk) only."""
    k, size, train = file.num_responses, chunk_prompts(config, file.num_responses), prompts.train
    num_tokens = 0
    with (
        policy_player(config, tokenizer) as player,
        progress.stage(
            "pass rates", total=len(train) - len(file.num_correct), unit="prompts"
        ) as advance,
    ):
        for start in range(0, len(train), size):
            chunk: list[Prompt] = train[start : start + size]
            missing = [i for i in range(start, start + len(chunk)) if i not in file.num_correct]
            if not missing:
                continue
            rollouts = player.play(
                chunk,
                group_size=k,
                settings=sampling_settings(config.rollouts),
                seed=derive_seed(config.seed, "pass rates", start),
            )
            for i, prompt in enumerate(chunk):
                file.append(start + i, prompt, rollouts[i * k : (i + 1) * k])
            file.flush()
            num_tokens += sum(rollout.num_sampled for rollout in rollouts)
            advance(len(missing))
    return num_tokens


def summary_metrics(histogram: list[int]) -> dict[str, float]:
    """What the file says of the prompts; keys as docs/metrics.md has them."""
    total, k = sum(histogram), len(histogram) - 1
    mean = sum(number * count for number, count in enumerate(histogram)) / (total * k)
    return {
        "filter/num_prompts": float(total),
        "filter/pass_rate_mean": mean,
        "filter/never_share": histogram[0] / total,
        "filter/always_share": histogram[-1] / total,
        "filter/mixed_share": 1 - (histogram[0] + histogram[-1]) / total,
    }


def render(histogram: list[int], metrics: dict[str, float]) -> str:
    """The histogram as text, and what of it can teach."""
    k, most = len(histogram) - 1, max(histogram)
    lines = ["pass rate  prompts"]
    for number, count in enumerate(histogram):
        bar = "#" * round(40 * count / most)
        lines.append(f"{number / k:9.2f}  {count:7d}  {bar}".rstrip())
    lines.append(
        f"{metrics['filter/num_prompts']:.0f} prompts, mean pass rate "
        f"{metrics['filter/pass_rate_mean']:.3f}; never right "
        f"{metrics['filter/never_share']:.1%}, always right {metrics['filter/always_share']:.1%}, "
        f"between {metrics['filter/mixed_share']:.1%}; {metrics['filter/num_response_tokens']:.0f} "
        f"response tokens in {metrics['filter/sampling_s']:.1f} s"
    )
    return "\n".join(lines)


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
