"""`vapo filter`: the policy's pass rate of each training prompt, as a file to train on."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from vapo.commands.command_rules import check_filter
from vapo.commands.pass_rate_file import PassRateFile, chunk_prompts, default_path, settings_of
from vapo.commands.sampling import policy_player, read_inputs, recorded
from vapo.config import FitConfig
from vapo.prompts.load import PromptSplit
from vapo.rollouts.engines.contract import sampling_settings
from vapo.system.libraries import quiet_libraries
from vapo.system.process import derive_seed
from vapo.system.progress import Progress
from vapo.system.shown_text import say
from vapo.types import Prompt


def run(config: FitConfig, *, num_responses: int = 8, output: str | None = None) -> Path:
    """Sample, judge and write what is not written yet; report; the file."""
    quiet_libraries()
    check_filter(config)
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
