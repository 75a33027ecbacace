"""Lightning's own set-up of a sharded run leaves offloaded shards on the host.

The GPU is played by the meta device: what is moved there shows.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.config.fits import fit_config
from tests.networks.test_build import one_process
from tests.tiny_model import save_tiny_folder, tiny_model
from vapo.config.schema import OptimizerConfig, TrainerConfig
from vapo.networks import build
from vapo.system.distributed import fill_from_first_rank
from vapo.training.optimizers import make_optimizer
from vapo.training.strategy import Sharding, make_strategy

__all__ = ["one_process"]
GPU = torch.device("meta")


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Linear(2, 2)
        self.register_buffer("iteration", torch.zeros(()))

    def configure_model(self) -> None: ...

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.actor, OptimizerConfig())


def set_up(monkeypatch: pytest.MonkeyPatch, *, offloads: bool) -> tuple[Module, Sharding]:
    strategy = make_strategy(TrainerConfig(strategy="fsdp", cpu_offload=offloads))
    assert isinstance(strategy, Sharding)
    module, trainer = Module(), L.Trainer(accelerator="cpu", logger=False)
    module.trainer = trainer
    trainer.state.fn = TrainerFn.FITTING  # type: ignore[assignment]
    strategy.connect(module)
    strategy.accelerator = SimpleNamespace(setup=lambda trainer: None)  # type: ignore[assignment]
    monkeypatch.setattr(Sharding, "root_device", GPU)
    strategy.setup(trainer)
    return module, strategy


@pytest.mark.parametrize("offloads", [True, False])
def test_shards_stay_on_the_host(monkeypatch: pytest.MonkeyPatch, offloads: bool) -> None:
    module, strategy = set_up(monkeypatch, offloads=offloads)
    expected = torch.device("cpu") if offloads else GPU
    assert module.actor.weight.device == expected
    states = strategy.optimizers[0].state
    assert len(states) == 2, "none is lost"
    assert {state["exp_avg"].device for state in states.values()} == {expected}
    # the module's own counters, and the place that inputs are moved to
    assert module.iteration.device == GPU
    assert module.device == GPU


def test_sums_over_ranks_reach_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    backends = [
        make_strategy(TrainerConfig(strategy="fsdp", cpu_offload=on)).process_group_backend  # type: ignore[union-attr]
        for on in (False, True)
    ]
    assert backends == [None, "cpu:gloo,cuda:nccl"]


def test_the_weights_that_shards_are_filled_with_stay_on_the_host(
    tmp_path: Path, one_process: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP refuses others; buffers are where the network computes."""

    def on_gpu(network: Any, load: Any, mesh: Any, **options: Any) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(mesh, "_device_type", GPU.type)
            fill_from_first_rank(network, load, mesh, **options)

    monkeypatch.setattr(build, "fill_from_first_rank", on_gpu)
    path = save_tiny_folder(tmp_path / "policy")
    overrides = (f"actor.path={path}", "trainer.strategy=fsdp", "trainer.cpu_offload=true")
    actor = build.make_actor(fit_config(tmp_path, *overrides), one_process)
    expected = dict(tiny_model().named_parameters())
    shards: dict[str, Any] = dict(actor.model.named_parameters())
    for name, shard in shards.items():
        assert torch.equal(shard.to_local(), expected[name].detach()), name
    assert {buffer.device for buffer in actor.buffers()} == {GPU}
