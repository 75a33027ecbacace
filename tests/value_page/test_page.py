"""The page's data is the batch's, bit by bit, and no response can do anything in it."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.systems import MAX_RESPONSE_TOKENS, made_up_batch, system_config
from tests.tiny_model import tiny_tokenizer
from tests.value_page.reading import page_json, token_ids, unpacked
from vapo.advantages import set_advantages, set_monte_carlo_targets, token_rewards
from vapo.config import FitConfig, resolve
from vapo.position_profiles import position_profile, value_calibration
from vapo.types import Prompt, RolloutBatch
from vapo.value_page.contents import PageContents, page_contents
from vapo.value_page.measures import MEASURES, domain
from vapo.value_page.rendering import render_page
from vapo.value_page.token_text import TokenText

HOSTILE = "</script><script>document.title='x'</script><!--\u202e\x00\ud800 & {{script}} <b>"
ABOUT: dict[str, Any] = {"title": "a run </title><b>", "facts": {"run": "<i>1</i>"}, "notes": []}


def evaluated(config: FitConfig) -> RolloutBatch:
    """Made-up rollouts after the advantage stage, in float32."""
    batch, _ = made_up_batch(config)
    for name in ("old_logprobs", "old_values", "ref_logprobs", "rewards", "baseline_rewards"):
        setattr(batch, name, getattr(batch, name).float())
    if not config.algorithm.has_critic:
        batch.old_values = None
    if config.algorithm.kl.coef == 0:
        batch.ref_logprobs = None
    assert batch.old_logprobs is not None
    batch.old_entropy = batch.old_logprobs.abs()
    batch.token_rewards = token_rewards(batch, config.algorithm)
    set_advantages(batch, resolve(config), config.algorithm)
    return batch


def contents_of(batch: RolloutBatch, config: FitConfig) -> PageContents:
    positions = position_profile(batch, resolve(config), max_response_tokens=MAX_RESPONSE_TOKENS)
    return page_contents(batch, config, positions, iteration=3)


def rendered(batch: RolloutBatch, config: FitConfig) -> tuple[str, dict[str, Any]]:
    page = render_page(contents_of(batch, config), TokenText(tiny_tokenizer()), ABOUT)
    return page, page_json(page)


def test_numbers_are_the_batchs() -> None:
    config = system_config("vapo", "components.decoupled_gae.lambda_critic=0.9")
    batch = evaluated(config)
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
    rollout = replace(batch.rollouts[0], response_ids=(4, 4), rollout_logprobs=(-1.0, -1.0))
    tokens: dict[str, Any] = {
        "response_ids": [4, 4],
        "response_mask": [True, True],
        "loss_mask": [True, True],
        "rollout_logprobs": [-1.0, -1.0],
        "old_logprobs": [-1.5, -1.0],
        "old_entropy": [0.5, 0.0],
        "old_values": [0.25, 0.5],
        "token_rewards": [0.0, 1.0],
    }
    tokens = {name: torch.tensor([row]) for name, row in tokens.items()}
    batch = RolloutBatch(
        rollouts=[rollout],
        verdicts=batch.verdicts[:1],
        rewards=torch.tensor([1.0]),
        is_correct=torch.tensor([True]),
        group_size=1,
        **tokens,
    )
    set_advantages(batch, resolve(config), config.algorithm)
    _, data = rendered(batch, config)
    columns = data["groups"][0]["responses"][0]["columns"]
    for name, expected in {
        "return": [0.5, 1.0],
        "value_error": [-0.25, -0.5],
        "td_error": [0.0, 0.5],
        "engine_gap": [-0.5, 0.0],
    }.items():
        assert unpacked(columns[name], 2).tolist() == expected, name


def test_charts_are_of_all_rollouts_whatever_is_shown() -> None:
    config = system_config("vapo", "value_pages.num_groups=1", "value_pages.max_responses=1")
    batch = evaluated(config)
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


@pytest.mark.parametrize("system", ["grpo", "dapo", "raft"])
def test_without_a_critic_there_is_nothing_of_values(system: str) -> None:
    config = system_config(system)
    _, data = rendered(evaluated(config), config)
    names = {measure["name"] for measure in data["measures"]}
    assert names == {"advantage", "logprob", "rollout_logprob", "entropy", "engine_gap"}
    assert data["calibration"] == {}
    assert not [key for key in data["positions"] if key.startswith(("value", "explained"))]
    response = data["groups"][0]["responses"][0]
    assert response["lambda_policy"] is None
    assert not {"value", "value_target", "td_error", "value_error"} & response["columns"].keys()


def test_value_pretraining_shows_values_against_targets() -> None:
    config = system_config("vapo")
    batch = evaluated(config)
    batch.old_logprobs = batch.old_entropy = batch.advantages = batch.raw_advantages = None
    set_monte_carlo_targets(batch, 1.0)
    _, data = rendered(batch, config)
    names = [measure["name"] for measure in data["measures"]]
    assert names == ["value", "value_error", "td_error", "rollout_logprob"]
    for group in data["groups"]:
        for response in group["responses"]:
            assert response["columns"]["value_target"] == response["reward"]
            assert response["lambda_policy"] is None


def test_responses_without_loss_say_so() -> None:
    config = system_config("raft")
    _, data = rendered(evaluated(config), config)
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


# ---- hostile text ----------------------------------------------------------------------------


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script" and self.scripts:
            self.scripts[-1] += data


def hostile_page() -> tuple[str, dict[str, Any]]:
    config = system_config("vapo", "value_pages.num_groups=1")
    batch = evaluated(config)
    prompt = Prompt(HOSTILE, HOSTILE, (2, 3), HOSTILE)
    batch.rollouts = [replace(rollout, prompt=prompt) for rollout in batch.rollouts]
    batch.verdicts = [
        replace(verdict, extracted=HOSTILE, failure=HOSTILE) for verdict in batch.verdicts
    ]
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([HOSTILE.replace("\ud800", "").replace("\x00", "\x01")])
    batch.response_ids[:] = len(tokenizer) - 1
    page = render_page(contents_of(batch, config), TokenText(tokenizer), ABOUT)
    return page, page_json(page)


def test_hostile_text_stays_text() -> None:
    page, data = hostile_page()
    elements = Elements()
    elements.feed(page)
    assert len(elements.scripts) == 2
    assert not {"b", "i", "img", "iframe", "object", "link", "base"} & set(elements.tags)
    assert elements.links == []
    assert "&lt;/title&gt;" in page
    token = next(iter(data["tokens"].values()))
    expected = "</script><script>document.title='x'</script><!--⟨U+202E⟩"
    assert token.startswith(expected)
    group = data["groups"][0]
    for text in (group["prompt"], group["prompt_id"], group["answer"]):
        assert text.startswith(f"{expected}␀⟨U+D800⟩")
    assert group["responses"][0]["extracted"].endswith("& {{script}} <b>")


def test_data_is_plain_ascii_without_markup() -> None:
    page, _ = hostile_page()
    start = page.index('id="data">') + len('id="data">')
    data = page[start:].partition("</script")[0]
    assert data.isascii()
    assert not set(data) & set("<>&\x00\x1b\u202e")


def test_policy_admits_the_pages_own_script_and_style_only() -> None:
    page, _ = hostile_page()
    found = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert found is not None
    policy = dict(part.strip().split(" ", 1) for part in found[1].split(";"))
    assert policy["default-src"] == "'none'"
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    style = page.partition("<style>")[2].partition("</style>")[0]
    for name, text in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[name] == f"'sha256-{digest}'"
    assert "http:" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https:" not in page
    for way in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("):
        assert way not in script


# ---- size, repeatability, readability ----------------------------------------------------------


def test_the_same_batch_gives_the_same_page() -> None:
    config = system_config("vapo")
    assert rendered(evaluated(config), config)[0] == rendered(evaluated(config), config)[0]


def test_size_is_bounded_whatever_the_batch() -> None:
    config = system_config("vapo", "value_pages.max_tokens=2000", "value_pages.num_groups=4")
    batch = evaluated(config)
    generator = torch.Generator().manual_seed(0)

    def noise() -> torch.Tensor:
        return torch.randn(12, 5000, generator=generator)

    long = replace(batch.rollouts[0].prompt, text="a < b\n" * 100_000, answer="9" * 10_000)
    batch.rollouts = [
        replace(r, prompt=long, response_ids=(4,) * 5000, rollout_logprobs=(-1.0,) * 5000)
        for r in batch.rollouts
    ]
    batch.response_ids = torch.full((12, 5000), 4)
    batch.response_mask = torch.ones(12, 5000, dtype=torch.bool)
    batch.loss_mask = batch.response_mask
    for name in ("rollout_logprobs", "old_logprobs", "old_values", "old_entropy"):
        setattr(batch, name, noise())
    batch.token_rewards = token_rewards(batch, config.algorithm)
    set_advantages(batch, resolve(config), config.algorithm)
    page, data = rendered(batch, config)
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
    style = (Path(__file__).parents[2] / "vapo/value_page/page.css").read_text()
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    for block in (light, dark):
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        pairs = [("text", ground) for ground in ("mid", "pos", "neg", "seq-lo", "seq-hi", "panel")]
        pairs += [("muted", ground) for ground in ("bg", "paper", "panel")]
        pairs += [("right", "paper"), ("wrong", "paper"), ("bg", "accent")]
        for text, ground in pairs:
            a, b = sorted([luminance(colours[text]), luminance(colours[ground])])
            assert (b + 0.05) / (a + 0.05) >= 4.5, (text, ground)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Debian's chromium")
def test_a_browser_draws_it_and_switches_colours(tmp_path: Path) -> None:
    """The script runs to its end; tokens are there as text; the measure of the URL is chosen."""
    page, data = hostile_page()
    file = tmp_path / "page.html"
    file.write_text(page)

    def drawn(fragment: str) -> str:
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        command += [
            "--window-size=1400,4000",
            "--virtual-time-budget=3000",
            f"--user-data-dir={tmp_path / 'profile'}",
        ]
        done = subprocess.run(
            [*command, f"{file.as_uri()}{fragment}"], capture_output=True, text=True, timeout=120
        )
        return done.stdout

    plain, advantage = drawn(""), drawn("#advantage")
    for dom, scale in ((plain, "sequential"), (advantage, "diverging")):
        assert re.search(rf'<body[^>]*data-scale="{scale}"', dom)
        assert 'data-ready="true"' in dom
        assert "<title>a run &lt;/title&gt;&lt;b&gt;</title>" in dom
        assert dom.count("<article") == len(data["groups"][0]["responses"])
        assert dom.count("<figure>") == 6
    assert re.search(r'class="t[^"]*"[^>]*>&lt;/script&gt;&lt;script&gt;', plain)
    strengths = [
        re.findall(r'class="t[^"]*" style="--x: ([\d.]+)', dom) for dom in (plain, advantage)
    ]
    assert len(strengths[0]) == sum(r["num_tokens"] for r in data["groups"][0]["responses"])
    assert strengths[0] != strengths[1]
