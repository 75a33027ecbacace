"""Callbacks that log and show the metrics of every optimizer step and iteration, and warn or stop
by them."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from typing import Any

import lightning as L
import psutil
import torch
from jaxtyping import Float
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from vapo.config import FitConfig, resolve
from vapo.config.schema import TrainerConfig
from vapo.config.watch import WatchConfig
from vapo.diagnostics.watchers import WatcherState
from vapo.errors import StoppedRun
from vapo.rewards.large_rewards import about_large
from vapo.runs.run_dirs import RunDir
from vapo.system.distributed import (
    gather_over_ranks,
    max_over_ranks,
    rank,
    sum_over_ranks,
    world_size,
)
from vapo.system.host_memory import GIB
from vapo.system.progress import Progress
from vapo.tracking.logger import RunLogger
from vapo.training.datamodule import iteration_of
from vapo.training.faults import Faults
from vapo.training.module import PHASES, VapoModule
from vapo.training.stage_times import StageTimes
from vapo.types import Phase

# Dense bfloat16 peaks of NVIDIA's data sheets, in TFLOP/s, by a part of torch's device name.
# The first that fits is taken.
BF16_PEAKS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
}


class Recording(Callback):
    """Logs and shows the metrics of every optimizer step and of every iteration.

    Their step is the number of optimizer steps (`trainer.global_step`), which the logger shifts so
    that the charts' x axis begins where the policy phase does (`StepAxis`).
    """

    def __init__(self, logger: RunLogger, progress: Progress) -> None:
        self.logger = logger
        self.progress = progress
        self._stages = ExitStack()
        self._since = time.monotonic()
        self._not_updated: set[str] = set()
        self._said_equal_rewards = False
        self._said_large_rewards = False
        self.profile = StageTimes()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Show the stage "loading" on the console, because Lightning loads the networks next."""
        self._stages.enter_context(self.progress.stage("loading"))

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stages.close()
        self.progress.pop_iteration_seconds()  # the first iteration begins here
        self._since = time.monotonic()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if batch_idx == 0:
            self._advance = self._stages.enter_context(
                self.progress.stage("training", total=trainer.num_training_batches, unit="steps")
            )

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        assert isinstance(outputs, dict)
        self.logger.log_metrics(outputs, step=trainer.global_step)
        self._advance(1)
        if batch_idx + 1 == trainer.num_training_batches:
            self._stages.close()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        iteration = iteration_of(trainer)
        if not pl_module.hyperparameters.reads_old_logprobs:  # the watchers after this see them
            iteration.metrics.update(pl_module.engine_gaps.metrics())
        now = time.monotonic()
        since, self._since = self._since, now
        flops = float(sum_over_ranks(torch.tensor(pl_module.update_flops, dtype=torch.double)))
        num_response_tokens = iteration.metrics["rollout/num_response_tokens"]
        num_given_tokens = iteration.metrics["rollout/num_prompt_tokens"]
        num_given_tokens += iteration.metrics.get("rollout/num_observation_tokens", 0.0)
        times = StageTimes(
            self.progress.pop_iteration_seconds(),
            pl_module.update_seconds,
            total_s=now - since,
            num_response_tokens=num_response_tokens,
            num_tokens=num_given_tokens + num_response_tokens,
            flops_per_rank=flops / world_size(),
            peak_tflops=peak_tflops(
                pl_module.config.trainer, pl_module.config.actor.dtype, pl_module.device
            ),
        )
        self.profile.add(times)
        metrics = {
            **iteration.metrics,
            **times.metrics(),
            **memory_metrics(),
            **{
                f"{name}/minibatches_without_loss": float(number)
                for name, number in pl_module.minibatches_without_loss.items()
            },
            "progress/iteration": float(iteration.number),
            "progress/phase": float(PHASES.index(iteration.phase)),
            "progress/policy_steps": float(pl_module.policy_steps),
        }
        self.logger.log_metrics(metrics, step=trainer.global_step)
        self.note_not_updated(pl_module)
        left_text = left_to_learn(pl_module.config, iteration.phase, metrics["rollout/accuracy"])
        self.note_rewards(iteration.batch.rewards, left_text)
        self.progress.metrics({**mean_of_steps(pl_module.minibatch_metrics), **metrics})

    def note_not_updated(self, module: VapoModule) -> None:
        """Note each network that had no loss in any minibatch of the iteration. Of several such
        iterations in a row, only the first is noted."""
        without = module.minibatches_without_loss
        not_updated = {n for n, number in without.items() if number == module.num_minibatches[n]}
        for name in sorted(not_updated - self._not_updated):
            self.progress.note(
                f"{name}: not updated in iteration {module.start.number}: no token of its "
                "rollouts carries loss"
            )
        self._not_updated = not_updated

    def note_rewards(self, rewards: Float[Tensor, " B"], left_text: str = "") -> None:
        """Note, each once in a run, that all rewards are equal, and that one is very large.

        `left_text` says what can still be learned from equal rewards. Every rank must call this.
        """
        every = gather_over_ranks(rewards)
        if not self._said_large_rewards and (large := about_large(every.tolist())) is not None:
            self._said_large_rewards = True
            self.progress.note(large)
        is_equal = len(every) > 1 and bool((every == every[0]).all())
        if is_equal and not self._said_equal_rewards:
            self._said_equal_rewards = True
            self.progress.note(
                f"all {len(every)} rewards are {float(every[0]):g}: there is nothing to learn "
                f"from{left_text}; look at responses with `vapo try`, or in the run's artifacts, "
                "in samples/"
            )

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._stages.close()


