"""The verdicts of `vapo inspect`: what is wrong, which figure shows it, and what to do.

docs/value_page.md has a row for each in its table "Verdicts of vapo inspect".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from vapo.intervals import Figure, decimals, quote
from vapo.studies.inspection.critic_verdicts import (
    leak_remark,
    main_diagnosis,
    shift_remark,
    siblings_remark,
)
from vapo.studies.inspection.findings import Findings, PartFindings
from vapo.studies.inspection.remarks import Remark, Remarks, sentence, short_file_names
from vapo.studies.inspection.reward_doubts import doubt_reason, with_doubt

EQUAL_ABOVE = 0.5  # share of the groups whose rewards are equal
TRUNCATED_ABOVE = 0.2
_MIN_STEPS = 8  # steps of one run before its critic is said to have changed
_CERTAIN = 2.58  # standard errors: bootstraps of few groups are too narrow
CHANGED_ABOVE = 0.05  # change of explained variance from the first quarter of a run to the last
MICRO_BATCHES_OFF = 0.1  # mean of micro-batches against the explained variance in one piece


def verdicts(findings: Findings) -> list[Remark]:
    """Return the remarks on the findings: first faults, then notes, then what is good.

    If there are several runs, each is judged separately, and the titles name the run.
    """
    names = short_file_names(list(findings.runs))
    remarks = [
        replace(remark, title=f"{names[file]}: {remark.title}")
        for file, run in findings.runs.items()
        for remark in _run_remarks(run)
    ]
    if findings.runs:
        remarks += [remark for remark in _change_remark(findings) if isinstance(remark, Remark)]
    else:
        remarks = _run_remarks(findings)
    return sorted(remarks, key=lambda remark: ("wrong", "note", "good").index(remark.severity))


def _run_remarks(findings: Findings) -> list[Remark]:
    items: list[Remark | str] = list(_number_remarks(findings))
    if (critic := findings.critic) is None:
        items += _could_know_remark(findings)
    elif findings.sums.low == findings.sums.high:
        text = f"All rewards are {findings.sums.low:g}: nothing can be said of the values."
        items.append(Remark("inspect-equal-rewards", "wrong", "All rewards are equal", text))
    else:
        diagnosis = list(main_diagnosis(critic, findings))
        return_remarks = [
            *diagnosis,
            *shift_remark(critic, diagnosis),
            *siblings_remark(critic, diagnosis),
        ]
        doubt = doubt_reason(findings.sums)
        is_aligned = findings.alignment is None or not findings.alignment.shift
        if is_aligned and (leak := list(leak_remark(critic))):  # no other verdict is true then
            return_remarks = leak
        items += [*_alignment_remark(findings, diagnosis), *_advantages_remark(findings)]
        items += with_doubt(return_remarks, doubt) if doubt else return_remarks
        items += _micro_batches_remark(findings)
    items += _group_remarks(findings)
    items += _change_remark(findings)
    remarks = [item for item in items if isinstance(item, Remark)]
    if undecided := [item for item in items if isinstance(item, str)]:
        text = f"There are too few to say {'; '.join(undecided)}."
        remarks.append(Remark("inspect-too-few", "note", "Not enough responses", text))
    return remarks


def _alignment_remark(findings: Findings, diagnosis: list[Remark | str]) -> Remarks:
    """A remark on whether each value stands at its own token. A constant critic gets none."""
    alignment = findings.alignment
    if alignment is None:
        return
    is_constant = any(isinstance(x, Remark) and x.anchor == "inspect-constant" for x in diagnosis)
    if alignment.shift is None and (is_constant or alignment.is_undecidable):
        return
    if alignment.shift is None:
        why = alignment.text.removesuffix(".").removeprefix("off by one? ")
        yield (
            f"whether each value stands at its own token ({why[:1].lower()}{why[1:]}"
            f"{_correlations_text(findings)})"
        )
    elif alignment.shift == 0:
        title = "Each value stands at its own token"
        text = sentence(alignment.text + _correlations_text(findings))
        yield Remark("inspect-alignment", "good", title, text)
    else:
        early = "each value has already seen its own token"
        late = "each value is that of the token before"
        yield Remark(
            "inspect-off-by-one",
            "wrong",
            f"Values are off by one: {early if alignment.shift > 0 else late}",
            sentence(alignment.text + _correlations_text(findings)),
            "The value of token t is the critic's output at the token before it: for prompts of P "
            "tokens slice outputs P-1 to -1, not P to the end, and shift the mask with it. "
            "Advantages otherwise blame the neighbour.",
        )


def _advantages_remark(findings: Findings) -> Remarks:
    """Yield a remark if the file's advantages and values stand at different tokens."""
    alignment = findings.advantages
    if alignment is not None and alignment.shift not in (None, 0):
        yield Remark(
            "inspect-off-by-one",
            "wrong",
            "Advantages and values stand at different tokens",
            sentence(alignment.text),
            "Whatever is logged, check which of both the loss uses: the mask of one is shifted.",
        )


