"""Read a stream of responses from anybody's rollouts, with notes on what their files lack."""

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

_TRL = next(form for form in FORMATS if "TRL" in form.name)
_FORMAT_ERRORS = (
    ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError,
)  # fmt: skip
_MAX_UNKNOWN_ROWS = 20  # rows of unknown format before the reader gives up a file
_RANK_COLUMNS = ("rank", "rollout_id", "sample_indices")  # of slime's older files
_COUNTED = ("values", "logprobs", "advantages", "returns", "response_ids", "step")
_WITHOUT = {
    "values": (
        "no values: the groups show only what a critic could know; --critic MODEL computes values"
    ),
    "logprobs": "no log-probs: they would show whether values move where the policy is surprised",
    "advantages": "no advantages: they would show whether they were made of these values",
    "response_ids": (
        "no token ids: give --policy or --critic, whose tokenizer makes them of the texts"
    ),
    "step": "no steps: all rows are taken as one step",
}


@dataclass
class _File:
    """One file and its rows, which all have one format.

    Args:
        table: the name of the table that this file belongs to.
        groups: files with an equal name here share the names of groups.
        step: the training step in the file's path, if there is one.
        path: None if the rows were passed as data.
    """

    name: str
    table: str
    groups: str
    rows: Iterable[NumberedRow]
    step: int | None = None
    path: Path | None = None


