"""Value pretraining: its phase and stop rule, off, and the failure that it prevents.

That the actor is bitwise unchanged during the phase, and that the critic is saved and can be
started from, is shown on the real command in tests/integration/test_fit.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import lightning as L
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from tests.config.fits import fit_config
from tests.systems import system_config
from vapo.config import FitConfig, resolve
from vapo.config.components import Components
from vapo.config.components import ValuePretraining as Settings
from vapo.config.schema import ActorConfig
from vapo.errors import UserError
from vapo.functional.advantages import gae, monte_carlo_returns
from vapo.functional.losses import value_loss
from vapo.networks.actor_critic import Critic
from vapo.rollouts.bad_rows import CheckedBatch
from vapo.rollouts.stored_rollouts import RolloutDataset
from vapo.system.progress import Progress
from vapo.training.callbacks import value_pretraining as value_pretraining_module
from vapo.training.callbacks.value_pretraining import ValuePretraining, nothing_trained
from vapo.training.datamodule import RolloutDataModule
from vapo.training.iteration import Iteration
from vapo.training.module import VapoModule
from vapo.types import Phase, TrainingBatch

NAN = float("nan")


def make_callback(settings: Settings, num_iterations: int, tmp_path: Path) -> ValuePretraining:
    return ValuePretraining(
        settings,
        num_iterations=num_iterations,
        critic_dir=tmp_path / "critic",
        progress=Progress(enabled=False),
    )


def make_module() -> VapoModule:
    module = VapoModule(FitConfig(actor=ActorConfig(path="unused")), pad_id=0)
    tiny = Qwen2Config(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    tiny.num_labels = 1
    module.critic = Critic(Qwen2ForSequenceClassification(tiny))
    return module


def fake_trainer() -> Any:
    return MagicMock(spec=L.Trainer)


def run_iteration(
    callback: ValuePretraining,
    module: VapoModule,
    explained_variance: float,
    *value_losses: float,
) -> None:
    """Its minibatches, as the module keeps them; nan: one whose update was skipped."""
    module.on_train_epoch_start()
    trainer = fake_trainer()
    trainer.datamodule = MagicMock(spec=RolloutDataModule)
    trainer.datamodule.iteration = Iteration(
        module.start,
        minibatches=[],
        metrics={"critic/explained_variance": explained_variance},
        batch=MagicMock(spec=TrainingBatch),
        checked=MagicMock(spec=CheckedBatch),
    )
    module.minibatch_metrics += [
        {"critic/value_loss": loss, "critic/grad_norm": 1.0} for loss in value_losses
    ]
    callback.on_train_epoch_end(trainer, module)
    module.iteration += 1


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    folders: list[Path] = []
    monkeypatch.setattr(
        value_pretraining_module,
        "save_network",
        lambda network, tokenizer, folder, lora: folders.append(folder),
    )
    return folders


def test_a_probes_states_of_a_file_have_the_engines_memory_and_are_freed(
    tmp_path: Path, saved: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the saved probe says whose they were."""
    callback, module = make_callback(Settings(data="f"), 1, tmp_path), make_module()
    module.config = fit_config(tmp_path, "critic.kind=probe")
    callback.stored = stored = MagicMock(spec=RolloutDataset, digest="abc")
    trainer, events = fake_trainer(), list[str]()
    trainer.datamodule = MagicMock(spec=RolloutDataModule)
    trainer.datamodule.runner.sleep = lambda: events.append("sleep")
    patched: list[tuple[str, Any]] = [
        ("compute_states", lambda *_: events.append("states")),
        ("fingerprint", lambda path: f"of {path}"),
    ]
    for name, value in patched:
        monkeypatch.setattr(value_pretraining_module, name, value)
    monkeypatch.setattr(callback, "measure_passes", lambda *_, **__: False)
    callback.setup(trainer, module, "fit")
    callback.on_train_start(trainer, module)
    assert events == ["sleep", "states"]
    stored.free_states.assert_not_called()
    run_iteration(callback, module, 0.9, 0.1)
    stored.free_states.assert_called_once()
    assert saved
    assert module.critic is not None
    assert module.critic.model.config.actor_fingerprint == "of some/policy"


def test_on_the_phase_lasts_its_iterations_then_the_critic_is_saved(
    tmp_path: Path, saved: list[Path]
) -> None:
    callback, module = make_callback(Settings(), 3, tmp_path), make_module()
    callback.setup(fake_trainer(), module, "fit")
    phases = []
    for _ in range(4):
        phases.append(module.phase)
        run_iteration(callback, module, 0.9, 0.1)
    assert phases == [Phase.VALUE_PRETRAINING] * 3 + [Phase.POLICY_OPTIMIZATION]
    assert saved == [tmp_path / "critic"]


def test_stop_rule_wants_both_limits_and_the_least_number_of_iterations(
    tmp_path: Path, saved: list[Path]
) -> None:
    settings = Settings(min_iterations=2, stop_explained_variance=0.5, stop_value_loss=0.2)
    callback, module = make_callback(settings, 10, tmp_path), make_module()
    callback.setup(fake_trainer(), module, "fit")
    observed = [(0.6, 0.1), (0.6, 0.3), (0.4, 0.1), (0.5, 0.2)]  # too early, loss, variance, met
    for explained_variance, loss in observed:
        assert module.phase is Phase.VALUE_PRETRAINING
        run_iteration(callback, module, explained_variance, loss)
    assert module.phase is Phase.POLICY_OPTIMIZATION
    assert len(saved) == 1


