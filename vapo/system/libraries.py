"""What is set up in other libraries: where torch computes, what may be printed."""

from __future__ import annotations

import logging
import os
import warnings

import torch
from transformers.utils import logging as transformers_logging

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


def quiet_libraries() -> None:
    """Leave the terminal to `Progress`."""
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    # one process reads the rollout buffer, which is in memory: workers would only copy it
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*`IterableDataset` has `__len__` defined.*")
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
    # a finished run was resumed: a note of our own says so
    warnings.filterwarnings("ignore", message="Total length of `.*` across ranks is zero.*")
    # checkpoints are of whole iterations, whose numbers of minibatches may differ by phase
    warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before")
    # vLLM begins a process group of one
    warnings.filterwarnings("ignore", message=".*recommended to use `self.log.*sync_dist=True.*")
    # a dependency of reasoning_gym, when it is first compiled
    warnings.filterwarnings("ignore", message='"is" with .*literal', category=SyntaxWarning)
