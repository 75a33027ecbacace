"""The LightningModule: actor and critic, their forward passes over rollouts, and their updates.

One `training_step` is one minibatch: one optimizer step of each network that it trains.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from vapo.advantages.mismatch_correction import EngineGaps
from vapo.advantages.poise import baseline_of
from vapo.advantages.value_loss_columns import with_value_offsets
from vapo.config import FitConfig, resolve
from vapo.config.critic import CriticConfig
from vapo.config.estimators import PoiseOptions
from vapo.config.networks import ActorConfig
from vapo.config.written import to_yaml
from vapo.errors import UserError
from vapo.networks.actor_critic import Actor, Critic, FrozenBase, forward_of_rows, members_of
from vapo.networks.build import make_actor, make_critic, make_reference
from vapo.networks.forward_passes import ForwardNetworks, add_logprobs_and_values
from vapo.networks.layouts import choose_layout, say_layout
from vapo.networks.probe import estimator_layers
from vapo.networks.token_inputs import Layout
from vapo.networks.weights_lineage import Lineage
from vapo.system.distributed import reshard, set_gradient_sync, sum_over_ranks, world_size
from vapo.training.faults import Faults, finite_over_ranks, inspect_minibatch
from vapo.training.microbatching import Measurement, MicrobatchChoice
from vapo.training.minibatches import Microbatch, Minibatch, passes
from vapo.training.objective import Totals, has_loss, policy_objective, value_objective
from vapo.training.optimizers import (
    clip_gradient,
    lr_of_iteration,
    make_optimizers,
    number_parameters_as_module,
    options_of_groups,
    set_learning_rate,
    stepper,
    take_options,
)
from vapo.training.ridge_fit import RidgeFit
from vapo.training.stage_times import timed
from vapo.types import EvaluatedBatch, IterationStart, Phase, RolloutBatch

PHASES = list(Phase)
_WITH_STATE = ("lineage", "baseline", "microbatching", "ridge")
LossShare = Callable[[Microbatch, Minibatch, Totals], Tensor]


class VapoModule(L.LightningModule):
    """The run's LightningModule: actor and critic, whose optimizers it steps itself.

    `iteration` counts finished iterations, `policy_iterations` those of the policy phase, and
    `policy_steps` the actor's updates. These counts and the next iteration's phase are buffers, so
    a checkpoint restores them before the first rollout. `start` has the counts from when the
    iteration in training began. The networks and `layout` exist once Lightning has called
    `configure_model`.
    """

    iteration: Tensor
    policy_iterations: Tensor
    policy_steps: Tensor
    phase_index: Tensor
    layout: Layout

    def __init__(self, config: FitConfig, *, pad_id: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.config = config
        self.hyperparameters = resolve(config)
        self.pad_id = pad_id
        self.has_critic = config.algorithm.has_critic
        for name in ("iteration", "policy_iterations", "policy_steps", "phase_index"):
            self.register_buffer(name, torch.zeros((), dtype=torch.long))
        self.phase = Phase.POLICY_OPTIMIZATION
        self.start = self.next_start
        self.update_seconds: dict[str, float] = {}  # of this iteration, by network
        self.update_flops = 0.0  # of this iteration, on this rank
        self.minibatch_metrics: list[dict[str, float]] = []  # of this iteration, one a minibatch
        self.num_minibatches: dict[str, int] = {}  # of this iteration, by trained network
        self.minibatches_without_loss: dict[str, int] = {}  # of these
        self.engine_gaps = EngineGaps()  # of this iteration, where nothing reads old log-probs
        self._reference: tuple[Actor | FrozenBase, ...] = ()
        self.lineage = Lineage()
        self.baseline = baseline_of(config.algorithm)
        self.microbatching = MicrobatchChoice(config)
        fits = self.has_critic and config.critic.ridge is not None
        self.ridge = RidgeFit(config.critic) if fits else None
        self.faults = Faults(config.watch.max_bad_updates, config.watch.max_saved_rollouts)

    @property
    def phase(self) -> Phase:
        return PHASES[int(self.phase_index)]

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self.phase_index.fill_(PHASES.index(phase))

    @property
    def next_start(self) -> IterationStart:
        """The counts and the phase with which the next iteration will begin."""
        number, policy_iterations = int(self.iteration) + 1, int(self.policy_iterations)
        return IterationStart(number, self.phase, policy_iterations, int(self.policy_steps))

    @property
    def is_finished(self) -> bool:
        """Whether all iterations are done. It may be true at once for a resumed run."""
        is_trained = int(self.policy_iterations) >= self.config.training.num_iterations
        return self.phase is Phase.POLICY_OPTIMIZATION and is_trained

    # ---- networks and optimizers -------------------------------------------------------------

    def configure_model(self) -> None:
        if hasattr(self, "layout"):
            return
        mesh = None if self.device_mesh is None else self.device_mesh["data_parallel"]
        self.actor = make_actor(self.config, mesh)
        self.critic = make_critic(self.config, mesh, self.actor) if self.has_critic else None
        if self.config.algorithm.kl.coef > 0:
            # kept out of the module's tree: neither trained nor checkpointed
            self._reference = (make_reference(self.config, mesh, self.actor),)
        networks = (self.actor, *members_of(self.critic), *self._reference)
        packing, models = self.config.training.packing, [network.model for network in networks]
        self.layout = choose_layout(packing, models)
        say_layout(packing, self.layout, models)

    def on_fit_start(self) -> None:
        """Record which weights the session begins with, and move the reference policy."""
        loads_weights = self.trainer.ckpt_path is None
        self.lineage.begin_session(self.config, self.device, loads_weights=loads_weights)
        if self.device_mesh is None:  # shards were filled in their place
            for reference in self._reference:
                reference.to(self.device)

    def configure_optimizers(self) -> tuple[list[Optimizer], list[LambdaLR]]:
        configs = self.trained_configs()
        optimizers = make_optimizers(self, configs)
        self._options = {
            n: options_of_groups(o) for n, o in zip(configs, optimizers[0], strict=True)
        }
        return optimizers

    def trained_configs(self) -> dict[str, ActorConfig | CriticConfig]:
        """Return the config of each network that has an optimizer, by the network's name."""
        critic = {"critic": self.config.critic} if self.has_critic else {}
        return {"actor": self.config.actor, **critic}

    def on_train_start(self) -> None:
        """Set the options of restored optimizers to this run's config, not the checkpoint's."""
        for name, options in self._options.items():
            wrapper, scheduler = stepper(self, name)
            take_options(wrapper.optimizer, scheduler, options)

    # ---- old log-probs, values and advantages of a rollout batch -----------------------------

    def choose_microbatching(self, batch: RolloutBatch) -> str | None:
        """Choose the micro-batching that the config leaves open, by the GPU's free memory; only
        once.

        Returns: a line that describes the choice, or None if nothing was chosen.
        """
        if not self.microbatching.is_open:
            return None
        networks: dict[str, Actor | Critic] = {"actor": self.actor}
        if self.critic is not None and not self.config.critic.reads_actor:
            networks["critic"] = self.critic
        measured = Measurement(self.config, networks, self.layout, self.pad_id, self.device)
        with self.trainer.precision_plugin.forward_context():
            return self.microbatching.choose(batch, measured)

    def add_logprobs_and_values(
        self, batch: RolloutBatch, phase: Phase, *, with_entropy: bool
    ) -> EvaluatedBatch:
        """Return the batch with values, and in the policy phase with log-probs for the losses.

        The reference policy's log-probs are added for a KL term. The old policy's are added if a
        loss reads them (`reads_old_logprobs`) or if `with_entropy` asks for entropies. What an
        advantage estimator reads of the actor, such as hidden states, is added as well.
        """
        wants_policy = phase is Phase.POLICY_OPTIMIZATION
        wants_old = wants_policy and (self.hyperparameters.reads_old_logprobs or with_entropy)
        reads_states = self.config.critic.reads_actor and batch.actor_states is None
        algorithm = self.config.algorithm
        poise = algorithm.poise if wants_policy and isinstance(algorithm, PoiseOptions) else None
        reads_layers = wants_policy and bool(algorithm.read_layers)
        networks = ForwardNetworks(
            actor=self.actor if wants_old or reads_states else None,
            reference=self._reference[0] if wants_policy and self._reference else None,
            critic=self.critic,
            temperature=self.config.rollouts.temperature,
            max_tokens=self.microbatching.tokens,
            pad_id=self.pad_id,
            layout=self.layout,
            device=self.device,
            wants_logprobs=wants_old,
            layers=estimator_layers(algorithm, self.actor.model.config) if reads_layers else (),
            num_states=None if poise is None else poise.num_states,
            wants_collisions=wants_policy and algorithm.reads_collisions,
            wants_answers=wants_policy and algorithm.reads_answers,
        )
        with_entropy |= poise is not None
        with self.trainer.precision_plugin.forward_context():
            evaluated = add_logprobs_and_values(batch, networks, with_entropy=with_entropy)
        return with_value_offsets(evaluated, self.config)

    # ---- losses and update -------------------------------------------------------------------

    def on_train_epoch_start(self) -> None:
        self.start = self.next_start
        for of_iteration in (self.update_seconds, self.minibatch_metrics, self.engine_gaps):
            of_iteration.clear()
        self.update_flops = 0.0
        self.num_minibatches = dict.fromkeys(self._losses(), 0)
        self.minibatches_without_loss = dict.fromkeys(self._losses(), 0)

    def _losses(self) -> dict[str, LossShare]:
        """Return the loss of each network that the iteration trains, in order of updates."""
        trains_actor = self.start.phase is Phase.POLICY_OPTIMIZATION
        losses: dict[str, LossShare] = {"actor": self._policy_loss} if trains_actor else {}
        if self.critic is not None:
            losses["critic"] = self._value_loss
        return losses

    def training_step(self, minibatch: Minibatch, batch_idx: int) -> dict[str, float]:
        """Compute losses and update the minibatch's networks; return metrics over all ranks.

        A network whose loss has no token is not updated, because a step with gradient 0 would move
        it by Adam's momentum and weight decay.
        """
        totals = Totals()
        metrics: dict[str, float] = {}
        losses = {n: loss for n, loss in self._losses().items() if n in minibatch.networks}
        for index, (name, loss_share) in enumerate(losses.items()):
            self.num_minibatches[name] += 1
            if not has_loss(name, minibatch, self.hyperparameters, self.config.algorithm):
                self.minibatches_without_loss[name] += 1
                if index == 0:
                    stepper(self, name)[0].step()  # no gradients: only advances global_step
                continue
            with timed(self.update_seconds, f"{name}_update"):
                loss = self._accumulate(getattr(self, name), loss_share, minibatch, totals)
                metrics |= self._update(name, loss, minibatch, counted=index == 0)
        if self.ridge is not None and self.critic is not None and self._ends_critic_passes():
            metrics |= self.ridge.refit(self.critic)
        self.minibatch_metrics.append(totals.reduce() | metrics)
        self.lineage.add_minibatch(self.minibatch_metrics[-1], actor="actor/grad_norm" in metrics)
        return self.minibatch_metrics[-1]

    def _ends_critic_passes(self) -> bool:
        """Whether the minibatch in training is the iteration's last one for the critic."""
        of_critic = [p for p in passes(self.config, self.start.phase) if "critic" in p.networks]
        return self.num_minibatches["critic"] == sum(p.num_minibatches for p in of_critic)

    def _accumulate(
        self, network: Actor | Critic, loss_share: LossShare, minibatch: Minibatch, totals: Totals
    ) -> Tensor:
        """Add up a minibatch's gradient over micro-batches; return this rank's loss."""
        if minibatch.fault is not None:
            return torch.tensor(torch.nan, device=self.device)
        total = torch.zeros((), device=self.device)
        microbatches = minibatch.of("critic" if network is self.critic else "actor")
        for index, microbatch in enumerate(microbatches):
            loss = loss_share(microbatch.to(self.device), minibatch, totals)
            is_last = index == len(microbatches) - 1
            set_gradient_sync(network, is_last or self.config.trainer.reduce_every_microbatch)
            if loss.requires_grad:  # that of a fitted probe does not
                self.manual_backward(loss * world_size())  # data parallelism averages over ranks
            self.update_flops += network.forward_flops.count_update(microbatch.inputs)
            total += loss.detach()
        return total

    def _policy_loss(self, micro: Microbatch, minibatch: Minibatch, totals: Totals) -> Tensor:
        policy = self._policy_forward(micro)
        if not self.hyperparameters.reads_old_logprobs:
            self.engine_gaps.add(policy["logprobs"], micro.rows)
        settings = self.hyperparameters, self.config.algorithm
        outputs = policy["logprobs"], policy["entropy"]
        return policy_objective(*outputs, micro.rows, minibatch, *settings, totals)

    def _value_loss(self, micro: Microbatch, minibatch: Minibatch, totals: Totals) -> Tensor:
        output = self._value_forward(micro)
        if self.ridge is not None and self.critic is not None:
            self.ridge.add(self.critic, micro, output["values"].detach())
        return value_objective(output, micro.rows, minibatch, self.config, totals)

    def _policy_forward(self, micro: Microbatch) -> dict[str, Tensor]:
        """Return the actor's log-probs and entropies of a micro-batch, each [b, T]."""
        inputs = micro.inputs.to(self.device)
        output = self.actor(inputs, temperature=self.config.rollouts.temperature)
        columns = {"logprobs": output.logprobs, "entropy": output.entropy}
        return {name: inputs.scatter(numbers) for name, numbers in columns.items()}

    def _value_forward(self, micro: Microbatch) -> dict[str, Tensor]:
        """Return the critic's values [b, T], and the logits of a categorical head."""
        assert self.critic is not None
        inputs = micro.inputs.to(self.device)
        output = forward_of_rows(self.critic, inputs, micro.rows.critic_members)._asdict()
        return {name: inputs.scatter(x) for name, x in output.items() if x is not None}

    def _update(
        self, name: str, loss: Tensor, minibatch: Minibatch, *, counted: bool
    ) -> dict[str, float]:
        """Clip a network's gradient and step its optimizer; return its `grad_norm` and `lr`.

        If the loss or the gradient norm is not finite, the update is skipped.

        One minibatch must count as one `trainer.global_step`, and Lightning counts every step of
        its optimizer wrappers. So only the network with `counted` steps through its wrapper. A
        skipped minibatch is counted, too, by a step without gradients, which changes nothing.
        """
        wrapper, scheduler = stepper(self, name)
        optimizer = wrapper.optimizer
        max_norm = getattr(self.config, name).optimizer.max_grad_norm
        before_clip = clip_gradient(getattr(self, name), max_norm)
        norm, is_finite = finite_over_ranks(before_clip.to(loss.device), loss)
        if (own_lr := lr_of_iteration(self.config, name, self.start)) is not None:
            set_learning_rate(optimizer, scheduler, own_lr)
        lr = optimizer.param_groups[0]["lr"]
        if not is_finite:
            optimizer.zero_grad(set_to_none=True)
        (wrapper if counted else optimizer).step()
        optimizer.zero_grad(set_to_none=True)
        if is_finite:
            scheduler.step()
            self.policy_steps += name == "actor"
            self.faults.stepped(name)
        else:
            self._skip(name, minibatch, loss, norm)
        if self.ridge is not None and name == "critic":
            self.ridge.keep() if is_finite else self.ridge.drop()
            if not optimizer.param_groups[0]["params"]:
                return {}  # no gradient, and no rate
        return {f"{name}/grad_norm": norm, f"{name}/lr": lr}

    def _skip(self, name: str, minibatch: Minibatch, loss: Tensor, norm: float) -> None:
        """Count a skipped update, with the numbers that were not finite as its reason.

        Raises: StoppedRun: too many updates in a row were skipped.
        """
        place = f"iteration {self.start.number}, step {self.trainer.global_step}"
        reason = minibatch.fault
        if reason is None:
            reason = inspect_minibatch(
                minibatch.of(name),
                self._policy_forward if name == "actor" else self._value_forward,
                sums=f"loss {float(sum_over_ranks(loss)):.3g}, gradient norm {norm:.3g}",
                records=self.faults.rollouts,
                place=f"{name} update, {place}",
            )
            reshard(getattr(self, name))
        self.faults.skipped(name, place, reason)

    def on_train_epoch_end(self) -> None:
        """Count the iteration, and stop the trainer after the last one.

        Lightning calls this after the callbacks and before the checkpoint is written.
        """
        self.iteration += 1
        self.policy_iterations += self.start.phase is Phase.POLICY_OPTIMIZATION
        if self.is_finished:
            self.trainer.should_stop = True

    @cached_property
    def _written_config(self) -> str:
        return to_yaml(self.config)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["config"] = self._written_config
        for name in self._parts_with_state():
            checkpoint[name] = getattr(self, name).state_dict()
        if self.device_mesh is None:
            states = checkpoint["optimizer_states"]
            number_parameters_as_module(self, self.trainer.optimizers, states)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the state of the module's parts that are not networks (see `_WITH_STATE`).

        Raises: UserError: this run has `critic.ridge` and the checkpoint's had not, or the reverse.
        """
        if ("ridge" in checkpoint) != (self.ridge is not None):
            had, value = ("has", "{}") if self.ridge is None else ("has no", "null")
            raise UserError(
                f"the run that saved this checkpoint {had} critic.ridge, so its optimizer holds "
                f"the state of other weights: set critic.ridge={value}"
            )
        for name in self._parts_with_state():
            if name in checkpoint:  # earlier versions lack some
                getattr(self, name).load_state_dict(checkpoint[name])

    def _parts_with_state(self) -> list[str]:
        return [name for name in _WITH_STATE if getattr(self, name) is not None]
