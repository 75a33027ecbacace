"""What a critic without a network needs, in the arithmetic and in the simulated step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from tests.studies.estimate.memory_measurement import mid_size_config
from tests.systems import CONF
from vapo.commands.estimate import run
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.networks.model_configs import as_critic
from vapo.networks.probe import ProbeForSequenceClassification
from vapo.studies.estimate.memory import MemoryEstimate, estimate_memory

PROBE = ("critic.kind=probe", "critic.init=policy", "critic.probe.layers=[-1,1]")


def estimate(folder: Path, *overrides: str) -> MemoryEstimate:
    config = mid_size_config(folder, *overrides)
    actor, read = (AutoConfig.from_pretrained(config.actor.path) for _ in range(2))
    critic = as_critic(read, config.actor.path, config.critic)
    return estimate_memory(config, actor=actor, critic=critic)


def test_it_has_a_head_and_no_network(folder: Path) -> None:
    network, probe = estimate(folder), estimate(folder, *PROBE)
    config = mid_size_config(folder)
    hidden = AutoConfig.from_pretrained(config.actor.path).hidden_size
    assert probe.parameters["critic"] == 2 * hidden
    assert probe.parameters["actor"] == network.parameters["actor"]
    stages = probe.stages["actor update"], network.stages["actor update"]
    mine, theirs = (stage["optimizer states"] for stage in stages)
    gone = network.parameters["critic"] - 2 * hidden
    assert theirs - mine == 2 * 4 * gone
    assert stages[0]["critic weights"] == 4 * 2 * hidden
    tokens = config.rollouts.max_response_tokens
    group = config.components.group_sampling
    rows = group.num_prompts * group.group_size
    assert probe.host == {"actor's states": 4 * rows * tokens * 2 * hidden}
    assert "actor's states" not in network.host


def test_a_fitted_head_has_gram_matrices_and_no_optimizer(folder: Path) -> None:
    """Of two layers' channels, ten columns, the target and a 1, for each batch of the window."""
    options = (*PROBE, "critic.sampled_logprobs={}")
    stepped = estimate(folder, *options)
    fitted = estimate(folder, *options, "critic.ridge.window_batches=3")
    hidden = stepped.parameters["critic"]
    grams = 3 * 8 * (hidden + 12) ** 2
    assert fitted.parameters["critic"] == hidden + 1, "the bias"
    assert fitted.host == stepped.host | {"Gram matrices of critic.ridge": grams}
    before, after = (one.stages["actor update"]["optimizer states"] for one in (stepped, fitted))
    assert before - after == 2 * 4 * hidden
    assert fitted.checkpoint - stepped.checkpoint == grams + 4 - 2 * 4 * hidden


@pytest.mark.slow
def test_a_files_states_are_all_kept(folder: Path, tmp_path: Path) -> None:
    """They are in the actor's dtype, whatever the probe's is."""
    file = tmp_path / "f.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"group": list(range(50))}), file)
    data, dtype = f"components.value_pretraining.data={file}", "actor.dtype=bfloat16"
    hidden, tokens = 256, mid_size_config(folder).rollouts.max_response_tokens
    found = estimate(folder, *PROBE, data, dtype)
    assert found.host == {"actor's states": 2 * 50 * tokens * 2 * hidden}
    file.unlink()
    assert estimate(folder, *PROBE, data, dtype).host["actor's states"] < 2 * 50 * tokens * hidden


@pytest.mark.night
def test_fake_states_have_the_actors_dtype(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes: set[torch.dtype] = set()
    real = ProbeForSequenceClassification.empty_states

    def noted(self: Any, *args: Any) -> Tensor:
        made = real(self, *args)
        dtypes.add(made.dtype)
        return made

    monkeypatch.setattr(ProbeForSequenceClassification, "empty_states", noted)
    estimate(folder, *PROBE, "actor.dtype=bfloat16")
    assert dtypes == {torch.bfloat16}
    dtypes.clear()
    run(mid_size_config(folder, *PROBE, "actor.dtype=bfloat16"), simulate_ranks=1)
    assert dtypes == {torch.bfloat16}


@pytest.mark.slow
def test_the_actors_pass_for_the_states_counts(folder: Path) -> None:
    """Where one step an iteration reads no log-probs, and no value page shows them."""
    no_pages = "value_pages.every_n_iterations=null"

    def forward(*overrides: str) -> float:
        stages = estimate(folder, "critic.kind=probe", "critic.init=policy", no_pages, *overrides)
        return stages.stages["log-probs"]["logits, temporaries"]

    one_step = "training.minibatch_size=null"
    assert forward(one_step) == forward("training.minibatch_size=4")
    assert forward(one_step, "critic.probe.layers=[-1,1]") > forward(one_step)


@pytest.mark.night
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_simulated_step(folder: Path, capsys: pytest.CaptureFixture[str], ranks: int) -> None:
    strategy = f"trainer.strategy={'fsdp' if ranks > 1 else 'auto'}"
    config = mid_size_config(folder, *PROBE, "critic.probe.hidden_size=16", strategy)
    run(config, simulate_ranks=ranks)
    said = capsys.readouterr().out
    assert "critic update" in said


def test_the_preset_is_a_config_of_its_own() -> None:
    config = load_config(FitConfig, [CONF / "vapo.yaml", CONF / "algorithm/probe.yaml"], [])
    assert config.critic.reads_actor
