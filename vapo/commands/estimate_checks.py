"""What `vapo estimate` refuses, simulates and needs of a model. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from vapo.config import FitConfig
from vapo.config.validation import first_problem
from vapo.errors import UserError
from vapo.networks.critic_folders import critic_path
from vapo.networks.model_folders import folder_with_config


def check_estimation(config: FitConfig, options: Mapping[str, Any]) -> None:
    """Check the options and the models. Raises: UserError: the estimate cannot be made of them."""
    if config.critic.head_function is not None:
        raise UserError(
            "vapo estimate does not count a value head of your own: set critic.head_function=null"
        )
    rates = options["sustained_tflops"], options["interconnect_gb_s"]
    simulated_config(config, options["simulate_ranks"], *rates)
    check_gpu_memory(config, options["gpu_memory_gib"])
    if options["model_config"] is not None:
        model_config_folder(options["model_config"])
        return
    with only_config_needed():
        folder_with_config(config.actor.path)
        if config.algorithm.has_critic:
            folder_with_config(critic_path(config))


def simulated_config(
    config: FitConfig, num_ranks: int | None, tflops: float | None, gb_s: float | None
) -> FitConfig:
    """Return the config on `num_ranks` processes (--simulate_ranks); unchanged if that is None.

    Raises: UserError: the config cannot be simulated or does not divide among the ranks, or a rate
        is out of range or has no effect.
    """
    if num_ranks is None:
        if gb_s is not None:
            raise UserError(
                "--interconnect_gb_s is read for a simulated step alone: give --simulate_ranks N "
                "too"
            )
        return config
    rates = [rate for rate in (tflops, gb_s) if rate is not None]
    if num_ranks < 1 or not all(0 < rate < math.inf for rate in rates):
        raise UserError(
            "--simulate_ranks must be at least 1, and --sustained_tflops and --interconnect_gb_s "
            "finite numbers above 0"
        )
    if gb_s is not None and tflops is None:
        raise UserError("a step's time needs --sustained_tflops beside --interconnect_gb_s")
    trainer = config.trainer
    if trainer.cpu_offload:
        raise UserError(
            "--simulate_ranks cannot tell a host's memory from a GPU's: set "
            "trainer.cpu_offload=false"
        )
    for name in ("actor", "critic"):
        if getattr(config, name).attn_implementation == "flash_attention_2":
            raise UserError(
                "--simulate_ranks runs on a CPU, which has no flash_attention_2: set "
                f"{name}.attn_implementation=sdpa, which keeps as much"
            )
    if num_ranks != trainer.num_ranks:
        trainer = replace(trainer, devices=num_ranks, num_nodes=1)
        config = replace(config, trainer=trainer)
    if (problem := first_problem(config)) is not None:
        raise UserError(f"--simulate_ranks {num_ranks}: {problem.message}")
    return config


def check_gpu_memory(config: FitConfig, gpu_memory_gib: float | None) -> None:
    """Check the value of the option --gpu_memory_gib of `vapo estimate`.

    Raises: UserError: it is not a finite number above 0, or the config is for a CPU.
    """
    if gpu_memory_gib is None:
        return
    if not 0 < gpu_memory_gib < math.inf:
        raise UserError(f"--gpu_memory_gib must be a finite number above 0, not {gpu_memory_gib:g}")
    if config.trainer.accelerator == "cpu":
        raise UserError(
            "--gpu_memory_gib is the memory of a GPU, but trainer.accelerator is cpu: leave the "
            "option out, or set trainer.accelerator=gpu"
        )


def model_config_folder(model_config: Path) -> str:
    """Return the folder that `vapo estimate --model_config` names, by itself or its config.json.

    Raises: UserError: it has no config.json.
    """
    folder = model_config.parent if model_config.name == "config.json" else model_config
    if not (folder / "config.json").is_file():
        raise UserError(f"--model_config: no config.json at {model_config}")
    return str(folder)


@contextmanager
def only_config_needed() -> Iterator[None]:
    """Add to a `UserError` of the block that `vapo estimate` needs only a model's config.json."""
    try:
        yield
    except UserError as error:
        raise UserError(
            f"{error}\nOnly the model's config.json is needed: give a folder that has one as "
            "--model (or actor.path=), or --model_config FILE for actor and critic alike"
        ) from error
