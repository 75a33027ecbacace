"""`vapo filter`: the policy's pass rate of each training prompt, as a file to train on.

The file has the rows as they were read, one line for each prompt. Beside it, `FILE.settings.json`
says what the numbers belong to: the weights, the prompts, how they were sampled and judged.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from vapo.commands.sampling import command_recorder, policy_player, read_inputs
from vapo.config import FitConfig
from vapo.config.rewards import RewardConfig, verifier_settings
from vapo.errors import UserError
from vapo.errors.shown_text import say
from vapo.files.made_folders import make_folders, taken_back_if_refused
from vapo.files.whole_files import try_lock, write_text
from vapo.prompts.columns import PASS_RATE
from vapo.prompts.fingerprint import fingerprint, prompts_digest
from vapo.rollouts.engines.contract import sampling_settings
from vapo.rollouts.player import RolloutRunner
from vapo.rollouts.rollout_file import row_text
from vapo.system.process import derive_seed
from vapo.system.progress import Progress
from vapo.types import Prompt, Rollout


def run(config: FitConfig, *, num_responses: int = 8, output: str | None = None) -> Path:
    """Write a file with the pass rate of each training prompt, and print a summary.

    Responses are sampled and judged for it, unless the file exists.

    Returns: the file.
    """
    tokenizer, prompts = read_inputs(config)
    settings = settings_of(config, prompts.train, num_responses)
    path = default_path(config, settings) if output is None else Path(output)
    is_there = path.exists() and path.stat().st_size > 0
    if is_there:
        check_settings(path, settings)
    with command_recorder(config, "filter", prompts) as (progress, logger):
        started, num_tokens = time.monotonic(), 0
        if not is_there:
            num_tokens = sample_pass_rates(
                config, prompts.train, tokenizer, path, settings, progress
            )
        histogram = read_histogram(path, num_responses)
        if sum(histogram) != len(prompts.train):
            raise UserError(
                f"--output {path}: it has {sum(histogram)} of {len(prompts.train)} prompts; remove "
                "it, or give another name"
            )
        metrics = pass_rate_metrics(histogram)
        metrics["filter/num_response_tokens"] = float(num_tokens)
        metrics["filter/sampling_s"] = time.monotonic() - started
        logger.log_metrics(metrics, step=0)
        text = histogram_text(histogram, metrics)
        logger.log_text(text + "\n", "pass_rates.txt")
        where = logger.describe()
    say(
        f"{text}\ntrain on it with data.train.kind=jsonl "
        "data.train.min_pass_rate=LOW data.train.max_pass_rate=HIGH data.train.path="
        f"{path}\n{where}\n{path}"
    )
    return path


def sample_pass_rates(
    config: FitConfig,
    train: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    settings: Mapping[str, Any],
    progress: Progress,
) -> int:
    """Sample and judge responses to all training prompts, and write the file of their pass rates.

    What is sampled for a chunk of prompts depends on the seed and the chunk's position alone.

    Returns: how many tokens this call sampled.
    """
    k = int(settings["num_responses"])
    size, text = chunk_prompts(config, k), json.dumps(settings, indent=1) + "\n"
    with closing(ResumableParts(path, text, -(-len(train) // size))) as parts:
        progress.note(
            f"{path}: {len(parts.files) - len(parts.missing)} of {len(parts.files)} parts are "
            f"there, each of up to {size} prompts; {k} responses to each prompt"
        )
        num_tokens = 0

        def write(number: int, player: RolloutRunner) -> None:
            nonlocal num_tokens
            first, sampling = number * size, sampling_settings(config.rollouts)
            seed = derive_seed(config.seed, "pass rates", first)
            chunk = train[first : first + size]
            rollouts = player.play(chunk, group_size=k, settings=sampling, seed=seed)
            write_text(parts.files[number], pass_rate_rows(rollouts, first, k))
            num_tokens += sum(rollout.num_sampled for rollout in rollouts)

        parts.fill("pass rates", config, tokenizer, progress, write)
        write_text(settings_path(path), text)
        write_text(path, "".join(file.read_text(encoding="utf-8") for file in parts.files))
        parts.remove()
    return num_tokens


def pass_rate_rows(rollouts: Sequence[Rollout], first: int, k: int) -> str:
    """Return a JSON line for each prompt, from its `k` rollouts.

    `first` is the number of the first prompt.
    """
    rows = []
    for place in range(0, len(rollouts), k):
        num_correct = sum(bool(rollout.is_correct) for rollout in rollouts[place : place + k])
        row = {
            **rollouts[place].prompt.record,
            PASS_RATE: num_correct / k,
            "num_correct": num_correct,
            "num_responses": k,
            "prompt_index": first + place // k,
        }
        rows.append(row_text(row) + "\n")
    return "".join(rows)


def settings_path(path: Path) -> Path:
    """Return the path of the file beside `path` that has the settings of its rows."""
    return path.with_name(f"{path.name}.settings.json")


def check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Check that the rows of the file belong to these settings.

    Raises: UserError: they belong to other settings, or the file beside it cannot be read.
    """
    beside = settings_path(path)
    try:
        stored_settings = json.loads(beside.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(
            f"--output {path}: there is a file without a readable {beside.name}; give "
            "another name, or remove it"
        ) from None
    for name in {**settings, **stored_settings}:
        stored_value, value = stored_settings.get(name), settings.get(name)
        if stored_value != value:
            raise UserError(
                f"--output {path}: its rows belong to other settings ({name} "
                f"{stored_value!r}, now {value!r}); give another name, or remove it"
            )


def read_histogram(path: Path, k: int) -> list[int]:
    """Return how many prompts in a file of pass rates have 0, 1, ..., k correct responses.

    Raises: UserError: a line is malformed.
    """
    bins = [0] * (k + 1)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            bins[int(json.loads(line)["num_correct"])] += 1
        except (ValueError, KeyError, TypeError, IndexError):
            raise UserError(
                f"{path}:{number}: not a row that `vapo filter` wrote; remove the file"
            ) from None
    return bins


def pass_rate_metrics(histogram: list[int]) -> dict[str, float]:
    """Return the metrics of a histogram of pass rates, under the keys of docs/metrics.md."""
    total, k = sum(histogram), len(histogram) - 1
    mean = sum(number * count for number, count in enumerate(histogram)) / (total * k)
    return {
        "filter/num_prompts": float(total),
        "filter/pass_rate_mean": mean,
        "filter/never_share": histogram[0] / total,
        "filter/always_share": histogram[-1] / total,
        "filter/mixed_share": 1 - (histogram[0] + histogram[-1]) / total,
    }


def histogram_text(histogram: list[int], metrics: dict[str, float]) -> str:
    """Return a histogram of pass rates as text, with the shares that are never or always solved."""
    k, max_count = len(histogram) - 1, max(histogram)
    lines = ["pass rate  prompts"]
    for number, count in enumerate(histogram):
        bar = "#" * round(40 * count / max_count)
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
    """Return all settings that the pass rates of a config depend on, by name.

    A function or environment is identified by its name, not by its code.
    """
    rewards, identify = config.rewards, config.from_environment.identify
    verifier = verifier_settings(rewards)
    several = {
        name: {
            "weight": block.weight,
            **({"reads_thoughts": True} if block.reads_thoughts else {}),
            **verifier_settings(block),
        }
        for name, block in verifier.get("verifiers", {}).items()
    }
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
        **({"verifiers": several, "correct_by": verifier["correct_by"]} if several else {}),
        "timeout_s": rewards.timeout_s,
        **_judged_part(rewards),
        **_environment_settings(config),
    }


