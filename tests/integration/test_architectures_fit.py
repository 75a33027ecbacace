"""Whole runs of families whose policies are no plain decoders of full attention."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.integration.commands import SHORT, vapo
from tests.networks.architectures import ALL
from tests.recorded_metrics import metric_values
from tests.tracking.ready_stores import ready_store
from vapo.networks.saved_tokenizers import read_tokenizer

FAMILIES = [
    one for one in ALL if one.name in ("Qwen3", "Qwen3-MoE", "Qwen3.5", "Gemma 3", "gpt-oss")
]
BY_DAY = ("Qwen3.5", "gpt-oss")
SIZES = [
    "components.value_pretraining.num_iterations=1",
    "components.group_sampling.num_prompts=4",
    "training.minibatch_size=8",
    "training.num_iterations=3",
    "training.packing=auto",
    "critic.init=policy",
    "actor.optimizer.lr=1e-3",
    "actor.optimizer.warmup_steps=0",
]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            one, id=one.name, marks=pytest.mark.slow if one.name in BY_DAY else pytest.mark.night
        )
        for one in FAMILIES
    ],
)
def test_three_iterations(family, tmp_path: Path) -> None:
    """Engine and trainer agree before and after updates, and what is exported can be imported."""
    tokenizer = read_tokenizer("models/state_tracking/policy")
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    policy = tmp_path / "policy"
    family.model(vocab_size=len(tokenizer), **ends).save_pretrained(policy)
    tokenizer.save_pretrained(policy)
    where = [f"output_dir={tmp_path / 'runs'}", f"tracking.uri={ready_store(tmp_path / 'mlruns')}"]
    config = ["--config", "conf/state_tracking/vapo.yaml", f"actor.path={policy}"]
    result = vapo("fit", *config, *SHORT, *SIZES, *where)
    assert result.returncode == 0, result.stderr
    has_experts = "router's auxiliary loss (router_aux_loss_coef 0.001) is off" in result.stderr
    assert has_experts == (family.name in ("Qwen3-MoE", "gpt-oss"))
    (run,) = (tmp_path / "runs").iterdir()
    gaps = metric_values(run, "rollout/logprob_gap_max")
    assert len(gaps) == 3
    assert max(gaps) < 1e-4
    exported, imported = tmp_path / "exported", tmp_path / "imported"
    for args in (
        ["export", run / "checkpoints/last.ckpt", exported],
        ["import", exported, imported],
    ):
        result = vapo(*map(str, args))
        assert result.returncode == 0, result.stderr
    names = [load_file(f / "model.safetensors").keys() for f in (policy, exported, imported)]
    assert names[0] == names[1] == names[2]
