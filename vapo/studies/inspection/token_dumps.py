"""Read dumps of token ids: slime's of rollouts and of training, and NeMo-RL's training data.

The formats are those of slime (`save_debug_rollout_data`, `save_debug_train_data`) and of NeMo-RL
(`train_data_step{N}.jsonl`), both of August 2026.
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
    entry_or_none,
    flag_of,
    is_cut_short,
    message_fields,
    row_reward,
    text_fields,
    whole_number,
)
from vapo.studies.inspection.responses import InspectedResponse


def slime_rollouts(row: Row, place: RowPlace) -> list[InspectedResponse]:
    """Read the response of a slime `Sample`, a dict. Its `status` says whether it was cut short."""
    status = entry_or_none(row, "status")
    if status in ("aborted", "failed", "pending"):
        raise RowError(f"its status is {status}")
    ids, prompt_ids = _split_ids(row, row["response_length"])
    prompt, group = place.prompt(row, "prompt"), entry_or_none(row, "group_index")
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
            **text_fields(row, "response"),
        )
    ]


def slime_training(row: Row, place: RowPlace) -> list[InspectedResponse]:
    """Read the response of a sample of slime's trainer. It has values, but no text."""
    ids, prompt_ids = _split_ids(row, row["response_lengths"])
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


def _split_ids(row: Row, length: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split the row's tokens; return the response's, which are the last `length`, and the prompt's.

    Raises: RowError: there are fewer tokens than `length`, or no number.
    """
    ids, num = entries(row, "tokens", int), whole_number(length)
    if ids is None or num is None or not 0 < num <= len(ids):
        raise RowError(f"a response of {length!r} tokens, and {len(ids or ())} tokens in all")
    return ids[-num:], ids[:-num]


def _mask(row: Row, key: str) -> tuple[bool, ...] | None:
    """Return the mask of sampled tokens; None if the row has no mask, or all tokens are sampled."""
    mask = entries(row, key, bool)
    return None if mask is None or all(mask) else mask


def nemo_rl(row: Row, place: RowPlace) -> list[InspectedResponse]:
    """Read the response of a line of NeMo-RL, which is a batch with one padded sequence.

    The response reaches from the first to the last token that the mask marks. A token and its
    log-prob have the same index. The step comes from the file's name.
    """
    sample = {key: _single(value) for key, value in row.items()}
    mask, ids = entries(sample, "token_loss_mask", bool), entries(sample, "token_ids", int)
    if mask is None or True not in mask:
        raise RowError("token_loss_mask marks no token of a response")
    start, end = mask.index(True), len(mask) - mask[::-1].index(True)
    texts = _texts(sample.get("content"))
    num_prompt = 1 if len(texts) == 2 else max(1, len(texts) - 1)
    prompt, response_mask = conversation(texts[:num_prompt]), mask[start:end]

    def response_entries(key: str) -> tuple[float, ...] | None:
        column = entries(sample, key, float)
        return None if column is None else column[start:end]

    return [
        place.response(
            place.step,
            prompt,
            prompt=prompt,
            reward=row_reward(sample, place.rewards or ("rewards",)),
            prompt_ids=None if ids is None else ids[:start],
            response_ids=None if ids is None else ids[start:end],
            is_sampled=None if all(response_mask) else response_mask,
            logprobs=response_entries("generation_logprobs"),
            advantages=response_entries("advantages"),
            **message_fields(texts[num_prompt:]),
        )
    ]


def _single(value: Any) -> Any:
    """Return the entry of a list of length 1; any other value as it is."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _texts(content: Any) -> list[Mapping[str, Any]]:
    """Return a text, or a list of texts, as messages.

    Raises: RowError: it is neither.
    """
    if isinstance(content, str):
        content = [content]
    if not isinstance(content, list) or not all(isinstance(text, str) for text in content):
        raise RowError("content must be a text or a list of texts")
    return [{"role": "turn", "content": text} for text in content]
