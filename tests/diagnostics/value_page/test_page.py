"""The page's data is the batch's, bit by bit; its size is bounded and its colours readable."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.diagnostics.value_page.made_up_pages import evaluated, rendered, training_batch
from tests.diagnostics.value_page.reading import token_ids, unpacked
from tests.systems import estimated, system_config
from vapo.advantages.estimators import estimate_advantages
from vapo.config import resolve
from vapo.diagnostics.position_profiles import value_calibration
from vapo.diagnostics.value_page.measures import MEASURES, domain
from vapo.functional.columns import select_rows
from vapo.functional.masking import first_tokens, place_at_last_token
from vapo.types import EvaluatedBatch, FinishReason, Phase, Turn


def test_numbers_are_the_batchs() -> None:
    config = system_config("vapo", "components.decoupled_gae.lambda_critic=0.9")
    batch = training_batch(config)
    _, data = rendered(batch, config)
    rows = [response["row"] for group in data["groups"] for response in group["responses"]]
    assert sorted(rows) == list(range(len(batch)))
    lambdas = 1 - 1 / (2.0 * batch.response_lengths)
    for group in data["groups"]:
        first = group["index"] * batch.group_size
        verdicts = batch.is_correct[first : first + batch.group_size]
        assert group["num_correct"] == int(verdicts.sum())
        assert group["prompt_id"] == f"made-up:{group['index']}"
        for response in group["responses"]:
            row, num = response["row"], int(batch.response_lengths[response["row"]])
            assert token_ids(response) == list(batch.rollouts[row].response_ids)
            assert response["reward"] == float(batch.rewards[row])
            assert response["is_correct"] == bool(batch.is_correct[row])
            assert response["finish_reason"] == ("length" if row == len(batch) - 1 else "stop")
            assert response["lambda_policy"] == pytest.approx(float(lambdas[row].clamp(0, 1)))
            for name, expected in {
                "value": batch.old_values,
                "value_target": batch.value_targets,
                "advantage": batch.advantages,
                "unwhitened_advantage": batch.raw_advantages,
                "logprob": batch.old_logprobs,
                "rollout_logprob": batch.rollout_logprobs,
                "entropy": batch.old_entropy,
            }.items():
                assert expected is not None
                shown = unpacked(response["columns"][name], num)
                assert torch.equal(shown, expected[row, :num]), name


def test_derived_numbers_by_hand() -> None:
    """Reward 1, gamma 0.5, values 0.25, 0.5: returns 0.5, 1; errors and TD errors follow."""
    config = system_config("vapo", "algorithm.gamma=0.5")
    batch = evaluated(config)
    rollout = replace(
        batch.rollouts[0],
        response_ids=(4, 4),
        rollout_logprobs=(-1.0, -1.0),
        turns=(Turn(0, 2, 1.0),),
    )
    tokens: dict[str, Any] = {
        "response_ids": [4, 4],
        **{key: [True, True] for key in ("response_mask", "loss_mask", "value_mask")},
        "turn_starts": [True, False],
        "turn_rewards": [0.0, 1.0],
        "rollout_logprobs": [-1.0, -1.0],
        "old_logprobs": [-1.5, -1.0],
        "old_entropy": [0.5, 0.0],
        "old_values": [0.25, 0.5],
    }
    tokens = {name: torch.tensor([row]) for name, row in tokens.items()}
    batch = EvaluatedBatch(
        rollouts=[rollout],
        rewards=torch.tensor([1.0]),
        unshaped_rewards=torch.tensor([1.0]),
        is_correct=torch.tensor([True]),
        is_lost=torch.tensor([False]),
        is_filler=torch.tensor([False]),
        group_size=1,
        max_response_tokens=2,
        **tokens,
    )
    _, data = rendered(estimated(config, batch), config)
    columns = data["groups"][0]["responses"][0]["columns"]
    for name, expected in {
        "return": [0.5, 1.0],
        "value_error": [-0.25, -0.5],
        "td_error": [0.0, 0.5],
        "engine_gap": [-0.5, 0.0],
    }.items():
        assert unpacked(columns[name], 2).tolist() == expected, name


def one_response(finish: FinishReason, *, gamma: float = 0.5) -> dict[str, list[float]]:
    """The columns of two tokens with values 0.25 and 0.5, and a reward of 1, bootstrapped."""
    config = system_config("vapo", f"algorithm.gamma={gamma}", "critic.bootstrap_truncated=true")
    batch = evaluated(config)
    rows = select_rows(batch, [0], width=2)
    rollout = replace(
        batch.rollouts[0],
        response_ids=(4, 4),
        rollout_logprobs=(-1.0, -1.0),
        finish_reason=finish,
    )
    both = torch.tensor([[True, True]])
    rows = replace(
        rows,
        rollouts=[rollout],
        response_mask=both,
        loss_mask=both,
        rewards=torch.tensor([1.0]),
        old_values=torch.tensor([[0.25, 0.5]]),
        group_size=1,
    )
    _, data = rendered(estimated(config, rows), config)
    columns = data["groups"][0]["responses"][0]["columns"]
    return {name: unpacked(columns[name], 2).tolist() for name in ("td_error", "value_error")}


def test_a_bootstrapped_responses_td_error_is_of_the_value_that_replaces_its_reward() -> None:
    """gamma V(s_2) - V(s_1) = 0, then 0.5 * 0.5 - 0.5 where it was cut, and 1 - 0.5 where not."""
    found = one_response(FinishReason.LENGTH)
    assert found == {"td_error": [0.0, -0.25], "value_error": [-0.25, -0.5]}
    assert one_response(FinishReason.LENGTH, gamma=1.0)["td_error"] == [0.25, 0.0]
    assert one_response(FinishReason.STOP)["td_error"] == [0.0, 0.5]


def test_charts_are_of_all_rollouts_whatever_is_shown() -> None:
    config = system_config("vapo", "value_pages.num_groups=1", "value_pages.max_responses=1")
    batch = training_batch(config)
    _, data = rendered(batch, config)
    assert len(data["groups"]) == len(data["groups"][0]["responses"]) == 1
    assert data["calibration"] == value_calibration(batch, resolve(config))
    assert sum(data["calibration"]["num_tokens"]) == int(batch.response_mask.sum())
    right = batch.response_mask[batch.is_correct]
    assert sum(data["calibration"]["num_correct_tokens"]) == int(right.sum())
    assert sum(data["positions"]["num_tokens"]) == int(batch.response_mask.sum())
    assert batch.old_values is not None
    assert data["positions"]["value_mean"][0] == pytest.approx(float(batch.old_values[:, 0].mean()))
    assert data["positions"]["return_mean"][0] == pytest.approx(float(batch.rewards.mean()))
    errors = batch.old_values[:, 0].double() - batch.rewards.double()
    explained = 1 - errors.var() / batch.rewards.double().var()
    assert data["positions"]["explained_variance"][0] == pytest.approx(float(explained), abs=1e-6)


def test_a_calibration_bar_ends_where_rewards_end() -> None:
    """An interval of few prompts by t alone goes beyond them."""
    config = system_config("vapo")
    batch = training_batch(config)
    assert batch.old_values is not None
    same = replace(batch, old_values=torch.zeros_like(batch.old_values))
    rows = value_calibration(same, resolve(config))
    limits = [v for v in (*rows["return_ci_low"], *rows["return_ci_high"]) if v is not None]
    assert limits
    lowest, highest = float(batch.rewards.min()), float(batch.rewards.max())
    assert all(lowest <= limit <= highest for limit in limits)


def test_calibration_bins_cut_the_values_range_evenly() -> None:
    config = system_config("vapo")
    batch = training_batch(config)
    assert batch.old_values is not None
    values = batch.old_values[batch.response_mask].double()
    rows = rendered(batch, config)[1]["calibration"]
    lows, highs = torch.tensor(rows["low"]).double(), torch.tensor(rows["high"]).double()
    assert float(lows[0]) == pytest.approx(float(values.min()))
    assert float(highs[-1]) == pytest.approx(float(values.max()))
    width = float(values.max() - values.min()) / 12
    assert (highs - lows).tolist() == pytest.approx([width] * len(lows))
    for low, high, num, mean in zip(
        lows, highs, rows["num_tokens"], rows["value_mean"], strict=True
    ):
        is_in = (values >= low - 1e-7) & (values < high - 1e-7)
        is_in |= (high == highs[-1]) & (values > high - 1e-7)
        assert num == int(is_in.sum())
        assert mean == pytest.approx(float(values[is_in].mean()))


@pytest.mark.parametrize("system", ["grpo", "dapo", "raft"])
def test_without_a_critic_no_values_are_shown(system: str) -> None:
    config = system_config(system)
    _, data = rendered(training_batch(config), config)
    names = {measure["name"] for measure in data["measures"]}
    assert names == {"advantage", "logprob", "rollout_logprob", "entropy", "engine_gap"}
    assert data["calibration"] == {}
    assert not [key for key in data["positions"] if key.startswith(("value", "explained"))]
    response = data["groups"][0]["responses"][0]
    assert response["lambda_policy"] is None
    assert not {"value", "value_target", "td_error", "value_error"} & response["columns"].keys()


def test_value_pretraining_shows_values_against_targets() -> None:
    config = system_config("vapo")
    batch = replace(evaluated(config), old_logprobs=None, old_entropy=None)
    _, data = rendered(
        estimate_advantages(batch, Phase.VALUE_PRETRAINING, config),
        config,
    )
    names = [measure["name"] for measure in data["measures"]]
    assert names == ["value", "value_error", "td_error", "rollout_logprob"]
    for group in data["groups"]:
        for response in group["responses"]:
            assert response["columns"]["value_target"] == response["reward"]
            assert response["lambda_policy"] is None


def test_responses_without_loss_say_so() -> None:
    config = system_config("raft")
    _, data = rendered(training_batch(config), config)
    for group in data["groups"]:
        for response in group["responses"]:
            assert response["carries_loss"] == response["is_correct"]


def test_scales_leave_extremes_out_and_are_symmetric_around_0() -> None:
    numbers = torch.cat([torch.linspace(-1, 0.5, 99), torch.tensor([50.0, float("nan")])])
    by_name = {measure.name: measure for measure in MEASURES}
    low, high = domain(by_name["advantage"], numbers)
    assert (low, high) == (-high, high)
    assert 0.9 < high < 1
    low, high = domain(by_name["value"], numbers)
    assert (low, high) == pytest.approx((-0.97, 0.48), abs=0.02)
    assert domain(by_name["value"], torch.tensor([float("nan")])) == (0.0, 1.0)


def test_the_surprise_at_the_end_does_not_pale_the_other_td_errors() -> None:
    config = system_config("vapo")
    batch = training_batch(config)
    assert batch.old_values is not None
    _, data = rendered(replace(batch, old_values=0.01 * batch.old_values), config)
    ends = {measure["name"]: measure["domain"][1] for measure in data["measures"]}
    assert ends["td_error"] < 0.05
    assert ends["value_error"] > 0.9


# ---- size, repeatability, readability ----------------------------------------------------------


def test_the_same_batch_gives_the_same_page() -> None:
    config = system_config("vapo")
    assert (
        rendered(training_batch(config), config)[0] == rendered(training_batch(config), config)[0]
    )


def test_size_is_bounded_whatever_the_batch() -> None:
    config = system_config("vapo", "value_pages.max_tokens=2000", "value_pages.num_groups=4")
    batch = evaluated(config)
    generator = torch.Generator().manual_seed(0)

    def noise() -> torch.Tensor:
        return torch.randn(12, 5000, generator=generator)

    long = replace(batch.rollouts[0].prompt, text="a < b\n" * 100_000, answer="9" * 10_000)
    every = torch.ones(12, 5000, dtype=torch.bool)
    batch = replace(
        batch,
        rollouts=[
            replace(
                r,
                prompt=long,
                response_ids=(4,) * 5000,
                rollout_logprobs=(-1.0,) * 5000,
                turns=(Turn(0, 5000, r.reward),),
            )
            for r in batch.rollouts
        ],
        response_ids=torch.full((12, 5000), 4),
        response_mask=every,
        loss_mask=every,
        value_mask=every,
        turn_starts=first_tokens(every),
        turn_rewards=place_at_last_token(batch.rewards, every),
        rollout_logprobs=noise(),
        old_logprobs=noise(),
        old_values=noise(),
        old_entropy=noise(),
        step_starts=None,
        step_values=None,
    )
    page, data = rendered(estimated(config, batch), config)
    shown = [len(token_ids(r)) for group in data["groups"] for r in group["responses"]]
    assert shown == [500] * 4
    assert {r["num_tokens"] for group in data["groups"] for r in group["responses"]} == {5000}
    assert "more characters" in data["groups"][0]["prompt"]
    assert len(page) < 60 * sum(shown) + 4 * 60_000 + 60_000


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_is_readable_on_every_colour_light_and_dark() -> None:
    """WCAG's 4.5 to 1. Colours between the two ends lie between them in contrast, too."""
    style = (Path(__file__).parents[3] / "vapo/diagnostics/value_page/page.css").read_text()
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    for block in (light, dark):
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        pairs = [("text", ground) for ground in ("mid", "pos", "neg", "seq-lo", "seq-hi", "panel")]
        pairs += [("muted", ground) for ground in ("bg", "paper", "panel")]
        pairs += [("right", "paper"), ("wrong", "paper"), ("bg", "accent")]
        for text, ground in pairs:
            a, b = sorted([luminance(colours[text]), luminance(colours[ground])])
            assert (b + 0.05) / (a + 0.05) >= 4.5, (text, ground)
