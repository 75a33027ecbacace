"""OTB and OPPO from their columns of the forward pass to advantages, and what they are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.advantages.told_batches import (
    PAIRS,
    TEMPERATURE,
    networks,
    told,
    told_batch,
    told_on_a_rank,
)
from tests.advantages.two_ranks import batch_of
from tests.config.test_validation import CRITIC_FREE, problem
from tests.forked import on_ranks
from tests.systems import estimated, system_config
from tests.tiny_model import save_tiny_folder, tiny_model, tiny_tokenizer
from vapo.config.hyperparameters import reads_old_logprobs, resolve
from vapo.diagnostics.iteration_metrics import iteration_metrics
from vapo.diagnostics.value_page.heldout import evaluated_heldout, load_forward_networks
from vapo.errors import UserError
from vapo.networks.actor_critic import Actor
from vapo.networks.forward_passes import add_logprobs_and_values
from vapo.networks.layouts import choose_layout
from vapo.networks.token_inputs import Layout
from vapo.prompts.critic_prompts import critic_prompt_adder
from vapo.training.minibatches import make_minibatches
from vapo.types import EvaluatedBatch, Prompt

LAYOUTS: tuple[Layout, ...] = ("padded", "packed", "shared_prompts")


def whole_softmax(actor: Actor, prompt: tuple[int, ...], response: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        logits = actor.model(torch.tensor([[*prompt, *response]])).logits[0]
    return (logits[len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(dim=1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_columns_are_those_of_each_whole_sequence(layout: Layout) -> None:
    """And the log-probs are bit for bit those without them, which nothing else asks for."""
    actor, batch = Actor(tiny_model()), told_batch()
    assert choose_layout(layout, [actor.model]) == layout
    found = add_logprobs_and_values(batch, networks(actor, layout))
    plain = add_logprobs_and_values(batch, networks(actor, layout, extra=False))
    assert plain.old_collisions is None
    assert plain.answer_logprobs is None
    assert plain.old_logprobs is not None
    assert found.old_logprobs is not None
    assert torch.equal(found.old_logprobs, plain.old_logprobs)
    assert found.old_collisions is not None
    assert found.answer_logprobs is not None
    for row, rollout in enumerate(batch.rollouts):
        length, ids = len(rollout.response_ids), torch.tensor(rollout.response_ids)
        log_softmax = whole_softmax(actor, rollout.prompt.prompt_ids, rollout.response_ids)
        same = log_softmax.exp().square().sum(dim=1)
        torch.testing.assert_close(found.old_collisions[row, :length], same)
        prompt = rollout.prompt.critic_prompt_ids
        assert prompt is not None
        told = whole_softmax(actor, prompt, rollout.response_ids)
        expected = told.gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(found.answer_logprobs[row, :length], expected)
        assert not found.answer_logprobs[row, length:].any()
    assert not torch.allclose(found.answer_logprobs, found.old_logprobs, atol=1e-3)


def evaluated(correct: list[bool], **columns: list[list[float]]) -> EvaluatedBatch:
    """Responses of two tokens each, in pairs."""
    batch = batch_of(system_config("oppo", PAIRS), correct, [[0.0, 0.0]] * len(correct))
    made: dict[str, Any] = {name: torch.tensor(x) for name, x in columns.items()}
    return replace(batch, old_values=None, **made)


def oppo_batch() -> EvaluatedBatch:
    logs = torch.tensor([[0.25, 0.25], [0.5, 0.5]]).log()
    ratios = torch.tensor([[2.0, 0.5], [0.25, 1.0]]).log()
    told = {"old_logprobs": logs.tolist(), "answer_logprobs": (logs + ratios).tolist()}
    return evaluated([True, False], **told)


def test_oppo_by_hand() -> None:
    """The other is wrong: odds 1/3, then 2/3, so values -1/2 and -1/5; and 3, then 3/4: 1/2 and
    -1/7. Lambda 1 is the reward less the value, lambda 0 the change of the value."""
    off = (PAIRS, "algorithm.whiten_advantages=false")
    made = estimated(system_config("oppo", *off), oppo_batch())
    assert made.advantages is not None
    assert made.step_values is not None
    assert made.value_targets is None
    expected = torch.tensor([[-1 / 2, -1 / 5], [1 / 2, -1 / 7]])
    torch.testing.assert_close(made.step_values, expected)
    rewards = torch.tensor([[1.0], [-1.0]])
    torch.testing.assert_close(made.advantages, rewards - expected)
    steps = estimated(system_config("oppo", *off, "algorithm.lambda_policy=0"), oppo_batch())
    changes = torch.tensor([[0.3, 1.2], [-1 / 7 - 1 / 2, -1 + 1 / 7]])
    torch.testing.assert_close(steps.advantages, changes)
    of_range = (*off, "rewards.correct=10", "rewards.incorrect=0")
    wide = estimated(system_config("oppo", *of_range), oppo_batch())
    torch.testing.assert_close(wide.step_values, 5 * (expected + 1))


def test_oppo_measures_its_values() -> None:
    config = system_config("oppo", PAIRS)
    metrics = iteration_metrics(estimated(config, oppo_batch()), resolve(config))
    errors = torch.tensor([3 / 2, 6 / 5, -3 / 2, -6 / 7]).double()
    explained = 1 - float(errors.var(correction=0))
    assert metrics["oppo/explained_variance"] == pytest.approx(explained, abs=1e-6)
    prior = 1 - 1.5**2
    assert metrics["oppo/prior_explained_variance"] == pytest.approx(prior, abs=1e-6)
    assert metrics["oppo/evidence_right_mean"] == pytest.approx(0, abs=1e-6)
    assert metrics["oppo/evidence_wrong_mean"] == pytest.approx(-1.386294, abs=1e-5)
    right = estimated(config, replace(oppo_batch(), is_correct=torch.tensor([True, True])))
    assert "oppo/evidence_wrong_mean" not in iteration_metrics(right, resolve(config))


def test_otb_by_hand() -> None:
    """W is 0.5, 1 and 0.25, 0.25; rewards 1 and -1, so baselines 1/3 and 3/5."""
    pi = [[0.5, 0.5], [0.75, 1.0]]
    columns = {"old_logprobs": torch.tensor(pi).log().tolist()}
    batch = evaluated([True, False], **columns, old_collisions=[[0.5, 0.5], [0.75, 1.0]])
    config = system_config("otb", PAIRS, "algorithm.whiten_advantages=false")
    made = estimated(config, batch)
    expected = torch.tensor([[2 / 3, 2 / 5], [-4 / 3, -8 / 5]])
    torch.testing.assert_close(made.advantages, expected)
    # the second response ends first: what is left of the other is alone
    mask = torch.tensor([[True, True], [True, False]])
    for alone, last in {"others_mean": 2.0, "zero": 1.0}.items():
        config.algorithm.otb.alone = alone  # type: ignore[attr-defined]
        short = estimated(config, replace(batch, response_mask=mask))
        torch.testing.assert_close(short.advantages, torch.tensor([[2 / 3, last], [-4 / 3, 0.0]]))


def test_no_microbatches_of_a_critic_are_cut_for_the_answers_prompts() -> None:
    config = system_config("oppo", PAIRS)
    batch = add_logprobs_and_values(told_batch(), networks(Actor(tiny_model())))
    (minibatch,) = make_minibatches(
        estimated(config, batch), num_minibatches=1, max_tokens=12, pad_id=0, seed=0
    )
    assert minibatch.critic_microbatches is None
    for micro in minibatch.of("actor"):
        lengths = {len(r.prompt.prompt_ids) + len(r.response_ids) for r in micro.rows.rollouts}
        assert micro.inputs.input_ids.shape[1] <= max(lengths), "the policy is not told the answer"


@pytest.mark.parametrize("system", ["otb", "oppo"])
def test_a_page_of_heldout_prompts_has_them(system: str) -> None:
    """As `vapo validate --value_page` evaluates responses, in which no run is trained."""
    config = system_config(system, PAIRS)
    tokenizer, device = tiny_tokenizer(), torch.device("cpu")
    found = load_forward_networks(config, tiny_model(), tokenizer, None, device)
    batch, _ = evaluated_heldout(config, told_batch(), found)
    assert (batch.old_collisions is not None) == (system == "otb")
    assert (batch.answer_logprobs is not None) == (system == "oppo")
    assert batch.raw_advantages is not None
    assert batch.raw_advantages[batch.response_mask].unique().numel() > 3, "not rewards alone"


@pytest.mark.slow
@pytest.mark.parametrize("system", ["otb", "oppo"])
def test_two_processes_are_one(system: str) -> None:
    """With responses so unlike that each process would cut its passes in another number."""
    (first, second), one = on_ranks(2, told_on_a_rank, system), told(system, 0, 1)
    torch.testing.assert_close(first["advantages"], one["advantages"], rtol=1e-4, atol=1e-5)
    assert first["metrics"] == second["metrics"]
    assert first["metrics"] == pytest.approx(one["metrics"], abs=1e-5)
    assert any(name.startswith("oppo/") for name in one["metrics"]) == (system == "oppo")


def test_what_both_need(tmp_path: Path) -> None:
    for name in ("otb", "oppo"):
        config = system_config(name)
        algorithm = config.algorithm
        assert (algorithm.has_critic, algorithm.compares_groups) == (False, True)
        config.training.minibatch_size = None  # one step, whose ratio is 1
        assert reads_old_logprobs(config)
        chosen = (f"algorithm.advantage_estimator={name}", *CRITIC_FREE)
        single = "components.group_sampling.group_size=1"
        assert f"{name} compares the responses of a group" in problem(tmp_path, *chosen, single)
    assert "it is a key of otb" in problem(tmp_path, "algorithm.otb.alone=zero")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("algorithm.gamma=0.9",), "oppo values a state by the rewards of right and wrong"),
        (("algorithm.kl.coef=0.1", "algorithm.kl.placement=reward"), "algorithm.kl.placement=loss"),
        (("algorithm.oppo.smoothing=0",), "algorithm.oppo.smoothing"),
        (("algorithm.oppo.max_evidence=0",), "algorithm.oppo.max_evidence"),
        (("algorithm.oppo.template='{prompt}'",), "must contain {prompt}, and {answer} or another"),
        (("algorithm.oppo.template='{answer}'",), "must contain {prompt}, and {answer} or another"),
        (
            ("rewards.verifier=python", "rewards.function=mine:judge"),
            "gives values between rewards.incorrect and rewards.correct",
        ),
        (
            ("environment.kind=function", "environment.function=my_games:Guess"),
            "oppo values a state by what whole responses earned",
        ),
    ],
)
def test_what_oppo_is_refused(tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    chosen = ("algorithm.advantage_estimator=oppo", *CRITIC_FREE)
    assert message in problem(tmp_path, *chosen, *overrides)


def adder(tmp_path: Path, *overrides: str) -> Callable[[Prompt], Prompt]:
    path = save_tiny_folder(tmp_path / "policy", tiny_model())
    config = system_config("oppo", f"actor.path={path}", *overrides)
    added = critic_prompt_adder(config, tiny_tokenizer())
    assert added is not None
    return lambda prompt: added([prompt], config.rollouts.max_response_tokens)[0]


def test_the_answers_prompt_is_made_by_the_template(tmp_path: Path) -> None:
    made = adder(tmp_path, "algorithm.oppo.template='{answer};{prompt}'")
    found = made(Prompt("p:1", "a=", (3,), "7"))
    wanted = tiny_tokenizer()("7;a=", add_special_tokens=False)["input_ids"]
    assert found.critic_prompt_ids is not None
    assert list(found.critic_prompt_ids[-len(wanted) :]) == wanted
    assert found.prompt_ids == (3,)


def test_rows_that_do_not_do(tmp_path: Path) -> None:
    made = adder(tmp_path, "algorithm.oppo.template='{answer}{prompt}'")
    with pytest.raises(
        UserError, match=r"oppo\.template has {answer}, but the answer of p:1 is empty: leave"
    ):
        made(Prompt("p:1", "a=", (3,), ""))
    with pytest.raises(UserError, match=r"oppo\.template: p:1 becomes a prompt of .* 128 posit"):
        made(Prompt("p:1", "a" * 200, (3,), "1"))
    of_column = adder(tmp_path, "algorithm.oppo.template='{prompt}{hint}'")
    with pytest.raises(UserError, match=r"oppo\.template has {hint}, and p:1 has no such column"):
        of_column(Prompt("p:1", "a=", (3,), "1"))
