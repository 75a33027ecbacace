"""The table of keys that help and checks are made from."""

from __future__ import annotations

import pytest

from vapo.config import FitConfig, RewardModelConfig, SftConfig
from vapo.config.options import Option, Section, describe, is_key, nearest_key
from vapo.config.written import flatten

SCHEMAS = [FitConfig, SftConfig, RewardModelConfig]
# Numbers that may be anything finite.
UNBOUNDED = {
    "rewards.reward_model_threshold",
    "rewards.verifiers.NAME.reward_model_threshold",
    "environment.correct_above",
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_key_has_a_doc_and_every_number_a_range(schema: type) -> None:
    for key, entry in describe(schema).items():
        assert entry.doc.strip(), f"{key} has no doc"
        if isinstance(entry, Option) and entry.type in (int, float):
            assert bool(entry.bounds) == (key not in UNBOUNDED), key


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_default_is_in_its_own_range(schema: type) -> None:
    for entry in describe(schema).values():
        if isinstance(entry, Option):
            assert entry.misfit(entry.default) is None, entry.key


def test_table_and_flattened_config_have_the_same_keys() -> None:
    options = {key for key, entry in describe(FitConfig).items() if isinstance(entry, Option)}
    null = {"data.heldout", "actor.lora", "critic.lora", "critic.sampled_logprobs", "critic.ridge"}
    inside_null = {key for key in options if key.startswith(tuple(f"{name}." for name in null))}
    named = {key for key in options if ".NAME." in key}
    defaults, entries = flatten(FitConfig()), describe(FitConfig)
    other_kinds = {
        key
        for key in options
        for part in range(key.count(".") + 1)
        for kind_key, kinds in entries[key.rsplit(".", part)[0]].only.items()
        if defaults.get(kind_key) not in kinds
    }
    assert set(defaults) == (options - inside_null - named - other_kinds) | null
    assert {"data.train.task", "rewards.pattern", "rollouts.vllm.dtype"} <= other_kinds


def test_entries_carry_type_default_and_range() -> None:
    entries = describe(FitConfig)
    clip = entries["critic.value_clip"]
    assert isinstance(clip, Option)
    assert (clip.label, clip.default, clip.range) == ("float|null", None, "> 0")
    lr = entries["critic.optimizer.lr"]
    assert isinstance(lr, Option)
    assert (lr.label, lr.default) == ("float", 2e-6)
    path = entries["actor.path"]
    assert isinstance(path, Option)
    assert path.required
    heldout = entries["data.heldout"]
    assert isinstance(heldout, Section)
    assert heldout.nullable


@pytest.mark.parametrize(
    ("key", "known"),
    [
        ("seed", True),
        ("data", True),
        ("data.heldout.path", True),
        ("data.train.options.anything.at_all", True),
        ("tracking.tags.x", True),
        ("data.train.sources.math", True),
        ("data.train.sources.math.weight", True),
        ("data.train.sources.math.options.min_terms", True),
        ("data.train.sources.math.wieght", False),
        ("data.train.nothing", False),
        ("seed.x", False),
        ("nothing", False),
        ("nothing.x", False),
    ],
)
def test_is_key(key: str, known: bool) -> None:
    assert is_key(key, describe(FitConfig)) is known


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("components.clip_higer", "components.clip_higher"),
        ("clip_higher.eps_high", "components.clip_higher.eps_high"),
        ("componets.clip_higher.eps_high", "components.clip_higher.eps_high"),
        ("alpha", "components.length_adaptive_gae.alpha"),
        ("training.minibatchsize", "training.minibatch_size"),
        ("rollout.temperature", "rollouts.temperature"),
        ("sede", "seed"),
        ("qqqqq", None),
    ],
)
def test_nearest_key(key: str, nearest: str | None) -> None:
    assert nearest_key(key, describe(FitConfig)) == nearest
