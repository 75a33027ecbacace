"""Files of tokens: slime's dumps of rollouts and of training, NeMo-RL's training data.

Read from slime of August 2026 (`save_debug_rollout_data`, `save_debug_train_data`) and NeMo-RL of
the same month (`train_data_step{N}.jsonl`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vapo.studies.inspection.fields import (
    Row,
    RowError,
    RowPlace,
    answer_of,
    conversation,
    entries,
    flag_of,
    given,
    is_cut_short,
    row_reward,
    whole_number,
    words,
    words_of,
)
from vapo.studies.inspection.responses import InspectedResponse


def slime_rollouts(row: Row, place: RowPlace) -> list[InspectedResponse]:
    """A `Sample` as a dict. `status` says whether it was cut short."""
    status = given(row, "status")
    if status in ("aborted", "failed", "pending"):
        raise RowError(f"its status is {status}")
    ids, prompt_ids = _parted(row, row["response_length"])
    prompt, group = place.prompt(row, "prompt"), given(row, "group_index")
    return [
        place.response(
            place.step_of(row, "rollout_id"),
            prompt if group is None else group,
            prompt=prompt,
            reward=row_reward(row, place.rewards or ("reward",)),
            prompt_ids=prompt_ids,
            response_ids=ids,
            is_sampled=_mask(row, "loss_mask"),
            logprobs=entries(row, "rollout_log_probs", float),
            is_truncated=is_cut_short(status),
            answer=answer_of(row, "label"),
            **words(row, "response"),
        )
    ]


def slime_training(row: Row, place: RowPlace) -> list[InspectedResponse]:
    """A sample of the trainer, which has values, advantages and returns, and no text."""
    ids, prompt_ids = _parted(row, row["response_lengths"])
    keys = place.rewards or (("raw_reward",) if "raw_reward" in row else ("rewards",))
    return [
        place.response(
            place.step_of(row, "rollout_id"),
            prompt_ids,
            prompt="",
            response="",
            reward=row_reward(row, keys),
            prompt_ids=prompt_ids,
            response_ids=ids,
            is_sampled=_mask(row, "loss_masks"),
            values=entries(row, "values", float),
            logprobs=entries(row, "log_probs", float) or entries(row, "rollout_log_probs", float),
            advantages=entries(row, "advantages", float),
            returns=entries(row, "returns", float),
            is_truncated=flag_of(row, "truncated"),
        )
    ]


def _parted(row: Row, length: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens of the response, the last ones, and those of the prompt."""
    ids, num = entries(row, "tokens", int), whole_number(length)
    if ids is None or num is None or not 0 < num <= len(ids):
        raise RowError(f"a response of {length!r} tokens, and {len(ids or ())} tokens in all")
    return ids[-num:], ids[:-num]


def _mask(row: Row, key: str) -> tuple[bool, ...] | None:
    mask = entries(row, key, bool)
    return None if mask is None or all(mask) else mask


def nemo_rl(row: Row, place: RowPlace) -> list[InspectedResponse]:
    """A line whose columns have one entry each, of the padded sequence; its mask parts it.

    A log-prob stands at the token that it is of. `step` comes from the file's name.
    """
    only = {key: _only(value) for key, value in row.items()}
    mask, ids = entries(only, "token_loss_mask", bool), entries(only, "token_ids", int)
    if mask is None or True not in mask:
        raise RowError("token_loss_mask marks no token of a response")
    start, end = mask.index(True), len(mask) - mask[::-1].index(True)
    texts = _texts(only.get("content"))
    num_prompt = 1 if len(texts) == 2 else max(1, len(texts) - 1)
    prompt, sampled = conversation(texts[:num_prompt]), mask[start:end]

    def part(key: str) -> tuple[float, ...] | None:
        found = entries(only, key, float)
        return None if found is None else found[start:end]

    return [
        place.response(
            place.step,
            prompt,
            prompt=prompt,
            reward=row_reward(only, place.rewards or ("rewards",)),
            prompt_ids=None if ids is None else ids[:start],
            response_ids=None if ids is None else ids[start:end],
            is_sampled=None if all(sampled) else sampled,
            logprobs=part("generation_logprobs"),
            advantages=part("advantages"),
            **words_of(texts[num_prompt:]),
        )
    ]


def _only(value: Any) -> Any:
    """A column's one entry: a line is a batch of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _texts(content: Any) -> list[Mapping[str, Any]]:
    if isinstance(content, str):
        content = [content]
    if not isinstance(content, list) or not all(isinstance(text, str) for text in content):
        raise RowError("content is no text and no list of texts")
    return [{"role": "turn", "content": text} for text in content]
