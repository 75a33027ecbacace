"""Adapters on shards: the gradients of one process, whichever pass a network runs first."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.forked import Ranks
from tests.invariance.gradients import FixedRollouts, RecordsGradients, config_on, fitted
from tests.invariance.test_gradients import MANY, ONE_FORWARD, PADDED, assert_same
from vapo.networks.forward_passes import ForwardNetworks, add_logprobs_and_values
from vapo.types import EvaluatedBatch, Phase, RolloutBatch

ADAPTERS = (
    *("actor.lora.rank=2", "critic.lora.rank=2"),
    "critic.lora.target_modules='q_proj,up_proj'",
)
ON_ONE_BASE = (  # the critic's beside those of the actor, whose layers are recomputed
    *("critic.kind=adapters", "critic.init=policy"),
    *("actor.gradient_checkpointing=true", "critic.gradient_checkpointing=true"),
)
WITH_REFERENCE = ("algorithm.kl.coef=0.1", "trainer.reduce_every_microbatch=true")


class MovedAdapters(RecordsGradients):
    """Adapters and a head that have left 0: all have gradients. The reference runs first."""

    def configure_model(self) -> None:
        super().configure_model()
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if ".lora_B." in name or ".score." in name:
                    parameter.fill_(0.02)

    def add_logprobs_and_values(
        self, batch: RolloutBatch, phase: Phase, *, with_entropy: bool
    ) -> EvaluatedBatch:
        for reference in self._reference:
            networks = ForwardNetworks(
                *(None, reference, None, 1.0, ONE_FORWARD, 0, self.layout, self.device)
            )
            add_logprobs_and_values(batch, networks)
        return super().add_logprobs_and_values(batch, phase, with_entropy=with_entropy)


def adapted(num_processes: int, microbatch_tokens: int, *overrides: str) -> dict[str, Any]:
    config = config_on(num_processes, microbatch_tokens, *ADAPTERS, *overrides)
    return fitted(MovedAdapters(config, pad_id=0), FixedRollouts(config), config)


@pytest.mark.slow
def test_on_one_base_a_gradient_does_not_depend_on_the_cut() -> None:
    one = adapted(1, ONE_FORWARD, *ON_ONE_BASE, PADDED)
    assert_same(one, adapted(1, MANY, *ON_ONE_BASE))
    check_trained(one["gradients"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [pytest.param((), marks=pytest.mark.night), ON_ONE_BASE],
    ids=["network", "adapters"],
)
def test_two_ranks_have_the_gradients_of_one(two_ranks: Ranks, kind: tuple[str, ...]) -> None:
    kl = WITH_REFERENCE[:1]
    one = adapted(1, ONE_FORWARD, *kind, *kl)
    two = two_ranks.run(adapted, 2, MANY, *kind, *WITH_REFERENCE)
    assert_same(one, two[0])
    check_trained(one["gradients"])


def check_trained(gradients: dict[str, torch.Tensor]) -> None:
    trained = {name for name in gradients if ".lora_" in name or ".score." in name}
    assert gradients.keys() == trained
    assert len({name.split(".")[0] for name in trained}) == 2, "of both networks"
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())
