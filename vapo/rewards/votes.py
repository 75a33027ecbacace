"""Votes: finds which responses to a prompt give the same answer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from vapo.rewards.text_judge import WorkerPool
from vapo.rewards.verifier_code import Task
from vapo.rewards.verifiers import MAX_EXTRACTED_CHARS, MAX_RESPONSE_CHARS, VoteTask
from vapo.types import Rollout

logger = logging.getLogger(__name__)


def count_votes(
    rollouts: Sequence[Rollout], *, group_size: int, pool: WorkerPool | None
) -> list[int | None]:
    """Return for each response the index in its group of the first with the same answer.

    The index is None for a response without an answer or with a failure. Equal texts are equal
    answers. Different texts are compared by the pool's processes, within one verdict's time limit
    per group. Without a pool, or if that fails, they count as different answers.
    """
    votes: list[int | None] = []
    for first in range(0, len(rollouts), group_size):
        votes += _by_text(rollouts[first : first + group_size])
    if pool is None:
        return votes
    groups, tasks = [], list[Task]()
    for first in range(0, len(votes), group_size):
        distinct = sorted({vote for vote in votes[first : first + group_size] if vote is not None})
        if len(distinct) > 1:
            groups.append((first, distinct))
            texts = (rollouts[first + index].response_text for index in distinct)
            tasks.append(VoteTask(tuple(text[-MAX_RESPONSE_CHARS:] for text in texts)))

    num_failed = 0

    def on_reply(index: int, reply: dict[str, Any]) -> None:
        nonlocal num_failed
        if "failure" in reply:
            num_failed += 1
            return
        first, distinct = groups[index]
        merged = {vote: distinct[c] for vote, c in zip(distinct, reply["classes"], strict=True)}
        for row in range(first, first + group_size):
            vote = votes[row]
            votes[row] = None if vote is None else merged[vote]

    pool.run(tasks, on_reply)
    if num_failed:
        logger.warning(
            "the answers to %d of %d prompts could not be compared within the time limit of a "
            "verdict: there they vote by their text",
            num_failed,
            len(votes) // group_size,
        )
    return votes


def _by_text(group: Sequence[Rollout]) -> list[int | None]:
    """Return for each response the index of the group's first with the same extracted text.

    The index is None for a response without an extracted answer or with a failure. A text of
    `MAX_EXTRACTED_CHARS` characters may have been cut, so its response gets its own index.
    """
    firsts: dict[str, int] = {}
    votes: list[int | None] = []
    for index, rollout in enumerate(group):
        text = rollout.extracted
        if not text or rollout.failure is not None:
            votes.append(None)
        elif len(text) >= MAX_EXTRACTED_CHARS:  # cut: equal beginnings of answers that may differ
            votes.append(index)
        else:
            votes.append(firsts.setdefault(text, index))
    return votes
