"""Sets up other libraries: torch's threads and device, and what they may print."""

from __future__ import annotations

import logging
import os
import warnings

import torch
from transformers.utils import logging as transformers_logging

from vapo.config.schema import TrainerConfig
from vapo.errors import UserError
from vapo.system.torch_build import advice, gpu_need


def set_threads(trainer: TrainerConfig) -> None:
    """Set torch's threads to `trainer.num_threads`, or to this process's share of the cores.

    With torch's default, spinning threads of several processes on few cores slow each other down
    tenfold.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(trainer.num_threads or max((cores or 1) // trainer.devices, 1))


def pick_device(trainer: TrainerConfig) -> torch.device:
    """Return the device that `trainer.accelerator` means, for commands without a Trainer.

    Raises: UserError: the config asks for a GPU or needs one, and there is none.
    """
    has_gpu = torch.cuda.is_available()
    if not has_gpu and (need := gpu_need(trainer)) is not None:
        raise UserError(need.format(problem=_why_no_gpu()))
    return torch.device("cuda" if has_gpu and trainer.accelerator != "cpu" else "cpu")


def about_gpus() -> str:
    """Return a text on the GPUs that torch can use or, if there are none, on torch's build."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    if torch.version.cuda is not None:
        return f"built for CUDA {torch.version.cuda}, but there is no GPU it can use"
    if torch.version.hip is not None:
        return f"built for ROCm {torch.version.hip}, but there is no GPU it can use"
    return "a CPU build"


def _why_no_gpu() -> str:
    """Return a text on which torch is installed, and how to get one that sees the GPU."""
    problem = f"torch {torch.__version__} is {about_gpus()}"
    if torch.version.cuda is not None or torch.version.hip is not None:
        return f"{problem}; see whether the driver lists one (`nvidia-smi`) and is new enough"
    return f"{problem}{advice(torch.__version__)}"


def quiet_libraries() -> None:
    """Silence warnings and progress bars of libraries: the terminal belongs to `Progress`."""
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
