"""Choose the precision for `trainer.precision` auto, by the device and the policy's width."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch

from vapo.config import FitConfig, RewardModelConfig, SftConfig
from vapo.config.engines import VllmServerEngine
from vapo.config.rewards import RewardModelVerifier, verifiers_in
from vapo.config.schema import TrainerConfig
from vapo.errors.shown_text import say
from vapo.networks.model_configs import read_model_config
from vapo.system.libraries import pick_device
from vapo.system.private_attributes import cpu_has_bfloat16_products
from vapo.system.process import is_main_process

# Below this width matrix products are so small that bfloat16 gains little, and costs digits: a
# width of 96 took 0.9 to 1.1 times as long in float32, 192 1.3 to 1.7, 256 1.6 to 1.8, 384 2.1.
LEAST_WIDTH = 256


def computing_dtype(config: FitConfig, network_dtype: str) -> str:
    """Return the dtype in which a network computes: with FSDP2 and bf16-mixed it is bfloat16.

    Otherwise it is `network_dtype`, that of the network's weights.
    """
    is_cast = config.trainer.strategy == "fsdp" and config.trainer.precision == "bf16-mixed"
    return "bfloat16" if is_cast else network_dtype


class Precision(NamedTuple):
    """A choice for `trainer.precision`, and the reason for it as the end of a sentence."""

    name: Literal["32-true", "bf16-mixed"]
    reason: str

    def line(self) -> str:
        """Return the line that the user is shown: the precision, and why it was chosen."""
        return f"trainer.precision auto: {self.name}, since {self.reason}"


def may_round_products(config: FitConfig) -> bool:
    """Whether float32 products may round their inputs where that is faster (`rounded_inputs`).

    That changes a setting of the whole process. So it must not be done if another thread of the
    process samples or judges ahead of the trainer, with the engine `transformers` or a reward
    model: its products would sometimes be rounded, too. On a CPU this made the angles of rotary
    embeddings, which are products in Transformers, wrong by up to 16 radians within 8,192
    positions.
    """
    if config.training.max_staleness == 0:
        return True
    samples_elsewhere = isinstance(config.rollouts, VllmServerEngine)
    verifiers = (block for _, block in verifiers_in("rewards", config.rewards))
    has_model = any(isinstance(verifier, RewardModelVerifier) for verifier in verifiers)
    return samples_elsewhere and not has_model


def choose_precision(device: torch.device, width: int) -> Precision:
    """Choose bf16-mixed if the device multiplies fast in bfloat16 and the policy is wide enough.

    Otherwise choose 32-true. `width` is the policy's hidden size. Torch says what the device
    supports. Nothing is timed, so that all processes of a run agree.
    """
    device_name = "GPU" if device.type == "cuda" else "processor"
    if not has_bfloat16_products(device):
        return Precision("32-true", f"this {device_name} has no fast products in bfloat16")
    return _precision_by_width(width, f"this {device_name} multiplies fast in bfloat16")


def has_bfloat16_products(device: torch.device) -> bool:
    """Whether the device has instructions for products in bfloat16. NVIDIA's have since Ampere."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return cpu_has_bfloat16_products()


def expected_precision(trainer: TrainerConfig, width: int) -> Precision:
    """Choose the precision of a run that is only estimated, by its policy's hidden size.

    With `trainer.accelerator=cpu` it is for this processor. Otherwise it is for a GPU, most often
    one of another machine, and bfloat16 is taken to be fast there.
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


def resolve_precision(config: FitConfig | SftConfig | RewardModelConfig) -> None:
    """Replace `trainer.precision` auto in the config by a choice, and print it in one line.

    The run's record, its checkpoints and all computations then have the same precision. Nothing is
    printed for a policy that is too narrow on every device. A precision that the config names
    stays, with a warning if the device only emulates it.
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
    """Warn if bf16-mixed is emulated: a step may then take minutes instead of seconds."""
    if not is_main_process() or trainer.precision != "bf16-mixed":
        return
    device = pick_device(trainer)
    if not has_bfloat16_products(device):
        name, measured = "GPU", ""
        if device.type == "cpu":
            name, measured = "processor", ", which took 9 times as long as float32 where measured"
        say(
            f"warning: trainer.precision=bf16-mixed: this {name} has no instructions "
            f"for products in bfloat16 and emulates them{measured}. trainer.precision=auto, the "
            "default, takes what is fast here",
            file=sys.stderr,
        )


def _width(config: FitConfig | SftConfig | RewardModelConfig) -> int:
    """Return the hidden size of the policy that the config names or makes."""
    if isinstance(config, SftConfig):
        if config.model_path is None:
            return config.new_model.hidden_size
        path = config.model_path
    else:
        path = config.policy_path if isinstance(config, RewardModelConfig) else config.actor.path
    return int(read_model_config(path).get_text_config().hidden_size)


@contextmanager
def rounded_inputs() -> Iterator[None]:
    """Let a CPU's float32 products in the block round their inputs to bfloat16.

    Sums and results stay float32. The setting holds for the whole process, so no other thread may
    multiply meanwhile (`may_round_products`). In the block torch's older
    getter, `torch.get_float32_matmul_precision`, raises an error.
    """
    backend: Any = torch.backends.mkldnn  # the stub does not have `matmul`
    previous_precision = backend.matmul.fp32_precision
    backend.matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        backend.matmul.fp32_precision = previous_precision
