"""Render a page's contents as one self-contained HTML file.

The data is JSON in the page; `page.js` draws it, with text nodes only, so that no response can
become markup. The Content-Security-Policy admits this script and no other, and no request.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vapo.diagnostics.position_profiles import Profile
from vapo.diagnostics.value_page.contents import PageContents
from vapo.diagnostics.value_page.group_choice import ChosenGroup
from vapo.diagnostics.value_page.measures import MEASURES, Measure, domain
from vapo.diagnostics.value_page.token_text import TokenText, visible
from vapo.diagnostics.value_page.truth import measured_prefixes, truth_data
from vapo.diagnostics.value_page.turns import in_context, turns_data

_SCRIPTS = ("charts.js", "truth.js", "tokens.js", "page.js")
_MAX_PROMPT_CHARS = 20_000
_MAX_ANSWER_CHARS = 500


def render_page(contents: PageContents, token_text: TokenText, about: Mapping[str, Any]) -> str:
    """The page's HTML. `about`: title, facts (name -> text) and notes, as the page shows them."""
    style = _template("page.css")
    script = "\n".join(_template(name) for name in _SCRIPTS)
    data = json.dumps(page_data(contents, token_text, about), separators=(",", ":"))
    for character in "<>&":  # in JSON they occur in strings only
        data = data.replace(character, f"\\u{ord(character):04x}")
    page = _template("page.html")
    parts = {
        "title": html.escape(visible(str(about["title"]))),
        "style_hash": _hash(style),
        "script_hash": _hash(script),
        "style": style,
        "data": data,
        "script": script,
    }
    first, *rest = page.split("{{")  # one pass: no part is searched for places
    return first + "".join(
        parts[name] + text for name, text in (piece.split("}}", 1) for piece in rest)
    )


def page_data(
    contents: PageContents, token_text: TokenText, about: Mapping[str, Any]
) -> dict[str, Any]:
    """The data for `page.js`.

    Columns: base64 of little-endian float32, or one constant number, or null: NaN throughout.
    """
    shown = {
        row: contents.batch.response_mask[row].nonzero()[:num_tokens, 0]
        for group in contents.groups
        for row, num_tokens in group.num_tokens.items()
    }
    ids = {i for row, at in shown.items() for i in contents.batch.response_ids[row, at].tolist()}
    tokens = {i: token_text.token(i) for i in sorted(ids)}
    truth, measured = contents.truth, {}
    if truth is not None:
        measured = measured_prefixes(truth, shown)
    return {
        **about,
        "measures": [
            {**measure._asdict(), "domain": domain(measure, _together(contents, shown, measure))}
            for measure in MEASURES
            if shown and measure.name in contents.columns
        ],
        "tokens": {str(i): token.text for i, token in tokens.items()},
        "special": [i for i, token in tokens.items() if token.is_special],
        "partial": {str(i): token.partial for i, token in tokens.items() if token.partial},
        "groups": [
            _group_data(contents, group, shown, measured, token_text) for group in contents.groups
        ],
        "positions": contents.positions,
        "calibration": contents.calibration,
        "truth": None if truth is None else truth_data(truth),
    }


def _group_data(
    contents: PageContents,
    group: ChosenGroup,
    shown: Mapping[int, Tensor],
    measured: Mapping[int, Profile],
    token_text: TokenText,
) -> dict[str, Any]:
    batch = contents.batch
    first, num_responses = group.index * batch.group_size, batch.group_size
    prompt = batch.rollouts[first].prompt
    return {
        "index": group.index,
        "reason": group.reason,
        "num_responses": num_responses,
        "num_correct": int(batch.is_correct[first : first + num_responses].sum()),
        "prompt_id": visible(prompt.prompt_id),
        "prompt": _shortened(prompt.text, _MAX_PROMPT_CHARS),
        "answer": _shortened(prompt.answer, _MAX_ANSWER_CHARS),
        "responses": [
            _response_data(contents, row, shown[row], token_text) | {"truth": measured.get(row)}
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
        "extracted": None if extracted is None else _shortened(extracted, _MAX_ANSWER_CHARS),
        "failure": failure and _shortened(failure, _MAX_ANSWER_CHARS),
        "carries_loss": bool((batch.loss_mask | batch.value_mask)[row].any()),
        "lambda_policy": None if lambdas is None else float(lambdas[row]),
        "num_tokens": rollout.num_sampled,
        "num_turns": len(rollout.turns),
        "turns": turns_data(rollout, len(token_ids), token_text),
        "ids": _base64(np.asarray(token_ids, dtype="<i4").tobytes()),
        "in_context": in_context(rollout, token_ids, token_text),
        "columns": {
            name: _packed(column[row, places].float()) for name, column in contents.columns.items()
        },
    }


def _packed(column: Tensor) -> str | float | None:
    """Pack numbers exactly: a float32 prints as the double that it is. None: no number at all."""
    if bool(column.isnan().all()):
        return None
    first = float(column[0])
    if bool((column == first).all()) and np.isfinite(first):
        return first
    return _base64(column.numpy().astype("<f4").tobytes())


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _together(contents: PageContents, shown: Mapping[int, Tensor], measure: Measure) -> Tensor:
    end = None if measure.last_token_counts else -1
    column = contents.columns[measure.name]
    return torch.cat([column[row, places[:end]].float() for row, places in shown.items()])


def _shortened(text: str, max_chars: int) -> str:
    shown = visible(text[:max_chars])
    left_out = len(text) - max_chars
    return shown + f" \u2026 ({left_out} more characters)" if left_out > 0 else shown


def _template(name: str) -> str:
    return files("vapo.diagnostics.value_page").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return _base64(hashlib.sha256(text.encode()).digest())
