"""Responses with their verdicts as text, and hints on what is wrong with a setting.

A hint only says what was seen in these responses. The module imports no torch.

Prompts, responses and what a verifier prints are other people's text: everything that a terminal
would act on is shown escaped, every line is marked, and lengths are bounded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vapo.config import FitConfig
from vapo.config.environments import environment_name
from vapo.config.rewards import RegexVerifier, RewardConfig, SeveralVerifiers
from vapo.errors.shown_text import visible
from vapo.rewards.large_rewards import about_large
from vapo.rewards.text_judge import judged_part
from vapo.rewards.thoughts import THOUGHT_END

MAX_SHOWN_CHARS = 4_000
"""The most characters that are shown of a text: its beginning, and its end with the answer."""

_END_CHARS = 1_500


@dataclass(frozen=True)
class Trial:
    """One response and its verdict.

    Args:
        problem: what the policy reads, special tokens included. For responses from a file it is the
            row's text.
        response: `response_text`, which the verifier reads. For an episode it is the turns, each
            with the text that the environment reads.
        num_prompt_tokens, num_response_tokens, finish_reason: None where nothing was sampled.
        output: what the verifier printed, with the traceback of what it raised.
        judged: the part of the response that was judged, in words. Empty if the config judges
            whole responses.
        is_unanswered: whether it is incorrect because it has no `rewards.answer_after`.
        foreign_end: a special token that the policy sampled and that did not end its turn.
        is_lost: whether its environment failed, so that the response was cut off.
        by_verifier: each verifier's verdict by its name, if there are several.
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
    judged: str = ""
    is_unanswered: bool = False
    is_lost: bool = False
    by_verifier: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason not in (None, "stop")


def which_part(rewards: RewardConfig, response: str, prompt: str = "") -> str:
    """Return in words which part of a response is judged; empty if the config judges all of it."""
    mark = rewards.answer_after
    if mark is None:
        return ""
    part = judged_part(rewards, response, prompt)
    if mark in response:
        words = f"the {len(part or '')} characters after the last {mark!r}"
    elif part is None:
        words = f"nothing, because it has no {mark!r} (rewards.without_answer_after)"
    else:
        words = f"all of it, which has no {mark!r}"
    readers = _readers_of_thoughts(rewards) if part != response else []
    return f"{words}; all of it by {', '.join(readers)} (reads_thoughts)" if readers else words


def is_unanswered(rewards: RewardConfig, response: str, prompt: str = "") -> bool:
    """Whether a response is incorrect because it has no `rewards.answer_after`."""
    if isinstance(rewards, SeveralVerifiers) and rewards.deciding in _readers_of_thoughts(rewards):
        return False
    return judged_part(rewards, response, prompt) is None


def _readers_of_thoughts(rewards: RewardConfig) -> list[str]:
    """Return the names of the verifiers that judge whole responses, whatever the others judge."""
    several = rewards.verifiers if isinstance(rewards, SeveralVerifiers) else {}
    return [name for name, block in several.items() if block.reads_thoughts]


def inline(text: str, max_chars: int = 200) -> str:
    """Return a text on one line, escaped, with at most `max_chars` of its characters."""
    cut = text if len(text) <= max_chars else f"{text[:max_chars]}..."
    return visible(cut, keep="")


def block(text: str) -> str:
    """Return a text with a mark before each line, so that it cannot pass for our output.

    The middle of a long text is left out.
    """
    if len(text) > MAX_SHOWN_CHARS:
        begin, end = text[: MAX_SHOWN_CHARS - _END_CHARS], text[-_END_CHARS:]
        num_left = len(text) - MAX_SHOWN_CHARS
        return f"{_marked(begin)}\n  ... {num_left} characters are left out here\n{_marked(end)}"
    return _marked(text) if text else "  (empty)"


def _marked(text: str) -> str:
    return "\n".join(f"  | {line}" for line in visible(text).split("\n"))


