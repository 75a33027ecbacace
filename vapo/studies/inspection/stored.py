"""Others' responses as a file of rollouts, which value pretraining and `vapo critics` read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from vapo.rollouts.rollout_file import METADATA_KEY, SCHEMA, SCHEMA_VERSION
from vapo.rollouts.stored_columns import TURN_COLUMNS
from vapo.studies.inspection.group_sample import is_sampled, sampled_rewards
from vapo.studies.inspection.responses import BadRow, InspectedResponse

_AT_ONCE = 256


def stored(
    responses: Iterable[InspectedResponse | BadRow],
    path: Path,
    *,
    tokenizer: str | None,
    notes: list[str],
) -> Iterator[InspectedResponse | BadRow]:
    """The responses, which are written when they have all been read: the file is whole or not
    there.

    Rewards along the way count at the end of their turn. Of a text without ids whoever reads the
    file makes tokens.

    Args:
        tokenizer: the fingerprint of the one whose ids they are; None: not known.
        notes: gets what was written.
    """
    metadata = {"schema_version": SCHEMA_VERSION, "tokenizer": tokenizer}
    said = json.dumps({name: x for name, x in metadata.items() if x is not None})
    aside, stream = path.with_name(f".{path.name}.new"), iter(responses)
    groups: dict[str, int] = {}
    num = num_unknown = 0
    try:
        with parquet.ParquetWriter(aside, SCHEMA.with_metadata({METADATA_KEY: said})) as table:
            while held := list(islice(stream, _AT_ONCE)):
                good = [one for one in held if isinstance(one, InspectedResponse)]
                rows = [_row(x, groups.setdefault(x.group, len(groups))) for x in good]
                table.write_table(pa.Table.from_pylist(rows, schema=table.schema))
                num += len(good)
                num_unknown += sum(one.is_truncated is None for one in good)
                yield from held
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
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
        length = sum(observed + sampled for observed, sampled, _ in turns)
        for name in ("response_ids", "rollout_logprobs"):  # nothing was sampled after the rest
            row[name] = row[name] and row[name][:length]
    return row


def _turns(response: InspectedResponse) -> list[tuple[int, int, float]]:
    """(observed tokens, sampled tokens, reward) of each."""
    is_own = is_sampled(response, len(response.is_sampled or ()))
    rewards = sampled_rewards(response)
    if rewards is None:
        rewards = np.zeros(int(is_own.sum()))
        rewards[-1:] = response.reward
    turns, observed, done = [], 0, 0
    for own, tokens in groupby(is_own.tolist()):
        num = len(list(tokens))
        if own:
            turns.append((observed, num, float(rewards[done : done + num].sum())))
            done += num
        observed = 0 if own else num
    return turns
