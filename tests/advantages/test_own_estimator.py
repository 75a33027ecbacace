"""An estimator of the user's own: what the built-in ones do, and one clear error a mistake."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.config.fits import ROOT, STATE_TRACKING
from tests.systems import SYSTEMS, estimated, made_up_batch, mostly_slow, system_config
from vapo.advantages.contract import check_estimate
from vapo.advantages.credit import rewards_on_tokens
from vapo.advantages.estimators import ESTIMATORS, estimator_of
from vapo.commands import fit
from vapo.config import FitConfig, resolve
from vapo.config.estimators import OwnEstimatorOptions
from vapo.config.loading import load_config
from vapo.errors import UserError
from vapo.functional.columns import float_columns
from vapo.networks.build import check_critic
from vapo.studies.estimate.waiting_states import read_layers
from vapo.types import EvaluatedBatch

MODULE = "own_estimator_of_a_test"
HEAD = "import torch\nfrom vapo.advantages.estimators import *\n"
SIGNATURE = "def estimate(batch, token_rewards, hyperparameters):\n"
WITH_CRITIC = "algorithm.estimator_uses_critic=true"

Write = Callable[[str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write the body of a function `estimate`, in the folder where the command is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def body(text: str) -> None:
        lines = "".join(f"    {line}\n" for line in text.splitlines())
        (tmp_path / f"{MODULE}.py").write_text(HEAD + SIGNATURE + lines)

    yield body
    sys.modules.pop(MODULE, None)


def own(system: str, *overrides: str, function: str = "estimate") -> FitConfig:
    config = system_config(
        system,
        "algorithm.advantage_estimator=function",
        f"algorithm.estimator_function={MODULE}:{function}",
        *overrides,
    )
    assert isinstance(config.algorithm, OwnEstimatorOptions)
    config.algorithm.estimator_function_folder = None  # it is kept, with another test's folder
    return config


def in_float32(config: FitConfig) -> EvaluatedBatch:
    """A made-up batch in the dtype of a run's own."""
    batch, _ = made_up_batch(config)
    columns: dict[str, Any] = {name: x.float() for name, x in float_columns(batch).items()}
    return replace(batch, **columns)


@pytest.mark.parametrize(
    ("system", "name", "overrides"),
    [
        ("vapo", "gae", [WITH_CRITIC]),
        ("rloo", "leave_one_out", []),
        ("raft", "correct_only", ["training.minibatch_size=null"]),
    ],
)
def test_a_built_in_one_as_a_function_changes_no_bit(
    write: Write, system: str, name: str, overrides: list[str]
) -> None:
    write(f"return ESTIMATORS[{name!r}](batch, token_rewards, hyperparameters)")
    built_in, config = system_config(system), own(system, *overrides)
    expected = estimated(built_in, in_float32(built_in))
    batch = estimated(config, in_float32(config))
    for column in ("advantages", "raw_advantages", "value_targets", "loss_mask"):
        ours, theirs = getattr(batch, column), getattr(expected, column)
        assert (ours is None) == (theirs is None), column
        assert ours is None or torch.equal(ours, theirs), column


@pytest.mark.parametrize("system", mostly_slow(SYSTEMS))
def test_the_built_in_ones_keep_the_contract(system: str) -> None:
    config = system_config(system)
    batch = in_float32(config)
    rewards = rewards_on_tokens(batch, config.algorithm)
    name = config.algorithm.advantage_estimator
    check_estimate(
        ESTIMATORS[name](batch, rewards, resolve(config)),
        batch,
        rewards,
        trains_critic=config.algorithm.has_critic,
        name=name,
    )


def test_what_stands_beside_the_responses_is_dropped(write: Write) -> None:
    write("return Estimate(torch.where(batch.response_mask, 2.0, torch.nan).double())")
    config = own("grpo")
    batch = estimated(config, made_up_batch(config)[0])
    assert torch.equal(batch.raw_advantages, 2.0 * batch.response_mask)  # type: ignore[arg-type]


def test_it_gets_the_config_s_own_arguments(write: Write) -> None:
    write("return Estimate(scale * token_rewards)")
    module = Path(f"{MODULE}.py")
    text = module.read_text().replace("hyperparameters):", "hyperparameters, *, scale, what=0):")
    module.write_text(text)
    config = own("grpo", "algorithm.estimator_args={scale: 3.0, what: 1}")
    batch = estimated(config, made_up_batch(config)[0])
    assert torch.equal(batch.raw_advantages, 3.0 * batch.token_rewards)  # type: ignore[arg-type]
    for args in ("{}", "{scale: 1.0, other: 2}", "{scale: 1.0, batch: 2}"):
        with pytest.raises(UserError, match=r"estimate cannot be called with \(batch, token"):
            estimator_of(own("grpo", f"algorithm.estimator_args={args}").algorithm)


