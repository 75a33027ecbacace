"""Made-up rollouts with a critic that knows exactly what it may know, and ways to spoil it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from vapo.studies.inspection.responses import InspectedResponse

STEPS = 6  # tokens of a response but for the last


def sound(
    num_prompts: int = 60, size: int = 8, *, seed: int = 0, step: int | None = None
) -> list[InspectedResponse]:
    """Walks of tokens `+` and `-`, of 6 to 9 steps, each of which changes the response's worth.

    The value is the true one: as likely as it says, the reward is 1, else -1.
    """
    draw, found = random.Random(seed), list[InspectedResponse]()
    for prompt in range(num_prompts):
        hardness, length = draw.uniform(-0.8, 0.8), STEPS + prompt % 4
        for _ in range(size):
            worth, values, tokens = hardness, list[float](), list[str]()
            for _ in range(length):
                values.append(worth)
                tokens.append(draw.choice("+-"))
                move = min(0.3, 1 - abs(worth))
                worth += move if tokens[-1] == "+" else -move
            values.append(worth)
            tokens.append(".")
            reward = 1.0 if draw.random() < (1 + worth) / 2 else -1.0
            found.append(
                InspectedResponse(
                    place=f"made_up.jsonl, row {len(found) + 1}",
                    prompt=f"prompt {prompt}",
                    response="".join(tokens),
                    reward=reward,
                    group=str(prompt),
                    step=step,
                    tokens=tuple(tokens),
                    values=tuple(values),
                    logprobs=tuple(-0.7 for _ in tokens),
                    is_truncated=False,
                )
            )
    return found


Change = Callable[[InspectedResponse, np.ndarray], np.ndarray]


def with_values(responses: Sequence[InspectedResponse], change: Change) -> list[InspectedResponse]:
    return list(_changed(responses, change))


def _changed(responses: Sequence[InspectedResponse], change: Change) -> Iterator[InspectedResponse]:
    for response in responses:
        yield replace(response, values=tuple(change(response, np.array(response.values)).tolist()))


def untrained(responses: Sequence[InspectedResponse]) -> list[InspectedResponse]:
    draw = np.random.default_rng(0)
    return with_values(responses, lambda _, v: 3 + 2 * draw.standard_normal(len(v)))


def off_by_one(responses: Sequence[InspectedResponse]) -> list[InspectedResponse]:
    return with_values(responses, lambda _, v: np.append(v[1:], v[-1]))


def lagging(responses: Sequence[InspectedResponse]) -> list[InspectedResponse]:
    return with_values(responses, lambda _, v: np.append(v[0], v[:-1]))


def wrong_scale(responses: Sequence[InspectedResponse]) -> list[InspectedResponse]:
    """Trained on rewards of 0 and 1, not -1 and 1."""
    return with_values(responses, lambda _, v: (v + 1) / 2)


def percent(responses: Sequence[InspectedResponse]) -> list[InspectedResponse]:
    return with_values(responses, lambda _, v: 50 * (v + 1))


def prompt_mean(responses: Sequence[InspectedResponse]) -> list[InspectedResponse]:
    return with_values(responses, lambda _, v: np.full_like(v, v[0]))


def reads_length(responses: Sequence[InspectedResponse]) -> list[InspectedResponse]:
    return with_values(responses, lambda _, v: 0.5 - 0.12 * np.arange(len(v)) + 0.05 * v)


def small_noise(
    responses: Sequence[InspectedResponse], spread: float, shift: float = 0.0
) -> list[InspectedResponse]:
    """A fresh value head: numbers that have nothing to do with the returns."""
    draw = np.random.default_rng(1)
    return with_values(responses, lambda _, v: shift + spread * draw.standard_normal(len(v)))


def coin_flips(responses: Sequence[InspectedResponse]) -> list[InspectedResponse]:
    """The same responses, with rewards that nothing tells."""
    draw = random.Random(5)
    return [replace(one, reward=draw.choice([-1.0, 1.0])) for one in responses]


def one_token(num_prompts: int = 80, size: int = 8, two: float = 0.0) -> list[InspectedResponse]:
    """Responses of one token, or of two in a share of them, and a critic that is right."""
    draw, found = random.Random(2), list[InspectedResponse]()
    for prompt in range(num_prompts):
        hardness = draw.uniform(-0.9, 0.9)
        for _ in range(size):
            reward = 1.0 if draw.random() < (1 + hardness) / 2 else -1.0
            values = (hardness, reward) if draw.random() < two else (hardness,)
            found.append(
                InspectedResponse(
                    place=f"made_up.jsonl, row {len(found) + 1}",
                    prompt=f"prompt {prompt}",
                    response="".join("+-"[: len(values)]),
                    reward=reward,
                    group=str(prompt),
                    tokens=tuple("+-"[: len(values)]),
                    values=values,
                )
            )
    return found


def step_rewards(num_prompts: int = 60, size: int = 8) -> list[InspectedResponse]:
    """Every token is rewarded or not, and how often is the prompt's; the critic is right: what is
    left to earn. `returns` are the framework's, of lambda 1."""
    draw, found = random.Random(3), list[InspectedResponse]()
    for prompt in range(num_prompts):
        chance, length = draw.uniform(0.1, 0.9), 6 + prompt % 4
        for _ in range(size):
            rewards = [float(draw.random() < chance) for _ in range(length)]
            found.append(
                InspectedResponse(
                    place=f"made_up.jsonl, row {len(found) + 1}",
                    prompt=f"prompt {prompt}",
                    response="x",
                    reward=sum(rewards),
                    group=str(prompt),
                    tokens=tuple("-+"[int(r)] for r in rewards),
                    values=tuple(chance * (length - t) for t in range(length)),
                    token_rewards=tuple(rewards),
                    returns=tuple(sum(rewards[t:]) for t in range(length)),
                )
            )
    return found
