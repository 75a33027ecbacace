"""The states that a probe reads, in an evaluation that no update follows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

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
