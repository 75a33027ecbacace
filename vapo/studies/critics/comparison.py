"""Trains one critic on stored rollouts, and measures its explained variance on held-out ones.

The module, the stages and the losses are those of a run's value pretraining, so a config's critic
is trained as in a run. No policy is trained, and engine, verifier and prompts are not needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from vapo.config import FitConfig
from vapo.config.critic import CriticConfig
from vapo.config.networks import ActorConfig
from vapo.networks.actor_critic import members_of
from vapo.networks.build import make_actor, make_critic
from vapo.networks.layouts import choose_layout
from vapo.networks.meta_device import empty_model
from vapo.rollouts.stored_rollouts import RolloutDataset
from vapo.studies.short_trainer import train_briefly
from vapo.system.progress import Progress
from vapo.training.callbacks.value_pretraining import compute_states, explained_now
from vapo.training.datamodule import iteration_of
from vapo.training.module import VapoModule
from vapo.training.parts import assemble_parts, num_pretraining_iterations
from vapo.types import IterationStart, Phase, RolloutBatch


@dataclass(frozen=True)
class CurvePoint:
    """A critic's held-out explained variance after `step` optimizer steps.

    Attributes:
        tokens: response tokens that it was trained on. A token counts for each iteration.
        seconds: the time of its training, without the measurements.
    """

    step: int
    tokens: int
    seconds: float
    explained_variance: float


@dataclass(frozen=True)
class StoredBatchSource:
    """A source of batches that reads all of them from a file and cannot sample others."""

    stored: RolloutDataset

    def next_batch(
        self, start: IterationStart, *, last: int
    ) -> tuple[RolloutBatch, dict[str, float]]:
        return self.stored.batch(start.index)


class CriticModule(VapoModule):
    """A run's module which trains the critic alone.

    A policy is loaded only for a critic that needs it: a probe reads its states, and adapters stand
    on its base. Its architecture is always taken into account when the layout of rows is chosen, so
    that a critic is the same here as in a run, bit for bit.
    """

    def configure_model(self) -> None:
        if hasattr(self, "layout"):
            return
        actor, base = self.config.actor, None
        if self.config.critic.kind != "network":
            self.actor = base = make_actor(self.config, None, trained=False)
            policy = base.model
        else:
            policy = empty_model(  # of config.json, without weights
                "causal_lm",
                actor.path,
                dtype=actor.dtype,
                attn_implementation=actor.attn_implementation,
            )
        self.critic = make_critic(self.config, None, base)
        models = [policy, *(member.model for member in members_of(self.critic))]
        self.layout = choose_layout(self.config.training.packing, models)

    def trained_configs(self) -> dict[str, ActorConfig | CriticConfig]:
        return {"critic": self.config.critic}


@dataclass(frozen=True)
class HeldoutValues:
    """What a critic says of the held-out rollouts when its training has ended.

    Attributes:
        rows: each rollout's row in its file, counted from 1.
        values: of the state before each token of each response.
        processor_s: seconds of this process for its training and these values. Measurements on
            the way are left out.
    """

    rows: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]
    processor_s: float


class CriticCurve(Callback):
    """Measures the critic's held-out explained variance during training.

    It is measured before the first iteration, after every n-th and after the last.

    Args:
        advance: called with 1 after each iteration.
    """

    latest_values: Tensor
    processor_s_of_latest: float

    def __init__(
        self, stored: RolloutDataset, *, every_n: int, advance: Callable[[int], None]
    ) -> None:
        self.stored, self.every_n, self.advance = stored, every_n, advance
        self.points: list[CurvePoint] = []
        self.tokens, self.seconds, self.processor_s = 0, 0.0, 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        start = time.process_time()
        compute_states(pl_module, self.stored)
        self.processor_s += time.process_time() - start
        self.measure(trainer, pl_module)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.start_time, self.processor_start = time.monotonic(), time.process_time()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seconds += time.monotonic() - self.start_time
        self.processor_s += time.process_time() - self.processor_start
        iteration = iteration_of(trainer)
        self.tokens += int(iteration.metrics["rollout/num_response_tokens"])
        if iteration.number % self.every_n == 0 or iteration.number == trainer.max_epochs:
            self.measure(trainer, pl_module)
        self.advance(1)

    def measure(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(module, VapoModule)
        start = time.process_time()
        batch, explained = explained_now(module, self.stored.heldout_batch())
        self.latest_values = batch.values
        self.processor_s_of_latest = self.processor_s + time.process_time() - start
        self.points.append(CurvePoint(trainer.global_step, self.tokens, self.seconds, explained))

    def heldout_values(self) -> HeldoutValues:
        """Return the critic's values at the last measurement."""
        rows = [row for unit in self.stored.heldout for row in unit]
        lengths = [len(row.rollout.response_ids) for row in rows]
        values = zip(self.latest_values, lengths, strict=True)
        return HeldoutValues(
            tuple(row.number for row in rows),
            tuple(tuple(row_values[:length].tolist()) for row_values, length in values),
            self.processor_s_of_latest,
        )


def train_critic(
    config: FitConfig,
    stored: RolloutDataset,
    *,
    tokenizer: PreTrainedTokenizerBase,
    every_n: int,
    advance: Callable[[int], None] = lambda n: None,
) -> tuple[list[CurvePoint], HeldoutValues]:
    """Train a critic on stored rollouts; return its held-out explained variance along the way, and
    its values of the held-out rollouts at the end.

    Args:
        every_n: a point is measured after every n-th iteration.
        advance: called with 1 after each iteration.
    """
    curve = CriticCurve(stored, every_n=every_n, advance=advance)
    train_with_callback(config, stored, curve, tokenizer=tokenizer)
    return curve.points, curve.heldout_values()


def train_with_callback(
    config: FitConfig,
    stored: RolloutDataset,
    callback: Callback,
    *,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Train a critic on stored rollouts, as a run's value pretraining does, with a callback."""
    module = CriticModule(config, pad_id=int(tokenizer.pad_token_id))
    module.phase = Phase.VALUE_PRETRAINING
    parts = assemble_parts(
        module,
        lambda module: StoredBatchSource(stored),
        progress=Progress(enabled=False),
        critic_dir=None,
    )
    train_briefly(parts, callback, num_iterations=num_pretraining_iterations(module))
