"""What `trainer.precision` auto becomes: by the device's products, and by the policy's width."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Literal, NamedTuple

import torch

from vapo.config import FitConfig, RewardModelConfig, SftConfig
from vapo.config.engines import VllmServerEngine
from vapo.config.rewards import RewardModelVerifier, verifiers_in
from vapo.config.schema import TrainerConfig
from vapo.networks.model_configs import read_model_config
from vapo.system.libraries import pick_device
from vapo.system.private_attributes import cpu_has_bfloat16_products
from vapo.system.process import is_main_process
from vapo.system.shown_text import say

# Below, matrix products are so small that bfloat16 gains little or nothing, and costs digits: a
# width of 96 took 0.9 to 1.1 times as long in float32, 192 1.3 to 1.7, 256 1.6 to 1.8, 384 2.1.
LEAST_WIDTH = 256


def computing_dtype(config: FitConfig, network_dtype: str) -> str:
    """The dtype of a network's states: FSDP2's mixed precision makes it bfloat16; else its own."""
    is_cast = config.trainer.strategy == "fsdp" and config.trainer.precision == "bf16-mixed"
    return "bfloat16" if is_cast else network_dtype


class Precision(NamedTuple):
    """Lightning's precision, and why it was taken."""

    name: Literal["32-true", "bf16-mixed"]
    reason: str

    def line(self) -> str:
        return f"trainer.precision auto: {self.name}, since {self.reason}"


def may_round_products(config: FitConfig) -> bool:
    """Whether float32 products may round their inputs where that is faster (`rounded_inputs`).

    The setting for it is the process's. Where another thread of the process samples or judges ahead
    of the trainer, by the engine `transformers` or a reward model, the setting would round that
    thread's products, too, now and then. On a CPU this made the angles of rotary embeddings, which
    are products in Transformers, wrong by up to 16 radians within 8,192 positions.
    """
    if config.training.max_staleness == 0:
        return True
    samples_elsewhere = isinstance(config.rollouts, VllmServerEngine)
    verifiers = (block for _, block in verifiers_in("rewards", config.rewards))
    has_model = any(isinstance(verifier, RewardModelVerifier) for verifier in verifiers)
    return samples_elsewhere and not has_model


def choose_precision(device: torch.device, width: int) -> Precision:
    """bf16-mixed where the device multiplies in bfloat16 and the policy is wide enough to gain.

    Torch says what the device can; nothing is timed, so that all processes of a run agree.
    """
    if device.type == "cuda":
        device_name, is_fast = "GPU", torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        device_name, is_fast = "processor", cpu_has_bfloat16_products()
    if not is_fast:
        return Precision("32-true", f"this {device_name} has no fast products in bfloat16")
    return _precision_by_width(width, f"this {device_name} multiplies fast in bfloat16")


def expected_precision(trainer: TrainerConfig, width: int) -> Precision:
    """What auto becomes, for an estimate: on this processor with `trainer.accelerator=cpu`.

    Otherwise the estimate is for a GPU, most often of another machine, on which bfloat16 is fast.
    """
    if trainer.accelerator == "cpu":
        return choose_precision(torch.device("cpu"), width)
    reason = "the estimate is for a GPU; trainer.accelerator=cpu makes it one for this processor"
    return _precision_by_width(width, reason)


def _precision_by_width(width: int, reason: str) -> Precision:
    if width < LEAST_WIDTH:
        return Precision(
            "32-true",
            f"a policy of width {width}, below {LEAST_WIDTH}, gains too little by bfloat16",
        )
    return Precision("bf16-mixed", reason)


def settle_precision(config: FitConfig | SftConfig | RewardModelConfig) -> None:
    """Put what `trainer.precision` auto means here into the config, and say so in one line.

    The run's record, its checkpoints and everything that is computed then have the same. Nothing
    is said of a policy that is too narrow on every device. A precision that the config names is
    kept, with a warning where the processor only emulates it.
    """
    if config.trainer.precision != "auto":
        _warn_of_emulation(config.trainer)
        return
    width = _width(config)
    precision = choose_precision(pick_device(config.trainer), width)
    config.trainer = replace(config.trainer, precision=precision.name)
    if width >= LEAST_WIDTH and is_main_process():
        say(precision.line(), file=sys.stderr)


def _warn_of_emulation(trainer: TrainerConfig) -> None:
    """A 135 M model's cold start, minutes a step instead of seconds, had said nothing of it."""
    if not is_main_process() or trainer.precision != "bf16-mixed":
        return
    if pick_device(trainer).type == "cpu" and not cpu_has_bfloat16_products():
        say(
            "warning: trainer.precision=bf16-mixed: this processor has no instructions "
            "for products in bfloat16 and emulates them, which took 9 times as long as float32 "
            "where it was measured. trainer.precision=auto, the default, takes what is fast here",
            file=sys.stderr,
        )


def _width(config: FitConfig | SftConfig | RewardModelConfig) -> int:
    """The hidden size of the policy that the config names or makes."""
    if isinstance(config, SftConfig):
        if config.model_path is None:
            return config.new_model.hidden_size
        path = config.model_path
    else:
        path = config.policy_path if isinstance(config, RewardModelConfig) else config.actor.path
    return int(read_model_config(path).get_text_config().hidden_size)
