"""Episodes, continuations and rollouts ahead of training, sampled by a real `vllm serve`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders import free_port
from tests.integration.commands import ROOT, SMALL, output_options, vapo_process
from tests.integration.test_vllm_fit import assert_same_actor
from tests.recorded_metrics import metric_values
from tests.vllm_engine import real_servers

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
TUG_OF_WAR = ("--config", "conf/tug_of_war/vapo.yaml")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its heads of 16 are padded on a CPU."""
    folder = tmp_path_factory.mktemp("tug_of_war") / "policy"
    return Path(shutil.copytree(ROOT / "models/tug_of_war/policy", folder))


@pytest.fixture(scope="module")
def served(policy: Path) -> Iterator[list[str]]:
    port = free_port()
    with real_servers(policy, port, config=TUG_OF_WAR):
        yield ["rollouts.engine=vllm_server", f"rollouts.servers.urls=http://127.0.0.1:{port}"]


def fit(policy: Path, folder: Path, *options: str) -> Path:
    result = vapo_process(
        "fit",
        *TUG_OF_WAR,
        *("environment.args.num_turns=5", "environment.max_turns=6"),
        *SMALL,
        *("components.value_pretraining.num_iterations=1", "training.num_iterations=2"),
        *("components.group_sampling.num_prompts=4", "training.minibatch_size=8"),
        *("evaluation.k=2", "evaluation.num_prompts=4", "rollouts.max_concurrent_sequences=64"),
        *("value_truth.every_n_iterations=1", "value_truth.num_responses=4"),
        *("value_truth.num_prefixes=4", "value_truth.num_continuations=2"),
        f"actor.path={policy}",
        *output_options(folder),
        *options,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return Path(result.stdout.strip().splitlines()[-1])


def test_episodes_and_their_continuations_are_those_in_process(
    policy: Path, served: list[str], tmp_path: Path
) -> None:
    engine = ["rollouts.engine=vllm", "rollouts.vllm.kv_cache_memory_bytes=33554432"]
    own = fit(policy, tmp_path, *engine)
    over_http = fit(policy, tmp_path, *served)
    assert_same_actor(own, over_http)
    for key in ("rollout/turns_mean", "rollout/accuracy", "eval/avg_at_k"):
        assert metric_values(own, key) == metric_values(over_http, key), key
    for key in ("truth/bias", "truth/mse"):
        expected = metric_values(own, key)
        assert len(expected) == 3
        assert metric_values(over_http, key) == pytest.approx(expected, abs=1e-5), key
    assert max(metric_values(over_http, "rollout/logprob_gap_max")) < 1e-4


def test_episodes_ahead_of_training_know_the_weights_of_each_token(
    policy: Path, served: list[str], tmp_path: Path
) -> None:
    ahead = ["training.max_staleness=1", "training.num_iterations=4"]
    run = fit(policy, tmp_path, *served, *ahead, "value_truth.every_n_iterations=null")
    ages = metric_values(run, "rollout/staleness_mean")
    assert len(ages) == 5
    assert all(0 <= age <= 1 for age in ages)
    assert max(ages) > 0, "nothing was sampled ahead"
    assert min(metric_values(run, "rollout/turns_mean")) > 2