def _judged_part(rewards: RewardConfig) -> dict[str, Any]:
    """Return the settings that choose the judged part of a response, but for defaults."""
    names, default = ("answer_after", "without_answer_after", "keep_special_tokens"), RewardConfig()
    return {n: getattr(rewards, n) for n in names if getattr(rewards, n) != getattr(default, n)}


def _environment_settings(config: FitConfig) -> dict[str, Any]:
    """Return the settings of the environment that decide rollouts; empty without an environment."""
    environment = config.environment
    if not environment.is_used:
        return {}
    identify = config.from_environment.identify
    options = {
        name: identify(value) if isinstance(value, str) else value
        for name, value in vars(environment).items()
        if name not in ("args", "function_folder", "max_processes")
    }
    args = getattr(environment, "args", {})
    arguments = {name: identify(json.dumps(args[name], default=str)) for name in sorted(args)}
    return {"environment": {**options, "args": arguments}}


def chunk_prompts(config: FitConfig, k: int) -> int:
    """Return how many prompts are sampled together: enough to fill the engine twice."""
    return max(1, 2 * config.rollouts.max_concurrent_sequences // k)


def default_path(config: FitConfig, settings: Mapping[str, Any]) -> Path:
    """Return a path whose name is a digest of the settings.

    A second command with the same settings takes the file of the first.
    """
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    return Path(config.output_dir) / "pass_rates" / f"{key}.jsonl"


class ResumableParts:
    """The part files of a file that takes long to sample.

    After a kill the next command reuses the parts that are there. Their folder lies beside the
    file. All of them were sampled with the same settings.

    Raises: UserError: the folder cannot be written, has parts of other settings, or another command
        writes it.
    """

    def __init__(self, path: Path, settings: str, num: int) -> None:
        self.folder = path.with_name(f"{path.name}.parts")
        self.files = [self.folder / f"{number:06d}{path.suffix}" for number in range(num)]
        about = self.folder / "settings.json"
        try:
            self._new_folders = make_folders(self.folder)
            self._lock = (self.folder / ".lock").open("a")
            if not try_lock(self._lock):
                raise UserError(f"--output {path}: another command is writing it")
            if about.exists() and about.read_text(encoding="utf-8") != settings:
                raise UserError(
                    f"--output {path}: {self.folder} has rollouts of other settings; give another "
                    "name, or remove it"
                )
            write_text(about, settings)
        except OSError as error:
            raise UserError(f"--output {path}: cannot be written ({error.strerror})") from None
        self.missing = [number for number, file in enumerate(self.files) if not file.is_file()]

    def fill(
        self,
        stage: str,
        config: FitConfig,
        tokenizer: PreTrainedTokenizerBase,
        progress: Progress,
        write: Callable[[int, RolloutRunner], None],
    ) -> None:
        """Load the config's policy, and call `write` for each part that is missing."""
        if not self.missing:
            return
        with (
            taken_back_if_refused(self._new_folders, ("settings.json", ".lock")),
            policy_player(config, tokenizer) as player,
            progress.stage(stage, total=len(self.missing), unit="parts") as advance,
        ):
            for number in self.missing:
                write(number, player)
                advance(1)

    def close(self) -> None:
        self._lock.close()

    def remove(self) -> None:
        """Delete the parts, once the file has all of them, and their folder if it is empty then."""
        names = ("settings.json", ".lock", *(file.name for file in self.files))
        for name in names:
            for path in (self.folder / name, self.folder / f".{name}.new"):
                path.unlink(missing_ok=True)
        if not self.folder.is_symlink() and not any(self.folder.iterdir()):
            self.folder.rmdir()
