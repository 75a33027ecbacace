"""Choose the groups of responses that a value page shows, and make the data of their cards.

A card shows one response, token by token.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from vapo.diagnostics.value_page.measures import MEASURES, domain
from vapo.diagnostics.value_page.row_choice import rows_to_show
from vapo.diagnostics.value_page.template import pack_ids, pack_numbers, shorten_text
from vapo.diagnostics.value_page.visible_text import visible_text
from vapo.studies.inspection.findings import Findings
from vapo.studies.inspection.group_sample import (
    GroupKey,
    response_length,
    response_values,
    returns_of,
    sampled_places,
)
from vapo.studies.inspection.profiles import Profile
from vapo.studies.inspection.responses import InspectedResponse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vapo.diagnostics.value_page.token_text import TokenText

_MAX_PROMPT_CHARS = 20_000
_UNKNOWN_TOKEN = "\u25aa"
# Why a group is shown, and its score. The group with the highest score is shown.
Reason = tuple[str, Callable[[list[InspectedResponse]], float]]


@dataclass(frozen=True)
class PageSize:
    """The most groups on a page, responses in each group, and tokens on the whole page."""

    num_groups: int
    max_responses: int
    max_tokens: int


@dataclass
class Vocabulary:
    """The text of each token on a page, by token id; it grows as cards are made.

    If a response has no ids, each different text gets a number as its id.

    Attributes:
        token_text: the tokenizer's texts; None without a tokenizer.
        texts: token id -> text.
        special: the ids of special tokens.
        partial: token id -> the bytes, in hex, of a token that is not whole characters.
    """

    token_text: TokenText | None
    texts: dict[int, str] = field(default_factory=dict)
    special: set[int] = field(default_factory=set)
    partial: dict[int, str] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)

    def ids(self, response: InspectedResponse, places: np.ndarray) -> tuple[list[int], list[Any]]:
        """Return the ids of a response's tokens at some indices, and the texts that differ.

        The second list has (place in `places`, text) for each token whose text here is not the one
        that the vocabulary has for its id. New tokens are added to the vocabulary.
        """
        if response.response_ids is not None and self.token_text is not None:
            ids = [response.response_ids[i] for i in places]
            for token_id in ids:
                token = self.token_text.token(token_id)
                self.texts[token_id] = token.text
                if token.is_special:
                    self.special.add(token_id)
                if token.partial:
                    self.partial[token_id] = token.partial
            return ids, self.token_text.in_context(ids)
        if response.tokens is not None:
            texts = [visible_text(response.tokens[i]) for i in places]
        else:
            texts = [_UNKNOWN_TOKEN] * len(places)
        if response.response_ids is None:
            ids = [self._numbers.setdefault(text, len(self._numbers)) for text in texts]
            self.texts.update(zip(ids, texts, strict=True))
            return ids, []
        ids = [response.response_ids[i] for i in places]
        for token_id, text in zip(ids, texts, strict=True):
            self.texts.setdefault(token_id, text)
        differing = enumerate(zip(ids, texts, strict=True))
        return ids, [(at, text) for at, (i, text) in differing if self.texts[i] != text]


def cards_data(
    findings: Findings,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    truths: Mapping[int, Profile],
    measured_groups: Sequence[GroupKey] = (),
    size: PageSize,
    seed: int,
) -> dict[str, Any]:
    """Return what `page.js` needs to draw the cards: groups, texts of tokens, and measures.

    Args:
        truths: a response's number in the sample -> the measured values of its prefixes.
        measured_groups: the groups with such measurements. They are shown first.
        seed: for the groups that are drawn at random.
    """
    vocabulary = Vocabulary(None if tokenizer is None else _token_text(tokenizer))
    card_columns: list[dict[str, np.ndarray]] = []
    groups, budget = [], size.max_tokens
    reasons = choose_groups(findings, measured_groups, size.num_groups, seed=seed)
    sample_numbers = findings.numbers
    for place, (key, reason) in enumerate(reasons.items()):
        group, numbers = findings.sample[key], sample_numbers[key]
        lengths = [_shown_length(response) for response in group]
        rows = rows_to_show(
            range(len(group)),
            is_correct=[bool(findings.is_right(response)) for response in group],
            lengths=lengths,
            max_responses=size.max_responses,
            max_tokens=budget // (len(reasons) - place),
            measured=[i for i, number in enumerate(numbers) if number in truths],
        )
        budget -= sum(rows.values())
        cards = []
        for row, num in rows.items():
            response, number = group[row], numbers[row]
            columns = _columns(response, num, findings.gamma)
            card_columns.append(columns)
            truth = truths.get(number)
            cards.append(_card(response, number, columns, num, vocabulary, findings, truth))
        groups.append(_group_data(key, reason, group, cards, findings, place))
    return {
        "measures": _measures(card_columns),
        "tokens": {str(i): text for i, text in sorted(vocabulary.texts.items())},
        "special": sorted(vocabulary.special),
        "partial": {str(i): text for i, text in vocabulary.partial.items()},
        "groups": groups,
    }


def _token_text(tokenizer: PreTrainedTokenizerBase) -> TokenText:
    from vapo.diagnostics.value_page.token_text import TokenText  # it loads transformers

    return TokenText(tokenizer)


def choose_groups(
    findings: Findings, measured_groups: Sequence[GroupKey], num_groups: int, *, seed: int
) -> dict[GroupKey, str]:
    """Choose the groups that the page shows; return group -> the reason for it.

    Measured groups come first, then the best group for each reason, then random ones. Groups that
    are not measured come from the last training step, if it has at least `num_groups`.
    """
    sample = findings.sample
    steps = [group[0].step for group in sample.values()]
    last_step = max((step for step in steps if step is not None), default=None)
    if steps.count(last_step) >= num_groups:
        sample = {key: group for key, group in sample.items() if group[0].step == last_step}
    reasons: dict[GroupKey, str] = dict.fromkeys(measured_groups[:num_groups], "measured")
    for reason, score in _reasons(findings):
        scores = {key: score(group) for key, group in sample.items() if key not in reasons}
        best = max(scores, key=lambda key: scores[key], default=None)
        if best is not None and scores[best] > 0 and len(reasons) < num_groups:
            reasons[best] = reason
    remaining = [key for key in sample if key not in reasons]
    random.Random(seed).shuffle(remaining)
    return reasons | dict.fromkeys(remaining[: num_groups - len(reasons)], "at random")


def _reasons(findings: Findings) -> list[Reason]:
    def error(group: list[InspectedResponse]) -> float:
        with_values = [response for response in group if response.values]
        if not with_values:
            return 0.0
        means = [
            float(np.nanmean(np.abs(np.asarray(response.values, dtype=float) - response.reward)))
            for response in with_values
        ]
        return float(np.mean(means))

    def reward_spread(group: list[InspectedResponse]) -> float:
        rewards = [response.reward for response in group]
        return float(np.std(rewards))

    def max_length(group: list[InspectedResponse]) -> float:
        return float(max(_shown_length(response) for response in group))

    def accuracy(group: list[InspectedResponse]) -> float:
        group_error = error(group)
        return 1 / (1 + group_error) if group_error else 0.0

    mixed: Reason = ("right and wrong answers", reward_spread)
    longest: Reason = ("longest response", max_length)
    if findings.critic is None:
        return [mixed, longest]
    return [mixed, ("largest value error", error), longest, ("smallest value error", accuracy)]


def _shown_length(response: InspectedResponse) -> int:
    return response_length(response) or 0


def _columns(response: InspectedResponse, num: int, gamma: float) -> dict[str, np.ndarray]:
    """Return measure -> its numbers at the response's first `num` sampled tokens."""
    columns: dict[str, np.ndarray] = {}
    for name, column in (
        ("value", response.values),
        ("value_target", response.returns),
        ("advantage", response.advantages),
        ("rollout_logprob", response.logprobs),
    ):
        if column is not None:
            places = sampled_places(response, len(column))
            columns[name] = np.asarray(column, dtype=float)[places][:num]
    if (numbers := response_values(response)) is not None:
        places = sampled_places(response, len(response.values or ()))
        returns = returns_of(numbers, gamma)
        error = np.asarray(response.values, dtype=float)[places] - returns
        columns["return"] = returns[:num]
        columns["value_error"] = error[:num]
        # r[t] + gamma V[t+1] - V[t], as R[t] = r[t] + gamma R[t+1]
        columns["td_error"] = (gamma * np.append(error[1:], 0.0) - error)[:num]
    return columns


