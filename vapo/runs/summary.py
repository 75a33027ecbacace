"""Writes the end of a run: `summary.json`, and the short text that the user reads."""

from __future__ import annotations

import json
import math
import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vapo.config.credentials import without_credentials
from vapo.errors import InterruptedRunError
from vapo.errors.shown_text import format_seconds
from vapo.files.whole_files import write_text
from vapo.tracking.links import how_to_open
from vapo.tracking.provenance import versions
from vapo.tracking.records import SCORE_START

CONFIG_NAME = "config.yaml"
SUMMARY_NAME = "summary.json"
_COLUMNS = 80
_SCORE, _RECENT = "eval/avg_at_k", "eval/recent_avg_at_k"
_FRESH, _AVERAGE = "fresh/accuracy", "average_policy"
FAILED_EPISODES = "failed_episodes_left_out"
"""The key in `RunSummary.faults` of rollouts that were not trained on, but have no bad number."""


@dataclass
class RunSummary:
    """The contents of `summary.json`. Scores are eval/avg_at_k, or None if not measured.

    `score_best` is the score of `best.ckpt`, which iteration `best_iteration` wrote; None if no
    checkpoint's policy was evaluated. `evaluation_before` and `evaluation_after` are all `eval/...`
    metrics of the first and the last evaluation. `score_recent` is the mean score of the last four
    evaluated policies. `fresh_accuracy` is the accuracy in the last training batches on prompts
    that were new to the policy, and `fresh` has all metrics of these. `average_policy` has the
    metrics of the averaged weights. `critic_after_pretraining` and `critic_at_end` are explained
    variances of the critic (`CriticKnowledge`), None if the run had no critic or did not get that
    far. `critic_was_held_out` says that the first is of held-out rollouts. `stopped` says why a run
    ended itself, `warnings` has the watchers' warnings, `faults` the numbers of skipped updates and
    of rollouts left out. Credentials in `tracking_uri` are left out.
    """

    score_before: float | None = field(init=False)
    score_before_ci: tuple[float, float] | None = field(init=False)
    score_after: float | None = field(init=False)
    score_after_ci: tuple[float, float] | None = field(init=False)
    k: int
    num_iterations: int
    stage_seconds: dict[str, float]
    total_seconds: float
    mlflow_run_id: str | None
    mlflow_experiment_id: str | None
    tracking_uri: str
    config_hash: str
    score_best: float | None = None
    best_iteration: int | None = None
    status: str = "FINISHED"
    stopped: str = ""
    warnings: list[str] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    undelivered_records: int = 0
    profile: str = ""
    versions: dict[str, str] = field(default_factory=versions)
    evaluation_before: dict[str, float] = field(default_factory=dict)
    evaluation_after: dict[str, float] = field(default_factory=dict)
    fresh: dict[str, float] = field(default_factory=dict)
    average_policy: dict[str, float] = field(default_factory=dict)
    critic_after_pretraining: float | None = None
    critic_at_end: float | None = None
    critic_was_held_out: bool = False
    fresh_accuracy: float | None = field(init=False)
    fresh_accuracy_ci: tuple[float, float] | None = field(init=False)
    score_recent: float | None = field(init=False)
    score_recent_ci: tuple[float, float] | None = field(init=False)

    def __post_init__(self) -> None:
        first, last = self.evaluation_before, self.evaluation_after
        self.tracking_uri = without_credentials(self.tracking_uri)
        self.score_before, self.score_before_ci = first.get(_SCORE), interval_of(first)
        self.score_after, self.score_after_ci = last.get(_SCORE), interval_of(last)
        self.score_recent, self.score_recent_ci = last.get(_RECENT), interval_of(last, _RECENT)
        self.fresh_accuracy = self.fresh.get(_FRESH)
        self.fresh_accuracy_ci = interval_of(self.fresh, _FRESH)


def unjudged(evaluation: Mapping[str, float]) -> list[str]:
    """Return a line on the last evaluation's responses without a verdict, if there are any."""
    share = evaluation.get("eval/failure_rate", 0.0)
    text = (
        f"{100 * share:.3g} % of the last evaluation's responses had no verdict, and count as wrong"
    )
    return [text] if share else []


def write_summary(run_dir: Path, summary: RunSummary) -> Path:
    """Write summary.json, whole or not at all, and return its path. Nan becomes null.

    Raises: InterruptedRunError: the run's folder was deleted, or cannot be written.
    """
    path = run_dir / SUMMARY_NAME
    try:
        write_text(path, json.dumps(finite(asdict(summary)), indent=2) + "\n")
    except OSError as error:
        why = "the folder was deleted or moved" if not run_dir.is_dir() else error.strerror
        raise InterruptedRunError(
            f"the training is done, but {path} cannot be written: {why}"
        ) from None
    return path


