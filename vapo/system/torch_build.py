"""Which build of torch is installed, by its metadata: torch itself takes seconds to load."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from vapo.config.schema import TrainerConfig
from vapo.errors import UserError


def check_build_has_gpus(trainer: TrainerConfig) -> None:
    """Refuse a config that needs a GPU where the installed torch is a build for CPUs.

    Other builds are asked for their GPUs once torch is loaded (`libraries.pick_device`).

    Raises: UserError: the config asks for a GPU or needs one, and torch can use none.
    """
    try:
        number = version("torch")
    except PackageNotFoundError:  # it comes from elsewhere, and can be asked only when loaded
        return
    if number.endswith("+cpu") and (need := gpu_need(trainer)) is not None:
        raise UserError(need.format(problem=f"torch {number} is a CPU build{advice(number)}"))


def gpu_need(trainer: TrainerConfig) -> str | None:
    """Return an error on what a config needs a GPU for, with a place for `problem`; None if not."""
    if trainer.accelerator == "gpu":
        return (
            "trainer.accelerator is gpu, but torch sees none: {problem}; without a GPU set it to "
            "auto or cpu"
        )
    if trainer.cpu_offload:
        return (
            "trainer.cpu_offload needs a GPU, but torch sees none: {problem}; without a GPU set "
            "trainer.cpu_offload=false"
        )
    return None


def advice(number: str) -> str:
    """Say how to get a torch of this version that sees the GPU, in place of a build for CPUs."""
    return (
        ". On a machine with one: `pip uninstall torch`, then "
        f"`pip install torch=={number.partition('+')[0]}` without an index of CPU wheels"
    )