def _card(
    response: InspectedResponse,
    number: int,
    columns: Mapping[str, np.ndarray],
    num: int,
    vocabulary: Vocabulary,
    findings: Findings,
    truth: Profile | None,
) -> dict[str, Any]:
    length = _shown_length(response)
    num_places = length if response.is_sampled is None else len(response.is_sampled)
    ids, in_context = vocabulary.ids(response, sampled_places(response, num_places)[:num])
    ends = {None: "not known", True: "length", False: "stop"}
    return {
        "row": number,
        "place": visible_text(PurePath(response.place).name),  # "rows.jsonl, row 12"
        "is_correct": findings.is_right(response),
        "reward": response.reward,
        "finish_reason": ends[response.is_truncated],
        "extracted": None,
        "failure": None,
        "carries_loss": True,
        "lambda_policy": None,
        "num_tokens": length,
        "num_turns": 1,
        "turns": None,
        "ids": pack_ids(ids),
        "in_context": in_context,
        "text": ""
        if response.tokens or vocabulary.token_text
        else shorten_text(response.response, 4000),
        "columns": {name: pack_numbers(x.astype(np.float32)) for name, x in columns.items()},
        "truth": truth,
    }


def _group_data(
    key: GroupKey,
    reason: str,
    group: Sequence[InspectedResponse],
    cards: Sequence[Mapping[str, Any]],
    findings: Findings,
    index: int,
) -> dict[str, Any]:
    is_right = [findings.is_right(response) for response in group]
    step, name = group[0].step, key[1].rpartition("|")[2]  # behind the file and the step
    return {
        "index": index,
        "reason": reason,
        "num_responses": len(group),
        "num_correct": sum(map(bool, is_right)) if None not in is_right else None,
        "prompt_id": visible_text(name if step is None else f"{name}, step {step}"),
        "prompt": shorten_text(group[0].prompt, _MAX_PROMPT_CHARS),
        "answer": shorten_text(group[0].answer or "", 500),
        "responses": cards,
    }


def _measures(card_columns: Sequence[Mapping[str, np.ndarray]]) -> list[dict[str, Any]]:
    """Return the measures that at least one card has, each with its range over all cards."""
    measures = []
    for measure in MEASURES:
        end = None if measure.last_token_counts else -1
        name = measure.name
        columns = [columns[name][:end] for columns in card_columns if name in columns]
        if columns:
            ends = domain(measure, np.concatenate(columns))
            measures.append({**measure._asdict(), "domain": ends})
    return measures
