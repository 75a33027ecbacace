"""What steps are worth: where responses are continued, what that gives them, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.judged import judged_batch
from tests.rollouts.playing import InstantScorer, player_of, sample_all
from tests.systems import estimated, system_config
from tests.tiny_model import ALPHABET, ragged_prompts, tiny_model, tiny_tokenizer
from vapo.config import FitConfig
from vapo.environments.contract import Verdict
from vapo.functional.columns import with_loss_on
from vapo.prompts.load import PromptReport, PromptSplit
from vapo.prompts.training_set import TrainingSet
from vapo.rollouts import continuations
from vapo.rollouts.collection import RolloutCollection
from vapo.rollouts.continuations import ContinuationSampler, with_step_values
from vapo.rollouts.engines.contract import Sampler, SamplingSettings
from vapo.rollouts.engines.engine import Generated, Request
from vapo.rollouts.engines.sampler import CastWeights, EngineSampler
from vapo.rollouts.engines.transformers.sampler import TransformersSampler
from vapo.system.progress import Progress
from vapo.types import EvaluatedBatch, FinishReason, Phase, Prompt, Rollout, RolloutBatch

K, BUDGET, EOS = 3, 10, 1
TOKENIZER = tiny_tokenizer()


def ids(text: str) -> tuple[int, ...]:
    """`.` is the end token."""
    return tuple(EOS if c == "." else ALPHABET.index(c) + 2 for c in text)


class ScriptedEngine:
    """Of K continuations as many end with 1 as the prompt has tokens beyond two, modulo K + 1."""

    max_tokens, has_weights = 64, True

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.open: dict[str, Request] = {}

    is_shared = False

    def submit(self, requests: Mapping[str, Request]) -> None:
        self.open |= requests

    def results(self, names: Any) -> dict[str, Generated]:
        found = {}
        for i, (name, request) in enumerate(self.open.items()):
            is_right = i % K < (len(request.prompt_ids) - 2) % (K + 1)
            found[name] = Generated(ids("1." if is_right else "0."), (-0.5, -1))
        self.requests += self.open.values()
        self.open = {}
        return found

    def abort(self, names: Any) -> None: ...

    def leave(self) -> None: ...

    def sleep(self) -> None: ...


def sampler_of(engine: ScriptedEngine) -> Sampler:
    return EngineSampler(
        engine,  # type: ignore[arg-type]
        end_ids=frozenset({EOS}),
        weights=list,
        convert=CastWeights(torch.float32),
        check=None,  # type: ignore[arg-type]
    )


class LastCharacter(InstantScorer):
    """Right is a response that ends with 1."""

    def verdicts(self, rollouts: Sequence[Rollout], *, advance: Any = None) -> list[Verdict]:
        return [self.judged(rollout.response_text) for rollout in rollouts]

    def judged(self, text: str) -> Verdict:
        return Verdict(text.endswith("1"), 1.0 if text.endswith("1") else -1.0)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def sampler(engine: ScriptedEngine) -> Sampler:
    return sampler_of(engine)


def vine_config(*overrides: str) -> FitConfig:
    own = (f"rollouts.max_response_tokens={BUDGET}", f"algorithm.vine_continuations={K}")
    pattern = "algorithm.vine_segments.pattern=';'"
    return system_config("vineppo", *own, pattern, "algorithm.whiten_advantages=false", *overrides)


def rollout(text: str, prompt: int = 0) -> Rollout:
    response = ids(text)
    return Rollout(
        Prompt(f"made-up:{prompt}", "", ids("7="), "1"),
        response,
        text.rstrip("."),
        (-1.0,) * len(response),
        FinishReason.STOP if text.endswith(".") else FinishReason.LENGTH,
    )


def batch_of(config: FitConfig, *rollouts: Rollout, group_size: int = 1) -> RolloutBatch:
    return judged_batch(
        rollouts,
        LastCharacter().verdicts(rollouts),
        group_size=group_size,
        rewards=config.rewards,
        max_response_tokens=BUDGET,
    )


def continued(
    batch: RolloutBatch, config: FitConfig, sampler: Sampler, **settings: Any
) -> tuple[RolloutBatch, dict[str, float]]:
    own = SamplingSettings(**{"max_response_tokens": BUDGET, **settings})
    stage = Progress(enabled=False).stage
    continuation_sampler = ContinuationSampler(
        config, own, player_of(sampler, LastCharacter(), config), stage
    )
    return with_step_values(batch, continuation_sampler, seed=5)


def advantages(batch: RolloutBatch, config: FitConfig) -> torch.Tensor:
    zeros = torch.zeros_like(batch.rollout_logprobs)
    made = estimated(config, EvaluatedBatch(**vars(batch), old_logprobs=zeros, ref_logprobs=zeros))
    assert made.advantages is not None
    return made.advantages


def test_values_are_of_the_place_before_each_step(sampler: Sampler, engine: ScriptedEngine) -> None:
    """After 0, 2 and 5 tokens 0, 2 and 1 of 3 continuations are right: -1, 1/3 and -1/3."""
    config = vine_config()
    batch, _ = continued(batch_of(config, rollout("a;bc;1.")), config, sampler)
    assert batch.step_starts is not None
    assert batch.step_starts.int().tolist() == [[1, 0, 1, 0, 0, 1, 0]]
    values = torch.tensor([[-1, -1, 1 / 3, 1 / 3, 1 / 3, -1 / 3, -1 / 3]])
    torch.testing.assert_close(batch.step_values, values, rtol=0, atol=1e-6)
    expected = torch.tensor([[4 / 3, 4 / 3, -2 / 3, -2 / 3, -2 / 3, 4 / 3, 4 / 3]])
    torch.testing.assert_close(advantages(batch, config), expected, rtol=0, atol=1e-6)
    asked = [(r.prompt_ids, r.max_tokens) for r in engine.requests]
    prefixes = [(ids("7="), 10), (ids("7=a;"), 8), (ids("7=a;bc;"), 5)]
    longest_first = reversed(prefixes)
    assert asked == [prefix for prefix in longest_first for _ in range(K)]


def test_no_step_starts_behind_the_last_token(sampler: Sampler) -> None:
    """Where the budget cut the response behind the end of a step; and a response of one token."""
    config = vine_config()
    rows = [rollout("abcdefghi;"), rollout(".", 1), rollout(";.", 2)]
    batch, metrics = continued(batch_of(config, *rows), config, sampler)
    assert batch.step_starts is not None
    assert [row.nonzero().flatten().tolist() for row in batch.step_starts] == [[0], [0], [0, 1]]
    assert metrics["vine/steps_mean"] == pytest.approx(4 / 3)
    assert batch.step_values is not None
    assert not batch.step_values[~batch.response_mask].any()


def test_what_it_costs(sampler: Sampler, engine: ScriptedEngine) -> None:
    """The prompt of a group and a common beginning are continued once."""
    config = vine_config()
    rows = [rollout("a;b;1."), rollout("a;c;0."), rollout("a;b;1.", 1)]
    batch, metrics = continued(batch_of(config, *rows), config, sampler)
    assert len(engine.requests) == K * (4 + 3)  # "", "a;", "a;b;", "a;c;" and the other prompt's
    assert metrics == {
        "vine/num_continuation_tokens": 2.0 * K * 7,
        "vine/token_ratio": 2 * K * 7 / 18,
        "vine/num_prefixes": 7.0,
        "vine/steps_mean": 3.0,
        "vine/verifier_failure_share": 0.0,
    }
    assert len(batch) == 3, "continuations are not trained on"


class NoVerdictAfterA(LastCharacter):
    """Its verifier fails on responses that begin with a."""

    def judged(self, text: str) -> Verdict:
        return replace(super().judged(text), failure="timeout" if text.startswith("a") else None)


def test_a_failure_counts_for_every_step_that_has_its_continuation(sampler: Sampler) -> None:
    """Of the steps "", "a;" of one response and "", "b;" of the other, only a;'s three fail."""
    config = vine_config()
    batch = batch_of(config, rollout("a;1."), rollout("b;1."))
    player = player_of(sampler, NoVerdictAfterA(), config)
    settings = SamplingSettings(max_response_tokens=BUDGET)
    continuation_sampler = ContinuationSampler(
        config, settings, player, Progress(enabled=False).stage
    )
    _, metrics = with_step_values(batch, continuation_sampler, seed=5)
    assert metrics["vine/num_prefixes"] == 3
    assert metrics["vine/verifier_failure_share"] == K / (4 * K)


