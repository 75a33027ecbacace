"""Runs with a real vLLM engine, on a GPU by `make gpu`, and the same on a CPU by `make vllm-test`.

A CPU computes in float32 and gives equal tokens for equal requests, so that whole runs can be
compared; a GPU in bf16-mixed, where the engine must agree with the trainer to rounding. The order
is that of importance, for a machine that may go away. vLLM compiles nothing here but in the first
run, which is as long as a user's first minute.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.builders import free_port
from tests.integration import commands
from tests.integration.commands import SHORTEST, summary
from tests.integration.test_gpu import metrics, preset
from tests.integration.test_vllm_fit import assert_same_actor
from tests.rollouts.playing import sample_all
from tests.rollouts.sampler_contract import ids_of
from tests.tiny_model import ragged_prompts, save_tiny_folder
from tests.vllm_engine import (
    GPU_SHARE,
    ON_GPU,
    make_engine,
    make_vllm_sampler,
    real_servers,
    vllm_model,
)
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.engine import EngineError
from vapo.rollouts.engines.vllm.colocated import ColocatedEngine

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.slow]
fit = partial(commands.fit, small=SHORTEST)
LARGEST_GAP = 0.02 if ON_GPU else 1e-5  # nats, the mean of an iteration
GAME = ("environment.args", "data.train.options", "data.heldout.options")
EAGER = "rollouts.vllm.enforce_eager=true"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = vllm_model(max_position_embeddings=1024)
    return save_tiny_folder(tmp_path_factory.mktemp("policy") / "folder", model)


def machine() -> list[str]:
    if ON_GPU:
        return ["trainer.accelerator=gpu", "trainer.precision=bf16-mixed"]
    return ["trainer.accelerator=cpu", "trainer.precision=32-true"]


def colocated(policy: Path, *, has_critic: bool = True) -> list[str]:
    return [
        f"actor.path={policy}",
        *["critic.init=policy"] * has_critic,
        "rollouts.engine=vllm",
        "rollouts.vllm.kv_cache_memory_bytes=33554432",
        f"rollouts.vllm.gpu_memory_utilization={GPU_SHARE}",
        *machine(),
    ]


@pytest.fixture(scope="module")
def whole_run(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both phases, with a checkpoint after each iteration; it sleeps while the networks train."""
    saved = ["checkpoints.every_n_iterations=1", "checkpoints.keep=9"]
    return fit(tmp_path_factory.mktemp("whole"), *colocated(policy), *saved)


def check_run(run: Path, *, largest_gap: float = LARGEST_GAP) -> dict[str, list[float]]:
    """All iterations are there, and in those of the policy the engine had the trainer's weights."""
    found = metrics(run)
    assert len(found["progress/iteration"]) == summary(run)["num_iterations"]
    gaps = found["rollout/logprob_gap_mean"]
    assert len(gaps) == sum(found["progress/phase"]) == 2
    assert 0 < max(gaps) < largest_gap
    assert all(map(math.isfinite, found["actor/grad_norm"]))
    return found


def test_a_colocated_run_agrees_with_its_engine(whole_run: Path) -> None:
    found = check_run(whole_run)
    assert min(found["time/rollout_s"]) > 0
    assert ("memory/gpu_gib" in found) == ON_GPU


def test_a_run_is_resumed_with_a_new_engine(policy: Path, whole_run: Path, tmp_path: Path) -> None:
    """From the second of three iterations; on a CPU it ends in the weights of the whole run."""
    copy = tmp_path / "runs" / whole_run.name  # a resumed run goes on in its own folder
    shutil.copytree(whole_run, copy)
    shutil.rmtree(copy / "checkpoints/iteration_000003")
    second = copy / "checkpoints/iteration_000002"
    resumed = fit(tmp_path, *colocated(policy), EAGER, "--ckpt_path", str(second))
    assert resumed == copy
    assert metrics(resumed)["rollout/logprob_gap_mean"][-1] < LARGEST_GAP
    assert (copy / "checkpoints/iteration_000003").exists()
    if not ON_GPU:
        assert_same_actor(whole_run, resumed)


# ---- one engine ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[1, 2], ids=["to the host", "discarded"])
def sleeper(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ColocatedEngine]:
    engine = make_engine(tmp_path_factory.mktemp("sleeper"), sleep_level=request.param)
    yield engine
    engine.close()