class ResponseReader:
    """Iterates over the responses of files or of data. An unreadable row becomes a `BadRow`.

    It can be iterated once. At the end `notes` says which format the files have, and what they
    lack.

    Args:
        source: paths of files and folders, or the data itself.
        rewards: the columns whose sum is the reward. If empty, the format decides.
        tokenizer: makes tokens of texts, or texts of tokens, if the file has only one of them.
        num_ids: the number of token ids that the model which will read the responses knows; None if
            it is unknown.
        has_critic: whether values are computed later, so that no note says they are missing.
        chat_template_kwargs: variables of the chat template that renders messages.

    Raises: UserError: the source cannot be read, or the only file has no known format.
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
        self._repeated_files: list[str] = []
        self._num_earlier_outputs = self._num_repeated_samples = 0
        self._ranks: dict[tuple[int | None, ...], int] = {}  # slime's sample -> its first rank

    def __iter__(self) -> Iterator[InspectedResponse | BadRow]:
        previous_digest = None
        for file in self._files:
            try:
                digest = self._trl_digest(file)
                if digest is not None and digest == previous_digest:
                    self._repeated_files.append(file.name)
                    continue
                previous_digest = digest
                yield from self._responses_of_file(file)
            except UserError as error:
                if len(self._files) == 1:
                    raise
                yield BadRow(f"{file.name}, row 1", str(error))
        self.notes += self._final_notes()

    def _trl_digest(self, file: _File) -> bytes | None:
        """Return a digest of a file of TRL's completions, made of all columns but the steps.

        If it equals the previous file's digest, the file repeats that file. It is None for another
        format. The whole file is read for it, which is certain without holding the file in memory.
        """
        if len(self._files) == 1 or file.path is None or file.path.suffix != ".parquet":
            return None
        columns = parquet_columns(file.path)
        is_trl = recognise(dict.fromkeys(columns)) is _TRL
        return parquet_digest(file.path, [x for x in columns if x != "step"]) if is_trl else None

    def _responses_of_file(self, file: _File) -> Iterator[InspectedResponse | BadRow]:
        form: Format | None = None
        num_unknown = 0
        render = None if self._tokens is None else self._tokens.render
        for number, row in self._last_outputs(file.rows):
            place = RowPlace(
                file.name, number, file.table, file.groups, file.step, self._rewards, render
            )
            if isinstance(row, str):
                yield BadRow(str(place), row)
                continue
            form = form or recognise(row)
            if form is None:
                num_unknown += 1
                if num_unknown == _MAX_UNKNOWN_ROWS:
                    break
                yield BadRow(str(place), _unknown(row))
                continue
            if not self._is_repeated_sample(row):
                yield from self._responses_of_row(form, row, place)
        if form is None:
            why = _unknown(row) if num_unknown and not isinstance(row, str) else "it has no rows"
            raise UserError(f"{file.name}: no known form of rollouts: {why} (docs/inspect.md)")

    def _last_outputs(self, rows: Iterable[NumberedRow]) -> Iterator[NumberedRow]:
        """Yield the rows, but of the rows of one verl session only the last."""
        pending: NumberedRow | None = None
        pending_session = None
        for numbered in rows:
            session = session_of(numbered[1])
            if pending is not None and session == pending_session:
                self._num_earlier_outputs += 1
            elif pending is not None:
                yield pending
            pending, pending_session = (None if session is None else numbered), session
            if pending is None:
                yield numbered
        if pending is not None:
            yield pending

    def _is_repeated_sample(self, row: Row) -> bool:
        """Whether the row is a sample of slime that was already read from another rank's file."""
        if "response_lengths" not in row:
            return False
        rank, *sample = (whole_number(row.get(key)) for key in _RANK_COLUMNS)
        if rank is None or None in sample:
            return False
        is_repeated = self._ranks.setdefault(tuple(sample), rank) != rank
        self._num_repeated_samples += is_repeated
        return is_repeated

    def _responses_of_row(
        self, form: Format, row: Row, place: RowPlace
    ) -> Iterator[InspectedResponse | BadRow]:
        if not form.fits(row):
            lacks = ", ".join(name for name in form.columns if name not in row)
            yield BadRow(str(place), f"it lacks {lacks}")
            return
        try:
            complete = without_tokenizer if self._tokens is None else self._tokens.complete
            responses = [complete(check_lists(response)) for response in form.read_row(row, place)]
        except RowError as error:
            yield BadRow(str(place), str(error))
            return
        except _FORMAT_ERRORS as error:
            reason = f"it cannot be read as a row of {form.name} ({type(error).__name__}: {error})"
            yield BadRow(str(place), reason)
            return
        for response in responses:
            self._formats[form.name] += 1
            for name in _COUNTED:
                if getattr(response, name) is not None or name in response.not_finite:
                    self._counts[name] += 1
            if form is _TRL and not response.not_finite:
                self._order.add(response, float(row["advantage"]))
            yield response

    def _final_notes(self) -> Iterator[str]:
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
        yield from self._order.notes()
        for table, num in Counter(file.table for file in self._files).items():
            if num > 1:
                yield f"{table}: {num} files are read as one table (docs/inspect.md says when)"
        if self._num_earlier_outputs:
            yield (
                f"{self._num_earlier_outputs:,} rows of earlier outputs of verl's sessions are "
                "left out: the last has the session's score"
            )
        if num := self._num_repeated_samples:
            yield f"{num:,} samples are those of another of slime's ranks, and left out"
        if self._repeated_files:
            yield (
                f"{len(self._repeated_files)} files repeat the one before them and are left out "
                "(TRL logs its last batch at every logging step): "
                f"{', '.join(self._repeated_files[:3])}"
            )
        if self._tokens is not None:
            yield from self._token_notes(self._tokens)

    def _token_notes(self, tokens: TextTokens) -> Iterator[str]:
        if tokens.num_encoded:
            yield (
                f"the tokens of {tokens.num_encoded:,} responses were made of their texts, which "
                "may cut them otherwise than they were sampled; the end token is not among them"
            )
        if tokens.num_without_text:
            yield (
                f"{tokens.num_without_text:,} responses are several messages, calls of tools or "
                "reasoning apart: the text that was generated is not in the file, so no tokens are "
                "made of it"
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
    if isinstance(source, Sequence) and all(isinstance(item, (str, Path)) for item in source):
        files = find_files(source)
        return [
            _File(str(path), table, numberless(path.name), rows_of(path), step_in_path(path), path)
            for path, table in zip(files, table_names(files, user_paths=source), strict=True)
        ]
    return [_File("data", "data", "data", rows_of_data(source))]


def _unknown(row: Row) -> str:
    keys = ", ".join(map(str, list(row)[:12]))
    return f"its rows have {keys or 'no columns'}; the plain form has prompt, response and reward"
