"""The scores of single prompts in each training batch and each evaluation of a run.

A run's folder has them in `prompt_scores.jsonl`, one line for each batch or evaluation. The run's
record gets the same file at its end:

    {"kind": "batch", "policy_iterations": 3, "policy_steps": 12, "prompts": ["0f3a...", ...],
     "correct": [5, ...], "responses": 8, "new": [true, ...]}

`policy_iterations` counts the iterations of the policy that were finished, and `policy_steps` its
updates. `responses` is a list if prompts have different numbers of them. `new` says for each prompt
of a batch whether no earlier batch had it. A line of the kind `begin` says that a process began
with the policy of `policy_iterations` iterations; lines before it that belong to later iterations
no longer count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vapo.files.whole_files import open_inside, read_inside, read_line
from vapo.types import PromptScore

SCORES_NAME = "prompt_scores.jsonl"
FRESH_BATCHES = 8
RECENT_POLICIES = 4
KINDS = ("batch", "evaluation", "average")
_MAX_BYTES = 64 * 2**20  # of the file; a batch of 512 prompts takes about 13 KB
_MAX_PROMPTS = 1_000_000  # of a line
_MAX_NAME_CHARS = 40


@dataclass(frozen=True)
class ScoredPrompts:
    """One policy's scores on the prompts of a training batch or an evaluation.

    Each prompt in `scores` has its own name: a second prompt with the same digest has `#2`
    appended. `is_new` says for each prompt of a batch whether no earlier batch had it.
    """

    policy_iterations: int
    policy_steps: int
    scores: tuple[PromptScore, ...]
    is_new: tuple[bool, ...] = ()

    @property
    def means(self) -> dict[str, float]:
        """The share of correct responses to each prompt, by the prompt's name."""
        return {score.prompt: score.num_correct / score.num_responses for score in self.scores}


@dataclass(frozen=True)
class FreshScores:
    """The scores of the prompts that were new in a run's last training batches: no earlier batch
    had them."""

    scores: tuple[PromptScore, ...]
    num_batches: int

    @property
    def means(self) -> list[float]:
        return [score.num_correct / score.num_responses for score in self.scores]

    @property
    def num_responses(self) -> int:
        return sum(score.num_responses for score in self.scores)


