"""Environments in processes, played by the loop that samples episodes."""

from __future__ import annotations

import time

import pytest

from tests.environments.open_environments import environments
from tests.rollouts.playing import AnsweringScorer, player_of
from tests.rollouts.scripted_episodes import ScriptedEngine, ScriptedStream
from tests.tiny_model import tiny_tokenizer
from vapo.config import FitConfig
from vapo.config.environments import EnvironmentConfig
from vapo.config.kinds import make
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.types import FinishReason, Prompt


@pytest.mark.slow
def test_slow_and_failing_environments_hold_up_nobody() -> None:
    """Two slow groups of 4, one whose processes die, with room for 6 at a time: 4 s in a row."""
    asked = [
        Prompt(name, name, tuple(tiny_tokenizer()("a")["input_ids"]), "", record={"fails": fails})
        for name, fails in (("first", False), ("second", True), ("third", False))
    ]
    config = FitConfig(environment=make(EnvironmentConfig, kind="function", function="m:Env"))
    start = time.monotonic()
    with environments("CountsOrDies", args={"turns": 2, "nap_s": 0.25}, max_processes=6) as envs:
        engine = ScriptedEngine(ScriptedStream(lambda request: "a"))
        rollouts = player_of(engine, AnsweringScorer(envs), config).play(
            asked, group_size=4, settings=SamplingSettings(max_response_tokens=500), seed=0
        )
    assert time.monotonic() - start < 3
    assert [rollout.failure for rollout in rollouts] == [None] * 4 + ["crash"] * 4 + [None] * 4
    for rollout in (*rollouts[:4], *rollouts[8:]):
        assert rollout.finish_reason is FinishReason.STOP
        assert [turn.reward for turn in rollout.turns] == [1.0, 2.0]
