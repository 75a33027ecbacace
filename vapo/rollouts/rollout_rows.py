"""The rows of a file of rollouts, checked one by one: ours, and those of other programs.

Needed are `group`, `reward`, and prompt and response as ids or as text. All else has a default.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from vapo.errors import UserError
from vapo.networks.saved_tokenizers import start_ids, tokenizer_fingerprint
from vapo.rollouts.stored_truth import StoredTruth, read_truth
from vapo.rollouts.stored_turns import is_episode, read_turns
from vapo.system.process_protocol import fits_float32
from vapo.types import FinishReason, Prompt, Rollout

_NEEDED = (("group",), ("reward",), ("prompt_ids", "prompt"), ("response_ids", "response"))


@dataclass(frozen=True)
class StoredRollout:
    """One row. `oracle` and `oracle_state` have one entry for each response token, or are None.

    `truth` has what was measured of states of the response, in their order.
    """

    rollout: Rollout
    group: str
    oracle: tuple[float, ...] | None = None
    oracle_state: tuple[str, ...] | None = None
    truth: tuple[StoredTruth, ...] = ()


@dataclass(frozen=True)
class RowReader:
    """Makes rollouts of rows.

    Args:
        vocab_size: ids from 0 to below it are allowed.
        max_response_tokens: the longest response that is allowed.
        needs_logprobs: whether a row without the log-probs of its tokens is an error.
    """

    path: Path
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    max_response_tokens: int
    needs_logprobs: bool = False

    def read(self, table: pa.Table, metadata: Mapping[str, Any]) -> list[StoredRollout]:
        """Raises: UserError that names the row (counted from 1) and the column."""
        written, own = metadata.get("tokenizer"), tokenizer_fingerprint(self.tokenizer)
        if written is not None and written != own:
            raise UserError(
                f"{self.path}: its tokens are of the tokenizer {written}, and actor.path has "
                f"{own}: ids would mean other texts; sample with this policy, or set actor.path "
                "to the policy that sampled them"
            )
        for names in _NEEDED:
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
                rows.append(self._row(record, len(rows) + 1))
        return rows

    def _fail(self, number: int, column: str, reason: str) -> NoReturn:
        raise UserError(f"{self.path}: row {number}, column {column}: {reason}")

    def _row(self, record: Mapping[str, Any], number: int) -> StoredRollout:
        group = record.get("group")
        if group is None or isinstance(group, float):
            self._fail(number, "group", f"{group!r} is no group: give a whole number or a name")
        reward = record.get("reward")
        if isinstance(reward, str) or reward is None or not math.isfinite(reward):
            self._fail(number, "reward", f"{reward!r} is not a finite number")
        if not fits_float32(reward):
            self._fail(number, "reward", f"{reward!r} is more than float32 holds")
        rollout = self._rollout(record, number, str(group))
        is_correct, length = record.get("is_correct"), len(rollout.response_ids)
        oracle = self._per_token(record, "oracle", number, length)
        states = self._per_token(record, "oracle_state", number, length)
        if oracle is not None and not all(map(_is_finite, oracle)):
            self._fail(number, "oracle", "has values that are not finite")
        is_correct = reward > 0 if is_correct is None else bool(is_correct)
        return StoredRollout(
            replace(rollout, is_correct=is_correct),
            str(group),
            None if oracle is None else tuple(map(float, oracle)),
            None if states is None else tuple(map(str, states)),
            read_truth(record, length, partial(self._fail, number)),
        )

    def _rollout(self, record: Mapping[str, Any], number: int, group: str) -> Rollout:
        reason = record.get("finish_reason")
        if reason is not None and reason not in list(FinishReason):
            allowed = " or ".join(FinishReason)
            self._fail(number, "finish_reason", f"{reason!r} is not {allowed}")
        has_turns = is_episode(record)
        self._check_ends(record, reason, number, has_turns=has_turns)
        failure = record.get("failure")
        response_ids = self._ids(
            record,
            "response",
            number,
            ends=reason != FinishReason.LENGTH,
            may_be_empty=has_turns and failure is not None,
        )
        if len(response_ids) > self.max_response_tokens:
            self._fail(
                number,
                "response_ids",
                f"{len(response_ids)} tokens, above rollouts.max_response_tokens "
                f"{self.max_response_tokens}: set that to the limit that they were sampled with",
            )
        if reason is None:
            ends = response_ids[-1] == self.tokenizer.eos_token_id
            reason = FinishReason.STOP if ends else FinishReason.LENGTH
        logprobs = self._per_token(record, "rollout_logprobs", number, len(response_ids))
        if logprobs is not None and not all(map(_is_finite, logprobs)):
            self._fail(number, "rollout_logprobs", "has values that are not finite")
        if logprobs is None and self.needs_logprobs:
            self._fail(
                number,
                "rollout_logprobs",
                "is null, and critic.sampled_logprobs reads it: sample with `vapo rollouts`, "
                "which writes it, or set critic.sampled_logprobs=null",
            )
        return Rollout(
            prompt=self._prompt(record, number, group),
            response_ids=response_ids,
            response_text=str(record.get("response") or ""),
            rollout_logprobs=(0.0,) * len(response_ids) if logprobs is None else tuple(logprobs),
            finish_reason=FinishReason(reason),
            turns=read_turns(record, len(response_ids), partial(self._fail, number)),
            failure=failure,
            in_environment=has_turns,
        )

    def _check_ends(
        self, record: Mapping[str, Any], reason: str | None, number: int, *, has_turns: bool
    ) -> None:
        """An episode's end is not in its tokens, and only an episode has turns with limits."""
        if has_turns and reason is None:
            self._fail(number, "finish_reason", "is null: an episode needs one beside its turns")
        if has_turns and record.get("response_ids") is None:
            self._fail(number, "response_ids", "is null: turns count tokens, not characters")
        if reason in (FinishReason.TURNS, FinishReason.TURN_LENGTH) and not has_turns:
            self._fail(number, "finish_reason", f"is {reason}, and turn_sampled is null")

    def _prompt(self, record: Mapping[str, Any], number: int, group: str) -> Prompt:
        own: Any = {}
        try:
            own = json.loads(record.get("record") or "{}")
        except (ValueError, TypeError):
            own = None
        if not isinstance(own, dict):
            self._fail(number, "record", "is not the JSON text of an object")
        return Prompt(
            prompt_id=str(record.get("prompt_id") or f"{self.path.name}: group {group}"),
            text=str(record.get("prompt") or ""),
            prompt_ids=self._ids(record, "prompt", number, ends=False),
            answer=str(record.get("answer") or ""),
            source=str(record.get("source") or ""),
            record=own,
        )

    def _ids(
        self,
        record: Mapping[str, Any],
        column: str,
        number: int,
        *,
        ends: bool,
        may_be_empty: bool = False,
    ) -> tuple[int, ...]:
        """The ids as they are; else those of the text, a response's with its end token."""
        ids, text, name = record.get(f"{column}_ids"), record.get(column), f"{column}_ids"
        if ids is None:
            if not isinstance(text, str):
                self._fail(number, name, f"is null, and so is {column}: one of them is needed")
            ids, name = self.tokenizer(text, add_special_tokens=False)["input_ids"], column
            if column == "prompt":
                ids = [*start_ids(self.tokenizer), *ids]
            if ends:
                ids = [*ids, int(self.tokenizer.eos_token_id)]
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            self._fail(number, name, "is not a list of whole numbers")
        if not ids and not may_be_empty:
            self._fail(number, name, f"is empty: a {column} has at least one token")
        outside = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if outside is not None:
            self._fail(
                number,
                name,
                f"{outside} is outside of the vocabulary, 0 to {self.vocab_size - 1}",
            )
        return tuple(ids)

    def _per_token(
        self, record: Mapping[str, Any], column: str, number: int, length: int
    ) -> list[Any] | None:
        values = record.get(column)
        if values is None:
            return None
        if not isinstance(values, list) or len(values) != length:
            size = f"{len(values)} values" if isinstance(values, list) else "is no list"
            self._fail(number, column, f"{size}; the response has {length} tokens")
        return values


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