@dataclass
class PromptHistory:
    """All scored prompts of a run: by kind (batch, evaluation, average), then by policy
    iterations."""

    of_kind: dict[str, dict[int, ScoredPrompts]] = field(
        default_factory=lambda: {kind: {} for kind in KINDS}
    )
    _first: dict[str, int] = field(default_factory=dict)  # the first batch that had a prompt

    def add(self, kind: str, scored: ScoredPrompts) -> None:
        """Add one policy's scores of a kind, in place of the same policy's earlier ones."""
        self.of_kind[kind].pop(scored.policy_iterations, None)
        self.of_kind[kind][scored.policy_iterations] = scored
        if kind == "batch":
            for score in scored.scores:
                self._first.setdefault(_digest(score.prompt), scored.policy_iterations)

    def begin(self, policy_iterations: int) -> None:
        """Forget the scores that a run will add again, as it restarts at `policy_iterations`."""
        for kind, lines in self.of_kind.items():
            last = policy_iterations - (kind == "batch")
            for number in [number for number in lines if number > last]:
                del lines[number]
        self._first = {
            name: number for name, number in self._first.items() if number < policy_iterations
        }

    def with_news(
        self, policy_iterations: int, policy_steps: int, scores: Iterable[PromptScore]
    ) -> ScoredPrompts:
        """Return a batch's scores, with marks on the prompts that no earlier batch had."""
        unique_scores = unique(scores)
        is_new = tuple(_digest(score.prompt) not in self._first for score in unique_scores)
        return ScoredPrompts(policy_iterations, policy_steps, unique_scores, is_new)

    def fresh(self) -> FreshScores:
        """Return new prompts' scores in the last 8 batches, or in the last half of less than 16."""
        batches = list(self.of_kind["batch"].values())
        last = batches[-min(FRESH_BATCHES, max(1, len(batches) // 2)) :]
        scores = [
            score
            for batch in last
            for score, is_new in zip(batch.scores, batch.is_new, strict=True)
            if is_new
        ]
        return FreshScores(tuple(scores), len(last))

    def evaluated(self, kind: str, within: int | None = None) -> ScoredPrompts | None:
        """Return the last evaluation of this kind, or None if there is none.

        With `within`, only evaluations after at most that many policy steps count.
        """
        evaluations = self._within(kind, within)
        return evaluations[-1] if evaluations else None

    def recent(self, within: int | None = None) -> tuple[dict[str, float], int]:
        """Return each held-out prompt's mean over the last evaluated policies, and their number.

        These are up to four policies, without the untrained one. Only prompts on which all of them
        were evaluated count. With `within`, policies with more policy steps are left out.
        """
        trained = [
            evaluation
            for evaluation in self._within("evaluation", within)
            if evaluation.policy_iterations
        ]
        last = [evaluation.means for evaluation in trained[-RECENT_POLICIES:]]
        if not last:
            return {}, 0
        common = [prompt for prompt in last[-1] if all(prompt in means for means in last)]
        return {p: sum(means[p] for means in last) / len(last) for p in common}, len(last)

    def _within(self, kind: str, within: int | None) -> list[ScoredPrompts]:
        lines = self.of_kind[kind].values()
        return [scored for scored in lines if within is None or scored.policy_steps <= within]


class ScoresFile:
    """Reads and extends `prompt_scores.jsonl` in a run's folder; `history` has its contents.

    If the file cannot be written, `note` is called once, and the run continues without it.
    """

    def __init__(self, folder: Path, note: Any) -> None:
        self.folder, self.note = folder, note
        self.history = PromptHistory()
        self._is_well = True

    def begin(self, policy_iterations: int) -> None:
        """Read what earlier processes of the run wrote, and continue from this policy."""
        self.history = history_of(self.read() or "")
        self.history.begin(policy_iterations)
        # on a line of its own, whatever a process that was killed has left of its last one
        self._write({"kind": "begin", "policy_iterations": policy_iterations}, prefix="\n")

    def add(self, kind: str, scored: ScoredPrompts) -> None:
        self.history.add(kind, scored)
        self._write(_as_line(kind, scored))

    def read(self) -> str | None:
        """Return the whole file's text, or None if it is missing, unreadable or too large."""
        try:
            content = read_inside(self.folder, SCORES_NAME, _MAX_BYTES)
        except OSError:
            return None
        return None if content is None else content.decode("utf-8", "replace")

    def _write(self, line: dict[str, Any], prefix: str = "") -> None:
        if not self._is_well:
            return
        try:
            with open_inside(self.folder, SCORES_NAME, "ab") as file:
                text = f"{prefix}{json.dumps(line, separators=(',', ':'))}\n".encode()
                if file.seek(0, os.SEEK_END) + len(text) > _MAX_BYTES:
                    raise OSError(None, f"it would have more than {_MAX_BYTES // 2**20} MiB")
                file.write(text)
        except OSError as error:
            self._is_well = False
            self.note(f"{SCORES_NAME}: no more scores of prompts are written: {error.strerror}")


def unique(scores: Iterable[PromptScore]) -> tuple[PromptScore, ...]:
    """Return the scores with unique names: a digest that is repeated gets a number appended."""
    times: dict[str, int] = {}
    unique_scores = []
    for score in scores:
        times[score.prompt] = number = times.get(score.prompt, 0) + 1
        unique_scores.append(
            score._replace(prompt=f"{score.prompt}#{number}") if number > 1 else score
        )
    return tuple(unique_scores)


def _digest(name: str) -> str:
    return name.partition("#")[0]


def history_of(text: str) -> PromptHistory:
    """Return the history that a file's text describes. Lines of another form are left out."""
    history = PromptHistory()
    for kind, scored in _lines(text):
        if isinstance(scored, int):
            history.begin(scored)
        else:
            history.add(kind, scored)
    return history


def _lines(text: str) -> Iterator[tuple[str, ScoredPrompts | int]]:
    """Yield each valid line's kind and scores, or for a `begin` line the iterations."""
    for line in text.splitlines():
        try:
            contents = read_line(line)
            numbers = contents["policy_iterations"], contents.get("policy_steps", 0)
            if not all(_is_count(number) for number in numbers):
                continue
            if contents["kind"] == "begin":
                yield "begin", numbers[0]
            elif contents["kind"] in KINDS and (scores := _scores(contents)) is not None:
                is_new = contents.get("new", [])
                if len(is_new) == (len(scores) if contents["kind"] == "batch" else 0):
                    news = tuple(bool(flag) for flag in is_new)
                    yield contents["kind"], ScoredPrompts(*numbers, scores, news)
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            continue  # a line that was cut, or is not ours


def _scores(contents: dict[str, Any]) -> tuple[PromptScore, ...] | None:
    """Return the scores in a parsed line, or None if they are not of the form that a run writes."""
    names, correct, responses = (contents[key] for key in ("prompts", "correct", "responses"))
    if not isinstance(responses, list):
        responses = [responses] * len(names)
    if not len(names) == len(correct) == len(responses) <= _MAX_PROMPTS:
        return None
    scores = tuple(map(PromptScore, names, correct, responses))
    return scores if len(set(names)) == len(names) and all(map(_is_score, scores)) else None


def _is_score(score: PromptScore) -> bool:
    is_name = isinstance(score.prompt, str) and len(score.prompt) <= _MAX_NAME_CHARS
    counts = score.num_correct, score.num_responses
    return is_name and all(map(_is_count, counts)) and counts[0] <= counts[1] and counts[1] > 0


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _as_line(kind: str, scored: ScoredPrompts) -> dict[str, Any]:
    names, correct, responses = map(list, zip(*scored.scores, strict=True))
    line = {
        "kind": kind,
        "policy_iterations": scored.policy_iterations,
        "policy_steps": scored.policy_steps,
        "prompts": names,
        "correct": correct,
        "responses": _one_or_all(responses),
    }
    return line | ({"new": list(scored.is_new)} if kind == "batch" else {})


def _one_or_all(numbers: Sequence[int]) -> int | Sequence[int]:
    return numbers[0] if len(set(numbers)) == 1 else numbers
