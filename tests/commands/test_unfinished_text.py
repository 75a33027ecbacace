"""A reward model that has seen unfinished text: some responses are cut and judged again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.judged import judged, with_verdict
from vapo.commands.reward_model import with_unfinished
from vapo.config import RewardModelConfig
from vapo.config.loading import load_config
from vapo.environments.contract import Verdict
from vapo.networks.loading import load_tokenizer
from vapo.types import FinishReason, Prompt, Rollout

ROOT = Path(__file__).parents[2]
TOKENIZER = load_tokenizer(str(ROOT / "models/state_tracking/policy"), key="policy_path")


def ends_in_semicolon_two(rollouts: Sequence[Rollout]) -> list[Rollout]:
    right = [rollout.response_text.endswith(";2") for rollout in rollouts]
    return judged(rollouts, (Verdict(x, 1.0 if x else -1.0) for x in right))


def whole(index: int) -> Rollout:
    text = "a3b2;2"
    ids = tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])
    prompt = Prompt(str(index), "p", (1,), "2")
    sampled = Rollout(prompt, ids, text, (-0.5,) * len(ids), FinishReason.STOP)
    return with_verdict(sampled, Verdict(True, 1.0))


def prepared(share: float) -> list[Rollout]:
    config = load_config(
        RewardModelConfig,
        [ROOT / "conf/state_tracking/reward_model.yaml"],
        [f"unfinished_share={share}"],
    )
    rollouts = [whole(i) for i in range(200)]
    return with_unfinished(rollouts, config, TOKENIZER, ends_in_semicolon_two)


def test_a_share_of_the_responses_is_cut_and_judged_as_it_is_then() -> None:
    cut = [r for r in prepared(0.5) if r.finish_reason is FinishReason.LENGTH]
    assert 70 < len(cut) < 130
    assert {len(rollout.response_ids) for rollout in cut} == {1, 2, 3, 4, 5}
    for rollout in cut:
        assert rollout.response_text == "a3b2;2"[: len(rollout.response_ids)]
        assert len(rollout.rollout_logprobs) == len(rollout.response_ids)
        assert (rollout.is_correct, rollout.reward) == (False, -1.0)


def test_without_the_option_every_response_is_whole() -> None:
    assert prepared(0.0) == [whole(i) for i in range(200)]


def test_the_same_seed_cuts_the_same_responses() -> None:
    assert prepared(0.3) == prepared(0.3)
