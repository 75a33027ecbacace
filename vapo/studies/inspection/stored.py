"""Write responses as a file of rollouts, which value pretraining and `vapo critics` read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from vapo.rollouts.rollout_file import SCHEMA, SCHEMA_VERSION, TURN_COLUMNS, table_writer
from vapo.studies.inspection.group_sample import is_sampled, sampled_rewards
from vapo.studies.inspection.responses import BadRow, InspectedResponse

_CHUNK_SIZE = 256  # responses that are written together


def write_responses(
    responses: Iterable[InspectedResponse | BadRow],
    path: Path,
    *,
    tokenizer: str | None,
    notes: list[str],
) -> Iterator[InspectedResponse | BadRow]:
    """Yield the responses, and write them to a file of rollouts at `path`.

    The file appears when all responses have been read, so it is complete or not there. Rewards of
    single tokens are added up to one reward for each turn. If a response has no ids, whoever reads
    the file makes tokens of its text.

    Args:
        tokenizer: the fingerprint of the tokenizer whose ids the responses have; None if unknown.
        notes: sentences on what was written are appended at the end.
    """
    metadata = {"schema_version": SCHEMA_VERSION, "tokenizer": tokenizer}
    stream, groups = iter(responses), dict[str, int]()
    num = num_unknown = 0
    with table_writer(path, {name: x for name, x in metadata.items() if x is not None}) as writer:
        while chunk := list(islice(stream, _CHUNK_SIZE)):
            good = [item for item in chunk if isinstance(item, InspectedResponse)]
            rows = [_row(x, groups.setdefault(x.group, len(groups))) for x in good]
            writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
            num += len(good)
            num_unknown += sum(response.is_truncated is None for response in good)
            yield from chunk
    notes.append(f"{path} has {num:,} responses in {len(groups):,} groups for `vapo critics`")
    if num_unknown:
        notes.append(f"{num_unknown:,} of them count as ended there: if they did is not known")


def _row(response: InspectedResponse, group: int) -> dict[str, Any]:
    rewards = response.token_rewards
    row: dict[str, Any] = {
        "group": group,
        "prompt": response.prompt,
        "prompt_ids": response.prompt_ids,
        "response": response.response,
        "response_ids": response.response_ids,
        "rollout_logprobs": response.logprobs,
        "finish_reason": "length" if response.is_truncated else "stop",
        "reward": response.reward if rewards is None else sum(rewards),
        "answer": response.answer,
    }
    if response.is_sampled is not None and not all(response.is_sampled):
        turns = _turns(response)
        row |= {name: [turn[i] for turn in turns] for i, name in enumerate(TURN_COLUMNS)}
        length = sum(num_observed + num_sampled for num_observed, num_sampled, _ in turns)
        for name in ("response_ids", "rollout_logprobs"):  # a turn ends with a sampled token
            row[name] = row[name] and row[name][:length]
    return row


def _turns(response: InspectedResponse) -> list[tuple[int, int, float]]:
    """Return (number of observed tokens, of sampled tokens, reward) for each turn of a response.

    Observed tokens come from the environment. Tokens after the last sampled one belong to no turn.
    """
    flags = is_sampled(response, len(response.is_sampled or ()))
    rewards = sampled_rewards(response)
    if rewards is None:
        rewards = np.zeros(int(flags.sum()))
        rewards[-1:] = response.reward
    turns, num_observed, start = [], 0, 0
    for is_turn, tokens in groupby(flags.tolist()):
        num = len(list(tokens))
        if is_turn:
            turns.append((num_observed, num, float(rewards[start : start + num].sum())))
            start += num
        num_observed = 0 if is_turn else num
    return turns
