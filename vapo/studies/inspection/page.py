"""Write an inspection as one page: verdicts, charts over steps, and responses with token values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from vapo.diagnostics.value_page.template import fill_page
from vapo.diagnostics.value_page.visible_text import visible_text
from vapo.intervals import Figure, decimals, quote
from vapo.studies.inspection.cards import PageSize, cards_data
from vapo.studies.inspection.figures import CriticFigures
from vapo.studies.inspection.findings import Findings, PartFindings
from vapo.studies.inspection.group_sample import GroupKey
from vapo.studies.inspection.profiles import (
    Profile,
    calibration_table,
    length_table,
    position_table,
)
from vapo.studies.inspection.remarks import Remark, short_file_names

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vapo.studies.inspection.truth import MeasuredTruth

FIGURE_TEXTS = {
    "explained": "explained variance, in one piece",
    "explained_unshifted": "the same, a constant shift counted as an error",
    "bias": "bias: mean of value - return",
    "slope": "slope of the line that predicts returns from values",
    "intercept": "intercept of that line",
    "correlation": "correlation of value and return",
    "spread": "sd of the values / sd of the returns",
    "outside": "share of values that are no possible return",
    "explained_between": "explained variance between prompts (first values)",
    "explained_within": "explained variance between the responses to a prompt",
    "value_between": "share of the values' variance between prompts",
    "siblings_ahead": "explained by the mean of the other responses, less that by the critic",
    "by_length": "share of the values' variance that position and length explain",
    "return_by_length": "share of the returns' variance that position and length explain",
    "explained_beyond_length": "explained variance beyond position and length",
    "length_correlation": "correlation of a response's mean value with its length",
    "reward_length_correlation": "correlation of its reward with its length",
}
_KINDS = ("a", "b", "c")


def inspection_page(
    findings: Findings,
    remarks: Sequence[Remark],
    *,
    title: str,
    facts: Mapping[str, str],
    notes: Sequence[str],
    tokenizer: PreTrainedTokenizerBase | None,
    truth: MeasuredTruth | None,
    size: PageSize,
    seed: int,
) -> str:
    """Return the inspection as one HTML page, with all data, scripts and styles inside.

    Args:
        title: the page's title.
        facts: name -> text, for the head of the page.
        notes: what the files lack, and how they were read.
        tokenizer: makes texts of token ids; None if there is none.
        truth: what continuations of some responses earned; None if this was not measured.
        size: how many groups, responses and tokens are shown.
        seed: for the random choice of groups.
    """
    tokens = findings.tokens
    measured_groups: list[GroupKey] = [] if truth is None else truth.groups(findings)
    cards = cards_data(
        findings,
        tokenizer,
        truths={} if truth is None else truth.prefixes(),
        measured_groups=measured_groups,
        size=size,
        seed=seed,
    )
    positions: Profile = {} if tokens is None else position_table(tokens)
    calibration: Profile = {}
    if tokens is not None:
        is_right = tokens.rewards > tokens.rewards.mean()
        calibration = calibration_table(tokens, is_right)
    data = {
        "title": title,
        "facts": {name: visible_text(text) for name, text in facts.items()},
        "notes": [visible_text(note) for note in notes],
        **cards,
        "positions": positions,
        "calibration": calibration,
        "truth": None if truth is None else truth.page_data(),
        "report": {
            "tiles": list(_tiles(findings)),
            "remarks": [_remark_data(remark) for remark in remarks],
            "tables": list(_tables(findings)),
            "course_title": "Over the steps" if _has_steps(findings) else "File by file",
            "course": list(_course(findings)),
            "charts": list(_length_chart(length_table(findings))),
        },
    }
    folder = files("vapo.studies.inspection")
    return fill_page(
        data,
        script=folder.joinpath("inspection.js").read_text(encoding="utf-8"),
        style=folder.joinpath("inspection.css").read_text(encoding="utf-8"),
    )


def _remark_data(remark: Remark) -> dict[str, str]:
    return {
        "severity": remark.severity,
        "title": remark.title,
        "text": visible_text(remark.text),
        "advice": remark.advice,
        "row": remark.row,
    }


def _tiles(findings: Findings) -> Iterator[dict[str, str]]:
    sums, groups, critic = findings.sums, findings.groups, findings.critic
    prompts = f"{groups.num_groups:,} groups of {groups.size_mean:.3g}"
    yield _tile("responses", f"{sums.num:,}", prompts)
    yield _tile("mean reward", decimals(sums.reward_mean), f"from {sums.low:g} to {sums.high:g}")
    if sums.num_with_length:
        yield _tile("response length", f"{sums.length_mean:.1f}", f"longest {sums.longest:,}")
    if sums.num_known_ends:
        yield _tile("truncated", f"{sums.truncated_share:.1%}", "cut at the budget")
    if critic is not None:
        yield _tile("explained variance", decimals(sums.explained.value), _limits(critic.explained))
        yield _tile("within prompts", *_value_and_limits(critic.explained_within))
        yield _tile("bias", *_value_and_limits(critic.bias))
        yield _tile("slope", *_value_and_limits(critic.slope))
    elif not groups.prompt_share.is_unknown:
        yield _tile("decided by the prompt", *_value_and_limits(groups.prompt_share))


def _tile(label: str, value: str, detail: str) -> dict[str, str]:
    return {"label": label, "value": value, "detail": detail}


def _value_and_limits(figure: Figure) -> tuple[str, str]:
    return ("\u2013", "") if figure.is_unknown else (decimals(figure.value), _limits(figure))


def _limits(figure: Figure) -> str:
    if not figure.is_bounded:
        return "no interval: few prompts"
    return f"[{decimals(figure.low)}, {decimals(figure.high)}]"


def _tables(findings: Findings) -> Iterator[dict[str, Any]]:
    if findings.critic is not None:
        yield {
            "title": "All figures, with 95 % intervals over prompts",
            "head": ["figure", "value and interval"],
            "rows": [
                *_figure_rows(findings.critic),
                *_shift_rows(findings),
                *_noise_rows(findings.critic),
                *_micro_batch_rows(findings),
            ],
            "remark": sample_note(findings),
        }
    if findings.parts:
        yield {
            "title": "Step by step" if _has_steps(findings) else "File by file, as a table",
            "head": [
                *("part", "responses", "mean reward", "length", "truncated", "equal groups"),
                *("explained variance", "bias", "slope"),
            ],
            "rows": [_part_row(part) for part in findings.parts],
            "remark": "Equal groups: groups all of whose rewards are equal.",
        }


def _figure_rows(critic: CriticFigures) -> list[list[str]]:
    return [[text, quote(getattr(critic, name))] for name, text in FIGURE_TEXTS.items()]


def _noise_rows(critic: CriticFigures) -> Iterator[list[str]]:
    """Yield a row on the noise of the policy's gradient, unless it is unknown.

    It is known if there are log-probs and several responses to a prompt.
    """
    if not critic.gradient_noise_ratio.is_unknown:
        name = "noise of the policy's gradient, divided by that with the other responses' mean"
        yield [name, quote(critic.gradient_noise_ratio)]


def _shift_rows(findings: Findings) -> Iterator[list[str]]:
    if (correlations := findings.return_correlations) is not None:
        name = (
            "correlation of values and returns at shifts -1, 0, +1; it cannot tell which is right"
        )
        yield [name, ", ".join(map(decimals, correlations))]


def _micro_batch_rows(findings: Findings) -> Iterator[list[str]]:
    for batches in findings.sums.micro_batches:
        if total := batches.num + batches.num_undefined:
            name = f"mean explained variance of micro-batches of {batches.num_rows} responses"
            undefined = f"{batches.num_undefined:,} of {total:,} have none"
            mean = "unknown" if math.isnan(batches.mean) else decimals(batches.mean)
            yield [name, f"{mean} ({undefined})"]
    targets = findings.sums.explained_of_targets
    if targets.num:
        name = "explained variance of the file's own value targets, which may hold values"
        yield [name, decimals(targets.value)]


def sample_note(findings: Findings) -> str:
    """Return a sentence on which responses the figures are of: all, or a random sample."""
    if findings.is_whole:
        return "Of all responses; the responses to one prompt of one step are one draw."
    num = 0 if findings.tokens is None else findings.tokens.num_groups
    return (
        f"Intervals are of a random {num:,} of {findings.groups.num_groups:,} groups; counts, "
        "rewards and explained variance in one piece are of all."
    )


def _part_row(part: PartFindings) -> list[str]:
    sums, critic = part.sums, part.critic
    figures = ["", "", ""]
    if critic is not None:
        figures = [
            quote(critic.explained),
            quote(critic.bias),
            quote(critic.slope),
        ]
    numbers = (sums.reward_mean, sums.length_mean)
    reward, length = ("\u2013" if math.isnan(x) else decimals(x) for x in numbers)
    truncated = "\u2013" if math.isnan(sums.truncated_share) else f"{sums.truncated_share:.1%}"
    equal = f"{part.groups.all_equal:.0%}" if part.groups.num_several else "\u2013"
    return [part.label, f"{sums.num:,}", reward, length, truncated, equal, *figures]


def _has_steps(findings: Findings) -> bool:
    return any(part.step is not None for part in findings.parts)


def _course(findings: Findings) -> Iterator[dict[str, Any]]:
    """Yield charts of the figures over training steps, or over files if there are no steps.

    Files are numbered from 1. There is no chart for a single step or file, and none of a figure
    that is unknown or 0 everywhere. If steps occur in several files, each of the first three files
    has a line of its own.
    """
    parts = findings.parts
    if len(parts) < 2:
        return
    runs: dict[str, list[PartFindings]] = {"": parts}
    if _has_steps(findings) and len({p.step for p in parts}) < len(parts):
        runs = {}
        for part in parts:
            runs.setdefault(part.file, []).append(part)
    names = short_file_names([part.file for part in parts])
    x_label, remark = "step", ""
    if not _has_steps(findings):
        x_label = "file"
        remark = "; ".join(f"{i}: {names[part.file]}" for i, part in enumerate(parts, start=1))
    numbers = {id(part): i for i, part in enumerate(parts, start=1)}
    for title, figure, text in _course_figures():
        series = []
        for (name, run), kind in zip(runs.items(), _KINDS, strict=False):
            rows = [(p.step if p.step is not None else numbers[id(p)], figure(p)) for p in run]
            rows = [(x, f) for x, f in rows if f is not None and not f.is_unknown]
            if len(rows) < 1:
                continue
            line = {"name": names.get(name, title), "kind": kind, "x": [x for x, _ in rows]}
            line["y"] = [f.value for _, f in rows]
            if all(f.is_bounded for _, f in rows):
                line["band"] = [[f.low for _, f in rows], [f.high for _, f in rows]]
            series.append(line)
        if any(y for line in series for y in line["y"]):  # no chart of zeros, as of "Truncated"
            about = f"{text} {remark}".strip()
            yield {"title": title, "x_label": x_label, "series": series, "remark": about}


def _course_figures() -> Iterator[tuple[str, Any, str]]:
    """Yield a title, a function and a text below it for each chart over steps or files.

    The function takes the findings on one step or file, and returns the number to draw with its
    interval. It returns None if there is no critic for a number on values, or if another number is
    unknown. Numbers that are not on values have no interval: its limits are infinite.
    """

    def critic_figure(name: str) -> Any:
        return lambda part: None if part.critic is None else getattr(part.critic, name)

    def plain_number(name: str) -> Any:
        def figure(part: PartFindings) -> Figure | None:
            x = float(getattr(part.sums, name))
            return None if math.isnan(x) else Figure(x, -math.inf, math.inf)

        return figure

    yield "Explained variance", critic_figure("explained"), "Shading: 95 % interval over prompts."
    yield (
        "Within prompts",
        critic_figure("explained_within"),
        "0: no better than the prompt's mean.",
    )
    yield "Bias of the values", critic_figure("bias"), "Mean of value - return; 0 is right."
    yield "Slope", critic_figure("slope"), "1 is calibrated; above: flattened; below: too extreme."
    yield "Mean reward", plain_number("reward_mean"), ""
    yield "Response length", plain_number("length_mean"), "Sampled tokens."
    yield "Truncated", plain_number("truncated_share"), "Share of the responses."


def _length_chart(lengths: Profile) -> Iterator[dict[str, Any]]:
    if not lengths:
        return
    x = lengths["length"]
    series = [
        {"name": "reward", "kind": "b", "x": x, "y": lengths["reward_mean"], "dashed": True},
    ]
    if any(value is not None for value in lengths["value_mean"]):
        series.insert(0, {"name": "mean value", "kind": "a", "x": x, "y": lengths["value_mean"]})
    yield {
        "title": "By response length",
        "x_label": "tokens of the response",
        "series": series,
        "remark": "A critic that reads length has a line of its own here.",
    }
