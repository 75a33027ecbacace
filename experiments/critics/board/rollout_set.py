"""The board's rollouts: what a critic may read of a response, and what the judge knows of it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pyarrow import parquet

from vapo.diagnostics.oracle import state_values
from vapo.diagnostics.value_truth.points import TruthPoint
from vapo.rollouts.rollout_file import METADATA_KEY
from vapo.studies.critics.judging import Judge, KnownResponse, indices_of_steps

HERE = Path(__file__).parent
TRAINING, TEST = HERE / "train.parquet", HERE / "test.parquet"
STEP_ENDS = frozenset(
    {43, 30}
)  # tokens `;` and `.` of SmolLM2, with which a worked sum's steps end


class Response(NamedTuple):
    """What a critic may read of a response. `logprobs` are of its tokens when they were sampled.

    The `reward` is for training. A value may not know that of its own response; it may know those
    of the others in its `group`, which are the responses to the same prompt.
    """

    group: int
    prompt: str
    answer: str
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs: Sequence[float]
    reward: float


@dataclass(frozen=True)
class RolloutSet:
    """The rollouts to train on, and those of other prompts that values are judged on.

    Attributes:
        points: the measured states of the test rollouts, without values, and with the mean reward
            of the other responses as baseline.
        outcomes: the rewards of a wrong and a right response.
    """

    training: Sequence[Response]
    test: Sequence[Response]
    judge: Judge
    points: Sequence[TruthPoint]
    outcomes: tuple[float, float]


def read_set(
    training: Path = TRAINING, test: Path = TEST, step_ends: Collection[int] = STEP_ENDS
) -> RolloutSet:
    """Read two files of rollouts.

    The oracle's value of a hidden state is the mean return of the training tokens in it, so no test
    response has a part in what it is judged by.
    """
    training_rows, test_rows = (parquet.read_table(path).to_pylist() for path in (training, test))
    shared = {row["prompt"] for row in training_rows} & {row["prompt"] for row in test_rows}
    if shared:
        raise SystemExit(f"{test}: {len(shared)} prompts are in {training}, too: {min(shared)!r}")
    oracle = state_values(
        [row["oracle_state"] for row in training_rows],
        [[row["reward"]] * len(row["oracle_state"]) for row in training_rows],
        [row["oracle_state"] for row in test_rows],
    )
    known = [
        KnownResponse(
            row["prompt"],
            row["reward"],
            np.array(values),
            indices_of_steps(row["response_ids"], step_ends),
            row["oracle_state"],
        )
        for row, values in zip(test_rows, oracle, strict=True)
    ]
    metadata = json.loads(parquet.read_schema(test).metadata[METADATA_KEY])
    best, worst = metadata["reward"]
    return RolloutSet(
        [response_of(row) for row in training_rows],
        [response_of(row) for row in test_rows],
        Judge(known),
        truth_points(test_rows, (worst, best)),
        (worst, best),
    )


def response_of(row: Mapping[str, Any]) -> Response:
    names = (
        "group",
        "prompt",
        "answer",
        "prompt_ids",
        "response_ids",
        "rollout_logprobs",
        "reward",
    )
    return Response(*(row[name] for name in names))


def truth_points(
    rows: Sequence[Mapping[str, Any]], outcomes: tuple[float, float]
) -> list[TruthPoint]:
    """Return the states whose continuations the file has, with the returns that their means say."""
    points = []
    for number, row in enumerate(rows):
        if row["truth_tokens"] is None:
            continue
        others = [r["reward"] for r in rows if r["group"] == row["group"] and r is not row]
        num = row["truth_continuations"]
        for num_tokens, mean, num_places in zip(
            row["truth_tokens"], row["truth_values"], row["truth_rows"], strict=True
        ):
            worst, best = outcomes
            num_right = round(num * (mean - worst) / (best - worst))
            points.append(
                TruthPoint(
                    number,
                    num_tokens,
                    (best,) * num_right + (worst,) * (num - num_right),
                    num_places=num_places,
                    prompt_id=row["prompt"],
                    length=len(row["response_ids"]),
                    baseline=float(np.mean(others)),
                )
            )
    return points
