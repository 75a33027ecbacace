"""Where torch computes, and with how many threads."""

from __future__ import annotations

import os

import torch

from vapo.config.schema import TrainerConfig
from vapo.errors import UserError


def set_threads(trainer: TrainerConfig) -> None:
    """`trainer.num_threads`, or the cores that this process may use, shared among processes.

    Set deliberately: spinning threads of several processes on few cores slow each other down
    tenfold.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(trainer.num_threads or max((cores or 1) // trainer.devices, 1))


def pick_device(trainer: TrainerConfig) -> torch.device:
    """The device of `trainer.accelerator`, for commands without a Trainer.

    Raises: UserError when a GPU is asked for, or needed, and there is none.
    """
    has_gpu = torch.cuda.is_available()
    if trainer.accelerator == "gpu" and not has_gpu:
        raise UserError("trainer.accelerator is gpu, but torch sees none; set it to auto or cpu")
    if trainer.cpu_offload and not has_gpu:
        raise UserError(
            "trainer.cpu_offload has no effect without a GPU, and torch sees none; leave it out"
        )
    return torch.device("cuda" if has_gpu and trainer.accelerator != "cpu" else "cpu")
