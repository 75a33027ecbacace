"""Anybody's rollouts as a stream of responses, and what their files do not say."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vapo.errors import UserError
from vapo.studies.inspection.fields import Place, Row, RowError, check_lengths
from vapo.studies.inspection.formats import FORMATS, Format, recognise
from vapo.studies.inspection.responses import BadRow, InspectedResponse
from vapo.studies.inspection.rows import (
    NumberedRow,
    find_files,
    rows_of,
    rows_of_data,
    step_in_path,
)
from vapo.studies.inspection.text_tokens import TextTokens, without_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TRL = next(one for one in FORMATS if "TRL" in one.name)
_MOST_UNKNOWN = 20  # rows, before a file is none of rollouts
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
class _Table:
    """Rows of one place that have one form."""

    name: str
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
        has_critic: values are computed later, so that nobody misses them.

    Raises: UserError: a file of no known form, or the only file is unreadable.
    """

    def __init__(
        self,
        source: Any,
        *,
        rewards: Sequence[str] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
        has_critic: bool = False,
    ) -> None:
        self.notes: list[str] = []
        self._tables = _tables(source)
        self._rewards = tuple(rewards)
        self._tokens = None if tokenizer is None else TextTokens(tokenizer)
        self._has_critic = has_critic
        self._formats: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._order = _AdvantageOrder()
        self._repeated: list[str] = []

    def __iter__(self) -> Iterator[InspectedResponse | BadRow]:
        before = None
        for table in self._tables:
            try:
                if table.path is not None and table.path.suffix == ".parquet":
                    now = _trl_digest(table.path)
                    if now is not None and now == before:
                        self._repeated.append(table.name)
                        continue
                    before = now
                yield from self._of_table(table)
            except UserError as error:
                if len(self._tables) == 1:
                    raise
                yield BadRow(f"{table.name}, row 1", str(error))
        self.notes += self._said()

    def _of_table(self, table: _Table) -> Iterator[InspectedResponse | BadRow]:
        found: Format | None = None
        num_unknown = 0
        render = None if self._tokens is None else self._tokens.render
        for number, row in table.rows:
            place = Place(table.name, number, table.step, self._rewards, render)
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
            yield from self._of_row(found, row, place)
        if found is None:
            first = _unknown(row) if num_unknown and not isinstance(row, str) else "it has no rows"
            raise UserError(f"{table.name}: no known form of rollouts: {first} (docs/inspect.md)")

    def _of_row(
        self, found: Format, row: Row, place: Place
    ) -> Iterator[InspectedResponse | BadRow]:
        if not found.fits(row):
            lacks = ", ".join(name for name in found.columns if name not in row)
            yield BadRow(str(place), f"it lacks {lacks}")
            return
        try:
            responses = [check_lengths(one) for one in found.read(row, place)]
            if self._tokens is None:
                responses = list(map(without_tokenizer, responses))
            else:
                responses = list(map(self._tokens.complete, responses))
        except RowError as error:
            yield BadRow(str(place), str(error))
            return
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            reason = f"it is no row of {found.name} ({type(error).__name__}: {error})"
            yield BadRow(str(place), reason)
            return
        for response in responses:
            self._formats[found.name] += 1
            self._counts.update(n for n in _COUNTED if getattr(response, n) is not None)
            if found is _TRL:
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


def _tables(source: Any) -> list[_Table]:
    if isinstance(source, (str, Path)):
        source = [source]
    if isinstance(source, Sequence) and all(isinstance(one, (str, Path)) for one in source):
        files = find_files(source)
        return [_Table(str(path), rows_of(path), step_in_path(path), path) for path in files]
    return [_Table("data", rows_of_data(source))]


def _unknown(row: Row) -> str:
    keys = ", ".join(map(str, list(row)[:12]))
    return f"its rows have {keys or 'no columns'}; the plain form has prompt, response and reward"


# ---- TRL -------------------------------------------------------------------------------------


def _trl_digest(path: Path) -> str | None:
    """What a file of TRL's completions says, but for its step; None of another form."""
    digest, form = hashlib.sha256(), None
    for _, row in rows_of(path):
        if not isinstance(row, Mapping) or (form := form or recognise(row)) is not _TRL:
            return None
        said = [value for name, value in row.items() if name != "step"]
        digest.update(repr(said).encode(errors="surrogatepass"))
    return digest.hexdigest()


class _AdvantageOrder:
    """Do TRL's advantages follow the sum of its reward columns within each group?

    Where they do not, the run had weights, or a column is no reward.
    """

    def __init__(self) -> None:
        self._groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._pairs: Counter[bool] = Counter()

    def add(self, response: InspectedResponse, advantage: float) -> None:
        if len(self._groups) > 1000:  # enough, and no more is held
            return
        group = self._groups[response.group]
        for reward, other in group:
            if reward != response.reward and other != advantage:
                self._pairs[(reward < response.reward) == (other < advantage)] += 1
        if len(group) < 64:
            group.append((response.reward, advantage))

    def said(self) -> Iterator[str]:
        if self._pairs[False] > 0.02 * self._pairs.total():
            yield (
                f"in {self._pairs[False]:,} of {self._pairs.total():,} pairs the advantages of "
                "one group do not follow the sum of the reward columns: the run has weights for "
                "them, or a column is no reward; name those that count with --reward"
            )
