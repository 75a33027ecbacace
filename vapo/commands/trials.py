"""A response with its verdict, as text for somebody who looks at it. Imports no torch.

Prompts, responses and what a verifier prints are other people's text: everything that a terminal
would act on is shown escaped, every line is marked, and lengths are bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vapo.system.shown_text import visible

MAX_SHOWN_CHARS = 4_000
"""Of one text: its beginning and its end, where the answer is."""

_END_CHARS = 1_500


@dataclass(frozen=True)
class Trial:
    """One response and its verdict.

    Args:
        problem: what the policy reads, special tokens included; of given responses the row's text.
        response: with special tokens; `response_text`, which the verifier reads, is without.
        num_prompt_tokens, num_response_tokens, finish_reason: None where nothing was sampled.
        output: what the verifier printed, with the traceback of what it raised.
        foreign_end: a special token that the policy sampled and that did not end its turn.
    """

    prompt_id: str
    problem: str
    answer: str
    response: str
    response_text: str
    is_correct: bool
    reward: float
    extracted: str | None
    failure: str | None
    output: str
    num_prompt_tokens: int | None = None
    num_response_tokens: int | None = None
    finish_reason: str | None = None
    foreign_end: str | None = None

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason not in (None, "stop")


def inline(text: str, max_chars: int = 200) -> str:
    """A short text on one line."""
    cut = text if len(text) <= max_chars else f"{text[:max_chars]}..."
    return visible(cut, keep="")


def block(text: str) -> str:
    """A text of any length, each of its lines marked, so that it cannot pass for ours."""
    if len(text) > MAX_SHOWN_CHARS:
        begin, end = text[: MAX_SHOWN_CHARS - _END_CHARS], text[-_END_CHARS:]
        num_left = len(text) - MAX_SHOWN_CHARS
        return f"{_marked(begin)}\n  ... {num_left} characters are left out here\n{_marked(end)}"
    return _marked(text) if text else "  (empty)"


def _marked(text: str) -> str:
    return "\n".join(f"  | {line}" for line in visible(text).split("\n"))


def render(trial: Trial, number: int, total: int) -> str:
    """Everything about one response."""
    is_sampled = trial.finish_reason is not None
    count = f", {trial.num_prompt_tokens} tokens" if is_sampled else ""
    parts = [
        f"--- {number} of {total}: {inline(trial.prompt_id)}",
        *([f"prompt{count}:", block(trial.problem)] if trial.problem else []),
        f"reference answer: {inline(trial.answer)}",
        f"response, {_length(trial)}:",
        block(trial.response),
        _verdict(trial),
    ]
    if trial.output:
        parts += ["the verifier printed:", block(trial.output.rstrip("\n"))]
    return "\n".join(parts)


def _length(trial: Trial) -> str:
    if trial.finish_reason is None:
        return f"{len(trial.response)} characters"
    ended = "truncated" if trial.is_truncated else "finished"
    return f"{trial.num_response_tokens} tokens, {ended} ({trial.finish_reason})"


def _verdict(trial: Trial) -> str:
    if trial.failure is not None:
        said = f"no verdict ({inline(trial.failure, 400)}), which counts as incorrect"
    else:
        said = "correct" if trial.is_correct else "incorrect"
    extracted = (
        "" if trial.extracted is None else f", read as the answer: {inline(trial.extracted)}"
    )
    return f"verdict: {said}; reward {trial.reward:g}{extracted}"


def summarize(trials: Sequence[Trial]) -> str:
    """The pass rate, and what else can be counted, in one line."""
    total, num_correct = len(trials), sum(t.is_correct for t in trials)
    mean = sum(t.reward for t in trials) / total
    text = (
        f"pass rate {num_correct / total:.3f} ({num_correct} of {total} correct), mean reward "
        f"{mean:.3f}, {sum(t.failure is not None for t in trials)} without a verdict"
    )
    lengths = [t.num_response_tokens for t in trials if t.num_response_tokens is not None]
    if lengths:
        num_truncated = sum(t.is_truncated for t in trials)
        text += (
            f"; response tokens {min(lengths)} to {max(lengths)}, mean "
            f"{sum(lengths) / len(lengths):.1f}, {num_truncated} truncated"
        )
    return text
