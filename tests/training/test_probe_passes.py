"""What a critic without a network costs the actor: no pass beside the one that it makes anyway."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.training.test_old_logprobs import ONE_STEP, PAGES_OFF, SEVERAL, fitted
from vapo.networks.actor_critic import Actor

PROBE = ("critic.kind=probe", "critic.init=policy")


def test_its_states_come_with_the_old_logprobs() -> None:
    """Its own second pass over the rollouts needs none of the actor's."""
    network, _ = fitted(PAGES_OFF, SEVERAL)
    probe, logged = fitted(PAGES_OFF, SEVERAL, *PROBE, "critic.epochs=2")
    assert 0 < probe.num_passes == network.num_passes
    assert "critic/explained_variance" in logged[-1]
    assert probe.critic is not None
    assert probe.critic.get_parameter("model.score.weight").any()


def test_where_nothing_reads_logprobs_none_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    temperatures: list[float | None] = []
    real = Actor.forward

    def noted(self: Actor, *args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            temperatures.append(options["temperature"])
        return real(self, *args, **options)

    monkeypatch.setattr(Actor, "forward", noted)
    _, logged = fitted(PAGES_OFF, ONE_STEP, *PROBE)
    assert temperatures
    assert set(temperatures) == {None}
    assert "critic/explained_variance" in logged[-1]
