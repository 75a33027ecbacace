"""Rules between the keys of value pretraining from stored rollouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.fits import fit_config
from vapo.errors import UserError

PRETRAINING = "components.value_pretraining"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["epochs=3"], "epochs is about the rollouts of a file"),
        (["patience=3"], "patience is about the rollouts of a file"),
        (["heldout_share=0.2"], "heldout_share is about the rollouts of a file"),
        (["targets=truth"], "targets is about the rollouts of a file"),
        (["truth_weight=only"], "truth_weight weighs tokens whose value was measured, but"),
        (["data=f", "patience=1", "heldout_share=0"], "patience waits for a better explained"),
    ],
)
def test_stored_rollouts(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        fit_config(tmp_path, *(f"{PRETRAINING}.{text}" for text in overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.strategy=fsdp"], "is read by one process"),
        (["trainer.devices=2", "trainer.strategy=fsdp"], "is read by one process"),
        (["rewards.shuffle=true"], "rewards.shuffle does not reach the rewards of"),
    ],
)
def test_stored_rollouts_with_other_blocks(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        fit_config(tmp_path, f"{PRETRAINING}.data=f", *overrides)


def test_all_of_it_together(tmp_path: Path) -> None:
    settings = ["data=f", "epochs=3", "patience=1", "heldout_share=0.2"]
    config = fit_config(tmp_path, *(f"{PRETRAINING}.{text}" for text in settings))
    assert config.components.value_pretraining.data == "f"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["critic.bootstrap_truncated=true"], "which critic.bootstrap_truncated replaces"),
        (["critic.truncated=leave_out"], "truncated responses carry no value loss"),
        (["rewards.overlong.filter_truncated=true"], "set critic.truncated=train"),
    ],
)
def test_the_truth_is_of_responses_that_end_in_any_way(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    truth = [f"{PRETRAINING}.data=f", f"{PRETRAINING}.targets=truth"]
    with pytest.raises(UserError, match=message):
        fit_config(tmp_path, *truth, *overrides)
    fit_config(tmp_path, f"{PRETRAINING}.data=f", *overrides)
    trained = ["rewards.overlong.filter_truncated=true", "critic.truncated=train"]
    fit_config(tmp_path, *truth, f"{PRETRAINING}.truth_weight=only", *trained)
