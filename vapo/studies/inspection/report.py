"""The inspection of anybody's rollouts, with its results as text, as a page and as numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from vapo.errors import UserError
from vapo.intervals import Figure, decimals, quote
from vapo.studies.inspection.findings import Findings, collect_findings
from vapo.studies.inspection.remarks import Remark
from vapo.studies.inspection.responses import BadRow, InspectedResponse
from vapo.studies.inspection.verdicts import verdicts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vapo.studies.inspection.truth import MeasuredTruth
    from vapo.studies.inspection.truth_request import TruthRequest

_HELPLESS_ABOVE = 0.9
"""Below the first a critic was worth 5 to 7 points, and above the second none was ahead
(docs/where_a_critic_pays.md, "A forecast from one batch")."""
_MARKS = {"wrong": "WRONG", "note": "note", "good": "good"}


@dataclass(frozen=True)
class Inspection:
    """The result of an inspection: findings about some rollouts, and the verdicts on them.

    Attributes:
        name: what was inspected.
        findings: counts, figures and a sample of the responses.
        remarks: the verdicts. The ones on faults come first.
        notes: what the files of the responses lack, and how they were read.
        policy, critic: names of the models, for text and page.
        tokenizer: makes texts of the page's token ids.
        truth: what continuations of some responses earned; None if this was not measured.
        seed: for the random choice of groups on the page.
    """

    name: str
    findings: Findings
    remarks: list[Remark]
    notes: Sequence[str]
    policy: str | None = None
    critic: str | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    truth: MeasuredTruth | None = None
    seed: int = 0

    def text(self) -> str:
        """Return the inspection as text for a terminal, with the rows that could not be read."""
        findings = self.findings
        lines = [self.name, *(f"{name}: {text}" for name, text in self._facts().items())]
        lines += [f"note: {note}" for note in self._notes()]
        lines += [f"{row.place}: {row.reason}" for row in findings.bad_rows]
        num_more = findings.num_bad_rows - len(findings.bad_rows)
        lines += [f"... and {num_more:,} more rows that cannot be read"] if num_more else []
        for remark in self.remarks:
            lines += ["", f"{_MARKS[remark.severity]}: {remark.title}. {remark.text}"]
            lines += [f"  what to do: {remark.advice}"] if remark.advice else []
            lines.append(f"  ({remark.row})")
        if self.truth is not None:
            lines += ["", self.truth.text()]
        return "\n".join(lines)

    def page(self, *, num_groups: int = 6, max_responses: int = 8, max_tokens: int = 20_000) -> str:
        """Return the inspection as one HTML file, which needs no network.

        Args:
            num_groups, max_responses: how many groups are shown, and how many responses of each.
            max_tokens: the most response tokens on the page. Each takes about 55 bytes.
        """
        from vapo.studies.inspection.cards import PageSize
        from vapo.studies.inspection.page import inspection_page

        return inspection_page(
            self.findings,
            self.remarks,
            title=self.name,
            facts=self._facts(),
            notes=[*self._notes(), *(f"{x.place}: {x.reason}" for x in self.findings.bad_rows)],
            tokenizer=self.tokenizer,
            truth=self.truth,
            size=PageSize(num_groups, max_responses, max_tokens),
            seed=self.seed,
        )

    def summary(self) -> dict[str, Any]:
        """Return the inspection as numbers and texts for JSON. An unknown number is null."""
        findings, sums = self.findings, self.findings.sums
        return {
            "name": self.name,
            "num_responses": sums.num,
            "num_groups": findings.groups.num_groups,
            "num_bad_rows": findings.num_bad_rows,
            "reward_mean": _number(sums.reward_mean),
            "reward_std": _number(sums.reward_std),
            "response_length_mean": _number(sums.length_mean),
            "truncated_share": _number(sums.truncated_share),
            "explained_variance": _number(sums.explained.value),
            "groups": _numbers(findings.groups),
            "critic": None if findings.critic is None else _numbers(findings.critic),
            "off_by_one": None if findings.alignment is None else findings.alignment.shift,
            "return_correlations": findings.return_correlations,
            "parts": [
                {
                    "file": part.file,
                    "step": part.step,
                    "num_responses": part.sums.num,
                    "reward_mean": _number(part.sums.reward_mean),
                    "critic": None if part.critic is None else _numbers(part.critic),
                }
                for part in findings.parts
            ],
            "verdicts": [asdict(remark) | {"row": remark.row} for remark in self.remarks],
            "notes": list(self.notes),
            "truth": None if self.truth is None else self.truth.table(),
        }

    def _notes(self) -> list[str]:
        if not self.findings.runs:
            return list(self.notes)
        num = len(self.findings.runs)
        text = f"{num} files are judged one by one; counts and figures are of all of them together"
        return [*self.notes, text]

    def _facts(self) -> dict[str, str]:
        findings, sums, groups = self.findings, self.findings.sums, self.findings.groups
        facts = {
            "responses": f"{sums.num:,} in {groups.num_groups:,} groups",
            "rewards": f"mean {decimals(sums.reward_mean)}, from {sums.low:g} to {sums.high:g}",
        }
        if findings.num_bad_rows:
            facts["rows that cannot be read"] = f"{findings.num_bad_rows:,}"
        if sums.num_with_length:
            facts["response tokens"] = f"{sums.tokens:,}, {sums.length_mean:.1f} per response"
        if sums.num_logprobs:
            facts["mean log-prob"] = f"{sums.logprob / sums.num_logprobs:.3f} nats"
        if findings.critic is not None:
            with_values = (
                ""
                if sums.num_with_values == sums.num
                else (f", {sums.num_with_values:,} responses have values")
            )
            facts["explained variance"] = f"{quote(findings.critic.explained)}{with_values}"
            if not (ratio := findings.critic.gradient_noise_ratio).is_unknown:
                forecast = _forecast(ratio, group_size=max(sums.num / groups.num_groups, 2.0))
                facts["gradient noise ratio"] = f"{quote(ratio)}: {forecast}"
        if self.critic is not None:
            facts["critic"] = self.critic
        if self.policy is not None:
            facts["policy"] = self.policy
        return facts


def _forecast(ratio: Figure, *, group_size: float) -> str:
    """Say whether a critic can help the policy, by its noise in the gradient (docs/inspect.md).

    A critic that knows no more than the mean reward of all responses comes to 1 - 1 / group_size.
    In groups of more than ten that is above the limit from which no critic helped.
    """
    batch_mean = min(1 - 1 / group_size, _HELPLESS_ABOVE)
    against = "against the mean of the other responses"
    if ratio.high < batch_mean:
        return (
            f"less noise than the mean of the other responses brings, and than that of all "
            f"responses can ({batch_mean:.2f} in groups of {group_size:.3g}): this critic may help"
        )
    if ratio.low > _HELPLESS_ABOVE:
        return f"this critic cannot help {against}: leave it out"
    return (
        f"not clear whether this critic can help {against} (it may below {batch_mean:.2f}, which "
        f"the mean of all responses can reach, and cannot above {_HELPLESS_ABOVE:g})"
    )


def inspect_responses(
    responses: Iterable[InspectedResponse | BadRow],
    *,
    name: str,
    policy: str | None = None,
    critic: str | None = None,
    truth: TruthRequest | None = None,
    gamma: float = 1.0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    notes: Sequence[str] = (),
    seed: int = 0,
) -> Inspection:
    """Read the stream of responses once; return statistics of them, and remarks on them.

    The remarks say what is wrong, notable or good.

    Args:
        name: what the responses are, for titles.
        policy, critic: the models' names for the page. No critic is run: the responses have values
            already.
        truth: how to measure the true values of some prefixes; None leaves this out.
        gamma: the discount of the rewards.
        tokenizer: makes texts of the page's token ids.
        notes: what the files of the responses lack. The list may grow until a text or page is made.
        seed: for samples, bootstraps and the random choice of groups on the page.

    Raises: UserError: there is no response, or the truth cannot be measured.
    """
    findings = collect_findings(responses, gamma=gamma, seed=seed)
    if not findings.sums.num:
        bad = findings.bad_rows
        why = f"; the first row: {bad[0].place}: {bad[0].reason}" if bad else ""
        raise UserError(f"{name}: no response could be read{why}")
    measured_truth = None
    if truth is not None:
        from vapo.studies.inspection.truth import measure_responses

        measured_truth = measure_responses(findings, truth)
    return Inspection(
        name=name,
        findings=findings,
        remarks=verdicts(findings),
        notes=notes,
        policy=policy,
        critic=critic,
        tokenizer=tokenizer,
        truth=measured_truth,
        seed=seed,
    )


def _numbers(figures: Any) -> dict[str, Any]:
    """Return the fields of a dataclass for JSON. A figure becomes [value, low, high]."""
    entries: dict[str, Any] = {}
    for field in fields(figures):
        x = getattr(figures, field.name)
        entries[field.name] = [_number(y) for y in x] if isinstance(x, Figure) else _number(x)
    return entries


def _number(x: float) -> float | int | None:
    return None if isinstance(x, float) and not math.isfinite(x) else x
