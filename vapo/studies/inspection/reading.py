"""Anybody's rollouts as a stream of responses, and what their files do not say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vapo.errors import UserError
from vapo.studies.inspection.fields import Row, RowError, RowPlace, check_lists, whole_number
from vapo.studies.inspection.formats import FORMATS, Format, recognise, session_of
from vapo.studies.inspection.responses import BadRow, InspectedResponse
from vapo.studies.inspection.rows import (
    NumberedRow,
    find_files,
    numberless,
    parquet_columns,
    parquet_digest,
    rows_of,
    rows_of_data,
    step_in_path,
    table_names,
)
from vapo.studies.inspection.text_tokens import TextTokens, without_tokenizer
from vapo.studies.inspection.trl import AdvantageOrder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TRL = next(one for one in FORMATS if "TRL" in one.name)
_NO_ROW_OF_ITS_FORM = (
    ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError,
)  # fmt: skip
_MOST_UNKNOWN = 20  # rows, before a file is none of rollouts
_OF_RANKS = ("rank", "rollout_id", "sample_indices")  # what slime's older files say
_COUNTED = ("values", "logprobs", "advantages", "returns", "response_ids", "step")
_WITHOUT = {
    "values": (
        "no values: told is what a critic could know, from the groups; --critic MODEL computes them"
    ),
    "logprobs": "no log-probs: whether values move at the policy's surprises is not told",
    "advantages": "no advantages: whether they were made of these values is not told",
    "response_ids": (
        "no token ids: give --policy or --critic, whose tokenizer makes them of the texts"
    ),
    "step": "no steps: everything is taken as one",
}


@dataclass
class _File:
    """Rows of one file, which have one form.

    Args:
        table: the name of the table that the file is, or is one of several of.
        groups: what is the name of the files of a table whose groups have names in common.
    """

    name: str
    table: str
    groups: str
    rows: Iterable[NumberedRow]
    step: int | None = None
    path: Path | None = None


class ResponseReader:
    """The responses of files or of data, one by one; rows that cannot be read are `BadRow`s.

    It can be gone through once. `notes` grows on the way: what form the files have, and what
    they do not have.

    Args:
        rewards: the columns whose sum is the reward; empty: those of the format.
        tokenizer: makes tokens of texts, and texts of tokens, where the file has one of them.
        num_ids: the tokens of the model that is to read them; None: it is not known.
        has_critic: values are computed later, so that nobody misses them.
        chat_template_kwargs: variables of the chat template in which messages are put.

    Raises: UserError: a file of no known form, or the only file is unreadable.
    """

    def __init__(
        self,
        source: Any,
        *,
        rewards: Sequence[str] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
        num_ids: int | None = None,
        has_critic: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.notes: list[str] = []
        self._files = _files(source)
        self._rewards = tuple(rewards)
        self._tokens = (
            None if tokenizer is None else TextTokens(tokenizer, num_ids, chat_template_kwargs)
        )
        self._has_critic = has_critic
        self._formats: Counter[str] = Counter()
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._order = AdvantageOrder()
        self._repeated: list[str] = []
        self._num_turns = self._num_seen = 0
        self._ranks: dict[tuple[int | None, ...], int] = {}  # of slime's samples, the first

    def __iter__(self) -> Iterator[InspectedResponse | BadRow]:
        before = None
        for file in self._files:
            try:
                now = self._trl_digest(file)
                if now is not None and now == before:
                    self._repeated.append(file.name)
                    continue
                before = now
                yield from self._of_file(file)
            except UserError as error:
                if len(self._files) == 1:
                    raise
                yield BadRow(f"{file.name}, row 1", str(error))
        self.notes += self._said()

    def _trl_digest(self, file: _File) -> bytes | None:
        """What a file of TRL's completions says, but for its step; None of another form.

        Whether a file repeats the one before is known at its end. So it is read twice, here without
        making rows of it, and is never held.
        """
        if len(self._files) == 1 or file.path is None or file.path.suffix != ".parquet":
            return None
        columns = parquet_columns(file.path)
        is_trl = recognise(dict.fromkeys(columns)) is _TRL
        return parquet_digest(file.path, [x for x in columns if x != "step"]) if is_trl else None

    def _of_file(self, file: _File) -> Iterator[InspectedResponse | BadRow]:
        found: Format | None = None
        num_unknown = 0
        render = None if self._tokens is None else self._tokens.render
        for number, row in self._last_outputs(file.rows):
            place = RowPlace(
                file.name, number, file.table, file.groups, file.step, self._rewards, render
            )
            if isinstance(row, str):
                yield BadRow(str(place), row)
                continue
            found = found or recognise(row)
            if found is None:
                num_unknown += 1
                if num_unknown == _MOST_UNKNOWN:
                    break
                yield BadRow(str(place), _unknown(row))
                continue
            if not self._is_seen(row):
                yield from self._of_row(found, row, place)
        if found is None:
            first = _unknown(row) if num_unknown and not isinstance(row, str) else "it has no rows"
            raise UserError(f"{file.name}: no known form of rollouts: {first} (docs/inspect.md)")

    def _last_outputs(self, rows: Iterable[NumberedRow]) -> Iterator[NumberedRow]:
        """The rows, of each of verl's sessions the last."""
        held: NumberedRow | None = None
        session = None
        for numbered in rows:
            now = session_of(numbered[1])
            if held is not None and now == session:
                self._num_turns += 1
            elif held is not None:
                yield held
            held, session = (None if now is None else numbered), now
            if held is None:
                yield numbered
        if held is not None:
            yield held

    def _is_seen(self, row: Row) -> bool:
        """Whether it is a sample of slime that another rank has, too."""
        if "response_lengths" not in row:
            return False
        rank, *sample = (whole_number(row.get(key)) for key in _OF_RANKS)
        if rank is None or None in sample:
            return False
        is_seen = self._ranks.setdefault(tuple(sample), rank) != rank
        self._num_seen += is_seen
        return is_seen

    def _of_row(
        self, found: Format, row: Row, place: RowPlace
    ) -> Iterator[InspectedResponse | BadRow]:
        if not found.fits(row):
            lacks = ", ".join(name for name in found.columns if name not in row)
            yield BadRow(str(place), f"it lacks {lacks}")
            return
        try:
            complete = without_tokenizer if self._tokens is None else self._tokens.complete
            responses = [complete(check_lists(one)) for one in found.read(row, place)]
        except RowError as error:
            yield BadRow(str(place), str(error))
            return
        except _NO_ROW_OF_ITS_FORM as error:
            reason = f"it is no row of {found.name} ({type(error).__name__}: {error})"
            yield BadRow(str(place), reason)
            return
        for response in responses:
            self._formats[found.name] += 1
            for name in _COUNTED:
                if getattr(response, name) is not None or name in response.not_finite:
                    self._counts[name] += 1
            if found is _TRL and not response.not_finite:
                self._order.add(response, float(row["advantage"]))
            yield response

    def _said(self) -> Iterator[str]:
        total = self._formats.total()
        if not total:
            return
        for form in FORMATS:
            if num := self._formats[form.name]:
                yield f"{num:,} responses read as {form.name}"
                for note in form.notes:
                    if "reward_weights" not in note or not self._rewards:
                        yield note
        for name, text in _WITHOUT.items():
            num = self._counts[name]
            if name == "values" and self._has_critic:
                continue
            if num == 0:
                yield text
            elif num < total:
                yield f"{total - num:,} of {total:,} responses have {text.partition(':')[0]}"
        yield from self._order.said()
        for table, num in Counter(file.table for file in self._files).items():
            if num > 1:
                yield f"{table}: {num} files are read as one table (docs/inspect.md says when)"
        if self._num_turns:
            yield (
                f"{self._num_turns:,} rows of earlier outputs of verl's sessions are left out: the "
                "last has the session's score"
            )
        if self._num_seen:
            yield f"{self._num_seen:,} samples are those of another of slime's ranks, and left out"
        if self._repeated:
            yield (
                f"{len(self._repeated)} files repeat the one before them and are left out (TRL "
                f"logs its last batch at every logging step): {', '.join(self._repeated[:3])}"
            )
        if self._tokens is not None:
            yield from self._said_of_tokens(self._tokens)

    def _said_of_tokens(self, tokens: TextTokens) -> Iterator[str]:
        if tokens.num_encoded:
            yield (
                f"the tokens of {tokens.num_encoded:,} responses were made of their texts, which "
                "may cut them otherwise than they were sampled; the end token is not among them"
            )
        if tokens.num_turns:
            yield (
                f"{tokens.num_turns:,} responses are several messages, calls of tools or reasoning "
                "apart: the text that was generated is not in the file, so no tokens are made of it"
            )
        if tokens.num_rebuilt:
            yield (
                f"{tokens.num_rebuilt:,} prompts got their chat template back; without its special "
                "tokens each reads as in the file"
            )
        if tokens.num_unlike:
            yield (
                f"{tokens.num_unlike:,} responses have another number of values or log-probs than "
                "their texts have tokens: they are left without token ids"
            )


def _files(source: Any) -> list[_File]:
    if isinstance(source, (str, Path)):
        source = [source]
    if isinstance(source, Sequence) and all(isinstance(one, (str, Path)) for one in source):
        files = find_files(source)
        return [
            _File(str(path), table, numberless(path.name), rows_of(path), step_in_path(path), path)
            for path, table in zip(files, table_names(files, named=source), strict=True)
        ]
    return [_File("data", "data", "data", rows_of_data(source))]


def _unknown(row: Row) -> str:
    keys = ", ".join(map(str, list(row)[:12]))
    return f"its rows have {keys or 'no columns'}; the plain form has prompt, response and reward"