def render_summary(
    summary: RunSummary,
    run_dir: Path,
    *,
    recorded: str,
    ablation: str | None = None,
    value_page: str | None = None,
    other_run: Path | None = None,
    config_is_whole: bool = True,
) -> str:
    """Return the text that ends `vapo fit`, for 80 columns. Its last line is the run's folder.

    The suggested commands take the folder from the shell variable R, which a line before them sets;
    the comment above each says what it is for. Only a path or an address that is longer than a line
    is not cut.

    Args:
        recorded: names the run and the store that has its record.
        ablation: an override that turns off a component which this run used.
        value_page: the path or address of the run's latest value page.
        other_run: the folder of a run with which this one can be compared.
        config_is_whole: False if the config names a function of a notebook, which no other process
            has. No command that reads the config is then suggested.
    """
    num_lost = summary.undelivered_records
    rows = [
        *_scores(summary),
        *_critic(summary),
        *([("stopped", summary.stopped)] if summary.stopped else []),
        *(("warned" if i == 0 else "", text) for i, text in enumerate(summary.warnings)),
        *([("faults", _faults(summary.faults))] if any(summary.faults.values()) else []),
        ("took", _times(summary)),
        *([("time went to", summary.profile)] if summary.profile else []),
        ("recorded", recorded),
        *([("", f"{num_lost} records were not delivered: see below")] if num_lost else []),
        *_first_page(value_page, has_critic=bool(_critic(summary))),
    ]
    commands = [f"R={shlex.quote(shown_path(run_dir))}"]
    if summary.mlflow_run_id and summary.mlflow_experiment_id:
        uri, run_id = summary.tracking_uri, summary.mlflow_run_id
        open_it = how_to_open(uri, summary.mlflow_experiment_id, run_id)
        if open_it.startswith("vapo "):
            commands += ["# its charts, in a browser", open_it]
        else:
            rows.append(("open it", open_it))
    if num_lost:
        commands += ["# send the records that the store has not", 'vapo deliver "$R"']
    commands += _comparison(other_run)
    if ablation is not None and config_is_whole:
        commands += [
            f"# train once more without {ablation.split('.')[1].replace('_', ' ')}",
            f'vapo fit --config "$R"/{CONFIG_NAME} {ablation}',
        ]
    name = "last" if summary.score_best is None else "best"
    checkpoint = f'"$R"/checkpoints/{name}.ckpt'
    if config_is_whole:
        commands += [
            f"# score the {name} checkpoint on the held-out prompts once more",
            f'vapo validate --config "$R"/{CONFIG_NAME} --ckpt_path {checkpoint}',
        ]
    commands += [
        "# write its policy as a folder for Transformers and vLLM",
        f'vapo export {checkpoint} "$R"/actor',
    ]
    lines = [line for label, text in rows for line in _row(label, text)]
    lines += ["try next:", *(f"  {command}" for command in commands), "run folder:"]
    return "\n".join(["", *lines, shown_path(run_dir)])


def _comparison(other_run: Path | None) -> list[str]:
    """Return shell lines that compare the run's folder, `$R`, with `other_run`.

    If that is None, the lines have a name in its place that the user has to replace.
    """
    if other_run is None:
        return [
            "# its score and curves beside those of another run",
            'vapo report ANOTHER_RUN_FOLDER "$R"',
        ]
    return [
        "# its score and curves beside those of the run before it",
        f"BEFORE={shlex.quote(shown_path(other_run))}",
        'vapo report "$BEFORE" "$R"',
    ]


def _first_page(value_page: str | None, *, has_critic: bool) -> list[tuple[str, str]]:
    """Return the rows (label, text) that name the value page; none if there is no page."""
    if value_page is None:
        return []
    contents = "what the critic expected before each token:"
    if not has_critic:
        contents = "its responses and their advantages, token by token:"
    return [("open first", contents), ("", value_page)]


def _critic(summary: RunSummary) -> list[tuple[str, str]]:
    """Return the row on what the critic knew, if the run had one that was measured.

    The figures are means over several batches, so they have another name than a batch's figure.
    """
    after_pretraining, at_end = summary.critic_after_pretraining, summary.critic_at_end
    texts = []
    if after_pretraining is not None:
        rollouts = "held-out rollouts" if summary.critic_was_held_out else "its last batches"
        texts.append(f"{_hundredths(after_pretraining)} after value pretraining ({rollouts})")
    if at_end is not None:
        texts.append(f"{_hundredths(at_end)} at the end (the last batches)")
    return [("critic", f"mean explained variance {', '.join(texts)}")] if texts else []


def _hundredths(figure: float) -> str:
    return f"{round(figure, 2) + 0.0:.2f}"  # -0.001 is 0.00


