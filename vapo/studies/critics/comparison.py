"""Train one critic on stored rollouts, and measure its explained variance on held-out ones.

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
    """A critic's explained variance on held-out rollouts after `step` optimizer steps.

    Attributes:
        tokens: the response tokens trained on so far. A token counts once for each iteration that
            uses it.
        seconds: the time spent on training so far, without the measurements.
    """

    step: int
    tokens: int
    seconds: float
    explained_variance: float


@dataclass(frozen=True)
class StoredBatchSource:
    """The source of a run's batches when all rollouts come from a file: nothing is sampled."""

    stored: RolloutDataset

    def next_batch(
        self, start: IterationStart, *, last: int
    ) -> tuple[RolloutBatch, dict[str, float]]:
        return self.stored.batch(start.index)


class CriticModule(VapoModule):
    """The training module of `vapo critics`: a run's module that trains its critic and no policy.

    The policy's weights are loaded only for a critic that needs them: a probe reads the policy's
    hidden states, and adapters need its base model. The policy's architecture always counts
    when the layout of rows is chosen, so a critic is the same here as in a run, bit for bit.
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
    """A critic's values of the held-out rollouts, after its training.

    Attributes:
        rows: the row of each held-out rollout in its file, counted from 1.
        values: for each held-out rollout, the value of the state before each response token.
        processor_s: the processor seconds that this process spent on the training and on these
            values. Earlier measurements are left out.
    """

    rows: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]
    processor_s: float


class CriticCurve(Callback):
    """Callback that measures the critic's held-out explained variance during training.

    It measures before the first iteration, after every n-th iteration and after the last.

    Args:
        stored: the rollouts to train on, with the held-out ones.
        every_n: the number of iterations between two measurements.
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
        """Return the critic's values of the held-out rollouts at the latest measurement."""
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
    """Train a critic on stored rollouts.

    Return its explained variance on the held-out rollouts at each measurement, and its values of
    the held-out rollouts at the end.

    Args:
        every_n: a measurement follows every n-th iteration.
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
    """Train a critic on stored rollouts as a run's value pretraining does.

    Args:
        callback: Lightning calls it during the training.
    """
    module = CriticModule(config, pad_id=int(tokenizer.pad_token_id))
    module.phase = Phase.VALUE_PRETRAINING
    parts = assemble_parts(
        module,
        lambda module: StoredBatchSource(stored),
        progress=Progress(enabled=False),
        critic_dir=None,
    )
    train_briefly(parts, callback, num_iterations=num_pretraining_iterations(module))
