"""A checkpoint of another model is refused in one line that says what differs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.config.fits import ROOT, STATE_TRACKING
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.errors import UserError
from vapo.networks.actor_critic import Actor, Critic
from vapo.networks.lora import add_adapters
from vapo.networks.meta_device import empty_model
from vapo.runs.checkpoints import (
    adapter_options,
    check_compatible,
    parameters_of,
    value_head_options,
)
from vapo.runs.manifests import Manifest

pytestmark = pytest.mark.usefixtures("in_the_repository")


def config(*overrides: str) -> FitConfig:
    return load_config(FitConfig, STATE_TRACKING, list(overrides))


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    """Of the default config."""
    options = {"dtype": "float32", "attn_implementation": "auto"}
    actor = empty_model("causal_lm", str(ROOT / "models/state_tracking/policy"), **options)
    critic = empty_model("value_model", str(ROOT / "models/state_tracking/reward_model"), **options)
    parameters = parameters_of(Actor(actor), "actor.") | parameters_of(Critic(critic), "critic.")
    return Manifest(3, 2, "policy_optimization", "abc", parameters, {})


def test_the_same_model_is_taken(manifest: Manifest) -> None:
    check_compatible(manifest, config(), name="last")
    without = {k: v for k, v in manifest.parameters.items() if k.startswith("actor.")}
    critic_free = config(
        "algorithm.advantage_estimator=group_relative",
        "components.value_pretraining.enabled=false",
        "components.decoupled_gae.enabled=false",
        "components.length_adaptive_gae.enabled=false",
    )
    check_compatible(replace(manifest, parameters=without), critic_free, name="last")
    with pytest.raises(UserError, match="last has a critic, and this config has none"):
        check_compatible(manifest, critic_free, name="last")
    with pytest.raises(UserError, match="last has no critic, and this config has one"):
        check_compatible(replace(manifest, parameters=without), config(), name="last")


def test_shapes_dtypes_and_names_are_compared(manifest: Manifest) -> None:
    other = config("actor.path=models/long_state_tracking/policy")
    with pytest.raises(UserError, match=r"last was saved from another actor than actor\.path mod"):
        check_compatible(manifest, other, name="last")
    with pytest.raises(UserError, match=r"float32 \[96\], not bfloat16 \[96\]; .* and \d+ more"):
        check_compatible(manifest, config("actor.dtype=bfloat16"), name="last")
    key = next(k for k in manifest.parameters if k.startswith("critic."))
    fewer = {k: v for k, v in manifest.parameters.items() if k != key}
    with pytest.raises(UserError, match=f"another critic .*{key} is not in it$"):
        check_compatible(replace(manifest, parameters=fewer), config(), name="last")
    more = {**manifest.parameters, "critic.extra": "float32 [1]"}
    with pytest.raises(UserError, match=r"critic\.extra is not in the model$"):
        check_compatible(replace(manifest, parameters=more), config(), name="last")


def test_adapters_are_compared_by_their_options(manifest: Manifest) -> None:
    """A scale changes no name and no shape."""
    plain, lora = config(), config("actor.lora.rank=4")
    assert lora.actor.lora is not None
    model = empty_model(
        "causal_lm",
        str(ROOT / "models/state_tracking/policy"),
        dtype="float32",
        attn_implementation="auto",
    )
    add_adapters(model, lora.actor.lora, seed=0)
    critic = {k: v for k, v in manifest.parameters.items() if k.startswith("critic.")}
    adapted = replace(
        manifest,
        parameters=parameters_of(Actor(model), "actor.") | critic,
        lora=adapter_options(lora, "actor"),
    )
    check_compatible(adapted, lora, name="last")
    with pytest.raises(UserError, match=r"last has no adapters, and actor\.lora asks for .*rank 4"):
        check_compatible(manifest, lora, name="last")
    with pytest.raises(UserError, match=r"has adapters of .* and actor\.lora asks for no adapters"):
        check_compatible(adapted, plain, name="last")
    with pytest.raises(UserError, match=r"lora_alpha 32\.0.* asks for .*lora_alpha 8\.0"):
        check_compatible(adapted, config("actor.lora.rank=4", "actor.lora.lora_alpha=8"), name="x")


def test_a_critic_of_another_target_is_refused(manifest: Manifest) -> None:
    """Its weights have the same names and shapes."""
    start = ("critic.head.start=mean_reward", "critic.head.mean_reward=0")
    plain, residual = config(*start), config(*start, "critic.target=residual")
    bias = {"critic.model.score.bias": "float32 [1]"}
    own = replace(manifest, parameters={**manifest.parameters, **bias})
    of_residuals = replace(own, value_head=value_head_options(residual))
    check_compatible(own, plain, name="last")
    check_compatible(of_residuals, residual, name="last")
    message = r"critic of last predicts the residual, .* is return: set critic\.target=residual, as"
    with pytest.raises(UserError, match=message):
        check_compatible(of_residuals, plain, name="last")
    with pytest.raises(UserError, match=r"predicts the return, .*: set critic\.target=return, as"):
        check_compatible(own, residual, name="last")
