"""A rate written for one model is refused for a much larger one, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.fits import write
from vapo.config import FitConfig
from vapo.config.loading import compose
from vapo.config.other_models import check_learning_rates
from vapo.errors import UserError


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A config with rates, for a policy of 1,000 bytes and a reward model of 1,000."""
    for name, size in (("policy", 1000), ("reward", 1000), ("alike", 9000), ("large", 11000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"0" * size)
    return write(
        tmp_path,
        f"actor: {{path: {tmp_path}/policy, optimizer: {{lr: 1.0e-4}}}}\n"
        f"critic: {{reward_model_path: {tmp_path}/reward, optimizer: {{lr: 5.0e-4}}}}\n"
        "data: {train: {path: prompts.jsonl}}\n",
        "small.yaml",
    )


def check(file: Path, *overrides: str) -> None:
    composed = compose(FitConfig, [file], list(overrides))
    check_learning_rates(composed.config)


def test_the_files_own_models_and_models_of_their_size_are_fine(small: Path) -> None:
    folder = small.parent
    check(small)
    check(small, f"actor.path={folder}/alike")
    check(small, f"critic.reward_model_path={folder}/alike")
    check(small, f"critic.init={folder}/alike")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["actor.path={}/large"], "small.yaml:1: actor.optimizer.lr 0.0001 .*11 times as large"),
        (["actor.path=Qwen/Qwen2.5-7B"], "actor is now Qwen/Qwen2.5-7B, whose size is not known"),
        (["critic.init={}/large"], "small.yaml:2: critic.optimizer.lr 0.0005 was given for .*"),
        (["critic.reward_model_path={}/large"], "the critic is now .*large, 11 times as large"),
        (
            ["actor.path={}/large", "actor.optimizer.lr=1e-6", "critic.init=policy"],
            "critic.optimizer.lr 0.0005 was given for .*reward, and the critic is now .*large",
        ),
    ],
)
def test_a_larger_model_needs_a_rate_of_its_own(
    small: Path, overrides: list[str], reason: str
) -> None:
    given = [override.format(small.parent) for override in overrides]
    with pytest.raises(UserError, match=reason):
        check(small, *given)


def test_with_rates_of_their_own_large_models_are_fine(small: Path) -> None:
    model = f"actor.path={small.parent}/large"
    check(small, model, "actor.optimizer.lr=1e-6")
    rates = ("actor.optimizer.lr=1e-6", "critic.optimizer.lr=2e-6")
    check(small, model, "critic.init=policy", *rates)


def test_a_probe_does_not_read_the_networks_rate(small: Path) -> None:
    large = (f"actor.path={small.parent}/large", "actor.optimizer.lr=1e-6", "critic.init=policy")
    with pytest.raises(UserError, match=r"critic\.optimizer\.lr"):
        check(small, *large)
    check(small, *large, "critic.kind=probe")


def test_a_rate_above_the_model_in_the_layers_is_for_that_model(small: Path) -> None:
    over = write(small.parent, "extends: small.yaml\nactor: {optimizer: {lr: 2.0e-4}}\n", "o.yaml")
    check(over)
    with pytest.raises(UserError, match=r"o.yaml:2: actor.optimizer.lr 0.0002 was given for"):
        check(over, f"actor.path={small.parent}/large")


def test_a_model_that_is_not_here_has_no_size_to_compare_with(tmp_path: Path) -> None:
    text = "critic: {init: policy}\ndata: {train: {path: prompts.jsonl}}\n"
    text += "actor: {path: Qwen/Qwen2.5-7B, optimizer: {lr: 1.0e-6}}\n"
    check(write(tmp_path, text), "actor.path=Qwen/Qwen2.5-14B")


def test_defaults_and_rates_without_a_model_are_for_any(tmp_path: Path) -> None:
    text = "critic: {init: policy}\ndata: {train: {path: prompts.jsonl}}\n"
    check(write(tmp_path, text), "actor.path=Qwen/Qwen2.5-7B")
    with_rate = write(tmp_path, f"{text}actor: {{optimizer: {{lr: 1.0e-5}}}}\n")
    check(with_rate, "actor.path=Qwen/Qwen2.5-7B")


def test_without_a_critic_its_rate_does_not_matter(small: Path) -> None:
    overrides = ["algorithm.advantage_estimator=leave_one_out", "critic.init=Qwen/Qwen2.5-7B"]
    switches = ("value_pretraining", "decoupled_gae", "length_adaptive_gae")
    off = [f"components.{name}.enabled=false" for name in switches]
    check(small, *overrides, *off, "algorithm.whiten_advantages=false")


def test_a_path_below_the_home_folder_is_the_folder(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(small.parent))
    check(small, "actor.path=~/alike")
    check(small, "actor.path=~/policy", f"critic.init={small.parent}/reward")
    text = small.read_text().replace(str(small.parent), "~")
    from_home = write(small.parent, text, "home.yaml")
    with pytest.raises(UserError, match="the actor is now ~/large, 11 times as large"):
        check(from_home, "actor.path=~/large")