def trial_text(trial: Trial, number: int, total: int) -> str:
    """Return a trial as text: prompt, reference answer, response, verdict and what was printed."""
    tokens, length = "", f"{len(trial.response)} characters"
    if trial.finish_reason is not None:
        tokens = f", {trial.num_prompt_tokens} tokens"
        ending = "truncated" if trial.is_truncated else "finished"
        length = f"{trial.num_response_tokens} tokens, {ending} ({trial.finish_reason})"
    verdict_text = "correct" if trial.is_correct else "incorrect"
    if trial.failure is not None:
        verdict_text = f"no verdict ({inline(trial.failure, 400)}), which counts as incorrect"
    answer_text = (
        "" if trial.extracted is None else f", read as the answer: {inline(trial.extracted)}"
    )
    parts = [
        f"--- {number} of {total}: {inline(trial.prompt_id)}",
        *([f"prompt{tokens}:", block(trial.problem)] if trial.problem else []),
        f"reference answer: {inline(trial.answer)}",
        f"response, {length}:",
        block(trial.response),
        *([f"judged: {inline(trial.judged, 400)}"] if trial.judged else []),
        f"verdict: {verdict_text}; reward {trial.reward:g}{answer_text}",
        *(_verifier_text(name, verdict) for name, verdict in trial.by_verifier.items()),
    ]
    if trial.output:
        parts += ["the verifier printed:", block(trial.output.rstrip("\n"))]
    return "\n".join(parts)


def _verifier_text(name: str, verdict: Mapping[str, Any]) -> str:
    """Return a line with the verdict of one of several verifiers and its reward without weight."""
    judged = "correct" if verdict["is_correct"] else "incorrect"
    if verdict["failure"] is not None:
        judged = f"no verdict ({inline(verdict['failure'], 400)}), which counts as incorrect"
    return f"  {name}: {judged}; reward {verdict['reward']:g} before its weight"


def trials_summary(trials: Sequence[Trial]) -> str:
    """Return one line with pass rate, mean reward, and counts of failures and truncation."""
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


_READS = {
    "exact": "verifier exact compares the whole response: with text around the answer, use "
    "rewards.verifier regex or math",
    "math": "verifier math reads the last \\boxed{...}, else what the last line ends in: ask for a "
    "box in data.prompt_template or data.system_prompt",
    "math_verify": "verifier math_verify reads the last \\boxed{...}, else the last expression: "
    "ask for a box in data.prompt_template or data.system_prompt",
    "reasoning_gym": "verifier reasoning_gym reads the last <answer>...</answer>, else the whole "
    "response",
    "python": "look at what your function compares with the answer",
    "reward_model": "look at rewards.reward_model_threshold",
    "several": "look at what each verifier says, and at rewards.correct_by",
}


@dataclass(frozen=True)
class Policy:
    """What hints on responses need to know of the policy's tokenizer. `end_tokens` are texts."""

    end_tokens: tuple[str, ...]
    has_chat_template: bool


def hints(trials: Sequence[Trial], config: FitConfig, policy: Policy | None) -> Iterator[str]:
    """Yield a sentence for each problem that the responses show, as `vapo try` prints it.

    `policy` is None if nothing was sampled.
    """
    failures = Counter(t.failure for t in trials if t.failure is not None)
    if 2 * failures.total() > len(trials):
        yield (
            f"{failures.total()} of {len(trials)} responses have no verdict and count as incorrect "
            f"(mostly: {inline(failures.most_common(1)[0][0], 120)}): mend the verifier first"
        )
    if policy is not None:
        yield from _length_hints(trials, config, policy)
    yield from _thought_hints(trials, config)
    judged = [t for t in trials if t.failure is None]
    if judged and not any(t.is_correct for t in judged):
        yield from _no_correct_response_hints(judged, config)
    correct = [t.reward for t in judged if t.is_correct]
    incorrect = [t.reward for t in judged if not t.is_correct]
    if correct and incorrect and max(incorrect) >= min(correct):
        yield (
            f"an incorrect response has the reward {max(incorrect):g}, and a correct one "
            f"{min(correct):g}: the policy is trained on rewards, not on verdicts"
        )
    if (large := about_large(t.reward for t in judged)) is not None:
        yield large
    if config.rewards.shuffle:
        yield "rewards.shuffle is true: a run deals these verdicts out to other responses"
    if config.rewards.overlong.soft_punishment:
        yield "rewards.overlong.soft_punishment is not in the rewards above"


def _thought_hints(trials: Sequence[Trial], config: FitConfig) -> Iterator[str]:
    """Yield hints on reasoning that is judged together with the answer, or that has no end."""
    total, mark = len(trials), config.rewards.answer_after
    thought_ends = [match for t in trials if (match := THOUGHT_END.search(t.response_text))]
    if mark is None and thought_ends and not config.environment.is_used:
        yield (
            f"{len(thought_ends)} of {total} responses end thoughts with "
            f"{inline(thought_ends[0][0])} and are judged whole: "
            f"rewards.answer_after={thought_ends[0][0]!r} judges only what follows"
        )
    unanswered = sum(t.is_unanswered for t in trials)
    if unanswered:
        yield (
            f"{unanswered} of {total} responses have no {mark!r} and are wrong: if they are "
            "cut, raise rollouts.max_response_tokens; if answers come without it, set "
            "rewards.without_answer_after=whole"
        )


