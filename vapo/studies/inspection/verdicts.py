"""The words of `vapo inspect`: what is wrong, by which figure, and what to do.

docs/value_page.md has a row of its table "Verdicts of vapo inspect" for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from vapo.diagnostics.value_truth.figure import Figure, rounded, shown
from vapo.studies.inspection.critic_verdicts import (
    beside_siblings,
    shift,
    what_it_knows,
)
from vapo.studies.inspection.findings import Findings, PartFindings
from vapo.studies.inspection.remarks import Remark, Said, sentence, short_file_names
from vapo.studies.inspection.reward_doubts import doubted, in_doubt

EQUAL_ABOVE = 0.5  # share of the groups whose rewards are equal
TRUNCATED_ABOVE = 0.2
_STEPS_NEEDED = 8  # of one run, to say that its critic changed
_CERTAIN = 2.58  # standard errors: bootstraps of few groups are too narrow
CHANGED_ABOVE = 0.05  # change of explained variance from the first quarter of a run to the last
MICRO_BATCHES_OFF = 0.1  # mean of micro-batches against the explained variance in one piece


def verdicts(findings: Findings) -> list[Remark]:
    """What is wrong first, then notes, then what is good; at least one remark.

    Of several runs each is judged on its own, and named in the titles.
    """
    names = short_file_names(list(findings.runs))
    remarks = [
        replace(remark, title=f"{names[file]}: {remark.title}")
        for file, run in findings.runs.items()
        for remark in _of_run(run)
    ]
    if findings.runs:
        remarks += [one for one in _over_time(findings) if isinstance(one, Remark)]
    else:
        remarks = _of_run(findings)
    return sorted(remarks, key=lambda one: ("wrong", "note", "good").index(one.severity))


def _of_run(findings: Findings) -> list[Remark]:
    said: list[Remark | str] = list(_of_numbers(findings))
    if (critic := findings.critic) is None:
        said += _could_know(findings)
    elif findings.sums.low == findings.sums.high:
        text = f"All rewards are {findings.sums.low:g}: nothing can be said of the values."
        said.append(Remark("inspect-equal-rewards", "wrong", "All rewards are equal", text))
    else:
        diagnosis = list(what_it_knows(critic, findings))
        of_returns = [*diagnosis, *shift(critic, diagnosis), *beside_siblings(critic, diagnosis)]
        why = in_doubt(findings.sums)
        said += [*_off_by_one(findings), *_beside_advantages(findings)]
        said += doubted(of_returns, why) if why else of_returns
        said += _micro_batches(findings)
    said += _of_groups(findings)
    said += _over_time(findings)
    remarks = [one for one in said if isinstance(one, Remark)]
    if undecided := [one for one in said if isinstance(one, str)]:
        text = f"There are too few to say {'; '.join(undecided)}."
        remarks.append(Remark("inspect-too-few", "note", "Not enough responses", text))
    return remarks


def _off_by_one(findings: Findings) -> Said:
    found = findings.alignment
    if found is None:
        return
    if found.shift is None:
        why = found.text.removesuffix(".").removeprefix("off by one? ")
        yield (
            f"whether each value stands at its own token ({why[:1].lower()}{why[1:]}"
            f"{_by_returns(findings)})"
        )
    elif found.shift == 0:
        title = "Each value stands at its own token"
        text = sentence(found.text + _by_returns(findings))
        yield Remark("inspect-alignment", "good", title, text)
    else:
        early = "each value has already seen its own token"
        late = "each value is that of the token before"
        yield Remark(
            "inspect-off-by-one",
            "wrong",
            f"Values are off by one: {early if found.shift > 0 else late}",
            sentence(found.text + _by_returns(findings)),
            "The value of token t is the critic's output at the token before it: for prompts of P "
            "tokens slice outputs P-1 to -1, not P to the end, and shift the mask with it. "
            "Advantages otherwise blame the neighbour.",
        )


def _beside_advantages(findings: Findings) -> Said:
    """Values and advantages of the file at different places: one of both was shifted."""
    found = findings.advantages
    if found is not None and found.shift not in (None, 0):
        yield Remark(
            "inspect-off-by-one",
            "wrong",
            "Advantages and values stand at different tokens",
            sentence(found.text),
            "Whatever is logged, check which of both the loss uses: the mask of one is shifted.",
        )


def _by_returns(findings: Findings) -> str:
    if (found := findings.return_correlations) is None:
        return ""
    before, at, after = map(rounded, found)
    return (
        f". Values and returns correlate by {before}, {at} and {after} at shifts -1, 0 and +1, "
        "which cannot decide it: a later value knows more of the return, wherever it stands"
    )


def _micro_batches(findings: Findings) -> Said:
    whole = findings.sums.explained.value
    for one in findings.sums.micro_batches:
        if one.num_rows == 1 or not one.num or math.isnan(whole):
            continue
        if abs(one.mean - whole) > MICRO_BATCHES_OFF:
            undefined = one.num_undefined / (one.num + one.num_undefined)
            yield Remark(
                "inspect-micro-batches",
                "note",
                "A mean over micro-batches would say something else",
                f"In one piece explained variance is {whole:.2f}; the mean over micro-batches of "
                f"{one.num_rows} responses is {one.mean:.2f} ({undefined:.0%} of them have equal "
                "returns and none).",
                "If your framework logs such a mean, its chart is not the critic's.",
            )
            return


def _could_know(findings: Findings) -> Said:
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
    none_seen = " (an estimate below 0: none is seen)" if groups.prompt_share.value < 0 else ""
    yield Remark(
        "inspect-could-know",
        "note",
        "There are no values; what a critic could know",
        f"{shown(groups.prompt_share)} of the rewards' variance lies between prompts: the most "
        f"that a critic of the prompt alone could explain{none_seen}. The mean of a response's "
        f"siblings explains {shown(groups.left_out_mean)}. The rest is decided within responses, "
        "where only a value per token can follow.",
        "A policy (--policy, --verifier, --value_truth) measures how early it is decided; `vapo "
        "critics` measures what critics learn of it, on what --output rollouts.parquet writes.",
    )


def _of_groups(findings: Findings) -> Said:
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


def _of_numbers(findings: Findings) -> Said:
    sums = findings.sums
    for name, found in sums.not_finite.items():
        yield Remark(
            "inspect-not-finite",
            "wrong",
            f"Some {name} are not finite",
            f"{found.num_rows:,} rows have NaN, infinity or null in their {name}, first "
            f"{found.first}. These lists are in no figure.",
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


def _over_time(findings: Findings) -> Said:
    """The first quarter of one run's steps against the last, or the first file against the last."""
    known = [part for part in findings.parts if part.critic and part.critic.explained.is_bounded]
    are_files = all(part.step is None for part in known)
    is_one_run = len({part.step for part in known}) == len(known)
    if len(known) < 2 or not (are_files or (is_one_run and len(known) >= _STEPS_NEEDED)):
        return
    num = max(1, len(known) // 4)
    first, last = known[:num], known[-num:]
    (before, noise), (after, other) = map(_mean_explained, (first, last))
    difference, half = after - before, _CERTAIN * math.hypot(noise, other)
    if abs(difference) < half or abs(difference) < CHANGED_ABOVE:
        return
    fell = difference < 0
    limits = shown(Figure(difference, difference - half, difference + half))
    yield Remark(
        "inspect-over-time",
        "good" if not fell else "wrong" if before > 0 and after < before / 2 else "note",
        f"Explained variance {'fell' if fell else 'rose'}",
        f"From {rounded(before)} ({_span(first)}) to {rounded(after)} ({_span(last)}), by "
        f"{limits} (99 % interval).",
        "Returns become more equal as a policy improves, so look at slope and bias, too: if they "
        "moved, the policy moves faster than the critic."
        if fell
        else "",
    )


def _mean_explained(parts: Sequence[PartFindings]) -> tuple[float, float]:
    """The mean over parts, and its standard error by their intervals."""
    figures = [part.critic.explained for part in parts if part.critic is not None]
    errors = [(figure.high - figure.low) / 3.92 for figure in figures]
    mean = sum(figure.value for figure in figures) / len(figures)
    return mean, math.hypot(*errors) / len(figures)


def _span(parts: Sequence[PartFindings]) -> str:
    first, last = parts[0], parts[-1]
    if len(parts) == 1:
        return first.label
    is_steps = first.step is not None
    return f"steps {first.step} to {last.step}" if is_steps else f"{first.label} to {last.label}"
