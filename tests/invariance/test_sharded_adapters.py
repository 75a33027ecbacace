"""Adapters on shards: the gradients of one process, whichever pass a network runs first."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.forked import Ranks
from tests.invariance.gradients import FixedRollouts, RecordsGradients, config_on, fitted
from tests.invariance.test_gradients import MANY, ONE_FORWARD, assert_same
from vapo.networks.forward_passes import ForwardNetworks, add_logprobs_and_values
from vapo.types import EvaluatedBatch, Phase, RolloutBatch

ADAPTERS = (
    *("actor.lora.rank=2", "critic.lora.rank=2"),
    "critic.lora.target_modules='q_proj,up_proj'",
)
WITH_REFERENCE = ("algorithm.kl.coef=0.1", "trainer.reduce_every_microbatch=true")


class MovedAdapters(RecordsGradients):
    """Adapters that have left 0, where A has no gradient; the reference runs before the actor."""

    def configure_model(self) -> None:
        super().configure_model()
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if ".lora_B." in name:
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
def test_two_ranks_have_the_gradients_of_one(two_ranks: Ranks) -> None:
    kl = WITH_REFERENCE[:1]
    one = adapted(1, ONE_FORWARD, *kl)
    two = two_ranks.run(adapted, 2, MANY, *WITH_REFERENCE)
    assert_same(one, two[0])
    gradients = one["gradients"]
    trained = {name for name in gradients if ".lora_" in name or ".score." in name}
    assert gradients.keys() == trained
    assert len({name.split(".")[0] for name in trained}) == 2, "of both networks"
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())
