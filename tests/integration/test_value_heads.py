"""The real command with each head: pretraining, policy phase, resume, export, and the next run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.config.fits import ON_STATE_TRACKING, STATE_TRACKING
from tests.integration.commands import fit, vapo
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.networks.build import make_critic
from vapo.networks.token_inputs import token_inputs
from vapo.runs.checkpoints import network_state, read_checkpoint

pytestmark = pytest.mark.usefixtures("unsent")
PLAIN = token_inputs([([5, 6, 7], [8, 9]), ([4], [3, 2, 5])], pad_id=0)
INPUTS = replace(PLAIN, sampled_logprobs=torch.full(PLAIN.response_mask.shape, -0.5))
SMALL = (
    "components.value_pretraining.num_iterations=1",
    "components.value_pretraining.min_iterations=1",
    "components.group_sampling.num_prompts=4",
    "training.minibatch_size=8",
    "rollouts.max_response_tokens=16",
    "data.train.num_examples=128",
    "data.heldout.num_examples=4",
    "evaluation.k=1",
)
HEADS = {
    "bounded": ("critic.head.kind=bounded",),
    "categorical": ("critic.head.kind=categorical", "critic.loss=cross_entropy"),
    "log-probs": ("critic.sampled_logprobs={}",),
}
FIRST_BATCH = "critic.head.start=first_batch"


def values_of(start: Path, *head: str) -> torch.Tensor:
    """The first forward of a run that starts from the critic's folder."""
    config = load_config(FitConfig, STATE_TRACKING, [*head, f"critic.init={start}"])
    with torch.no_grad():
        return make_critic(config, None)(INPUTS).values


def critic_lines(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("critic/")]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["fit", "gates"])
def test_a_run_does_not_throw_a_saved_head_away(command: str, tmp_path: Path) -> None:
    saved = "critic.init=models/state_tracking/reward_model"
    where = f"output_dir={tmp_path / 'runs'}"
    result = vapo(command, *ON_STATE_TRACKING, *SMALL, saved, FIRST_BATCH, where)
    assert result.returncode == 2
    assert "critic.head.start first_batch would throw away" in result.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.night  # test_a_run_of_everything_resumes_in_either_phase has a categorical head
@pytest.mark.parametrize("head", ["bounded", "categorical", "log-probs"])
def test_the_head_survives_saving_resuming_and_exporting(head: str, tmp_path: Path) -> None:
    chosen = (*HEADS[head], FIRST_BATCH)
    whole = fit(tmp_path, *chosen, *SMALL, "training.num_iterations=2")
    part = fit(tmp_path, *chosen, *SMALL, "training.num_iterations=1", "tracking.run_name=part")
    last = str(part / "checkpoints" / "last.ckpt")
    another, wanted = "critic.head.low=-3", "set critic.head as the run had it"
    if head == "log-probs":
        another = "critic.sampled_logprobs=null"
        wanted = "set critic.sampled_logprobs={}, as the run had it"
    result = vapo("fit", *ON_STATE_TRACKING, *chosen, another, "--ckpt_path", last)
    assert result.returncode == 2
    assert wanted in result.stderr
    resumed = fit(
        tmp_path,
        *(*chosen, *SMALL, "training.num_iterations=2", "tracking.run_name=part"),
        # its head would be lost in a new run; here the checkpoint's is loaded over it
        *(f"critic.init={part / 'pretrained_critic'}", "--ckpt_path", last),
    )
    ends = [
        network_state(read_checkpoint((run / "checkpoints" / "last.ckpt").resolve()), "critic")
        for run in (whole, resumed)
    ]
    assert ends[0]["score.bias"].any()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])

    exported = tmp_path / "exported"
    ended = str(whole / "checkpoints" / "last.ckpt")
    assert vapo("export", ended, str(exported), "--network", "critic").returncode == 0
    loaded = load_config(FitConfig, STATE_TRACKING, [*HEADS[head], f"critic.init={exported}"])
    critic = make_critic(loaded, None)
    assert all(torch.equal(tensor, ends[0][n]) for n, tensor in critic.model.state_dict().items())
    pretrained = values_of(whole / "pretrained_critic", *HEADS[head])
    assert torch.isfinite(pretrained).all()
    assert not torch.equal(pretrained, values_of(exported, *HEADS[head]))

    page = tmp_path / "page.html"
    shown = (*chosen, *SMALL, "--ckpt_path", ended, "--value_page", str(page))
    result = vapo("validate", *ON_STATE_TRACKING, *shown)
    assert result.returncode == 0, result.stderr
    # the checkpoint's head is loaded over any start
    again = vapo("validate", *ON_STATE_TRACKING, *shown, f"critic.init={exported}")
    assert again.returncode == 0, again.stderr
    assert critic_lines(again.stdout) == critic_lines(result.stdout) != []
    other = vapo("validate", *ON_STATE_TRACKING, *shown, another)
    assert other.returncode == 2
    assert wanted in other.stderr