def test_an_engine_sleeps_and_wakes_with_its_weights(sleeper: ColocatedEngine) -> None:
    """Asleep it holds less of the GPU; awake it samples what it sampled before."""
    sampler = make_vllm_sampler(sleeper, vllm_model())

    def greedy() -> list[tuple[int, ...]]:
        settings = SamplingSettings(16, greedy=True)
        return ids_of(
            sample_all(sampler, ragged_prompts(4), group_size=1, settings=settings, seed=0)
        )

    before = greedy()
    awake = torch.cuda.mem_get_info()[0] if ON_GPU else 0
    sampler.sleep()
    if ON_GPU:
        assert torch.cuda.mem_get_info()[0] > awake
    assert greedy() == before


def test_new_weights_reach_an_engine_that_sleeps(sleeper: ColocatedEngine) -> None:
    """The sync proves it: it compares the engine's log-probs with the trainer's."""
    model = vllm_model()
    sampler = make_vllm_sampler(sleeper, model)
    sampler.sleep()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(-1)
    sampler.sync(model.state_dict().items())
    sampler.sleep()
    sampler.sync(model.state_dict().items())


def test_a_push_that_does_not_arrive_is_an_error(
    sleeper: ColocatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that the engine walks over and does not take: it still has the old ones."""
    model = vllm_model()
    sampler = make_vllm_sampler(sleeper, model)
    monkeypatch.setattr(sleeper, "load", lambda weights: list(weights))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(-1)
    with pytest.raises(EngineError, match=r"max_logprob_gap|did not reach the engine"):
        sampler.sync(model.state_dict().items())


# ---- more runs ----------------------------------------------------------------------------------


def test_low_rank_adapters_are_merged_into_the_engine(policy: Path, tmp_path: Path) -> None:
    check_run(fit(tmp_path, *colocated(policy), EAGER, "actor.lora.rank=4"))


def test_episodes_of_two_turns(tmp_path: Path) -> None:
    """Of a rope that is pulled twice; the policy has learned to pull it twenty times."""
    path = Path("models/tug_of_war/policy")
    result = commands.vapo(
        *("fit", "--config", "conf/tug_of_war/vapo.yaml", *SHORTEST, *colocated(path), EAGER),
        *(f"{key}.num_turns=2" for key in GAME),
        *("critic.epochs=1", "critic.minibatch_size=null"),
        f"output_dir={tmp_path / 'runs'}",
        f"tracking.uri={commands.store(tmp_path)}",
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = check_run(Path(result.stdout.strip().splitlines()[-1]))
    assert set(found["rollout/turns_max"]) == {2}
    assert min(found["rollout/num_observation_tokens"]) > 0


@pytest.mark.parametrize("name", ["grpo", "sao", "probe", "hl_gauss"])
def test_a_preset_samples_with_it(policy: Path, tmp_path: Path, name: str) -> None:
    options = colocated(policy, has_critic=name != "grpo")
    run = fit(tmp_path, *preset(name), *options, EAGER)
    # those of `dis` are the updates' own log-probs, after earlier steps of the iteration
    check_run(run, largest_gap=0.02 if name == "sao" else LARGEST_GAP)


@pytest.fixture(scope="module")
def served(policy: Path) -> Iterator[list[str]]:
    """`vapo serve` beside the trainer, on the same GPU if there is one."""
    port = free_port()
    with real_servers(policy, port):
        yield [
            f"actor.path={policy}",
            "critic.init=policy",
            "rollouts.engine=vllm_server",
            f"rollouts.servers.urls=http://127.0.0.1:{port}",
            *machine(),
        ]


def test_a_server_on_the_same_device(served: list[str], whole_run: Path, tmp_path: Path) -> None:
    """On a CPU the run's weights are those of the engine in the trainer's process."""
    run = fit(tmp_path, *served)
    check_run(run)
    if not ON_GPU:
        assert_same_actor(whole_run, run)


def test_a_server_samples_an_iteration_ahead(served: list[str], tmp_path: Path) -> None:
    """Rollouts of older weights differ from the trainer's by what an update has moved, too."""
    run = fit(tmp_path, *served, "training.max_staleness=1")
    found = metrics(run)
    assert len(found["progress/iteration"]) == summary(run)["num_iterations"]
    assert max(found["rollout/staleness_max"]) == 1
    assert max(found["rollout/logprob_gap_mean"]) < 0.1
