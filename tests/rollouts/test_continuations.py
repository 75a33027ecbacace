"""Responses sampled on from prefixes, and what the prefixes are worth by them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.config.fits import fit_config
from tests.rollouts.playing import sample_all
from tests.rollouts.scripted_episodes import ScriptedStream
from tests.tiny_model import ragged_prompts, sample, tiny_model, tiny_tokenizer
from vapo.config import FitConfig
from vapo.diagnostics.value_truth.points import true_value_interval
from vapo.networks.new_model import make_tokenizer
from vapo.rewards.scorer import make_scorer
from vapo.rollouts.continuations import Continuations, ContinuationSampler, MeasuredState, Place
from vapo.rollouts.engines.contract import SampledTurn, Sampler, SamplingSettings, TurnRequest
from vapo.rollouts.engines.transformers.sampler import TransformersSampler
from vapo.rollouts.player import RolloutRunner
from vapo.tasks.checked_steps import KEYS, POSITIONS, moves
from vapo.types import FinishReason, Prompt, Rollout


@contextmanager
def no_stage(name: str, total: float | None = None, unit: str = "items"):
    yield lambda n: None


def continued(
    rollouts: Sequence[Rollout],
    prefixes: Sequence[Place],
    sampler: Sampler,
    config: FitConfig,
    tokenizer: Any,
    *,
    k: int,
    most: int,
) -> Continuations:
    with make_scorer(config) as scorer:
        settings = SamplingSettings(max_response_tokens=most)
        player = RolloutRunner(config, sampler, scorer, tokenizer)
        continuation_sampler = ContinuationSampler(config, settings, player, no_stage)
        return continuation_sampler.sample(rollouts, prefixes, num_continuations=k, seed=3)


class TestWithTheEngine:
    most = 24

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.config = fit_config(tmp_path, "rewards.verifier=exact")

    def found(self, prefixes: Sequence[Place]) -> tuple[list[Rollout], Continuations]:
        model, tokenizer = tiny_model(), tiny_tokenizer()
        rollouts = sample(model, ragged_prompts(4), group_size=2, max_response_tokens=self.most)
        engine = TransformersSampler(model, tokenizer, max_concurrent_sequences=8, device="cpu")
        return rollouts, continued(
            rollouts, prefixes, engine, self.config, tokenizer, k=3, most=self.most
        )

    def test_a_continuation_is_a_whole_response_that_begins_with_its_prefix(self) -> None:
        prefixes = [Place(0, 0), Place(0, 2), Place(3, 5), Place(7, 1)]
        rollouts, found = self.found(prefixes)
        assert found.batch.group_size == 3
        for i, rollout in enumerate(found.batch.rollouts):
            prefix = prefixes[i // 3]
            start = rollouts[prefix.row].response_ids[: prefix.num_tokens]
            assert rollout.response_ids[: prefix.num_tokens] == start
            assert prefix.num_tokens < len(rollout.response_ids) <= self.most
            assert len(rollout.rollout_logprobs) == len(rollout.response_ids)
            assert rollout.prompt == rollouts[prefix.row].prompt
            if rollout.finish_reason is FinishReason.LENGTH:
                assert len(rollout.response_ids) == self.most
        ends = {rollout.response_ids for rollout in found.batch.rollouts}
        assert len(ends) > 8

    def test_equal_prefixes_of_a_prompt_are_sampled_once(self) -> None:
        _, found = self.found([Place(0, 0), Place(1, 0), Place(2, 0)])
        assert found.states == [[Place(0, 0), Place(1, 0)], [Place(2, 0)]]
        first, other = found.groups
        assert first != other
        sampled = sum(len(r.response_ids) for r in [*first, *other])
        assert found.num_sampled_tokens == sampled
        measured = found.measured(torch.tensor([1.0, -1.0, 0.5, 0.0, 0.0, 2.0]), gamma=1.0)
        assert list(measured.values()) == [
            MeasuredState(0, 0, (1.0, -1.0, 0.5), num_places=2),
            MeasuredState(1, 0, (1.0, -1.0, 0.5), num_places=2),
            MeasuredState(2, 0, (0.0, 0.0, 2.0)),
        ]
        assert list(measured) == [Place(0, 0), Place(1, 0), Place(2, 0)]

    def test_nothing_is_left_of_a_whole_response(self) -> None:
        rollouts, _ = self.found([Place(0, 0)])
        with pytest.raises(ValueError, match="nothing is left"):
            self.found([Place(0, len(rollouts[0].response_ids))])

    def test_the_return_is_discounted_by_the_tokens_between(self) -> None:
        _, found = self.found([Place(0, 2)])
        rewards = torch.tensor([1.0, -1.0, 0.5])
        lengths = [len(rollout.response_ids) for rollout in found.batch.rollouts]
        wanted = [
            0.9 ** (length - 3) * reward
            for length, reward in zip(lengths, rewards.tolist(), strict=True)
        ]
        place = Place(0, 2)
        assert found.measured(rewards, gamma=0.9)[place].returns == pytest.approx(wanted)
        assert found.measured(rewards, gamma=1.0)[place].returns == (1.0, -1.0, 0.5)


# ---- a policy whose values are known ------------------------------------------------------------

TOKENIZER = make_tokenizer("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGH=;+-")
HAZARDS = (0.02, 0.1, 0.3)


def hazard_of(problem: str) -> float:
    return HAZARDS[len(problem) % 3]


@cache
def chance(position: str, keys: str, answer: str, hazard: float) -> float:
    """That the position after all keys is the answer; a step that fails goes to any other."""
    if not keys:
        return float(position == answer)
    right = moves()[keys[0], position]
    others = POSITIONS.replace(right, "")
    after = {p: chance(p, keys[1:], answer, hazard) for p in POSITIONS}
    return (1 - hazard) * after[right] + hazard / len(others) * sum(after[p] for p in others)


class ScriptedPolicy:
    """Writes checked steps without checks: `aC5bF2;2`. From any prefix its value is known."""

    end_ids = frozenset([1])

    @contextmanager
    def turns(self, settings: SamplingSettings, *, seed: int) -> Iterator[ScriptedStream]:
        rng = Random(seed)

        class Stream(ScriptedStream):
            def turn(_, request: TurnRequest) -> SampledTurn:
                ids = self._respond(request.ids, rng)
                return SampledTurn(request, ids, (0.0,) * len(ids), True)

        yield Stream(lambda request: "")

    def _respond(self, before: tuple[int, ...], rng: Random) -> tuple[int, ...]:
        text = str(TOKENIZER.decode(list(before)))
        problem, _, start = text.partition("=")
        position, keys = self.state(problem, start)
        written = ""
        for label, key in keys:
            right = moves()[key, position]
            fails = rng.random() < hazard_of(problem)
            position = rng.choice(POSITIONS.replace(right, "")) if fails else right
            written += f"{label}{key}{position}"
        return (*TOKENIZER.encode(f"{written};{position}"), 1)

    @staticmethod
    def state(problem: str, start: str) -> tuple[str, list[tuple[str, str]]]:
        """The position that the steps so far have led to, and the steps that are left."""
        steps = re.findall(rf"([a-z])([{KEYS}])", problem)
        done = re.findall(rf"[a-z][{KEYS}]([{POSITIONS}])", start)
        return (done[-1] if done else problem[0]), steps[len(done) :]


def problems(num: int) -> list[Prompt]:
    rng, found = Random(5), []
    for i in range(num):
        keys = [rng.choice(KEYS) for _ in range(rng.randint(2, 8))]
        start = rng.choice(POSITIONS)
        answer = start
        for key in keys:
            answer = moves()[key, answer]
        text = start + "".join("abcdefgh"[j] + key for j, key in enumerate(keys)) + "="
        found.append(Prompt(f"p{i}", text, tuple(TOKENIZER.encode(text)), answer))
    return found


@pytest.mark.night
def test_the_interval_covers_the_exact_value(tmp_path: Path) -> None:
    """Of 1,000 prefixes of a policy with known values 95 % +- 2 %, by 4, 8 and 16 continuations."""
    policy: Any = ScriptedPolicy()
    settings = SamplingSettings(max_response_tokens=40)
    rollouts = sample_all(
        policy, problems(400), group_size=1, settings=settings, seed=1, tokenizer=TOKENIZER
    )
    rng, exact = Random(2), []
    prefixes: list[Place] = []
    while len(prefixes) < 1000:
        row = rng.randrange(len(rollouts))
        rollout = rollouts[row]
        num = 3 * rng.randrange(rollout.response_text.index(";") // 3 + 1)
        if Place(row, num) in prefixes:
            continue
        problem = rollout.prompt.text[:-1]
        position, keys = policy.state(problem, rollout.response_text[:num])
        rest = "".join(key for _, key in keys)
        prefixes.append(Place(row, num))
        exact.append(2 * chance(position, rest, rollout.prompt.answer, hazard_of(problem)) - 1)
    config = fit_config(
        tmp_path, overlay="rewards: {verifier: regex, pattern: ';(\\d)$', num_workers: 1}"
    )
    found = continued(rollouts, prefixes, policy, config, TOKENIZER, k=16, most=40)
    measured = found.measured(found.batch.rewards, gamma=1.0)
    for k in (4, 8, 16):
        states = [MeasuredState(p.row, p.num_tokens, measured[p].returns[:k]) for p in prefixes]
        covered = [
            low <= value <= high
            for state, value in zip(states, exact, strict=True)
            for low, high in [true_value_interval(state, (-1.0, 1.0), spread=0.0)]
        ]
        bias = sum(s.mean - v for s, v in zip(states, exact, strict=True)) / len(exact)
        assert abs(bias) < 0.03
        assert 930 <= sum(covered) <= 970, (k, sum(covered))