def _correlations_text(findings: Findings) -> str:
    if (correlations := findings.return_correlations) is None:
        return ""
    earlier, at_token, later = map(decimals, correlations)
    return (
        f". Values and returns correlate by {earlier}, {at_token} and {later} at shifts -1, 0 and "
        "+1, which cannot decide it: a later value knows more of the return, wherever it stands"
    )


def _micro_batches_remark(findings: Findings) -> Remarks:
    """Yield a remark on the smallest micro-batches whose mean explained variance misleads."""
    explained = findings.sums.explained.value
    for batches in findings.sums.micro_batches:
        if batches.num_rows == 1 or not batches.num or math.isnan(explained):
            continue
        if abs(batches.mean - explained) > MICRO_BATCHES_OFF:
            undefined = batches.num_undefined / (batches.num + batches.num_undefined)
            yield Remark(
                "inspect-micro-batches",
                "note",
                "A mean over micro-batches would say something else",
                f"In one piece explained variance is {explained:.2f}; the mean over micro-batches "
                f"of {batches.num_rows} responses is {batches.mean:.2f} ({undefined:.0%} of them "
                "have equal returns and none).",
                "If your framework logs such a mean, its chart is not the critic's.",
            )
            return


def _could_know_remark(findings: Findings) -> Remarks:
    """Yield a note on how much a critic could explain, from the rewards of groups alone."""
    groups = findings.groups
    if groups.prompt_share.is_unknown:
        yield Remark(
            "inspect-could-know",
            "note",
            "There are no values, and no groups",
            "Without a critic's values, and without two responses to a prompt, only rewards, "
            "lengths and log-probs can be shown.",
            "Give a critic (--critic), or rollouts with several responses per prompt.",
        )
        return
    below_zero = " (an estimate below 0: none is seen)" if groups.prompt_share.value < 0 else ""
    yield Remark(
        "inspect-could-know",
        "note",
        "There are no values; what a critic could know",
        f"{quote(groups.prompt_share)} of the rewards' variance lies between prompts: the most "
        f"that a critic of the prompt alone could explain{below_zero}. The mean of a response's "
        f"siblings explains {quote(groups.left_out_mean)}. The rest is decided within responses, "
        "where only a value per token can follow.",
        "A policy (--policy, --verifier, --value_truth) measures how early it is decided; `vapo "
        "critics` measures what critics learn of it, on what --output rollouts.parquet writes.",
    )


