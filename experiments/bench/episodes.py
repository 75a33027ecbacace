"""Episodes that do not wait for each other, against rounds that wait for the slowest episode.

    python experiments/bench/episodes.py

Unequal episodes of 1 to 10 turns, whose environment takes 0 to 2 s for an answer: the same
episodes, with the same answers and latencies, the same engine and the same environment processes
on both sides. The other side plays in rounds, as a loop over turns does it: the turn of every
episode is sampled, then all environments are asked, and the next round begins when the last one
has answered. If there are more episodes than can run at a time, it plays them in batches of that
size. The sides alternate. Wall-clock time is measured, because most of it is waiting.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from vapo.config import FitConfig
from vapo.config.environments import EnvironmentConfig
from vapo.config.kinds import make
from vapo.environments.contract import Environments, Reply
from vapo.environments.processes import make_environments
from vapo.networks.saved_tokenizers import read_tokenizer
from vapo.rewards.scorer import make_scorer
from vapo.rollouts.engines.contract import SampledTurn, SamplingSettings, TurnRequest
from vapo.rollouts.engines.transformers.sampler import TransformersSampler
from vapo.rollouts.player import RolloutRunner
from vapo.types import Prompt

POLICY = "models/tug_of_war/policy"
PROMPT = "018273:qM"
TURN_TOKENS = 16


class Slow:
    """An environment of 1 to `max_turns` turns, which answers each after up to `max_latency_s`.

    The number of turns and the delays depend on the row alone.
    """

    def __init__(self, max_latency_s: float = 2.0, max_turns: int = 10) -> None:
        self.max_latency_s, self.max_turns = max_latency_s, max_turns

    def reset(self, row: Mapping[str, Any]) -> str:
        self.draw = random.Random(int(row["number"]))
        self.num_left = self.draw.randint(1, self.max_turns)
        return ""

    def step(self, text: str) -> tuple[str | None, float]:
        time.sleep(self.draw.uniform(0, self.max_latency_s))
        self.num_left -= 1
        return ("kM" if self.num_left else None), 0.0


def settings(latency_s: float, num_at_once: int) -> FitConfig:
    environment = make(
        EnvironmentConfig,
        kind="function",
        function=f"{Path(__file__).resolve()}:Slow",
        args={"max_latency_s": latency_s},
        max_turns=10,
        max_turn_tokens=TURN_TOKENS,
        max_processes=num_at_once,
    )
    return FitConfig(environment=environment)


def in_rounds(
    engine: TransformersSampler,
    environments: Environments,
    prompts: Sequence[Prompt],
    sampling: SamplingSettings,
    observation: tuple[int, ...],
) -> int:
    """Play the episodes round by round; the number of sampled tokens."""
    num_tokens = 0
    with engine.turns(sampling, seed=0) as stream:
        keys = [(i, 0) for i in range(len(prompts))]
        ids = {key: list(prompts[key[0]].prompt_ids) for key in keys}
        for key in keys:
            environments.reset(key, prompts[key[0]])
        live, turn = answered(environments, keys), 0
        while live:
            for key in live:
                stream.submit(TurnRequest(key, turn, tuple(ids[key]), TURN_TOKENS))
            sampled: list[SampledTurn] = []
            while len(sampled) < len(live):
                sampled += stream.step()
            for episode in sampled:
                ids[episode.request.key] += [*episode.ids, *observation]
                num_tokens += len(episode.ids)
                environments.step(episode.request.key, "x")
            live, turn = answered(environments, live), turn + 1
    return num_tokens


def answered(environments: Environments, keys: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Wait for all; the episodes that go on."""
    replies: list[Reply] = []
    while len(replies) < len(keys):
        replies += environments.poll(1.0)
    assert all(reply.failure is None for reply in replies)
    return [(r.key[0], r.key[1]) for r in replies if r.observation is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--at_once", type=int, default=32, help="environments that run at a time")
    parser.add_argument("--max_latency_s", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = settings(arguments.max_latency_s, arguments.at_once)
    tokenizer = read_tokenizer(POLICY)
    prompt_ids, observed_ids = (
        tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (PROMPT, "kM")
    )
    prompts = [
        Prompt(str(i), PROMPT, prompt_ids, "0", record={"number": i})
        for i in range(arguments.episodes)
    ]
    sampling = SamplingSettings(max_response_tokens=250)
    engine = TransformersSampler(
        AutoModelForCausalLM.from_pretrained(POLICY, trust_remote_code=False),
        tokenizer,
        max_concurrent_sequences=arguments.at_once,
        device="cpu",
    )
    scorer = make_scorer(config)
    player = RolloutRunner(config, engine, scorer, tokenizer)

    def ours() -> int:
        rollouts = player.play(prompts, group_size=1, settings=sampling, seed=0)
        assert all(rollout.failure is None for rollout in rollouts)
        return sum(rollout.num_sampled for rollout in rollouts)

    def rounds() -> int:
        total = 0
        with closing(make_environments(config)) as environments:
            for first in range(0, len(prompts), arguments.at_once):
                batch = prompts[first : first + arguments.at_once]
                total += in_rounds(engine, environments, batch, sampling, observed_ids)
        return total

    rates: dict[str, list[float]] = {"nobody waits": [], "in rounds": []}
    sides: list[tuple[str, Callable[[], int]]] = [("nobody waits", ours), ("in rounds", rounds)]
    with scorer:
        for _ in range(arguments.repeats):
            for name, side in sides:
                start = time.perf_counter()
                num_tokens = side()
                rates[name].append(num_tokens / (time.perf_counter() - start))
                print(f"{name}: {num_tokens} tokens, {rates[name][-1]:.1f}/s", flush=True)
    ratios = [a / b for a, b in zip(rates["nobody waits"], rates["in rounds"], strict=True)]
    print(
        f"{arguments.episodes} episodes, {arguments.at_once} at a time, latencies of 0 to "
        f"{arguments.max_latency_s:g} s: {median(rates['nobody waits']):.1f} tokens/s against "
        f"{median(rates['in rounds']):.1f}, ratio {median(ratios):.2f} "
        f"[{min(ratios):.2f}, {max(ratios):.2f}]"
    )


if __name__ == "__main__":
    main()
