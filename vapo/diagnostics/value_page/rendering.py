"""Render a page's contents as one self-contained HTML file, with `template`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from vapo.diagnostics.position_profiles import Profile
from vapo.diagnostics.value_page.contents import ChosenGroup, PageContents
from vapo.diagnostics.value_page.measures import MEASURES, Measure, domain
from vapo.diagnostics.value_page.template import fill_page, pack_ids, pack_numbers, shorten_text
from vapo.diagnostics.value_page.token_text import TokenText
from vapo.diagnostics.value_page.truth import measured_prefixes, truth_data
from vapo.diagnostics.value_page.visible_text import visible_text
from vapo.rollouts.segments import shows_turns
from vapo.types import Rollout

_MAX_PROMPT_CHARS = 20_000
_MAX_ANSWER_CHARS = 500
_MAX_OBSERVED_CHARS = 4000


def render_page(contents: PageContents, token_text: TokenText, about: Mapping[str, Any]) -> str:
    """Return the page's HTML.

    Args:
        about: has the page's `title`, `facts` (name -> text) and `notes`.
    """
    return fill_page(page_data(contents, token_text, about))


def page_data(
    contents: PageContents, token_text: TokenText, about: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the data from which `page.js` draws the page.

    A column is base64 of little-endian float32, or a number if all are equal, or null if all are
    NaN.

    Args:
        about: has the page's `title`, `facts` (name -> text) and `notes`.
    """
    places_by_row = {
        row: contents.batch.response_mask[row].nonzero()[:num_tokens, 0]
        for group in contents.groups
        for row, num_tokens in group.num_tokens.items()
    }
    response_ids = contents.batch.response_ids
    ids = {i for row, places in places_by_row.items() for i in response_ids[row, places].tolist()}
    tokens = {i: token_text.token(i) for i in sorted(ids)}
    truth = contents.truth
    measured = {} if truth is None else measured_prefixes(truth, places_by_row)
    return {
        **about,
        "measures": [
            {
                **measure._asdict(),
                "domain": domain(measure, _shown_numbers(contents, places_by_row, measure)),
            }
            for measure in MEASURES
            if places_by_row and measure.name in contents.columns
        ],
        "tokens": {str(i): token.text for i, token in tokens.items()},
        "special": [i for i, token in tokens.items() if token.is_special],
        "partial": {str(i): token.partial for i, token in tokens.items() if token.partial},
        "groups": [
            _group_data(contents, group, places_by_row, measured, token_text)
            for group in contents.groups
        ],
        "positions": contents.positions,
        "calibration": contents.calibration,
        "truth": None if truth is None else truth_data(truth),
    }


def _group_data(
    contents: PageContents,
    group: ChosenGroup,
    places_by_row: Mapping[int, Tensor],
    measured: Mapping[int, Profile],
    token_text: TokenText,
) -> dict[str, Any]:
    batch = contents.batch
    rows = slice(group.index * batch.group_size, (group.index + 1) * batch.group_size)
    prompt = batch.rollouts[rows.start].prompt
    return {
        "index": group.index,
        "reason": group.reason,
        "num_responses": batch.group_size,
        "num_correct": int(batch.is_correct[rows].sum()),
        "prompt_id": visible_text(prompt.prompt_id),
        "prompt": shorten_text(prompt.text, _MAX_PROMPT_CHARS),
        "answer": shorten_text(prompt.answer, _MAX_ANSWER_CHARS),
        "responses": [
            _response_data(contents, row, places_by_row[row], token_text)
            | {"truth": measured.get(row)}
            for row in group.num_tokens
        ],
    }


def _response_data(
    contents: PageContents, row: int, places: Tensor, token_text: TokenText
) -> dict[str, Any]:
    batch, lambdas = contents.batch, contents.lambdas
    rollout = batch.rollouts[row]
    extracted, failure = rollout.extracted, rollout.failure
    token_ids = batch.response_ids[row, places].tolist()
    return {
        "row": row,
        "is_correct": rollout.is_correct,
        "reward": float(batch.rewards[row]),
        "finish_reason": rollout.finish_reason.value,
        "extracted": None if extracted is None else shorten_text(extracted, _MAX_ANSWER_CHARS),
        "failure": failure and shorten_text(failure, _MAX_ANSWER_CHARS),
        "carries_loss": bool((batch.loss_mask | batch.value_mask)[row].any()),
        "lambda_policy": None if lambdas is None else float(lambdas[row]),
        "num_tokens": rollout.num_sampled,
        "num_turns": len(rollout.turns),
        "turns": _turns_data(rollout, len(token_ids), token_text),
        "ids": pack_ids(token_ids),
        "in_context": _in_context(rollout, token_ids, token_text),
        "columns": {
            name: pack_numbers(column[row, places].float().numpy())
            for name, column in contents.columns.items()
        },
    }


def _turns_data(
    rollout: Rollout, num_tokens: int, token_text: TokenText
) -> list[dict[str, Any]] | None:
    """Return the turns that begin within the first `num_tokens` sampled tokens.

    `at` is the number of sampled tokens before the turn, `observed` the visible text that the
    environment wrote before it. The result is None if the rollout is not shown in turns.
    """
    if not shows_turns(rollout):
        return None
    return [
        {
            "at": at,
            "reward": turn.reward,
            "num_observed": turn.num_observed,
            "observed": _observed(rollout.response_ids[span.begin : span.first], token_text),
        }
        for at, turn, span in zip(
            _turn_places(rollout), rollout.turns, rollout.turn_spans, strict=True
        )
        if turn.num_sampled and at < num_tokens
    ]


def _turn_places(rollout: Rollout) -> list[int]:
    """Return for each turn how many sampled tokens come before it."""
    return list(accumulate((turn.num_sampled for turn in rollout.turns), initial=0))[:-1]


def _observed(token_ids: Sequence[int], token_text: TokenText) -> str:
    """Return the visible text of an observation, shortened."""
    in_context = dict(token_text.in_context(token_ids))
    texts = [in_context.get(i, token_text.token(id_).text) for i, id_ in enumerate(token_ids)]
    return shorten_text("".join(texts), _MAX_OBSERVED_CHARS, show=str)


def _in_context(
    rollout: Rollout, token_ids: Sequence[int], token_text: TokenText
) -> list[tuple[int, str]]:
    """Return (index, text) of the tokens whose text depends on other tokens of their turn.

    The indices count sampled tokens.
    """
    return [
        (start + place, text)
        for start, end in pairwise([*_turn_places(rollout), len(token_ids)])
        for place, text in token_text.in_context(token_ids[start:end])
    ]


def _shown_numbers(
    contents: PageContents, places_by_row: Mapping[int, Tensor], measure: Measure
) -> Tensor:
    """Return the measure's numbers at all shown tokens that count for its scale."""
    end = None if measure.last_token_counts else -1
    column = contents.columns[measure.name]
    return torch.cat([column[row, places[:end]].float() for row, places in places_by_row.items()])
