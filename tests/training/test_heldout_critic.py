"""The best critic of a pretraining from stored rollouts, and the oracle's explained variance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch.optim import AdamW

from tests.components.test_value_pretraining import make_module
from tests.config.fits import fit_config
from tests.tiny_model import tiny_tokenizer
from vapo.config import resolve
from vapo.config.components import ValuePretraining as Settings
from vapo.config.critic import CriticConfig, RidgeConfig
from vapo.config.networks import OptimizerConfig
from vapo.diagnostics.oracle import oracle_explained_variance
from vapo.errors import UserError
from vapo.rollouts.rollout_rows import StoredRollout
from vapo.rollouts.stored_rollouts import RolloutDataset
from vapo.training.callbacks import value_pretraining as heldout_critic
from vapo.training.callbacks.value_pretraining import BestCritic
from vapo.training.module import VapoModule
from vapo.training.optimizers import make_optimizer
from vapo.training.ridge_fit import RidgeFit
from vapo.types import EvaluatedBatch, FinishReason, Prompt, Rollout, Turn


def stored_stub(heldout: Sequence[Any] = ("group",)) -> Any:
    """A pass is two iterations."""
    stub = MagicMock(spec=RolloutDataset)
    stub.passes = lambda finished: finished // 2
    stub.heldout, stub.digest, stub.name = heldout, "abc", "f.parquet"
    return stub


def follow(
    best: BestCritic, module: Any, monkeypatch: pytest.MonkeyPatch, found: Sequence[float]
) -> tuple[int, AdamW]:
    """Set the head's weight and all moments to the pass's number, measure; the passes until it is
    over."""
    optimizer = make_optimizer(module.critic, OptimizerConfig())
    for number, value in enumerate(found, start=1):
        monkeypatch.setattr(
            heldout_critic, "explained_now", lambda module, batch, v=value: (None, v)
        )
        with torch.no_grad():
            module.critic.model.score.weight.fill_(number)
        for state in optimizer.state.values():
            for tensor in state.values():
                tensor.fill_(number)
        best.measure(module, optimizer, stored_stub(), 2 * number)
        if best.is_over():
            return number, optimizer
    return 0, optimizer


def test_patience_and_the_best_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    best, module = BestCritic(Settings(data="f", patience=2)), make_module()
    passes, optimizer = follow(best, module, monkeypatch, [0.1, 0.3, 0.3, 0.2, 0.9])
    assert passes == 4
    assert (best.best, best.best_pass) == (0.3, 2)
    again = BestCritic(best.settings)
    again.load_state_dict(best.state_dict())
    again.restore(module, optimizer)
    assert module.critic is not None
    weight = module.critic.state_dict()["model.score.weight"]
    assert set(weight.flatten().tolist()) == {2.0}
    states = list(optimizer.state.values())
    assert len(states) == len(list(module.critic.parameters()))
    numbers = {float(x) for state in states for t in state.values() for x in t.flatten()}
    assert numbers == {2.0}, "step and both moments are those of the best pass, too"
    assert (again.weights, again.moments) == ({}, [])


def test_the_best_pass_brings_back_the_window_that_it_was_fitted_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    best, module = BestCritic(Settings(data="f", patience=2)), make_module()
    module.ridge = ridge = RidgeFit(CriticConfig(ridge=RidgeConfig()))
    measure = best.measure

    def measured(*args: Any) -> float | None:
        ridge.grams.append(torch.full((1, 3, 3), float(args[3])))
        return measure(*args)

    monkeypatch.setattr(best, "measure", measured)
    _, optimizer = follow(best, module, monkeypatch, [0.1, 0.3, 0.3, 0.2])
    assert len(ridge.grams) == 4
    best.restore(module, optimizer)
    assert [float(gram.mean()) for gram in ridge.grams] == [2.0, 4.0]
    assert best.ridge == {}


def test_a_number_that_is_none_is_not_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    best, module = BestCritic(Settings(data="f", patience=3)), make_module()
    assert follow(best, module, monkeypatch, [-0.5, float("nan"), 0.1])[0] == 0
    assert (best.best, best.best_pass) == (0.1, 3)


def test_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    best, module = BestCritic(Settings(data="f", epochs=3)), make_module()
    assert follow(best, module, monkeypatch, [0.1, 0.2, 0.3, 0.4])[0] == 3
    stored = stored_stub()
    assert [best.due(stored, n, is_last=False) for n in range(1, 6)] == [
        False, True, False, True, False
    ]  # fmt: skip
    assert best.due(stored, 5, is_last=True)


def test_nothing_held_out_keeps_the_last_weights() -> None:
    best, module = BestCritic(Settings(data="f", epochs=1, heldout_share=0.0)), make_module()
    assert module.critic is not None
    optimizer = make_optimizer(module.critic, OptimizerConfig())
    assert best.measure(module, optimizer, stored_stub(heldout=()), 2) is None
    assert best.is_over()
    assert (best.weights, best.moments) == ({}, []), "there is nothing to go back to"


def test_another_file_is_refused_when_a_run_resumes() -> None:
    """A checkpoint from before the end of the first pass names the file already."""
    best, again = BestCritic(Settings()), BestCritic(Settings())
    best.begin(stored_stub())
    again.load_state_dict(best.state_dict())
    other = stored_stub()
    again.begin(other)
    other.digest = "xyz"
    with pytest.raises(UserError, match="not the one that the run began with"):
        again.begin(other)


# ---- oracle ----------------------------------------------------------------------------------


def row(
    prompt: int, reward: float, states: str = "", oracle: Sequence[float] = ()
) -> StoredRollout:
    length = len(states) or len(oracle) or 1
    rollout = Rollout(
        Prompt(f"p{prompt}", "", (prompt,), ""), (5,) * length, "", (0.0,) * length,
        FinishReason.STOP, (Turn(0, length, reward),), reward > 0,
    )  # fmt: skip
    return StoredRollout(
        rollout,
        str(prompt),
        tuple(oracle) or None,
        tuple(states) or None,
    )


def stored_of(
    folder: Path, training: list[StoredRollout], heldout: list[StoredRollout], *overrides: str
) -> Any:
    config = fit_config(
        folder,
        "components.group_sampling.enabled=false",
        "components.value_pretraining.data=f",
        *overrides,
    )
    stored = RolloutDataset(config, [*training, *heldout], tiny_tokenizer(), name="f")
    stored.training, stored.heldout = [[r] for r in training], [[r] for r in heldout]
    return stored


def test_the_oracles_table_is_of_the_training_rollouts(tmp_path: Path) -> None:
    """Training returns: a 1, 1, 0; b 0; their mean is 1/2, which counts as one token more.

    So V(a) = (2 + 1/2) / 4 = 5/8, V(b) = 1/4, V(c) = 1/2. Held out: a 1, c 0, so R = 1, 0 and
    V = 5/8, 1/2: 1 - Var(3/8, -1/2) / Var(1, 0) = 1 - (7/16)^2 / (1/2)^2 = 15/64.
    """
    training = [row(1, 1.0, "a"), row(2, 1.0, "a"), row(3, 0.0, "a"), row(4, 0.0, "b")]
    heldout = [row(5, 1.0, "a"), row(6, 0.0, "c")]
    found = oracle_explained_variance(stored_of(tmp_path, training, heldout))
    assert found == pytest.approx(15 / 64, abs=1e-6)


def test_given_values_come_first(tmp_path: Path) -> None:
    """R = 1, 1, 0, V = 1, 1/2, 1/2: errors 0, 1/2, -1/2; 1 - (1/6) / (2/9) = 1/4."""
    training = [row(1, 1.0, "a"), row(2, 0.0, "a")]
    heldout = [row(3, 1.0, oracle=[1.0, 0.5]), row(4, 0.0, oracle=[0.5])]
    found = oracle_explained_variance(stored_of(tmp_path, training, heldout))
    assert found == pytest.approx(0.25, abs=1e-6)
    assert oracle_explained_variance(stored_of(tmp_path, training, [row(5, 1.0)])) is None


PUNISHED = (
    "rollouts.max_response_tokens=4",
    "rewards.overlong.soft_punishment=true",
    "rewards.overlong.cache_tokens=2",
)


def test_unshaped_rewards_are_what_oracle_and_critic_are_measured_on(tmp_path: Path) -> None:
    """Two responses of 3 tokens, each punished by 1/2, and one of 1, which is not.

    Without the punishment R = 1, 1, 1, 0, 0, 0, 1, which the given values are; with it R = 1/2
    and -1/2 for the long ones.
    """
    training = [row(1, 1.0, "a"), row(2, 0.0, "a")]
    perfect = [row(3, 1.0, oracle=[1.0] * 3), row(4, 0.0, oracle=[0.0] * 3), row(5, 1.0, "", [1.0])]
    found = {
        kind: stored_of(tmp_path, training, perfect, *PUNISHED, f"critic.reward={kind}")
        for kind in ("shaped", "unshaped")
    }
    assert oracle_explained_variance(found["unshaped"]) == 1.0
    shaped = oracle_explained_variance(found["shaped"])
    assert shaped is not None
    assert shaped < 0.95
    returns = {}
    for kind, stored in found.items():
        module = MagicMock(
            spec=VapoModule, config=stored.config, hyperparameters=resolve(stored.config)
        )
        module.add_logprobs_and_values = lambda batch, phase, with_entropy: EvaluatedBatch(
            **{**vars(batch), "actor_states": [torch.zeros(1)] * len(batch)},
            old_values=torch.zeros(batch.response_mask.shape),
        )
        with patch.object(heldout_critic, "explained_variance", return_value=0.0) as explained:
            batch, _ = heldout_critic.explained_now(module, stored.heldout_batch())
        assert batch.actor_states is None, "no update follows"
        returns[kind] = explained.call_args.args[1].tolist()
    assert returns["unshaped"] == [[1.0] * 3, [0.0] * 3, [1.0, 0.0, 0.0]]
    assert returns["shaped"] == [[0.5] * 3, [-0.5] * 3, [1.0, 0.0, 0.0]]
