"""Merging, interpolation, and a config back to YAML, keys and a hash."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.config.fits import MINIMAL, PROCEDURAL, fit_config, write
from vapo.config import FitConfig
from vapo.config.checkpoints import identity_values
from vapo.config.components import ClipHigher
from vapo.config.data import JsonlSource
from vapo.config.loading import compose, from_yaml, load_config
from vapo.config.schema import OptimizerConfig, SourceConfig
from vapo.config.written import config_hash, flatten, to_yaml


def test_last_layer_wins_and_the_rest_stays(tmp_path: Path) -> None:
    files = [
        write(tmp_path, MINIMAL, "a.yaml"),
        write(tmp_path, "algorithm: {gamma: 0.5, eps_low: 0.1}", "b.yaml"),
        write(tmp_path, "algorithm: {gamma: 0.6}", "c.yaml"),
    ]
    config = load_config(FitConfig, files, ["seed=7"])
    assert (config.algorithm.gamma, config.algorithm.eps_low, config.seed) == (0.6, 0.1, 7)
    assert load_config(FitConfig, files, ["algorithm.gamma=0.7"]).algorithm.gamma == 0.7
    assert load_config(FitConfig, files[::-1], []).algorithm.gamma == 0.5


def test_result_is_typed_dataclasses(tmp_path: Path) -> None:
    config = fit_config(tmp_path, "data.heldout.path=x.jsonl")
    assert type(config) is FitConfig
    assert type(config.actor.optimizer) is OptimizerConfig
    assert isinstance(config.data.heldout, SourceConfig)
    assert isinstance(config.data.heldout, JsonlSource)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.components.clip_higher.eps_high = 1.0  # type: ignore[misc]


def test_a_nullable_block_is_set_and_unset_by_overlays(tmp_path: Path) -> None:
    overlay = "data: {heldout: {path: x.jsonl}}"
    heldout = fit_config(tmp_path, overlay=overlay).data.heldout
    assert heldout is not None
    assert heldout.path == "x.jsonl"  # type: ignore[attr-defined]
    assert fit_config(tmp_path, "data.heldout=null", overlay=overlay).data.heldout is None


def test_overrides_reach_interpolations(tmp_path: Path) -> None:
    overlay = "actor: {optimizer: {lr: '${critic.optimizer.lr}'}}"
    assert fit_config(tmp_path, overlay=overlay).actor.optimizer.lr == 2e-6
    config = fit_config(tmp_path, "critic.optimizer.lr=5e-4", overlay=overlay)
    assert config.actor.optimizer.lr == config.critic.optimizer.lr == 5e-4


def test_interpolation_to_a_key_of_another_file_and_to_a_block(tmp_path: Path) -> None:
    files = [
        write(tmp_path, "actor: {optimizer: '${critic.optimizer}'}", "a.yaml"),
        write(tmp_path, MINIMAL, "b.yaml"),
        write(tmp_path, "critic: {optimizer: {warmup_steps: 9}}", "c.yaml"),
    ]
    config = load_config(FitConfig, files, [])
    assert config.actor.optimizer == config.critic.optimizer
    assert config.actor.optimizer.warmup_steps == 9


def test_interpolation_on_the_command_line(tmp_path: Path) -> None:
    config = fit_config(tmp_path, "algorithm.lambda_policy=${algorithm.gamma}")
    assert config.algorithm.lambda_policy == 1.0


@pytest.mark.parametrize(
    ("override", "read", "expected"),
    [
        ("components.clip_higher.enabled=false", "components.clip_higher", ClipHigher(False)),
        ("actor.optimizer.lr=1e-3", "actor.optimizer.lr", 1e-3),
        ("algorithm.gamma=1", "algorithm.gamma", 1.0),
        ("critic.value_clip=null", "critic.value_clip", None),
        ("critic.value_clip=", "critic.value_clip", None),
        ("data.train.options={a: [1, x]}", "data.train.options", {"a": [1, "x"]}),
        ("data.train.options.a=true", "data.train.options", {"a": True}),
        ("tracking.tags.team=red", "tracking.tags", {"team": "red"}),
        ("tracking.run_name=3", "tracking.run_name", "3"),
        ("tracking.run_name=2026-01-02", "tracking.run_name", "2026-01-02"),
        ("tracking.run_name=null", "tracking.run_name", None),
        ("tracking.run_name='null'", "tracking.run_name", "null"),
        ("data.prompt_template={prompt}", "data.prompt_template", "{prompt}"),
        ("data.prompt_template=Q: {prompt} # A=", "data.prompt_template", "Q: {prompt} # A="),
        ('data.prompt_template="{prompt}\\n"', "data.prompt_template", "{prompt}\n"),
        ("rewards.pattern=[(]([0-9: ]+)", "rewards.pattern", "[(]([0-9: ]+)"),
    ],
)
def test_override_values(tmp_path: Path, override: str, read: str, expected: object) -> None:
    value: object = fit_config(
        tmp_path, *PROCEDURAL, "rewards={verifier: regex, pattern: (x)}", override
    )
    for name in read.split("."):
        value = getattr(value, name)
    assert value == expected
    assert type(value) is type(expected)


def test_yaml_round_trip_with_text_that_looks_like_interpolation(tmp_path: Path) -> None:
    config = fit_config(
        tmp_path,
        r"data.prompt_template=\${x}$ {prompt} \\\${y}",
        "tracking.run_name='1e-3'",
        *PROCEDURAL,
        "data.train.options={nested: {a: 1.5, b: null}}",
    )
    assert config.data.prompt_template == r"${x}$ {prompt} \${y}"
    assert from_yaml(FitConfig, to_yaml(config), source="text") == config


def test_a_config_that_an_earlier_version_recorded_is_read(tmp_path: Path) -> None:
    """Of a checkpoint, in which nobody can edit it. A file gets the error with the new name."""
    now = ("critic.value_clip=0.25", "checkpoints.every_n_iterations=3")
    config = fit_config(tmp_path, *now)
    text = to_yaml(config)
    for block, new, old in (
        ("algorithm", "  value_clip: 0.25\n", "  value_clip: 0.25\n"),
        ("trainer", "  every_n_iterations: 3\n", "  checkpoint_every_n_iterations: 3\n"),
    ):
        assert text.count(new) == 1
        text = text.replace(new, "").replace(f"\n{block}:\n", f"\n{block}:\n{old}")
    assert from_yaml(FitConfig, text, source="the checkpoint's config") == config
    recorded = {"algorithm.value_clip": 0.25, "trainer.checkpoint_every_n_iterations": 3}
    assert identity_values(recorded) == identity_values({"critic.value_clip": 0.25})


def test_tree_keeps_interpolations_and_loads_back(tmp_path: Path) -> None:
    overlay = "actor: {optimizer: {lr: '${critic.optimizer.lr}'}}"
    files = [write(tmp_path, MINIMAL, "a.yaml"), write(tmp_path, overlay, "b.yaml")]
    composed = compose(FitConfig, files, ["seed=3"])
    text = to_yaml(composed.tree)
    assert "lr: ${critic.optimizer.lr}" in text
    again = write(tmp_path, text, "again.yaml")
    assert load_config(FitConfig, [again], []) == composed.config
    changed = load_config(FitConfig, [again], ["critic.optimizer.lr=1e-2"])
    assert changed.actor.optimizer.lr == 1e-2


def test_flatten_has_one_scalar_per_dotted_key(tmp_path: Path) -> None:
    flat = flatten(fit_config(tmp_path, *PROCEDURAL, "data.train.options={a: {b: 1}, c: [1, 2]}"))
    assert flat["components.clip_higher.eps_high"] == 0.28
    assert flat["data.train.options.a.b"] == 1
    assert flat["data.train.options.c"] == "[1, 2]"
    assert flat["data.heldout"] is None
    assert flat["tracking.tags"] == "{}"
    assert all(v is None or isinstance(v, (str, int, float, bool)) for v in flat.values())
    assert flatten(ClipHigher()) == {"enabled": True, "eps_high": 0.28}


def test_hash_follows_the_resolved_values(tmp_path: Path) -> None:
    plain = config_hash(fit_config(tmp_path))
    assert len(plain) == 12
    assert int(plain, 16) >= 0
    assert config_hash(fit_config(tmp_path, "actor.optimizer.lr=0.000001")) == plain
    same = fit_config(tmp_path, overlay="algorithm: {lambda_policy: 0.95}")
    assert config_hash(same) == plain
    assert config_hash(fit_config(tmp_path, "seed=1")) != plain
    options = ["data.train.options={a: 1, b: 2}", "data.train.options={b: 2, a: 1}"]
    first, second = (config_hash(fit_config(tmp_path, *PROCEDURAL, option)) for option in options)
    assert first == second != plain


def test_defaults_are_complete_and_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert fit_config(tmp_path, overlay="# only a comment\n") == fit_config(tmp_path)


def test_a_config_shares_nothing_with_the_file_that_was_read(tmp_path: Path) -> None:
    """A file's text is read once for all configs."""
    overlay = "environment: {kind: function, function: 'm:f', args: {grid: [[1, 2], {a: [3]}]}}"

    def grid() -> list[Any]:
        found: Any = fit_config(tmp_path, overlay=overlay).environment
        return found.args["grid"]

    first = grid()
    first[0].append(5)
    first[1]["a"].append(5)
    assert grid() == [[1, 2], {"a": [3]}]
