"""One run with everything that has a state, resumed in either phase: bit for bit the whole run.

Each of these options had a resumed run of its own; those are repeated by `make kills`, and the
tests of an option's file have its other behaviour.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.config.fits import ROOT, STATE_TRACKING
from tests.integration.test_algorithms import PRETRAINING, TINY
from tests.recorded_metrics import metric_points
from tests.runs.comparing import assert_same
from tests.tracking.ready_stores import ready_store
from vapo.commands.fit import run
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.runs.checkpoints import read_checkpoint

MIXTURE = """\
data:
  train:
    kind: mixture
    sources:
      swaps:
        weight: 3
        kind: procedural
        task: state_tracking
        num_examples: 64
        curriculum:
          - {from_iteration: 0, options: {min_steps: 2, max_steps: 3}}
          - {from_iteration: 2, options: {min_steps: 3, max_steps: 5}}
      first_digit:
        weight: 1
        kind: procedural
        task: state_tracking
        num_examples: 32
        seed: 7
        verifier: regex
        pattern: "^[a-z](\\\\d)"
"""
DATA = [item for item in TINY if not item.startswith("data.train.")]
EVERYTHING = [
    # what draws or counts beside the weights
    "algorithm.dynamic_sampling_attempts=2",
    "algorithm.baseline.kind=tether",
    "algorithm.agreement_mask_share=0.2",
    "algorithm.disagreement_mask_share=0.2",
    "algorithm.entropy_coef=0.001",
    "algorithm.kl.coef=0.01",
    "algorithm.kl.placement=loss",
    "watch.approx_kl.limit=10",
    "rewards.overlong.soft_punishment=true",
    # two critics with steps, a schedule and inputs of their own
    "critic.count=2",
    "critic.epochs=2",
    "critic.minibatch_size=4",
    "critic.head.kind=categorical",
    "critic.head.start=first_batch",
    "critic.weights=prompt_noise",
    "critic.anchors=[0.3,0.6,0.9]",
    "critic.reward=unshaped",
    "critic.init=policy",
    "critic.prompt.kind=privileged",
    "critic.prompt.template='{prompt}{answer}'",
    "critic.optimizer.lr=0.001",
    "critic.optimizer.warmup_steps=10",
    "components.value_pretraining.lr=0.004",
    # adapters, whose first steps move tokens
    "actor.lora.rank=2",
    "actor.optimizer.lr=0.01",
    "actor.optimizer.warmup_steps=0",
    "training.minibatch_size=8",
    "checkpoints.keep=9",
]


def fit(folder: Path, ckpt_path: Path | None = None) -> Path:
    overlay = folder / "mixture.yaml"
    overlay.write_text(MIXTURE)
    where = [f"output_dir={folder / 'runs'}", f"tracking.uri={ready_store(folder / 'mlruns')}"]
    files = [*STATE_TRACKING, overlay]
    config = load_config(FitConfig, files, [*DATA, *PRETRAINING, *EVERYTHING, *where])
    return run(config, ckpt_path=None if ckpt_path is None else str(ckpt_path))


def end(run_dir: Path) -> dict[str, Any]:
    contents = dict(read_checkpoint(run_dir / "checkpoints/last.ckpt"))
    names = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "baseline")
    return {name: contents[name] for name in (*names, "callbacks")}


@pytest.mark.slow
def test_a_run_of_everything_resumes_in_either_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    whole = fit(tmp_path)
    expected, metrics = end(whole), metric_points(whole)
    # all of it took place
    assert [value for _, value in metrics["progress/phase"]] == [0, 1, 1]
    assert [value for _, value in metrics["source_swaps/curriculum_stage"]] == [0, 0, 1]
    assert max(value for _, value in metrics["rollout/dynamic_sampling_attempts"]) > 1
    assert expected["baseline"]["num_batches"] == 2
    assert expected["baseline"]["rho"] != 0
    for key in ("critic/value_spread", "critic/agreement_masked_share", "actor/kl_loss"):
        assert metrics[key][-1][1] > 0, key
    for iteration in (1, 2):
        checkpoint = whole / f"checkpoints/iteration_{iteration:06d}"
        resumed = fit(tmp_path, checkpoint)
        assert_same(end(resumed), expected, f"after {iteration}")
