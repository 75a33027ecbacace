"""A slow verifier beside the sampling: an iteration's rollouts and verdicts against the longer.

    python experiments/bench/judging.py [--workers 4] [--repeats 3]

64 responses of 20 to 120 tokens by an engine whose steps are held back, so that sampling takes
about as long as judging; the verifier sleeps for 0.5 s. Wall-clock time: it is that of waiting.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from all_responses import sample_all  # beside this file

from vapo.config import FitConfig
from vapo.config.kinds import make
from vapo.config.schema import RewardConfig
from vapo.networks.loading import load_causal_lm, load_tokenizer
from vapo.rewards.scorer import VerifierScorer
from vapo.rollouts.engines.contract import SampledTurn, SamplingSettings
from vapo.rollouts.engines.transformers.sampler import TransformersSampler
from vapo.rollouts.player import RolloutRunner
from vapo.types import Prompt

POLICY = str(Path(__file__).parents[2] / "models/state_tracking/policy")
NUM_RESPONSES, ROWS, TOKENS = 64, 8, 120
VERDICT_S = 0.5  # of slow_verifier.py


class SlowSampler(TransformersSampler):
    """Each step of a stream takes a while longer, and no token ends a response."""

    delay_s = 0.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.end_ids = frozenset({-1})

    @contextmanager
    def turns(self, settings: SamplingSettings, *, seed: int) -> Iterator[Any]:
        with super().turns(settings, seed=seed) as stream:
            step = stream.step

            def slow_step() -> list[SampledTurn]:
                time.sleep(self.delay_s)
                return step()

            stream.step = slow_step  # type: ignore[method-assign]
            yield stream


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(POLICY)
    model = load_causal_lm(POLICY, dtype="float32", attn_implementation="auto")
    sampler = SlowSampler(model, tokenizer, max_concurrent_sequences=ROWS, device="cpu")
    longest = NUM_RESPONSES * VERDICT_S / options.workers
    # as many rounds of 8 rows as there are responses, of steps of 8 tokens
    sampler.delay_s = 0.6 * longest / (NUM_RESPONSES / ROWS * TOKENS / 8)
    draw = random.Random(0)
    prompts = [
        Prompt(str(i), "", (5, 6, 7), "1", max_response_tokens=draw.randint(20, TOKENS))
        for i in range(NUM_RESPONSES)
    ]
    how: dict[str, Any] = {"group_size": 1, "settings": SamplingSettings(TOKENS)}
    config = FitConfig(
        rewards=make(
            RewardConfig,
            verifier="python",
            function="slow_verifier:judge",
            function_folder=str(Path(__file__).parent),
            num_workers=options.workers,
        )
    )
    ratios = []
    with VerifierScorer(config) as scorer:
        player = RolloutRunner(config, sampler, scorer, tokenizer)
        for seed in range(options.repeats):
            times = [time.perf_counter()]
            rollouts = sample_all(sampler, tokenizer, prompts, seed=seed, **how)
            times.append(time.perf_counter())
            scorer.score(rollouts)
            times.append(time.perf_counter())
            player.play(prompts, seed=seed, **how)
            times.append(time.perf_counter())
            sampling, judging, both = (b - a for a, b in itertools.pairwise(times))
            ratios.append(both / max(sampling, judging))
            print(f"sampling {sampling:.1f} s, judging {judging:.1f} s, together {both:.1f} s")
    print(f"together against the longer: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