def test_it_reads_layers_that_the_actor_has_and_their_states_wait(write: Write) -> None:
    write("assert batch.actor_states is not None\nreturn Estimate(token_rewards)")
    config = own("grpo", "algorithm.estimator_reads_layers=[-1,0]")
    assert read_layers(config) == (-1, 0), "whose memory is counted"
    made, _ = made_up_batch(config)
    states = [torch.zeros(len(rollout.response_ids), 2, 4) for rollout in made.rollouts]
    assert estimated(config, replace(made, actor_states=states)).actor_states is None
    actor = f"actor.path={ROOT / 'models/state_tracking/policy'}"
    check_critic(own("grpo", actor, "algorithm.estimator_reads_layers=[-1,0]"))
    with pytest.raises(UserError, match=r"algorithm\.estimator_reads_layers: .* has no layer 9; "):
        check_critic(own("grpo", actor, "algorithm.estimator_reads_layers=[9]"))


def test_it_cannot_change_the_rewards_of_the_batch(write: Write) -> None:
    write("token_rewards.zero_()\nreturn Estimate(token_rewards)")
    config = own("grpo")
    batch = estimated(config, made_up_batch(config)[0])
    assert torch.equal(batch.token_rewards.sum(dim=1), batch.rewards)
    assert batch.rewards.abs().sum() > 0


@pytest.mark.parametrize(
    ("body", "overrides", "message"),
    [
        ("return token_rewards", [], r"returned Tensor, not a vapo.advantages.contract.Estimate"),
        ("return Estimate(batch.rewards)", [], r"advantages have the shape \[12\], but need"),
        ("return Estimate(token_rewards.half())", [], "the dtype torch.float16, but need"),
        ("return Estimate(1.0)", [], "advantages are float, not a tensor"),
        (
            "return Estimate(token_rewards / 0)",
            [],
            r"advantages are not finite at \d+ of \d+ response tokens; the first is nan at token 0"
            r" of response \d+ \(prompt made-up:0\)",
        ),
        ("return Estimate(token_rewards)", [WITH_CRITIC], "returned no value_targets, and a"),
        (
            "return Estimate(token_rewards, value_targets=token_rewards)",
            [],
            "returned value_targets, but this run trains no critic",
        ),
        (
            "return Estimate(token_rewards, value_targets=token_rewards.log() )",
            [WITH_CRITIC],
            "value_targets are not finite at",
        ),
        (
            "return Estimate(token_rewards, kept=batch.rewards)",
            [],
            "kept have the dtype torch.float64, but need torch.bool",
        ),
        (
            "x = 1\nreturn Estimate(token_rewards * x.y)",
            [],
            r"raised AttributeError: .*'y' \(own_estimator_of_a_test.py:5\)",
        ),
    ],
)
def test_one_clear_error(write: Write, body: str, overrides: list[str], message: str) -> None:
    write(body)
    config = own("vapo" if overrides else "grpo", *overrides)
    batch, _ = made_up_batch(config)
    with pytest.raises(UserError, match=message) as caught:
        estimated(config, batch)
    assert f"algorithm.estimator_function {MODULE}:estimate" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_numbers_of_the_batch_are_not_the_functions_fault(write: Write) -> None:
    """Where most rollouts are bad the batch comes as it is, and is not trained on."""
    write("return Estimate(token_rewards)")
    config = own("grpo")
    batch: EvaluatedBatch = made_up_batch(config)[0]
    bad = batch.rewards.clone()
    bad[0] = torch.nan
    estimated(config, replace(batch, rewards=bad))


def test_a_wrong_number_of_arguments_is_found_before_a_call(write: Write) -> None:
    write("return 1")
    with Path(f"{MODULE}.py").open("a") as file:
        file.write("def two(batch, token_rewards): ...\n")
    with pytest.raises(UserError, match=r"cannot be called with \(batch, token_rewards, hyper"):
        estimator_of(own("grpo", function="two").algorithm)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_such_module_here:f", "cannot import no_such_module_here:f: there is no module"),
        ("json:dmps", r"cannot import json:dmps: .*no function dmps; did you mean dumps\?"),
        ("json:__name__", "json:__name__ is str, not a function"),
    ],
)
def test_fit_finds_an_import_error_before_any_model(
    tmp_path: Path, function: str, message: str
) -> None:
    config = load_config(
        FitConfig,
        [*STATE_TRACKING, ROOT / "conf" / "algorithm" / "grpo.yaml"],
        [
            "algorithm.advantage_estimator=function",
            f"algorithm.estimator_function={function}",
            f"actor.path={tmp_path / 'there_is_none'}",
        ],
    )
    with pytest.raises(UserError, match=f"algorithm.estimator_function: {message}"):
        fit.run(config)