def test_metrics_are_of_all_ranks(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    config = vine_config()
    other = torch.tensor([100, 3, 1, 6, 40, 9, 4], dtype=torch.double)
    monkeypatch.setattr(continuations, "sum_over_ranks", lambda counts: counts + other)
    _, metrics = continued(batch_of(config, rollout("a;b;1.")), config, sampler)
    assert metrics == {
        "vine/num_continuation_tokens": 118.0,
        "vine/token_ratio": 118 / 46,
        "vine/num_prefixes": 6.0,
        "vine/steps_mean": 12 / 5,
        "vine/verifier_failure_share": 1 / 15,
    }


def test_the_rewards_of_continuations_are_shaped_as_the_batchs(sampler: Sampler) -> None:
    """The ramp is the last 4 of 10 tokens: continuations to 2 and 4 pay nothing, to 10 all of 1."""
    overlong = ("rewards.overlong.soft_punishment=true", "rewards.overlong.cache_tokens=4")
    config = vine_config(*overlong)
    batch, _ = continued(batch_of(config, rollout("a;bcdef;1.")), config, sampler)
    assert batch.step_values is not None
    values = batch.step_values[0, [0, 2, 8]]  # after 8 tokens none is right
    torch.testing.assert_close(values, torch.tensor([-1.0, 1 / 3, -1.0 - 1.0]), rtol=0, atol=1e-6)


def test_a_larger_budget_of_the_responses_does_not_change_the_punishment(sampler: Sampler) -> None:
    """As on held-out prompts: the batch is shaped by the training budget, its prefixes too."""
    overlong = ("rewards.overlong.soft_punishment=true", "rewards.overlong.cache_tokens=4")
    config = vine_config(*overlong)
    batch = batch_of(config, rollout("a;bcdef;1."))
    own, _ = continued(batch, config, sampler)
    larger, _ = continued(batch, config, sampler, max_response_tokens=20)
    torch.testing.assert_close(larger.step_values, own.step_values, rtol=0, atol=0)


def test_rows_without_loss_are_not_continued(sampler: Sampler, engine: ScriptedEngine) -> None:
    """As fillers of dynamic sampling: their advantages are 0."""
    config = vine_config()
    batch = batch_of(config, rollout("a;1."), rollout("b;1.", 1), rollout("b;0.", 2))
    batch = with_loss_on(batch, torch.tensor([True, False, False]))
    batch, metrics = continued(batch, config, sampler)
    assert metrics["vine/num_prefixes"] == 2
    assert {r.prompt_ids for r in engine.requests} == {ids("7="), ids("7=a;")}
    found = advantages(batch, config)
    assert found[0].any()
    assert not found[1:].any()


def test_a_rank_of_fillers_alone_samples_as_the_others_do(
    sampler: Sampler, engine: ScriptedEngine
) -> None:
    """An engine gathers the actor's shards in each call, on all ranks."""
    config = vine_config()
    batch = with_loss_on(batch_of(config, rollout("a;1.")), torch.tensor([False]))
    continued(batch, config, sampler)
    assert engine.requests


@pytest.mark.slow
@pytest.mark.parametrize("greedy", [True, False])
def test_the_engine_goes_on_from_the_prefix(greedy: bool) -> None:
    """A greedy response is its own continuation from everywhere, so that no step changes a thing.

    And sampled, the prompt's continuations are those that the engine's contract gives its seed.
    """
    engine = TransformersSampler(tiny_model(), TOKENIZER, max_concurrent_sequences=8, device="cpu")
    kind = ("algorithm.vine_segments.kind=tokens", "algorithm.vine_segments.num_tokens=3")
    config = system_config("vineppo", *kind, f"rollouts.max_response_tokens={BUDGET}")
    settings = SamplingSettings(max_response_tokens=BUDGET, greedy=greedy)
    prompts = ragged_prompts(6)
    rollouts = sample_all(engine, prompts, group_size=1, settings=settings, seed=1)

    class Parity(LastCharacter):
        def judged(self, text: str) -> Verdict:
            return Verdict(len(text) % 2 == 0, float(sum(map(ord, text)) % 7))

    batch = judged_batch(
        rollouts, Parity().verdicts(rollouts), rewards=config.rewards, max_response_tokens=BUDGET
    )
    stage = Progress(enabled=False).stage
    continuation_sampler = ContinuationSampler(
        config, settings, player_of(engine, Parity(), config), stage
    )
    batch, _ = with_step_values(batch, continuation_sampler, seed=5)
    assert batch.step_values is not None
    if greedy:
        own = batch.rewards[:, None] * batch.response_mask
        torch.testing.assert_close(batch.step_values, own, rtol=0, atol=0)
        return
    again = sample_all(engine, prompts[:1], group_size=9, settings=settings, seed=5)
    mean = sum(verdict.reward for verdict in Parity().score(again)) / 9
    assert float(batch.step_values[0, 0]) == pytest.approx(mean, abs=1e-6)
    starts = batch.step_starts
    assert starts is not None
    assert len(set(batch.step_values[starts].tolist())) > 3


def collection(engine: ScriptedEngine, *overrides: str) -> RolloutCollection:
    sizes = ("num_prompts=4", "group_size=2")
    config = vine_config(
        *(f"components.group_sampling.{size}" for size in sizes),
        "training.minibatch_size=4",
        *overrides,
    )
    train = [Prompt(str(i), str(i), ids("7" * (2 + i % 3)), "1") for i in range(40)]
    return RolloutCollection(
        config,
        prompts=PromptSplit(TrainingSet.of(train), [], PromptReport(40, 0, 0, 0)),
        player=player_of(sampler_of(engine), LastCharacter(), config),
        progress=Progress(enabled=False),
    )


def test_an_iterations_batch_has_its_steps_values(engine: ScriptedEngine) -> None:
    made = collection(engine)
    batch, metrics = made.sample_batch(3, Phase.POLICY_OPTIMIZATION)
    assert len(batch) == 8
    assert metrics["vine/num_prefixes"] == 4
    assert batch.step_values is not None
    right = torch.tensor([(len(r.prompt.prompt_ids) - 2) % (K + 1) for r in batch.rollouts])
    expected = (2 * right / K - 1)[:, None] * batch.response_mask
    torch.testing.assert_close(batch.step_values, expected, rtol=0, atol=1e-6)
    seeds = [r.seed for r in engine.requests]
    assert len(set(seeds)) == len(seeds), "continuations draw from other streams than responses"
    again = ScriptedEngine()
    collection(again).sample_batch(3, Phase.POLICY_OPTIMIZATION)
    assert [r.seed for r in again.requests] == seeds, "a resumed run samples the same"
    other = ScriptedEngine()
    collection(other).sample_batch(4, Phase.POLICY_OPTIMIZATION)
    assert not set(seeds) & {r.seed for r in other.requests}
