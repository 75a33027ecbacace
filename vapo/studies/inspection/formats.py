"""The forms of rollouts that are recognised, by the columns of their rows, and how each is read.

docs/inspect.md says of every one which source it was read from. What a framework's file has
beside these columns is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vapo.studies.inspection.fields import (
    Place,
    Row,
    RowError,
    answer_text,
    entries,
    number_of,
    reward_of,
    text_of,
)
from vapo.studies.inspection.responses import InspectedResponse
from vapo.studies.inspection.token_dumps import nemo_rl, slime_rollouts, slime_training
from vapo.studies.inspection.traces import traces

_ANSWERS = ("answer", "solution", "ground_truth", "target", "label")
_NOT_REWARDS = {"step", "prompt", "completion", "advantage"}


@dataclass(frozen=True)
class Format:
    """A form of rows.

    Args:
        name: as a reader is told.
        columns: those that a row has to have.
        read: the responses of a row. Raises: RowError.
        notes: what whoever reads figures of it has to know.
    """

    name: str
    columns: tuple[str, ...]
    read: Callable[[Row, Place], Sequence[InspectedResponse]]
    notes: tuple[str, ...] = ()

    def fits(self, row: Row) -> bool:
        return set(self.columns) <= row.keys()


def recognise(row: Row) -> Format | None:
    """The first form that a row has."""
    return next((one for one in FORMATS if one.fits(row)), None)


# ---- the plain form, and our own file --------------------------------------------------------


def _plain(row: Row, place: Place) -> list[InspectedResponse]:
    step = place.step_of(row)
    prompt = place.text(row, "prompt")
    given = row.get("group")
    truncated = row.get("is_truncated")
    if truncated is None and row.get("finish_reason") is not None:
        truncated = row["finish_reason"] != "stop"
    return [
        InspectedResponse(
            place=str(place),
            prompt=prompt,
            response=place.text(row, "response"),
            reward=reward_of(row, place.rewards or ("reward",)),
            group=place.group(step, prompt if given is None else given),
            step=step,
            prompt_ids=entries(row, "prompt_ids", int),
            response_ids=entries(row, "response_ids", int),
            tokens=entries(row, "tokens", str),
            is_sampled=_sampled(row),
            values=entries(row, "values", float),
            logprobs=entries(
                row, "rollout_logprobs" if "rollout_logprobs" in row else "logprobs", float
            ),
            advantages=entries(row, "advantages", float),
            token_rewards=_token_rewards(row),
            returns=entries(row, "returns", float),
            is_truncated=None if truncated is None else bool(truncated),
            answer=answer_text(row.get("answer")),
        )
    ]


def _sampled(row: Row) -> tuple[bool, ...] | None:
    """Which tokens were sampled; our own file has the lengths of turns."""
    observed, sampled = entries(row, "turn_observed", int), entries(row, "turn_sampled", int)
    if observed is None or sampled is None:
        return entries(row, "is_sampled", bool)
    turns = zip(observed, sampled, strict=True)
    return tuple(kind for o, s in turns for kind in (*[False] * o, *[True] * s))


def _token_rewards(row: Row) -> tuple[float, ...] | None:
    """Rewards along the way; our own file has one for each turn, which its last token earned."""
    rewards, sampled = entries(row, "turn_rewards", float), entries(row, "turn_sampled", int)
    observed = entries(row, "turn_observed", int)
    if rewards is None or sampled is None or observed is None:
        return entries(row, "token_rewards", float)
    turns = zip(observed, sampled, rewards, strict=True)
    return tuple(x for o, s, reward in turns for x in (*[0.0] * (o + s - 1), reward))


# ---- verl, OpenRLHF --------------------------------------------------------------------------


def _verl(row: Row, place: Place) -> list[InspectedResponse]:
    """`uid` is `{prompt}_{rollout}_{turn}` in newer versions, and absent in older ones."""
    step, prompt, uid = place.step_of(row), place.text(row, "input"), row.get("uid")
    whose = uid.rsplit("_", 2)[0] if isinstance(uid, str) and uid.count("_") >= 2 else uid
    return [
        InspectedResponse(
            place=str(place),
            prompt=prompt,
            response=place.text(row, "output"),
            reward=reward_of(row, place.rewards or ("score",)),
            group=place.group(step, prompt if whose is None else whose),
            step=step,
            answer=answer_text(row.get("gts")),
        )
    ]


def _openrlhf(row: Row, place: Place) -> list[InspectedResponse]:
    prompt = place.text(row, "input")
    return [
        InspectedResponse(
            place=str(place),
            prompt=prompt,
            response=place.text(row, "output"),
            reward=reward_of(row, place.rewards or ("reward",)),
            group=place.group(place.step, prompt),
            step=place.step,
        )
    ]


# ---- TRL -------------------------------------------------------------------------------------


def _trl(row: Row, place: Place) -> list[InspectedResponse]:
    """The advantage is one number for a response: no column of its tokens.

    A reference is there if a reward function logged it with TRL's `log_extra`.
    """
    step, prompt = place.step_of(row), place.text(row, "prompt")
    rewards = place.rewards or trl_rewards(row)
    if not rewards:
        raise RowError("no column of a reward function: name one with --reward")
    number_of(row, "advantage")
    return [
        InspectedResponse(
            place=str(place),
            prompt=prompt,
            response=place.text(row, "completion"),
            reward=reward_of(row, rewards),
            group=place.group(step, prompt),
            step=step,
            answer=next((answer_text(row[name]) for name in _ANSWERS if name in row), None),
        )
    ]


def trl_rewards(row: Row) -> list[str]:
    """The columns of reward functions, which stand between the completion and the advantage."""
    return [
        name
        for name, value in row.items()
        if name not in (*_NOT_REWARDS, *_ANSWERS) and (value is None or isinstance(value, float))
    ]


# ---- verifiers' results, and prime-rl's of that time -----------------------------------------


def _results(row: Row, place: Place) -> list[InspectedResponse]:
    """A response of several turns is its whole conversation; tokens are read of a single turn."""
    if row.get("error"):
        raise RowError(f"ended in an error: {str(row['error']).splitlines()[0]:.100}")
    steps = row.get("trajectory")
    tokens: Mapping[str, Any] = {}
    if isinstance(steps, list) and len(steps) == 1 and isinstance(steps[0], Mapping):
        tokens = steps[0].get("tokens") or {}
    truncated = row.get("is_truncated", tokens.get("is_truncated"))
    step = place.step_of(row)
    return [
        InspectedResponse(
            place=str(place),
            prompt=place.text(row, "prompt"),
            response=text_of(row, "completion"),
            reward=reward_of(row, place.rewards or ("reward",)),
            group=place.group(step, row.get("task"), row["example_id"]),
            step=step,
            prompt_ids=entries(tokens, "prompt_ids", int),
            response_ids=entries(tokens, "completion_ids", int),
            logprobs=entries(tokens, "completion_logprobs", float),
            is_truncated=None if truncated is None else bool(truncated),
            answer=answer_text(row.get("answer")),
        )
    ]


FORMATS = (
    Format("slime's rollout dump", ("tokens", "response_length", "response"), slime_rollouts),
    Format("the plain form", ("prompt", "response", "reward"), _plain),
    Format(
        "verl's dumped rollouts (trainer.rollout_data_dir or validation_data_dir)",
        ("input", "output", "score"),
        _verl,
        ("verl writes its texts without special tokens, those of a chat template included",),
    ),
    Format(
        "verifiers' or prime-rl's results (results.jsonl, train_rollouts.jsonl)",
        ("prompt", "completion", "reward", "example_id"),
        _results,
    ),
    Format(
        "TRL's completions (log_completions)",
        ("prompt", "completion", "advantage"),
        _trl,
        ("the reward is the sum of its reward functions, whatever reward_weights are",),
    ),
    Format("verifiers' or prime-rl's episodes (traces.jsonl)", ("traces",), traces),
    Format("verifiers' or prime-rl's traces", ("nodes", "rewards"), traces),
    Format("slime's training dump", ("tokens", "response_lengths"), slime_training),
    Format("NeMo-RL's training data", ("content", "rewards", "token_loss_mask"), nemo_rl),
    Format("OpenRLHF's scored responses", ("input", "output", "reward"), _openrlhf),
)
