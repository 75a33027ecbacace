"""A resumed run trains with the optimizer options of its own config, not of the checkpoint's."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from tests.config.fits import fit_config
from tests.runs.comparing import assert_same
from vapo.config import FitConfig
from vapo.config.networks import OptimizerConfig
from vapo.networks.value_head import LOGPROB_SCORE
from vapo.training.minibatches import Minibatch
from vapo.training.module import VapoModule
from vapo.training.optimizers import make_optimizer, make_scheduler, options_of_groups, take_options

BEFORE = {"lr": 0.01, "warmup_steps": 4, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95}
BEFORE |= {"max_grad_norm": 1.0}
AFTER = {"lr": 0.001, "warmup_steps": 40, "weight_decay": 0.3, "beta1": 0.5, "beta2": 0.6}
AFTER |= {"max_grad_norm": 0.1}
KINDS = {
    "network": ["critic.sampled_logprobs.lr=0.03"],
    "probe": ["critic.kind=probe", "critic.probe.lr=0.02"],
}


class TinyModule(VapoModule):
    """VapoModule's optimizers, schedules and updates on two networks of a few numbers."""

    def configure_model(self) -> None:
        torch.manual_seed(0)
        self.actor: Any = nn.Linear(3, 2)
        self.critic: Any = nn.ModuleDict({"score": nn.Linear(3, 1), LOGPROB_SCORE: nn.Linear(3, 1)})
        self.seen: list[dict[str, float]] = []

    def on_fit_start(self) -> None: ...

    def training_step(self, minibatch: Any, batch_idx: int) -> dict[str, float]:
        minibatch = object.__new__(
            Minibatch
        )  # of which an update that is not skipped reads nothing
        states = torch.tensor([1.0, -2.0, 3.0]) * (1 + int(self.iteration))
        outputs = {"actor": self.actor(states).square().sum()}
        outputs["critic"] = sum(head(states).square().sum() for head in self.critic.values())
        metrics: dict[str, float] = {}
        for name, loss in outputs.items():
            self.manual_backward(loss)
            counted = name == "actor"
            metrics |= self._update(name, loss.detach(), minibatch, counted=counted)
        self.seen.append(metrics)
        return metrics


def train(config: FitConfig, num: int, checkpoint: Path | None = None) -> TinyModule:
    """So many iterations in all, of one update of each network."""
    module = TinyModule(config, pad_id=0)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=num,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader([0]), ckpt_path=checkpoint)  # type: ignore[arg-type]
    return module


def weights(module: VapoModule, network: str) -> list[Tensor]:
    return [p.detach().clone() for p in module.get_submodule(network).parameters()]


def options(optimizer: Optimizer) -> list[Mapping[str, Any]]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


@pytest.fixture(scope="module", params=list(KINDS))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two iterations and their checkpoint, from which the third is taken by either config."""
    folder, kind = tmp_path_factory.mktemp(request.param), request.param
    networks = ("actor", "critic")
    before = [f"{n}.optimizer.{key}={value}" for n in networks for key, value in BEFORE.items()]
    if kind == "probe":
        before.remove(f"critic.optimizer.lr={BEFORE['lr']}")  # which a probe does not read
    config = fit_config(folder, *before, *KINDS[kind])
    train(config, 2).trainer.save_checkpoint(folder / "after.ckpt")
    return SimpleNamespace(config=config, kind=kind, checkpoint=folder / "after.ckpt")


def third(run: Any, **changed: float) -> TinyModule:
    return train(changed_config(run.config, changed), 3, run.checkpoint)


def changed_config(config: FitConfig, changed: Mapping[str, float]) -> FitConfig:
    """As overrides would make it, which takes tenths of a second."""
    config = copy.deepcopy(config)
    for key, value in changed.items():
        *path, name = key.split(".")
        part: Any = config
        for attribute in path:
            part = getattr(part, attribute)
        assert hasattr(part, name)
        setattr(part, name, value)
    return config


def test_an_unchanged_config_goes_on_bit_for_bit(run: Any) -> None:
    whole, resumed = train(run.config, 3), third(run)
    for name in ("actor", "critic"):
        assert_same(weights(resumed, name), weights(whole, name))
    for optimizer, expected in zip(
        resumed.trainer.optimizers, whole.trainer.optimizers, strict=True
    ):
        assert_same(optimizer.state_dict(), expected.state_dict())
    for schedule, same in zip(resumed.lr_schedulers(), whole.lr_schedulers(), strict=True):  # type: ignore[arg-type]
        assert_same(schedule.state_dict(), same.state_dict())


def test_each_key_of_an_optimizer_acts_from_the_first_resumed_update_on(run: Any) -> None:
    """A key that is added to the config needs a value here, and then an effect."""
    assert {field.name for field in fields(OptimizerConfig)} == BEFORE.keys() == AFTER.keys()
    unchanged = third(run)
    of_critic = {key: f"critic.optimizer.{key}" for key in AFTER}
    if run.kind == "probe":
        of_critic["lr"] = "critic.probe.lr"
    for key, value in AFTER.items():
        resumed = third(run, **{f"actor.optimizer.{key}": value, of_critic[key]: value})
        for network in ("actor", "critic"):
            assert moved_otherwise(resumed, unchanged, network), f"{network}: {key} is ignored"
    if run.kind == "network":
        resumed = third(run, **{"critic.sampled_logprobs.lr": 0.5})
        assert moved_otherwise(resumed, unchanged, "critic")
        assert not moved_otherwise(resumed, unchanged, "actor")


def moved_otherwise(one: VapoModule, other: VapoModule, network: str) -> bool:
    pairs = zip(weights(one, network), weights(other, network), strict=True)
    return any(not torch.equal(a, b) for a, b in pairs)


def test_the_rate_is_the_new_ones_at_the_restored_step(run: Any) -> None:
    own = "critic.optimizer.lr" if run.kind == "network" else "critic.probe.lr"
    changed = {"actor.optimizer.lr": 0.4, own: 0.8, "critic.optimizer.warmup_steps": 8}
    changed |= {"actor.optimizer.beta1": 0.5, "critic.optimizer.weight_decay": 0.3}
    resumed = third(run, **changed)
    (metrics,) = resumed.seen
    assert metrics["actor/lr"] == 0.4 * 3 / 4, "the third step of a warmup of 4"
    assert metrics["critic/lr"] == pytest.approx(0.8 * 3 / 8, rel=1e-12)
    new = train(changed_config(run.config, changed), 3)  # with these from its start on
    for optimizer, expected in zip(resumed.trainer.optimizers, new.trainer.optimizers, strict=True):
        assert_same(options(optimizer), options(expected))
        steps = {float(state["step"]) for state in optimizer.state.values()}
        assert steps == {3.0}, "the moments and their steps stay"
    for schedule, same in zip(resumed.lr_schedulers(), new.lr_schedulers(), strict=True):  # type: ignore[arg-type]
        assert schedule.base_lrs == same.base_lrs
        assert schedule.last_epoch == 3


@pytest.mark.parametrize("kernels", [{"fused": False, "foreach": True}, {"fused": True}])
def test_what_the_device_decides_stays(kernels: dict[str, bool]) -> None:
    """Which kernels step is not of the config; a simulated step has a GPU's on a CPU."""
    optimizer = make_optimizer(nn.Linear(2, 1), OptimizerConfig())
    scheduler, options = make_scheduler(optimizer, 0), options_of_groups(optimizer)
    for group in optimizer.param_groups:
        group.update(kernels)
    take_options(optimizer, scheduler, options)
    assert all(kernels.items() <= group.items() for group in optimizer.param_groups)
