"""Measure the true values of prefixes: a policy continues responses, a verifier judges the
results.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from vapo.config import FitConfig
from vapo.diagnostics.position_profiles import Profile
from vapo.diagnostics.value_page.truth import measured_prefixes, truth_data
from vapo.diagnostics.value_truth.figures import truth_figures
from vapo.diagnostics.value_truth.measure import (
    ValueTruth,
    describe_truth,
    measure_truth,
    truth_table,
)
from vapo.diagnostics.value_truth.points import Outcomes, TruthPoint
from vapo.diagnostics.value_truth.verdict import verdict
from vapo.errors import UserError
from vapo.networks.end_tokens import folder_end_tokens
from vapo.networks.loading import load_causal_lm, load_tokenizer
from vapo.rewards.scorer import Scorer, VerifierScorer
from vapo.rollouts.batch import make_rollout_batch
from vapo.rollouts.continuations import ContinuationSampler
from vapo.rollouts.engines.contract import has_ended, sampled_text, sampling_settings
from vapo.rollouts.engines.selection import access_to, check_engine, make_sampler
from vapo.rollouts.player import RolloutRunner
from vapo.studies.inspection.findings import Findings
from vapo.studies.inspection.group_sample import GroupKey
from vapo.studies.inspection.responses import InspectedResponse
from vapo.studies.inspection.truth_request import TruthRequest
from vapo.system.libraries import pick_device
from vapo.system.progress import Progress
from vapo.types import FinishReason, Prompt, Rollout, Turn

_AGREES_ABOVE = 0.95  # share of the file's rewards that the verifier must give again
_MAX_RESPONSES = 2000  # most candidates for continuation


@dataclass(frozen=True)
class MeasuredTruth:
    """The rewards of continuations from prefixes of responses, with the critic's values there.

    Attributes:
        truth: the measured prefixes. A point's `row` is the response's number in the sample.
        agreement: the share of the `num_judged` rewards in the file that the verifier gave again.
        num_judged: how many of the file's responses the verifier judged.
    """

    truth: ValueTruth
    agreement: float
    num_judged: int

    @property
    def note(self) -> str:
        """A sentence on how often the verifier gives the file's rewards again."""
        text = f"{self.agreement:.0%} of {self.num_judged} of the file's own rewards"
        if self.agreement >= _AGREES_ABOVE:
            return f"The verifier gives {text} again."
        return (
            f"The verifier gives only {text} again: the truth below is another reward's than the "
            "values'. Check --verifier and the answers."
        )

    def text(self) -> str:
        figures = self.truth.figures
        lines = ["values against the truth", self.note, describe_truth(figures)]
        lines += [f"{remark.text} ({remark.row})" for remark in verdict(figures)]
        return "\n".join(lines)

    def table(self) -> dict[str, Any]:
        agreement = {"agreement": self.agreement, "num_judged": self.num_judged}
        return agreement | truth_table(self.truth)

    def page_data(self) -> dict[str, Any]:
        """Return the verdict and two charts, for `page.js`."""
        return truth_data(self.truth)

    def groups(self, findings: Findings) -> list[GroupKey]:
        """Return the groups that have a response which was continued from every step.

        The groups are sorted by the widest range of measured means that one of their responses has.
        """
        means: dict[int, list[float]] = {}
        for point in self.truth.points:
            means.setdefault(point.row, []).append(point.mean)
        spread: dict[GroupKey, float] = {}
        for key, numbers in findings.numbers.items():
            rows = [row for row in numbers if row in self.truth.rows]
            if rows:
                spread[key] = max(max(means[row]) - min(means[row]) for row in rows)
        return sorted(spread, key=lambda key: -spread[key])

    def prefixes(self) -> dict[int, Profile]:
        """Return a response's number in the sample -> the columns of its measured prefixes."""
        lengths = {point.row: point.length for point in self.truth.points}
        return measured_prefixes(self.truth, {row: torch.arange(n) for row, n in lengths.items()})