def left_to_learn(config: FitConfig, phase: Phase, accuracy: float) -> str:
    """Return what the policy still learns from a batch of equal rewards, as the end of a sentence.
    It is empty if the policy learns nothing."""
    algorithm = config.algorithm
    if phase is not Phase.POLICY_OPTIMIZATION:
        return ""
    if algorithm.reads_other_rewards:
        return f" but what {algorithm.advantage_estimator} compares them with"
    if accuracy > 0 and resolve(config).mu > 0:
        return " but to repeat the right ones (components.positive_example_lm_loss)"
    return ""


def memory_metrics() -> dict[str, float]:
    """Return the resident memory of this process, and torch's peaks on the GPU, if any, in GiB.

    Memory that torch has reserved includes freed blocks, which other processes cannot have.
    """
    metrics = {"memory/rss_gib": psutil.Process().memory_info().rss / GIB}
    if torch.cuda.is_available():
        metrics["memory/gpu_gib"] = torch.cuda.max_memory_allocated() / GIB
        metrics["memory/gpu_reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    return metrics


def peak_tflops(trainer: TrainerConfig, dtype: str, device: torch.device) -> float | None:
    """Return the device's peak in TFLOP/s for this run, or None if it is not known.

    It is the config's number. If the config has none and the run computes in bfloat16, it is the
    data sheet's of a known GPU.
    """
    if trainer.peak_tflops is not None:
        return trainer.peak_tflops
    computes_in_bf16 = dtype == "bfloat16" or trainer.precision.startswith("bf16")
    if device.type != "cuda" or not computes_in_bf16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in BF16_PEAKS.items() if part in name), None)


def mean_of_steps(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the steps in which it is finite; nan if none."""
    keys = {key for step in steps for key in step}
    values = {
        key: [step[key] for step in steps if math.isfinite(step.get(key, math.nan))] for key in keys
    }
    return {key: sum(v) / len(v) if v else math.nan for key, v in values.items()}


class Watch(Callback):
    """Logs `faults/...` and `watch/...` metrics, warns, and stops a run whose watcher says so.

    It raises StoppedRun at the end of an iteration. It must come after `Recording` and before the
    checkpointing, so that a run which stops has its metrics, and keeps the checkpoint from before.
    """

    def __init__(
        self,
        config: WatchConfig,
        faults: Faults,
        run_dir: RunDir,
        logger: RunLogger,
        progress: Progress,
    ) -> None:
        self.faults = faults
        faults.note = progress.note
        self.run_dir = run_dir
        self.logger = logger
        self.progress = progress
        self.watchers = [WatcherState(name, w) for name, w in config.watchers().items()]
        self.warnings: dict[str, str] = {}  # the newest of each watcher
        self._counting: list[WatcherState] = []  # those that may stop the run, in this iteration

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.faults.rollouts.open(self.run_dir.path, rank())

    def state_dict(self) -> dict[str, Any]:
        states = {state.name: state.state_dict() for state in self.watchers}
        return {**states, "faults": self.faults.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for state in self.watchers:
            if state.name in state_dict:
                state.load_state_dict(state_dict[state.name])
        self.faults.load_state_dict(state_dict.get("faults", {}))  # earlier versions have none

    @property
    def why_held(self) -> str:
        """Why the run may soon stop itself, so that `last.ckpt` is kept; empty if it may not.

        It depends on the latest iteration alone. A watcher whose metric that iteration lacks gives
        none.
        """
        skipped = [f"the {n}'s latest update was skipped" for n in self.faults.latest_skipped]
        return " and ".join([*skipped, *(state.describe_count() for state in self._counting)])

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VapoModule)
        iteration = iteration_of(trainer)
        metrics = {**iteration.metrics, **mean_of_steps(pl_module.minibatch_metrics)}
        logged = self.faults.pop_metrics()
        stops: list[WatcherState] = []
        for state, is_alarm in self.check_metrics(iteration.number, iteration.phase, metrics):
            logged[f"watch/{state.name}"] = float(is_alarm)
            stops += [state] if is_alarm and state.watcher.action == "stop" else []
        self.logger.log_metrics(logged, step=trainer.global_step)
        if stops:
            raise StoppedRun("; ".join(f"{s.describe()}; {s.advise()}" for s in stops))

    def check_metrics(
        self, iteration: int, phase: Phase, metrics: dict[str, float]
    ) -> list[tuple[WatcherState, bool]]:
        """Return the watchers whose metrics this iteration has, each with whether it is in alarm.
        Warn for each that is."""
        looks = []
        for state in self.watchers:
            if state.sign.of_policy_phase and phase is Phase.VALUE_PRETRAINING:
                continue
            is_alarm = state.check_metrics(iteration, metrics | agreed(metrics, state))
            if is_alarm:
                self.warn(state)
            if is_alarm is not None:
                looks.append((state, is_alarm))
        self._counting = [state for state, _ in looks if state.may_stop]
        return looks

    def warn(self, state: WatcherState) -> None:
        """Keep the watcher's description for the summary. Once per episode of alarms, show it on
        the console and tag the run with it."""
        assert state.episode is not None
        self.warnings[state.name] = state.describe()
        if not state.episode.alarmed:
            state.episode.alarmed = True
            self.progress.note(f"watch: {state.describe()}; {state.advise()}")
            self.logger.set_tags({f"watch/{state.name}": state.describe()})


def agreed(metrics: dict[str, float], state: WatcherState) -> dict[str, float]:
    """Return the watcher's metrics, the same on all ranks, so that all ranks stop or none does.

    Each is the maximum over ranks; -inf if no rank has a finite number.
    """
    values = [metrics.get(key, math.nan) for key in state.sign.metrics]
    finite_values = [v if math.isfinite(v) else -math.inf for v in values]
    known_everywhere = max_over_ranks(torch.tensor(finite_values, dtype=torch.double))
    return dict(zip(state.sign.metrics, known_everywhere.tolist(), strict=True))
