"""The known formats of rollout files. A format is recognised by its columns and has its own reader.

docs/inspect.md says from which version of a framework each format was taken. Further columns of a
file are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vapo.studies.inspection.fields import (
    Row,
    RowError,
    RowPlace,
    answer_of,
    entries,
    entry_or_none,
    flag_of,
    is_cut_short,
    row_reward,
    text_fields,
)
from vapo.studies.inspection.responses import InspectedResponse
from vapo.studies.inspection.token_dumps import nemo_rl, slime_rollouts, slime_training
from vapo.studies.inspection.traces import traces
from vapo.studies.inspection.trl import completions


@dataclass(frozen=True)
class Format:
    """A known format of rollout files, with the function that reads its rows.

    Args:
        name: the format's name in messages.
        columns: the columns that a row must have.
        read_row: returns the responses of a row. Raises: RowError.
        notes: what a reader of figures from such files has to know.
    """

    name: str
    columns: tuple[str, ...]
    read_row: Callable[[Row, RowPlace], Sequence[InspectedResponse]]
    notes: tuple[str, ...] = ()

    def fits(self, row: Row) -> bool:
        return all(name in row for name in self.columns)


def recognise(row: Row) -> Format | None:
    """Return the first format whose columns the row has, or None."""
    return next((form for form in FORMATS if form.fits(row)), None)


# ---- the plain format, and our own file ------------------------------------------------------


def _plain(row: Row, place: RowPlace) -> list[InspectedResponse]:
    prompt, group = place.prompt(row, "prompt"), entry_or_none(row, "group")
    truncated = flag_of(row, "is_truncated")
    if truncated is None:
        truncated = is_cut_short(entry_or_none(row, "finish_reason"))
    logprobs = "rollout_logprobs" if "rollout_logprobs" in row else "logprobs"
    return [
        place.response(
            place.step_of(row),
            prompt if group is None else group,
            prompt=prompt,
            reward=row_reward(row, place.rewards or ("reward",)),
            prompt_ids=entries(row, "prompt_ids", int),
            response_ids=entries(row, "response_ids", int),
            tokens=entries(row, "tokens", str),
            is_sampled=_sampled_flags(row),
            values=entries(row, "values", float),
            logprobs=entries(row, logprobs, float),
            advantages=entries(row, "advantages", float),
            token_rewards=_token_rewards(row),
            returns=entries(row, "returns", float),
            is_truncated=truncated,
            answer=answer_of(row, "answer"),
            **text_fields(row, "response"),
        )
    ]


def _sampled_flags(row: Row) -> tuple[bool, ...] | None:
    """Return whether each token was sampled, or None if the row does not tell.

    Files that vapo writes have the lengths of turns instead of a flag for each token.
    """
    num_observed = entries(row, "turn_observed", int)
    num_sampled = entries(row, "turn_sampled", int)
    if num_observed is None or num_sampled is None:
        return entries(row, "is_sampled", bool)
    turns = zip(num_observed, num_sampled, strict=True)
    return tuple(flag for o, s in turns for flag in (*[False] * o, *[True] * s))


def _token_rewards(row: Row) -> tuple[float, ...] | None:
    """Return the reward of each token, or None if the row has only one reward.

    Files that vapo writes have a reward for each turn instead; the turn's last token gets it.
    """
    rewards, num_sampled = entries(row, "turn_rewards", float), entries(row, "turn_sampled", int)
    num_observed = entries(row, "turn_observed", int)
    if rewards is None or num_sampled is None or num_observed is None:
        return entries(row, "token_rewards", float)
    turns = zip(num_observed, num_sampled, rewards, strict=True)
    return tuple(x for o, s, reward in turns for x in (*[0.0] * (o + s - 1), reward))


# ---- verl, OpenRLHF --------------------------------------------------------------------------


def _verl(row: Row, place: RowPlace) -> list[InspectedResponse]:
    """Read a row of verl.

    In newer versions its `uid` has the form `{prompt}_{session}_{output}`.
    """
    prompt, uid = place.prompt(row, "input"), entry_or_none(row, "uid")
    return [
        place.response(
            place.step_of(row),
            prompt if uid is None else str(uid).rsplit("_", 2)[0],
            prompt=prompt,
            reward=row_reward(row, place.rewards or ("score",)),
            answer=answer_of(row, "gts"),
            **text_fields(row, "output"),
        )
    ]


def session_of(row: Row | str) -> str | None:
    """Return the name of the session of a verl row; None for other formats and older versions.

    An agent loop writes a row for each of its outputs. The rows of a session follow one another,
    and the last has its score (`compute_advantage_for_multi_trajectories` of verl 0.9.1).

    Args:
        row: the row, or a text that says why it cannot be read.
    """
    if isinstance(row, str) or not _VERL.fits(row) or not isinstance(uid := row.get("uid"), str):
        return None
    return uid.rpartition("_")[0] if uid.count("_") >= 2 else None


def _openrlhf(row: Row, place: RowPlace) -> list[InspectedResponse]:
    prompt = place.prompt(row, "input")
    reward = row_reward(row, place.rewards or ("reward",))
    return [
        place.response(
            place.step, prompt, prompt=prompt, reward=reward, **text_fields(row, "output")
        )
    ]


# ---- verifiers' results, and prime-rl's of that time -----------------------------------------


def _results(row: Row, place: RowPlace) -> list[InspectedResponse]:
    """Read a row of verifiers' or prime-rl's results.

    Several turns become one text. Only a response of a single turn has token ids.
    """
    if row.get("error"):
        raise RowError(f"ended in an error: {str(row['error']).splitlines()[0]:.100}")
    steps = row.get("trajectory")
    tokens: Mapping[str, Any] = {}
    if isinstance(steps, list) and len(steps) == 1 and isinstance(steps[0], Mapping):
        tokens = steps[0].get("tokens") or {}
    truncated = flag_of(row, "is_truncated")
    return [
        place.response(
            place.step_of(row),
            f"{row.get('task')}|{row['example_id']}",
            prompt=place.prompt(row, "prompt"),
            reward=row_reward(row, place.rewards or ("reward",)),
            prompt_ids=entries(tokens, "prompt_ids", int),
            response_ids=entries(tokens, "completion_ids", int),
            logprobs=entries(tokens, "completion_logprobs", float),
            is_truncated=flag_of(tokens, "is_truncated") if truncated is None else truncated,
            answer=answer_of(row, "answer"),
            **text_fields(row, "completion"),
        )
    ]


_VERL = Format(
    "verl's dumped rollouts (trainer.rollout_data_dir or validation_data_dir)",
    ("input", "output", "score"),
    _verl,
    ("verl writes its texts without special tokens, those of a chat template included",),
)
FORMATS = (
    Format("slime's rollout dump", ("tokens", "response_length", "response"), slime_rollouts),
    Format("the plain form", ("prompt", "response", "reward"), _plain),
    _VERL,
    Format(
        "verifiers' or prime-rl's results (results.jsonl, train_rollouts.jsonl)",
        ("prompt", "completion", "reward", "example_id"),
        _results,
    ),
    Format(
        "TRL's completions (log_completions)",
        ("prompt", "completion", "advantage"),
        completions,
        ("the reward is the sum of its reward functions, whatever reward_weights are",),
    ),
    Format("verifiers' or prime-rl's episodes (traces.jsonl)", ("traces",), traces),
    Format("verifiers' or prime-rl's traces", ("nodes", "rewards"), traces),
    Format("slime's training dump", ("tokens", "response_lengths"), slime_training),
    Format("NeMo-RL's training data", ("content", "rewards", "token_loss_mask"), nemo_rl),
    Format("OpenRLHF's scored responses", ("input", "output", "reward"), _openrlhf),
)