def measure_responses(findings: Findings, request: TruthRequest) -> MeasuredTruth:
    """Continue some responses of the sample with the policy, and judge the continuations.

    The result has the continuations' rewards, and the critic's values if the responses have any.
    The verifier also judges some of the file's own responses. The result's `num_judged` is the
    number of these, and `agreement` is the share of them whose reward it gave again.

    Raises: UserError: no response can be continued, or policy, verifier or engine cannot be used.
    """
    responses = findings.responses
    rows = [i for i, response in enumerate(responses) if _can_continue(response)][:_MAX_RESPONSES]
    config = request.config(findings)
    check_engine(config)
    tokenizer = request.tokenizer or load_tokenizer(str(request.policy), key="--policy")
    if not rows:
        raise UserError(
            "--value_truth: no response can be continued: the ids of prompt and response are "
            "needed, all tokens must be the policy's, and no reward may come before the last"
        )
    ends = folder_end_tokens(config.actor.path, tokenizer)
    keeps_special = config.rewards.keep_special_tokens
    rollouts = [
        _rollout(responses[i], findings, tokenizer, ends.ids, keeps_special=keeps_special)
        for i in rows
    ]
    with Progress() as progress, VerifierScorer(config) as scorer:
        verdicts = scorer.score(rollouts[: 4 * request.num_responses])
        bare_points, num_tokens = _measure(
            config, rollouts, scorer, tokenizer, progress, request.seed
        )
    agrees = [abs(a.reward - b.reward) < 1e-6 for a, b in zip(verdicts, rollouts, strict=False)]
    siblings = {row: numbers for numbers in findings.numbers.values() for row in numbers}
    points = []
    for bare_point in bare_points:
        row = rows[bare_point.row]
        point = _with_estimates(bare_point, row, responses, siblings[row])
        points += [] if point is None else [point]
    if not points:
        raise UserError("--value_truth: nothing could be measured: no finite value at a prefix")
    outcomes = _outcomes(points)
    figures = truth_figures(points, outcomes=outcomes, seed=request.seed)
    truth = ValueTruth(points, figures, outcomes, num_tokens)
    return MeasuredTruth(truth, fmean(agrees), len(verdicts))


def _measure(
    config: FitConfig,
    rollouts: Sequence[Rollout],
    scorer: Scorer,
    tokenizer: PreTrainedTokenizerBase,
    progress: Progress,
    seed: int,
) -> tuple[list[TruthPoint], int]:
    """Load the policy and continue rollouts; return the points and the number of sampled tokens."""
    batch = make_rollout_batch(
        rollouts,
        group_size=1,
        rewards=config.rewards,
        max_response_tokens=config.rollouts.max_response_tokens,
    )
    model = load_causal_lm(
        config.actor.path,
        dtype=config.actor.dtype,
        attn_implementation=config.actor.attn_implementation,
    )
    access = access_to(model, pick_device(config.trainer))
    with closing(make_sampler(config, access, tokenizer)) as sampler:
        player = RolloutRunner(config, sampler, scorer, tokenizer)
        settings = sampling_settings(config.rollouts)
        continuation_sampler = ContinuationSampler(config, settings, player, progress.stage)
        return measure_truth(batch, continuation_sampler, seed=seed, note=progress.note)


def _can_continue(response: InspectedResponse) -> bool:
    """Whether a response has token ids, a single turn, and no reward before its last token.

    If it has values, there must be one for each token.
    """
    is_one_turn = response.is_sampled is None or all(response.is_sampled)
    has_ids = bool(response.prompt_ids) and bool(response.response_ids)
    same_length = response.values is None or len(response.values) == len(
        response.response_ids or ()
    )
    return is_one_turn and has_ids and same_length and not any((response.token_rewards or ())[:-1])


def _rollout(
    response: InspectedResponse,
    findings: Findings,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Set[int],
    *,
    keeps_special: bool,
) -> Rollout:
    ids = tuple(response.response_ids or ())
    is_cut = response.is_truncated
    if is_cut is None:
        is_cut = not has_ended(ids, tokenizer, end_ids)
    return Rollout(
        prompt=Prompt(
            prompt_id=response.group,
            text=response.prompt,
            prompt_ids=tuple(response.prompt_ids or ()),
            answer=response.answer or "",
        ),
        response_ids=ids,
        response_text=sampled_text(ids, tokenizer, end_ids, keeps_special=keeps_special),
        rollout_logprobs=response.logprobs or (0.0,) * len(ids),
        finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
        turns=(Turn(0, len(ids), response.reward),),
        is_correct=bool(findings.is_right(response)),
    )


def _with_estimates(
    point: TruthPoint, row: int, responses: Sequence[InspectedResponse], siblings: range
) -> TruthPoint | None:
    """Return the point with the critic's value and the mean reward of the group's other responses.

    The value is None if the response has no values. The result is None if the value is NaN.

    Args:
        row: the number of the point's response in the sample.
        siblings: the numbers of the group's responses, `row` among them.
    """
    response = responses[row]
    rewards = [responses[sibling].reward for sibling in siblings if sibling != row]
    baseline = fmean(rewards) if rewards else None
    value = None if response.values is None else float(response.values[point.num_tokens])
    if value is not None and value != value:
        return None
    return replace(point, row=row, value=value, baseline=baseline)


def _outcomes(points: Sequence[TruthPoint]) -> Outcomes:
    """Return the two returns that occur, the lower one first; None if there are not exactly two."""
    returns = sorted({x for point in points for x in point.returns})
    return (returns[0], returns[1]) if len(returns) == 2 else None
