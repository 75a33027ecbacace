"""Every YAML under conf/ is parsed, checked and resolved, alone or over what it overlays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.config.fits import ROOT
from vapo.config import FitConfig, RewardModelConfig, SftConfig, resolve
from vapo.config.loading import Composed, compose, from_yaml, load_config
from vapo.config.written import flatten, to_yaml
from vapo.errors import UserError

CONF = ROOT / "conf"
DEFAULT = CONF / "vapo.yaml"
ALGORITHMS = sorted(CONF.glob("algorithm/*.yaml"))
SCALES = sorted(CONF.glob("scale/*.yaml"))
DATA = sorted(CONF.glob("data/*.yaml"))
RECIPES = sorted(CONF.glob("recipes/*.yaml"))
TASKS = sorted(CONF.glob("*/vapo.yaml"))
TASKS.remove(CONF / "algorithm/vapo.yaml")
OWN_MODEL = ["actor.path=mine", "critic.init=policy"]
NAMES = {"vapo": FitConfig, "sft": SftConfig, "reward_model": RewardModelConfig}


def schema_of(path: Path) -> type | None:
    """The schema of a whole config, by its name: vapo*.yaml, sft*.yaml, reward_model*.yaml."""
    if path in RECIPES:
        return FitConfig
    return next((s for name, s in NAMES.items() if path.stem.startswith(name)), None)


FOLDERS_OF_OVERLAYS = {"algorithm", "data", "scale", "sweep"}
WHOLE = [  # at the top, and in the tasks' folders
    path
    for path in CONF.rglob("*.yaml")
    if path.relative_to(CONF).parts[0] not in FOLDERS_OF_OVERLAYS
]


def test_every_file_has_a_known_place() -> None:
    unknown = [path for path in WHOLE if schema_of(path) is None]
    assert not unknown
    assert {path.name for path in CONF.iterdir() if path.is_file()} == {DEFAULT.name}
    assert not list(CONF.rglob("*.yml"))


@pytest.mark.parametrize("path", sorted(WHOLE), ids=lambda path: str(path.relative_to(CONF)))
def test_whole_config(path: Path) -> None:
    schema = schema_of(path)
    assert schema is not None
    composed: Composed[Any] = compose(schema, [path], [])
    assert from_yaml(schema, to_yaml(composed.config), source="again") == composed.config
    if isinstance(composed.config, FitConfig):
        resolve(composed.config)


def test_default_has_all_seven_components_on() -> None:
    numbers = resolve(load_config(FitConfig, [DEFAULT], []))
    assert numbers.value_pretraining_iterations > 0
    assert numbers.lambda_critic == 1.0
    assert numbers.alpha is not None
    assert numbers.loss_reduction == "token_mean"
    assert (numbers.eps_low, numbers.eps_high) == (0.2, 0.28)
    assert numbers.mu == 0.1
    assert numbers.group_size > 1


def test_state_tracking_has_the_settings_of_its_recorded_runs() -> None:
    """The tasks' files hold the numbers that they depend on, whatever the default's are."""
    resolved = {
        task: flatten(load_config(FitConfig, [CONF / f"{task}/vapo.yaml"], []))
        for task in ("state_tracking", "long_state_tracking")
    }
    expected = {
        "components.value_pretraining.num_iterations": (12, 50),
        "components.value_pretraining.min_iterations": (4, 10),
        "components.value_pretraining.lr": (None, None),
        "components.length_adaptive_gae.alpha": (2.0, 1.0),
        "components.group_sampling.num_prompts": (32, 16),
        "components.group_sampling.group_size": (8, 8),
        "actor.optimizer.lr": (1e-4, 1e-4),
        "actor.optimizer.warmup_steps": (5, 10),
        "critic.optimizer.lr": (1e-3, 2e-4),
        "critic.optimizer.warmup_steps": (5, 10),
        "data.train.task": ("state_tracking", "state_tracking"),
        "data.heldout.task": ("state_tracking", "state_tracking"),
        "data.train.num_examples": (4096, 8192),
        "data.train.seed": (3, 3),
        "data.heldout.seed": (4, 4),
        "data.train.options.min_steps": (2, 2),
        "data.train.options.max_steps": (10, 52),
        "data.heldout.options.max_steps": (10, 52),
        "data.max_prompt_tokens": (40, 160),
        "rollouts.max_response_tokens": (32, 256),
        "rollouts.max_concurrent_sequences": (512, 256),
        "algorithm.lambda_policy": (0.95, 0.95),
        "training.num_iterations": (40, 40),
        "training.minibatch_size": (64, 32),
        "training.microbatch_tokens": (4096, 2048),
        "evaluation.k": (8, 4),
    }
    found = {key: tuple(tree[key] for tree in resolved.values()) for key in expected}
    assert found == expected


PUNISHMENT = "rewards.overlong.soft_punishment"
NOT_WITH_EPISODES = {
    "dapo": (PUNISHMENT, [f"{PUNISHMENT}=false"]),
    "easyppo": ("critic.weights", ["critic.weights=none"]),
    "justrl2": (PUNISHMENT, [f"{PUNISHMENT}=false", "critic.reward=shaped"]),
    "remax": ("greedy_baseline", []),
    "vineppo": ("vine", []),
    "milestones": ("milestones", []),
    "oppo": ("oppo", []),
}
"""The key of what an environment is refused with, and what makes the rest of the system work."""


OF_ONE_SYSTEM = (  # the second has a probe, which systems without a critic refuse
    CONF / "recipes/sao_environment_qwen2.5_0.5b.yaml",
    CONF / "recipes/dapo_math_qwen2.5_7b_lora.yaml",
)


WHOLE = [path for path in (DEFAULT, *TASKS, *RECIPES) if path not in OF_ONE_SYSTEM]


@pytest.mark.slow
@pytest.mark.parametrize("base", WHOLE, ids=lambda path: str(path.relative_to(CONF)))
def test_every_sixth_algorithm_over_every_whole_config(base: Path) -> None:
    """Each time another sixth: six whole configs in a row have had all of them."""
    check_algorithms(base, ALGORITHMS[WHOLE.index(base) % 6 :: 6])


@pytest.mark.night
@pytest.mark.parametrize("base", WHOLE, ids=lambda path: str(path.relative_to(CONF)))
def test_every_algorithm_over_every_whole_config(base: Path) -> None:
    check_algorithms(base, ALGORITHMS)


def check_algorithms(base: Path, algorithms: Sequence[Path]) -> None:
    own = ["critic.reward_model_path=mine"]
    is_used = load_config(FitConfig, [base], own).environment.is_used
    for algorithm in algorithms:
        if is_used and algorithm.stem in NOT_WITH_EPISODES:
            key, fix = NOT_WITH_EPISODES[algorithm.stem]
            with pytest.raises(UserError, match=key):
                load_config(FitConfig, [base, algorithm], own)
            if fix:
                resolve(load_config(FitConfig, [base, algorithm], [*own, *fix]))
            continue
        resolve(load_config(FitConfig, [base, algorithm], own))


@pytest.mark.slow
@pytest.mark.parametrize("data", DATA, ids=lambda path: path.stem)
def test_data_over_every_scale_and_recipe(data: Path) -> None:
    """Data alone leaves the training problems, or the model, to another file."""
    train = CONF / "data/gsm8k.yaml"
    for files in [*([train, scale, data] for scale in SCALES), *([r, data] for r in RECIPES)]:
        own = [] if files[0] in RECIPES else OWN_MODEL
        config = load_config(FitConfig, files, own)
        assert config.rewards.verifier == "math"
        resolve(config)


@pytest.mark.parametrize("data", [CONF / "data/gsm8k.yaml", CONF / "data/dapo_math_17k.yaml"])
def test_data_and_a_model_of_ones_own_are_a_whole_config(data: Path) -> None:
    """With the paper's values, and none of the default task's."""
    config = load_config(FitConfig, [data], OWN_MODEL)
    numbers = resolve(config)
    assert (config.actor.optimizer.lr, config.critic.optimizer.lr) == (1e-6, 2e-6)
    assert (numbers.num_prompts, numbers.group_size) == (512, 16)
    assert (numbers.alpha, numbers.lambda_critic, numbers.gamma) == (0.05, 1.0, 1.0)
    assert (numbers.eps_low, numbers.eps_high, numbers.mu) == (0.2, 0.28, 0.1)
    assert numbers.value_pretraining_iterations == 50
