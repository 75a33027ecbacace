"""Reads and checks the rows of a file of rollouts, which vapo or another program wrote.

A row needs `group`, `reward`, and prompt and response as ids or as text. All else has a default.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from vapo.errors import UserError
from vapo.files.row_values import value_text
from vapo.networks.end_tokens import EndTokens, end_tokens, turn_ids_with_end
from vapo.networks.saved_tokenizers import start_ids, tokenizer_fingerprint, with_start
from vapo.rollouts.engines.contract import has_ended
from vapo.rollouts.stored_columns import FileRow, StoredTruth, is_episode, read_truth, read_turns
from vapo.types import FinishReason, Prompt, Rollout, Turn
from vapo.user_code.process_protocol import reward_problem

_REQUIRED_COLUMNS = (
    ("group",),
    ("reward",),
    ("prompt_ids", "prompt"),
    ("response_ids", "response"),
)


@dataclass(frozen=True)
class StoredRollout:
    """A row of a file of rollouts, read and checked.

    `oracle` and `oracle_state` have one entry for each response token, or are None. `truth` has the
    states of the response whose values were measured, in their order. `number` is the row's number
    in the file, counted from 1.
    """

    rollout: Rollout
    group: str
    oracle: tuple[float, ...] | None = None
    oracle_state: tuple[str, ...] | None = None
    truth: tuple[StoredTruth, ...] = ()
    number: int = 0


@dataclass(frozen=True)
class RowReader:
    """Makes rollouts from the rows of a file at `path`, and checks every entry.

    Args:
        vocab_size: ids from 0 to below it are allowed.
        max_response_tokens: the longest response that is allowed.
        needs_logprobs: whether a row without the log-probs of its tokens is an error.
        read_ends: returns the policy's end tokens, and is called when a row first needs them;
            None: the end tokens are the tokenizer's alone.
    """

    path: Path
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    max_response_tokens: int
    needs_logprobs: bool = False
    read_ends: Callable[[], EndTokens] | None = None

    def read(self, table: pa.Table, metadata: Mapping[str, Any]) -> list[StoredRollout]:
        """Return all rows of a file's table as checked rollouts.

        Raises: UserError: the file was made with another tokenizer, lacks a column or all rows, or
            an entry is wrong. The error names the row, counted from 1, and the column.
        """
        file_tokenizer, policy_tokenizer = (
            metadata.get("tokenizer"),
            tokenizer_fingerprint(self.tokenizer),
        )
        if file_tokenizer is not None and file_tokenizer != policy_tokenizer:
            raise UserError(
                f"{self.path}: its tokens were made with the tokenizer {file_tokenizer}, but "
                f"actor.path has {policy_tokenizer}, so the ids would mean other texts: sample "
                "with this policy, or set actor.path to the policy that sampled them"
            )
        for names in _REQUIRED_COLUMNS:
            if not any(name in table.column_names for name in names):
                raise UserError(
                    f"{self.path}: no column {' or '.join(names)}; it has "
                    f"{', '.join(table.column_names)}"
                )
        if table.num_rows == 0:
            raise UserError(f"{self.path}: no rows")
        rows: list[StoredRollout] = []
        for batch in table.to_batches(max_chunksize=1024):
            for record in batch.to_pylist():
                rows.append(self._stored(record, len(rows) + 1))
        return rows

    def _stored(self, record: dict[str, Any], number: int) -> StoredRollout:
        row = FileRow(record, f"{self.path}: row {number}")
        group = record.get("group")
        if group is None or isinstance(group, float):
            row.fail("group", f"{group!r} cannot name a group: give a whole number or a name")
        reward = record.get("reward")
        if isinstance(reward, str) or reward is None or not math.isfinite(reward):
            row.fail("reward", f"{reward!r} is not a finite number")
        if problem := reward_problem(reward):
            row.fail("reward", problem)
        rollout = self._rollout(row, str(group))
        length = len(rollout.response_ids)
        oracle, states = (_per_token(row, name, length) for name in ("oracle", "oracle_state"))
        row.check_finite("oracle", oracle or ())
        return StoredRollout(
            rollout,
            str(group),
            None if oracle is None else tuple(map(float, oracle)),
            None if states is None else tuple(map(str, states)),
            read_truth(row, length),
            number,
        )

    def _rollout(self, row: FileRow, group: str) -> Rollout:
        record = row.record
        reason, failure = record.get("finish_reason"), record.get("failure")
        if reason is not None and reason not in list(FinishReason):
            allowed = " or ".join(FinishReason)
            row.fail("finish_reason", f"{reason!r} is not {allowed}")
        has_turns, is_correct = is_episode(record), record.get("is_correct")
        # An episode's end is not in its tokens, and only an episode has turns with limits.
        if has_turns and reason is None:
            row.fail("finish_reason", "is null: an episode needs one beside its turns")
        if has_turns and record.get("response_ids") is None:
            row.fail("response_ids", "is null: turns count tokens, not characters")
        if reason in (FinishReason.TURNS, FinishReason.TURN_LENGTH) and not has_turns:
            row.fail("finish_reason", f"is {reason}, and turn_sampled is null")
        response_ids = self._ids(
            row,
            "response",
            ends=reason != FinishReason.LENGTH,
            may_be_empty=has_turns and failure is not None,
        )
        if len(response_ids) > self.max_response_tokens:
            row.fail(
                "response_ids",
                f"{len(response_ids)} tokens, above rollouts.max_response_tokens "
                f"{self.max_response_tokens}: set that to the limit that they were sampled with",
            )
        if reason is None:
            is_whole = has_ended(response_ids, self.tokenizer, self._ends.ids)
            reason = FinishReason.STOP if is_whole else FinishReason.LENGTH
        logprobs, length = self._logprobs(row, len(response_ids)), len(response_ids)
        single = Turn(0, length, float(record["reward"]))
        return Rollout(
            prompt=self._prompt(row, group),
            response_ids=response_ids,
            response_text=str(record.get("response") or ""),
            rollout_logprobs=logprobs,
            finish_reason=FinishReason(reason),
            turns=read_turns(row, length) if has_turns else (single,),
            is_correct=record["reward"] > 0 if is_correct is None else bool(is_correct),
            failure=failure,
            in_environment=has_turns,
            is_lost=has_turns and failure is not None,
        )

    @cached_property
    def _ends(self) -> EndTokens:
        return end_tokens(self.tokenizer) if self.read_ends is None else self.read_ends()

    @cached_property
    def _start_ids(self) -> tuple[int, ...]:
        return start_ids(self.tokenizer)

    def _logprobs(self, row: FileRow, length: int) -> tuple[float, ...]:
        logprobs = _per_token(row, "rollout_logprobs", length)
        row.check_finite("rollout_logprobs", logprobs or ())
        if logprobs is None and self.needs_logprobs:
            row.fail(
                "rollout_logprobs",
                "is null, and critic.sampled_logprobs reads it: sample with `vapo rollouts`, "
                "which writes it, or set critic.sampled_logprobs=null",
            )
        return (0.0,) * length if logprobs is None else tuple(logprobs)

    def _prompt(self, row: FileRow, group: str) -> Prompt:
        record, data_row = row.record, None
        answer = record.get("answer")  # another program may have it as a number
        with suppress(ValueError, TypeError, RecursionError):
            data_row = json.loads(record.get("record") or "{}")
        if not isinstance(data_row, dict):
            row.fail("record", "is not the JSON text of an object")
        return Prompt(
            prompt_id=str(record.get("prompt_id") or f"{self.path.name}: group {group}"),
            text=str(record.get("prompt") or ""),
            prompt_ids=self._ids(row, "prompt", ends=False),
            answer="" if answer is None else value_text(answer),
            source=str(record.get("source") or ""),
            record=data_row,
        )

    def _ids(
        self, row: FileRow, column: str, *, ends: bool, may_be_empty: bool = False
    ) -> tuple[int, ...]:
        """Return the token ids of the row's prompt or response (`column`), checked.

        If the row has no ids, its text is tokenized; with `ends` an end token is added to that.
        """
        name = f"{column}_ids"
        ids, text = row.record.get(name), row.record.get(column)
        if ids is None:
            if not isinstance(text, str):
                row.fail(name, f"is null, and so is {column}: one of them is needed")
            name = column
            if ends:
                ids = turn_ids_with_end(text, self.tokenizer, self._ends)
            else:
                ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            if column == "prompt":
                ids = [*with_start(ids, self._start_ids)]
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            row.fail(name, "is not a list of whole numbers")
        if not ids and not may_be_empty:
            row.fail(name, f"is empty: a {column} has at least one token")
        outside = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if outside is not None:
            row.fail(name, f"{outside} is outside of the vocabulary, 0 to {self.vocab_size - 1}")
        return tuple(ids)


def _per_token(row: FileRow, column: str, length: int) -> list[Any] | None:
    values: list[Any] | None = row.record.get(column)
    if values is not None:
        row.check_list(column, values, length, f"the response has {length} tokens")
    return values