def _group_remarks(findings: Findings) -> Remarks:
    """Yield remarks on groups of equal rewards, and on truncated responses."""
    groups, sums = findings.groups, findings.sums
    if groups.num_several and groups.all_equal > EQUAL_ABOVE:
        yield Remark(
            "inspect-equal-rewards",
            "note",
            "Most groups have equal rewards",
            f"{groups.all_equal:.0%} of {groups.num_several:,} groups: {groups.all_best:.0%} have "
            f"the best reward throughout, {groups.all_equal - groups.all_best:.0%} another one.",
            "A comparison within groups (GRPO, RLOO) learns nothing from them; a critic does. "
            "Harder or easier prompts, dynamic sampling, or larger groups.",
        )
    if sums.num_known_ends and sums.truncated_share > TRUNCATED_ABOVE:
        mean = sums.truncated_reward / sums.num_truncated
        yield Remark(
            "inspect-truncated",
            "note",
            "Many responses are truncated",
            f"{sums.truncated_share:.0%} were cut at the budget, with a mean reward of {mean:.2f} "
            f"(all: {sums.reward_mean:.2f}).",
            "Their reward says little of their tokens: a larger budget, or leave them out of the "
            "critic's loss.",
        )


def _number_remarks(findings: Findings) -> Remarks:
    """Yield remarks on lists with NaN or infinity, and on log-probs above 0."""
    sums = findings.sums
    for name, rows in sums.not_finite.items():
        yield Remark(
            "inspect-not-finite",
            "wrong",
            f"Some {name} are not finite",
            f"{rows.num_rows:,} rows have NaN, infinity or null in their {name}, first "
            f"{rows.first}. These lists are in no figure.",
            "One NaN reaches every advantage of its batch through whitening: find its rows first.",
        )
    if sums.num_impossible_logprobs:
        yield Remark(
            "inspect-log-probs",
            "wrong",
            "Some log-probs cannot be",
            f"{sums.num_impossible_logprobs:,} log-probs are above 0.",
            "A log-prob is at most 0: check the mask, and which column was written.",
        )


def _change_remark(findings: Findings) -> Remarks:
    """Yield a remark if explained variance changed from the first quarter of the parts to the last.

    Parts are the steps of one run, of which _MIN_STEPS are needed, or files without steps.
    """
    parts = [part for part in findings.parts if part.critic and part.critic.explained.is_bounded]
    are_files = all(part.step is None for part in parts)
    is_one_run = len({part.step for part in parts}) == len(parts)
    if len(parts) < 2 or not (are_files or (is_one_run and len(parts) >= _MIN_STEPS)):
        return
    num = max(1, len(parts) // 4)
    start, end = parts[:num], parts[-num:]
    (at_start, start_error), (at_end, end_error) = map(_mean_explained, (start, end))
    difference, half = at_end - at_start, _CERTAIN * math.hypot(start_error, end_error)
    if abs(difference) < half or abs(difference) < CHANGED_ABOVE:
        return
    fell = difference < 0
    limits = quote(Figure(difference, difference - half, difference + half))
    yield Remark(
        "inspect-over-time",
        "good" if not fell else "wrong" if at_start > 0 and at_end < at_start / 2 else "note",
        f"Explained variance {'fell' if fell else 'rose'}",
        f"From {decimals(at_start)} ({_span(start)}) to {decimals(at_end)} ({_span(end)}), by "
        f"{limits} (99 % interval).",
        "Returns become more equal as a policy improves, so look at slope and bias, too: if they "
        "moved, the policy moves faster than the critic."
        if fell
        else "",
    )


def _mean_explained(parts: Sequence[PartFindings]) -> tuple[float, float]:
    """Return the mean explained variance of some parts, and its standard error.

    The error follows from the parts' 95 % intervals.
    """
    figures = [part.critic.explained for part in parts if part.critic is not None]
    errors = [(figure.high - figure.low) / 3.92 for figure in figures]
    mean = sum(figure.value for figure in figures) / len(figures)
    return mean, math.hypot(*errors) / len(figures)


def _span(parts: Sequence[PartFindings]) -> str:
    start, end = parts[0], parts[-1]
    if len(parts) == 1:
        return start.label
    is_steps = start.step is not None
    return f"steps {start.step} to {end.step}" if is_steps else f"{start.label} to {end.label}"
