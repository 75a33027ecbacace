"""The commands on models of one's own: untied embeddings, and adapters beside frozen weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.config.fits import STATE_TRACKING
from tests.integration.commands import SHORTEST, final_weights, store, summary
from tests.recorded_metrics import metric_values
from tests.tiny_model import save_tiny_folder, tiny_model
from vapo.commands import export, fit, validate
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.errors import UserError
from vapo.networks.actor_critic import Actor
from vapo.networks.token_inputs import token_inputs
from vapo.runs.checkpoints import read_checkpoint

pytestmark = pytest.mark.slow
LORA = ["actor.lora.rank=4", "actor.lora.lora_alpha=8", "actor.optimizer.lr=1e-2"]
INPUTS = token_inputs([([5, 6, 7], [8, 9]), ([4], [3, 2, 5])], pad_id=0)


def config(tmp_path: Path, *overrides: str, tied: bool = False, runs: str = "runs") -> FitConfig:
    policy = tmp_path / "policy"
    if not policy.exists():
        save_tiny_folder(policy, tiny_model(tie_word_embeddings=tied))
    values = [
        f"actor.path={policy}",
        "critic.init=policy",
        f"output_dir={tmp_path / runs}",
        f"tracking.uri={store(tmp_path)}",
        "evaluation.every_n_iterations=100",
        "evaluation.temperature=1e-4",  # the likeliest tokens: equal policies score alike
        "actor.optimizer.warmup_steps=0",
    ]
    return load_config(FitConfig, STATE_TRACKING, [*SHORTEST, *values, *overrides])


def logprobs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        values: torch.Tensor = Actor(model)(INPUTS, temperature=1.0).logprobs
    return values


def exported(run_dir: Path, folder: Path) -> Any:
    export.run(run_dir / "checkpoints/last.ckpt", folder, "actor")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


# test_fit.py exports the tied policy of the task
@pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.night), False])
def test_embeddings_and_output_layer(tmp_path: Path, tied: bool) -> None:
    """Tied they stay one tensor, untied both are trained; either way the engine has them."""
    moves = "algorithm.entropy_coef=0.1"  # with equal rewards nothing else moves the policy
    run_dir = fit.run(config(tmp_path, moves, tied=tied))
    model = exported(run_dir, tmp_path / "out")
    before, saved = (
        tiny_model(tie_word_embeddings=tied),
        load_file(tmp_path / "out/model.safetensors"),
    )
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert ("lm_head.weight" in saved) != tied
    for module in ("lm_head", "model.embed_tokens"):
        moved = model.get_submodule(module).weight - before.get_submodule(module).weight
        assert moved.abs().max() > 1e-6, module
    gaps = metric_values(run_dir, "rollout/logprob_gap_mean")
    assert len(gaps) == 2
    assert max(gaps) < 1e-5


WITH_KL = [*LORA, "algorithm.kl.coef=0.01", "algorithm.kl.placement=loss"]


@pytest.mark.kills  # test_composite_resume.py has adapters among all that resumes
def test_adapters_resume(tmp_path: Path) -> None:
    whole = fit.run(config(tmp_path, *WITH_KL))
    expected = read_checkpoint(whole / "checkpoints/last.ckpt")["state_dict"]
    again = config(tmp_path, *WITH_KL, runs="again")
    again.training.num_iterations = 1
    first = fit.run(again)
    again.training.num_iterations = 2
    assert fit.run(again, ckpt_path="last") == first
    resumed = read_checkpoint(first / "checkpoints/last.ckpt")["state_dict"]
    adapters = {name for name in expected if ".lora_" in name}
    assert len(adapters) == 28
    for name in adapters:
        torch.testing.assert_close(resumed[name], expected[name], atol=1e-6, rtol=0)


@pytest.mark.slow
def test_adapters(tmp_path: Path) -> None:
    """Trained beside weights that stay bit for bit; validated and exported merged."""
    whole = fit.run(config(tmp_path, *WITH_KL))
    state = read_checkpoint(whole / "checkpoints/last.ckpt")["state_dict"]
    start = tiny_model(tie_word_embeddings=False).state_dict()
    actor = {n.removeprefix("actor.model."): t for n, t in state.items() if n.startswith("actor.")}
    adapters = {n for n in actor if ".lora_" in n}
    assert len(adapters) == 28
    assert all(actor[n].any() for n in adapters), "B starts at zero and has moved"
    for name in actor.keys() - adapters:
        assert torch.equal(actor[name], start[name.replace(".base_layer", "")]), name
    assert max(metric_values(whole, "rollout/logprob_gap_mean")) < 1e-5
    kl = metric_values(whole, "actor/kl_loss")
    assert kl[0] < kl[-1], "the reference is where the actor began"

    model = exported(whole, tmp_path / "out")
    merged = final_weights(whole, "actor")
    live = tiny_model(tie_word_embeddings=False)
    live.load_state_dict(merged)
    assert torch.equal(logprobs(model), logprobs(live))
    assert (logprobs(model) - logprobs(tiny_model(tie_word_embeddings=False))).abs().max() > 1e-2
    path = str(whole / "checkpoints/last.ckpt")
    scores = validate.run(config(tmp_path, *WITH_KL), ckpt_path=path)
    plain = validate.run(config(tmp_path, f"actor.path={tmp_path / 'out'}"))
    expected = summary(whole)["score_after"]
    assert scores["eval/avg_at_k"] == plain["eval/avg_at_k"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.night  # by day each alone: test_adapters, test_staleness.py
def test_adapters_and_rollouts_sampled_ahead(tmp_path: Path) -> None:
    """The engine's copy is plain, and takes merged weights at each sync."""
    run_dir = fit.run(config(tmp_path, *LORA, "training.max_staleness=1"))
    assert len(metric_values(run_dir, "rollout/logprob_gap_mean")) == 2


def test_a_plain_checkpoint_is_not_resumed_with_adapters(tmp_path: Path) -> None:
    settings = config(tmp_path)
    settings.training.num_iterations = 1
    fit.run(settings)
    with pytest.raises(UserError, match=r"actor\.lora"):
        fit.run(config(tmp_path, *LORA), ckpt_path="last")