def _row(label: str, text: str) -> list[str]:
    """Return the lines of a label and a text in 80 columns. Words are not cut; a path too long for
    its line gets its own."""
    lines = textwrap.wrap(text, _COLUMNS - 14, break_long_words=False, break_on_hyphens=False)
    if len(lines) == 1 and len(lines[0]) > _COLUMNS - 14:
        return [*([label] if label else []), f"  {lines[0]}"]
    return [f"{label if i == 0 else '':<13} {line}" for i, line in enumerate(lines)]


def shown_path(path: Path) -> str:
    """Return a path relative to the working directory if it is inside it, else unchanged."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _scores(summary: RunSummary) -> list[tuple[str, str]]:
    """Return the rows (label, text) of scores. The first measured score says its unit."""
    score_before = describe_score(summary.score_before, summary.score_before_ci, summary.k)
    score_after = describe_score(summary.score_after, summary.score_after_ci, summary.k)
    unit = f"  (avg@{summary.k}, held-out prompts)"
    if summary.score_before is not None:
        score_after = score_after.removesuffix(unit)
    rows = [("score before", score_before), ("score after", score_after)]
    if (best := _best(summary)) is not None:
        rows.append(("score best", best))
    if (score := summary.average_policy.get(f"{_AVERAGE}/avg_at_k")) is not None:
        interval = interval_of(summary.average_policy, f"{_AVERAGE}/avg_at_k")
        count = int(summary.average_policy[f"{_AVERAGE}/num_policies"])
        source = f"mean weights of the last {count} policies"
        rows.append(("averaged", f"{100 * score:.1f} %{_shown(interval, '  ')}  ({source})"))
    if summary.fresh_accuracy is not None:
        share = f"{100 * summary.fresh_accuracy:.1f} %{_shown(summary.fresh_accuracy_ci, '  ')}"
        prompts, batches = (int(summary.fresh[f"fresh/num_{n}"]) for n in ("prompts", "batches"))
        source = f"{prompts} new prompts of the last {batches} batches"
        rows.append(("fresh prompts", f"{share}  ({source})"))
    return rows


def _best(summary: RunSummary) -> str | None:
    """Return a text on best.ckpt; None if it is the last one and better than the start."""
    start, score = summary.score_before, summary.score_best
    if score is None:
        return None if start is None else "no checkpoint's policy was evaluated"
    text = f"{100 * score:.1f} % after iteration {summary.best_iteration}"
    if start is not None and score <= start:
        return f"no checkpoint is better than the start, {100 * start:.1f} %; best.ckpt: {text}"
    return None if summary.best_iteration == summary.num_iterations else f"{text} (best.ckpt)"


def _faults(faults: Mapping[str, int]) -> str:
    bad = {key: number for key, number in faults.items() if number and key != FAILED_EPISODES}
    counts = ", ".join(f"{number} {key.replace('_', ' ')}" for key, number in bad.items())
    parts = [f"{counts}: numbers that are not finite"] if bad else []
    if num_failed := faults.get(FAILED_EPISODES, 0):
        parts.append(f"{num_failed} episodes left out: an environment failed")
    return "; ".join(parts)


def interval_of(metrics: Mapping[str, float], key: str = _SCORE) -> tuple[float, float] | None:
    low, high = metrics.get(f"{key}_ci_low"), metrics.get(f"{key}_ci_high")
    return None if low is None or high is None else (low, high)


def describe_score(score: float | None, interval: tuple[float, float] | None, k: int) -> str:
    if score is None:
        return "not measured"
    return f"{100 * score:.1f} %{_shown(interval, '  ')}  (avg@{k}, held-out prompts)"


def _shown(interval: tuple[float, float] | None, space: str) -> str:
    if interval is None:
        return ""
    return f"{space}[{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"


def score_line(
    first_metrics: Mapping[str, float], last_metrics: Mapping[str, float], k: int
) -> str | None:
    """Return `held-out avg@8 52.6 % -> 90.4 % [88.6, 92.3]`, from the metrics of two evaluations.

    It is None if the last evaluation did not measure the score.
    """
    if (last := last_metrics.get(_SCORE)) is None:
        return None
    first = f"{100 * first_metrics[_SCORE]:.1f} % -> " if _SCORE in first_metrics else ""
    return f"{SCORE_START}{k} {first}{100 * last:.1f} %{_shown(interval_of(last_metrics), ' ')}"


def _times(summary: RunSummary) -> str:
    stages = ", ".join(
        f"{name} {format_seconds(seconds)}"
        for name, seconds in sorted(summary.stage_seconds.items(), key=lambda item: -item[1])
    )
    total = f"{format_seconds(summary.total_seconds)}, {summary.num_iterations} iterations"
    return f"{total} ({stages})" if stages and not summary.profile else total


def finite(value: Any) -> Any:
    """Return the value with null in place of the numbers that JSON cannot represent (nan, inf)."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