def _length_hints(trials: Sequence[Trial], config: FitConfig, policy: Policy) -> Iterator[str]:
    total, truncated = len(trials), [t for t in trials if t.is_truncated and not t.is_lost]
    foreign = Counter(t.foreign_end for t in truncated if t.foreign_end is not None)
    if 2 * len(truncated) > total:
        kinds = Counter(t.finish_reason for t in truncated)
        lacks_template = not policy.has_chat_template and not config.environment.is_used
        yield _truncation_sentence(kinds, total, config, policy) + (
            ", unless the next line is why" if foreign or lacks_template else ""
        )
        if lacks_template:
            yield (
                "the tokenizer has no chat template, so no mark in the prompt says that an answer "
                "is to begin and to end: if this is a chat model, put the template that it was "
                "trained with into chat_template.jinja in actor.path and set "
                "data.chat_template=true; a base model needs a cold start (`vapo sft`), or a "
                "data.prompt_template with examples"
            )
    for token, count in foreign.most_common(1):
        yield (
            f"{count} of the truncated responses have the special token {inline(token)} in them, "
            f"which ends no response here: if it ends a turn, add it to eos_token_id in the "
            "generation_config.json of actor.path"
        )
    empty = sum(not t.response_text.strip() for t in trials)
    if empty:
        yield f"{empty} of {total} responses are empty"
    if policy.has_chat_template and not config.data.chat_template:
        yield (
            "the tokenizer has a chat template and data.chat_template is false, so the prompts are "
            "plain text: for a chat model set it to true"
        )


def _truncation_sentence(
    kinds: Counter[str | None], total: int, config: FitConfig, policy: Policy
) -> str:
    """Return a sentence on the limit that cut the most responses, and the key that sets it."""
    (kind, count), *_ = kinds.most_common(1)
    episodes, ends = config.environment.episode_options, ", ".join(map(inline, policy.end_tokens))
    key, limit = "rollouts.max_response_tokens", str(config.rollouts.max_response_tokens)
    if kind == "turns":
        subject = "episodes had all their turns before the environment ended them"
        key, limit = "environment.max_turns", str(episodes.max_turns)
    elif kind == "turn_length":
        subject = f"episodes ended in a turn that was cut without an end token ({ends})"
        key, limit = "environment.max_turn_tokens", str(episodes.max_turn_tokens)
    elif config.environment.is_used:
        subject = "episodes used up their budget, observations included"
    else:
        subject = f"responses reached their budget without an end token ({ends})"
    return f"{count} of {total} {subject}: raise {key}, which is {limit}"


def _no_correct_response_hints(judged: Sequence[Trial], config: FitConfig) -> Iterator[str]:
    total, rewards = len(judged), config.rewards
    if config.environment.is_used:
        yield (
            f"no episode of {total} is correct: ended by environment "
            f"{environment_name(config.environment)} with rewards that sum to more than "
            f"environment.correct_above, {config.environment.episode_options.correct_above:g}"
        )
        return
    extracts = rewards.verifier in ("regex", "math", "math_verify", "reasoning_gym")
    num_without = sum(not t.extracted for t in judged) if extracts else 0
    where = f"rewards.pattern {rewards.pattern!r}" if isinstance(rewards, RegexVerifier) else ""
    if num_without == total:
        reader = where or f"verifier {rewards.verifier}"
        yield f"{reader} found no answer in any of {total} responses"
    num_there = sum(_occurs_in(t.answer, t.response_text) for t in judged)
    if num_there:
        hint = _READS.get(rewards.verifier, f"{where} read something else: look at its group")
        yield (
            f"no response is correct, but the reference answer stands in {num_there} of {total}: "
            f"{hint}"
        )


def _occurs_in(answer: str, text: str) -> bool:
    """Whether an answer occurs in a text, and not only as a part of another number or word."""
    answer = answer.strip()
    if not answer:
        return False
    around = r"[\d.]" if answer[0].isdigit() and answer[-1].isdigit() else r"\w"
    pattern = rf"(?<!{around}){re.escape(answer)}(?!{around.replace('.', '')})"
    return re.search(pattern, text, re.IGNORECASE) is not None
