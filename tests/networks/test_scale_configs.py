"""conf/scale/ and the paper's recipe at their real size: built without weights, estimated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from vapo.commands.estimate import run
from vapo.config import FitConfig, resolve
from vapo.config.loading import load_config
from vapo.networks.actor_critic import Actor, Critic
from vapo.networks.meta_device import empty_model
from vapo.system.distributed import shard
from vapo.system.host_memory import GIB

ROOT = Path(__file__).parents[2]
SHAPES = ROOT / "models/shapes"
KERNELS = {"dtype": "float32", "attn_implementation": "auto"}


def scale(name: str) -> FitConfig:
    """An overlay of conf/scale over data and a model of one's own."""
    files = [ROOT / "conf/data/gsm8k.yaml", ROOT / f"conf/scale/{name}.yaml"]
    return load_config(FitConfig, files, ["actor.path=mine", "critic.init=policy"])


def paper() -> FitConfig:
    return load_config(FitConfig, [ROOT / "conf/recipes/paper_qwen2.5_32b.yaml"], [])


@pytest.fixture
def sixty_four_processes() -> Iterator[None]:
    """A process group that communicates nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    yield
    dist.destroy_process_group()


def test_paper_values() -> None:
    config = paper()
    numbers = resolve(config)
    assert (numbers.num_prompts, numbers.group_size) == (512, 16)
    assert config.training.minibatch_size == 512
    assert (numbers.alpha, numbers.lambda_critic, numbers.gamma) == (0.05, 1.0, 1.0)
    assert (numbers.eps_low, numbers.eps_high, numbers.mu) == (0.2, 0.28, 0.1)
    assert (config.actor.optimizer.lr, config.critic.optimizer.lr) == (1e-6, 2e-6)
    assert numbers.value_pretraining_iterations == 50
    evaluation = config.evaluation
    assert (evaluation.k, evaluation.temperature, evaluation.top_p) == (32, 1.0, 0.7)


@pytest.mark.parametrize(
    ("shape", "num_parameters"),
    [
        ("qwen2.5_32b", 32_763_876_352),
        ("qwen2.5_7b", 7_615_616_512),
        ("qwen2.5_1.5b", 1_543_714_304),
        ("qwen2.5_0.5b", 494_032_768),
        ("smollm2_135m", 134_515_008),
        ("qwen3_0.6b", 596_049_920),
        ("qwen3_1.7b", 1_720_574_976),
        ("qwen3_4b", 4_022_468_096),
        ("qwen3_8b", 8_190_735_360),
    ],
)
def test_shapes_have_the_published_numbers_of_parameters(shape: str, num_parameters: int) -> None:
    model = empty_model("causal_lm", str(SHAPES / shape), **KERNELS)
    assert sum(p.numel() for p in model.parameters()) == num_parameters


@pytest.mark.slow
@pytest.mark.usefixtures("sixty_four_processes")
def test_the_papers_networks_shard_over_64_processes() -> None:
    config, path = paper(), str(SHAPES / "qwen2.5_32b")
    mesh = init_device_mesh("cpu", (config.trainer.devices * config.trainer.num_nodes,))
    networks = (
        Actor(empty_model("causal_lm", path, **KERNELS)),
        Critic(empty_model("value_model", path, **KERNELS)),
    )
    for network in networks:
        shard(network, mesh, config.trainer)
        parameters = list(network.parameters())
        assert all(isinstance(p, DTensor) and p.is_meta for p in parameters)
        here = sum(p.to_local().numel() for p in parameters if isinstance(p, DTensor))
        whole = sum(p.numel() for p in parameters)
        assert here == pytest.approx(whole / 64, rel=1e-3)


@pytest.mark.night  # the arithmetic itself: tests/studies/estimate
@pytest.mark.parametrize(
    ("name", "shape", "gpu_memory_gib"),
    [
        ("one_gpu", "qwen2.5_1.5b", 80),
        ("fsdp_8gpu", "qwen2.5_7b", 80),
    ],
)
def test_what_the_overlays_say_of_memory(
    name: str, shape: str, gpu_memory_gib: float, capsys: pytest.CaptureFixture[str]
) -> None:
    estimate = run(
        scale(name), gpu_memory_gib=gpu_memory_gib, model_config=SHAPES / shape / "config.json"
    )
    assert f"fits in {gpu_memory_gib:g} GiB" in capsys.readouterr().out
    states = 16 * sum(estimate.parameters.values()) / estimate.num_processes
    assert estimate.peak > states, "weights, gradients and AdamW's two states in float32"
    assert estimate.peak < gpu_memory_gib * GIB
