"""`vapo fit` on rollout servers that run the Transformers engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.commands import fit
from tests.integration.test_vllm_fit import assert_same_actor
from tests.tiny_model import save_tiny_folder
from tests.vllm_engine import real_server, vllm_model


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_on_servers_is_the_run_with_the_trainers_own_engine(tmp_path: Path) -> None:
    """The weights arrive after each iteration, and the draws are the same, up to 1e-6."""
    policy = save_tiny_folder(tmp_path / "policy", vllm_model())
    options = [f"actor.path={policy}", "critic.init=policy"]
    options += ["rollouts.max_concurrent_sequences=64"]
    own = fit(tmp_path / "own", *options)
    with real_server(policy, "transformers") as (url, _):
        servers = ["rollouts.engine=servers", f"rollouts.servers.urls={url}"]
        assert_same_actor(own, fit(tmp_path / "served", *options, *servers))