def test_nan_explained_variance_never_stops(tmp_path: Path, saved: list[Path]) -> None:
    """All rewards equal: no variance to explain is not a good critic."""
    callback = make_callback(Settings(stop_explained_variance=0.5), 10, tmp_path)
    module = make_module()
    callback.setup(fake_trainer(), module, "fit")
    for _ in range(5):
        run_iteration(callback, module, NAN, 0.0)
    assert module.phase is Phase.VALUE_PRETRAINING


def test_skipped_updates_do_not_count_for_the_stop_rule(tmp_path: Path, saved: list[Path]) -> None:
    """The mean is of the finite losses; an iteration without one does not stop the phase."""
    callback = make_callback(Settings(stop_value_loss=0.2), 10, tmp_path)
    module = make_module()
    callback.setup(fake_trainer(), module, "fit")
    for losses in ([NAN, NAN], [float("inf")], [], [NAN, 0.1, 0.4]):
        run_iteration(callback, module, 0.9, *losses)
        assert module.phase is Phase.VALUE_PRETRAINING, losses
    run_iteration(callback, module, 0.9, 0.1, NAN, 0.3)
    assert module.phase is Phase.POLICY_OPTIMIZATION


def test_off_the_policy_phase_begins_at_once(tmp_path: Path, saved: list[Path]) -> None:
    config = FitConfig(
        actor=ActorConfig(path="unused"),
        components=Components(value_pretraining=Settings(enabled=False)),
    )
    assert resolve(config).value_pretraining_iterations == 0
    callback, module = make_callback(Settings(enabled=False), 0, tmp_path), make_module()
    callback.setup(fake_trainer(), module, "fit")
    assert module.phase is Phase.POLICY_OPTIMIZATION
    assert saved == []


def reward_model_values(num_rollouts: int, length: int) -> torch.Tensor:
    """Values that rise along the response, whatever it is worth: scored at the last token."""
    return torch.linspace(-0.5, 0.5, length, dtype=torch.float64).expand(num_rollouts, length)


def test_negative_control_a_reward_model_as_critic_favours_early_tokens() -> None:
    """VC-PPO 3.1: rising values make the first tokens' advantage large at equal rewards.

    The rewards are balanced, so an unbiased critic gives every position mean advantage 0. With
    lambda < 1 the reward model's rise (0.2 a token here) counts as progress, most at the
    start: A_0 = sum_k 0.8^k * 0.2 over the first five steps, then the last token pays it back.
    Pretraining on the returns removes it.
    """
    length = 6
    rewards = torch.zeros(2, length, dtype=torch.float64)
    rewards[:, -1] = torch.tensor([1.0, -1.0])
    mask = torch.ones_like(rewards, dtype=torch.bool)
    values = reward_model_values(2, length)
    biased = gae(rewards, values, mask, gamma=1.0, lambda_=0.8).mean(dim=0)
    expected_first = sum(0.8**k * 0.2 for k in range(5)) - 0.8**5 * 0.5
    assert float(biased[0]) == pytest.approx(expected_first, abs=1e-12)
    assert float(biased[0]) > 0.5
    assert float(biased[-1]) == pytest.approx(-0.5, abs=1e-12)

    offset = values[0].clone().requires_grad_()  # one value a position: what a critic can learn
    targets = monte_carlo_returns(rewards, mask, gamma=1.0)
    optimizer = torch.optim.SGD([offset], lr=1.0)
    for _ in range(200):
        optimizer.zero_grad()
        value_loss(offset.expand(2, length), targets, mask).backward()
        optimizer.step()
    pretrained = offset.detach().expand(2, length)
    unbiased = gae(rewards, pretrained, mask, gamma=1.0, lambda_=0.8).mean(dim=0)
    torch.testing.assert_close(
        unbiased, torch.zeros(length, dtype=torch.float64), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize(
    ("losses", "is_trained"),
    [(((), ()), False), (((NAN,), (NAN, NAN)), False), (((), (0.1,)), True), (((0.1,), ()), True)],
)
def test_a_critic_that_nothing_has_trained_ends_the_run_at_the_switch(
    tmp_path: Path,
    saved: list[Path],
    losses: tuple[tuple[float, ...], ...],
    is_trained: bool,
) -> None:
    """Also where the run was resumed before its last iteration, which is then trained again."""
    callback, module = make_callback(Settings(), len(losses), tmp_path), make_module()
    callback.setup(fake_trainer(), module, "fit")

    def resumed() -> ValuePretraining:
        again = make_callback(Settings(), len(losses), tmp_path)
        again.load_state_dict(callback.state_dict())
        return again

    *first, last = losses
    for values in first:
        run_iteration(callback, module, NAN, *values)
        callback = resumed()
    if is_trained:
        run_iteration(callback, module, NAN, *last)
        assert saved
        return
    again = resumed()
    with pytest.raises(UserError, match="has not trained the critic in any of its 2 iterations"):
        run_iteration(callback, module, NAN, *last)
    assert not saved
    assert module.phase is Phase.VALUE_PRETRAINING
    run_iteration(again, module, NAN, 0.1)
    assert saved
    assert module.phase is Phase.POLICY_OPTIMIZATION


def test_the_refusal_names_the_filter_that_left_nothing() -> None:
    filtered = nothing_trained(
        system_config("vapo", "rewards.overlong.filter_truncated=true"), finished=5
    )
    assert "rewards.overlong.filter_truncated leaves truncated responses out" in filtered
    assert "set critic.truncated=train, or rewards.overlong.filter_truncated=false" in filtered
    left_out = nothing_trained(system_config("vapo", "critic.truncated=leave_out"), finished=5)
    assert "critic.truncated leave_out leaves" in left_out
    assert "filter_truncated" not in left_out
    assert "say why" in nothing_trained(system_config("vapo"), finished=5)
