"""What the critic explained at the end of each phase, from the metrics of the iterations."""

from __future__ import annotations

import math
from types import SimpleNamespace
from unittest.mock import MagicMock

import lightning as L
import pytest

from vapo.training.callbacks import critic_knowledge
from vapo.training.callbacks.critic_knowledge import CriticKnowledge
from vapo.types import Phase

PRETRAINING, POLICY = Phase.VALUE_PRETRAINING, Phase.POLICY_OPTIMIZATION


@pytest.fixture
def end_iteration(monkeypatch):
    """Return a function that ends an iteration of a phase, with these metrics, for a callback."""

    def end(knowledge: CriticKnowledge, phase: Phase, **metrics: float) -> None:
        iteration = SimpleNamespace(
            phase=phase, metrics={f"critic/{k}": v for k, v in metrics.items()}
        )
        monkeypatch.setattr(critic_knowledge, "iteration_of", lambda trainer: iteration)
        knowledge.on_train_epoch_end(MagicMock(spec=L.Trainer), MagicMock(spec=L.LightningModule))

    return end


def test_it_is_the_mean_of_the_last_four_batches_of_each_phase(end_iteration):
    knowledge = CriticKnowledge()
    for explained in (-5.0, 0.1, 0.2, math.nan, 0.3, 0.4):
        end_iteration(knowledge, PRETRAINING, explained_variance=explained)
    for explained in (0.5, 0.1):
        end_iteration(knowledge, POLICY, explained_variance=explained)
    assert knowledge.after(PRETRAINING) == pytest.approx(0.25)
    assert knowledge.after(POLICY) == pytest.approx(0.3)


def test_a_resumed_run_goes_on_with_the_batches_of_its_checkpoint(end_iteration):
    first, resumed = CriticKnowledge(), CriticKnowledge()
    end_iteration(first, PRETRAINING, explained_variance=0.2, heldout_explained_variance=0.6)
    resumed.load_state_dict(first.state_dict())
    end_iteration(resumed, PRETRAINING, explained_variance=0.4, heldout_explained_variance=0.1)
    assert resumed.latest == {"value_pretraining": [0.2, 0.4]}
    assert resumed.after(PRETRAINING) == 0.6, "the held-out figure of the best pass"
    assert resumed.after(POLICY) is None


def test_a_run_without_a_critic_knows_nothing(end_iteration):
    knowledge = CriticKnowledge()
    end_iteration(knowledge, POLICY)
    assert knowledge.after(POLICY) is knowledge.after(PRETRAINING) is None
