"""Names of other libraries: each leads to a key that exists."""

from __future__ import annotations

import pytest

from vapo.config import FitConfig, RewardModelConfig, SftConfig
from vapo.config.foreign_names import FOREIGN_NAMES, did_you_mean_key, meant_key
from vapo.config.loading import load_config
from vapo.config.options import Option, describe, is_key
from vapo.errors import UserError

ENTRIES = describe(FitConfig)


def test_every_name_leads_to_a_key_that_holds_a_value() -> None:
    for name, key in FOREIGN_NAMES.items():
        assert isinstance(ENTRIES.get(key), Option), f"{name} -> {key}"
        assert not is_key(name, ENTRIES), f"{name} is a key of ours: nobody would be told"
        assert meant_key(name, ENTRIES) == key


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("actor.lr", "actor.optimizer.lr"),
        ("critic.lr", "critic.optimizer.lr"),
        ("critic.optimizer.learning_rate", "critic.optimizer.lr"),
        ("actor_rollout_ref.actor.optim.lr", "actor.optimizer.lr"),
        ("critic.optim.lr", "critic.optimizer.lr"),
        ("actor_rollout_ref.rollout.n", "components.group_sampling.group_size"),
        ("algorithm.kl_ctrl.kl_coef", "algorithm.kl.coef"),
        ("evaluation.max_new_tokens", "evaluation.max_response_tokens"),
        ("data.train_batch_size", "components.group_sampling.num_prompts"),
        ("train_batch_size", "training.minibatch_size"),
        ("components.clip_higer", "components.clip_higher"),
    ],
)
def test_the_key_that_is_meant(key: str, meant: str) -> None:
    assert meant_key(key, ENTRIES) == meant


def test_keys_of_the_other_schemas() -> None:
    for schema in (SftConfig, RewardModelConfig):
        assert meant_key("learning_rate", describe(schema)) == "optimizer.lr"


def test_another_unit_is_said() -> None:
    hint = did_you_mean_key("per_device_train_batch_size", ENTRIES)
    assert hint.startswith("; did you mean 'training.microbatch_tokens'? (in tokens")
    assert did_you_mean_key("training.microbatch_token", ENTRIES).endswith("tokens'?")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("kl_coef=0.1", "unknown key 'kl_coef'; did you mean 'algorithm.kl.coef'?"),
        ("actor_rollout_ref.actor.optim.lr=1e-6",
         "unknown key 'actor_rollout_ref'; did you mean 'actor.optimizer.lr'?"),
        ("trainer.total_epochs=3", "did you mean 'training.num_iterations'? (an iteration is"),
        ("num_iterations=3", "did you mean 'training.num_iterations'?"),
        ("algorithm.value_clip=0.2", "did you mean 'critic.value_clip'?"),
        ("trainer.checkpoint_every_n_iterations=2",
         "did you mean 'checkpoints.every_n_iterations'?"),
        ("components.clip_higer.enabled=false", "did you mean 'components.clip_higher'?"),
    ],
)  # fmt: skip
def test_the_error_names_it(override: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(FitConfig, [], [override])
    assert said in str(caught.value)
