"""The hidden states that are read in an evaluation, which no update follows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.config.fits import ROOT
from tests.systems import made_up_batch, system_config
from vapo.diagnostics.value_page import heldout
from vapo.networks.forward_passes import ForwardNetworks


def test_they_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    config = system_config("vapo")
    batch, _ = made_up_batch(config)
    read = replace(batch, actor_states=[torch.zeros(1)] * len(batch))
    monkeypatch.setattr(heldout, "add_logprobs_and_values", lambda *_, **__: read)
    networks = ForwardNetworks(None, None, None, 1.0, 100, 0, "padded", torch.device("cpu"))
    found, checked = heldout.evaluated_heldout(config, batch, networks)
    assert found.actor_states is None
    assert checked.batch.actor_states is None


def test_an_estimator_that_reads_them_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    config = system_config(
        "grpo",
        "algorithm.advantage_estimator=function",
        f"algorithm.estimator_function={ROOT / 'experiments/smollm2/kernel.py'}:estimate",
        "algorithm.estimator_args={temperature: 1.0, by: states, alpha: 0.5}",
        "algorithm.estimator_reads_layers=[0]",
    )
    batch, _ = made_up_batch(config)
    states = [torch.randn(len(rollout.response_ids), 1, 4) for rollout in batch.rollouts]
    read = replace(batch, actor_states=states)
    monkeypatch.setattr(heldout, "add_logprobs_and_values", lambda *_, **__: read)
    networks = ForwardNetworks(None, None, None, 1.0, 100, 0, "padded", torch.device("cpu"))
    found, _ = heldout.evaluated_heldout(config, batch, networks)
    assert found.actor_states is None
    assert found.raw_advantages is not None
    assert found.raw_advantages.std() > 0
