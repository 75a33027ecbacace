"""What a command does not do: rules between it, its options and its config. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from vapo.config import FitConfig, resolve
from vapo.config.continuation_rules import unlike_the_rollouts
from vapo.config.data import GeneratedSource, Mixture
from vapo.config.validation import first_problem
from vapo.errors import UserError

DATA_KEY = "components.value_pretraining.data"


def check_one_process(command: str, config: FitConfig) -> None:
    """Raises: UserError where the config asks a command that is one process for more."""
    if not config.trainer.is_one_process:
        raise UserError(
            f"vapo {command} is one process: set trainer.devices=1, trainer.num_nodes=1 and "
            "trainer.strategy=auto"
        )


def check_filter(config: FitConfig) -> None:
    """What this command does not do, before anything is read."""
    train = config.data.train
    if isinstance(train, Mixture):
        raise UserError("data.train.kind mixture: filter one source at a time, as data.train")
    if isinstance(train, GeneratedSource) and train.curriculum:
        raise UserError("data.train.curriculum: a curriculum has its own difficulty; leave it out")
    check_one_process("filter", config)
    if config.rewards.shuffle:
        raise UserError("rewards.shuffle would make pass rates meaningless: set it to false")


def check_rollouts(config: FitConfig, output: str | None = None) -> None:
    """What this command does not do, before anything is read."""
    check_one_process("rollouts", config)
    if output is not None and Path(output).suffix != ".parquet":
        raise UserError(
            f"--output {output}: the file is Parquet: give it a name that ends in .parquet"
        )
    if config.rewards.shuffle:
        raise UserError("rewards.shuffle would deal the rewards out anew: set it to false")


def check_gates(config: FitConfig, answer_now: str | None) -> None:
    """What this command does not do, before anything is read."""
    if answer_now is not None and config.environment.is_used:
        raise UserError(
            f"--answer_now {answer_now!r} has a response answer in its middle, and an episode is "
            "answered by its environment: leave it out, or set environment.kind=null"
        )
    if not config.algorithm.has_critic:
        raise UserError(
            f"algorithm.advantage_estimator is {config.algorithm.advantage_estimator}, which has "
            "no critic: vapo gates measures what a critic can show; give the config of a system "
            "that has one, as conf/vapo.yaml"
        )
    check_one_process("gates", config)
    if config.rewards.shuffle:
        raise UserError("rewards.shuffle deals the rewards out anew: set it to false")


def check_critic_row(name: str, config: FitConfig, rollouts: Path) -> None:
    """What this command does not do."""
    settings, where = config.components.value_pretraining, f"row '{name}' of the grid: "
    if settings.data != str(rollouts):
        raise UserError(f"{where}{DATA_KEY}: every critic reads --rollouts; leave the key out")
    if not config.algorithm.has_critic or resolve(config).value_pretraining_iterations == 0:
        raise UserError(
            f"{where}it pretrains no critic: set components.value_pretraining.enabled=true and "
            "num_iterations above 0, with an estimator that has one"
        )
    if (settings.epochs, settings.patience) != (None, None):
        raise UserError(
            f"{where}components.value_pretraining.epochs and patience: every critic is trained "
            "for num_iterations, so that the curves can be compared; leave them out"
        )
    if settings.heldout_share == 0:
        raise UserError(
            f"{where}components.value_pretraining.heldout_share is 0: there is nothing to "
            "measure the critics on"
        )


def check_value_truth(config: FitConfig, value_truth: int | None) -> None:
    """`vapo validate --value_truth`. Raises: UserError naming the option or the key."""
    if value_truth is None:
        return
    if value_truth < 2:
        raise UserError("--value_truth: one continuation says nothing of its noise; give 2 or more")
    for problem in unlike_the_rollouts(config, "--value_truth", in_training=False):
        raise UserError(problem.message)


def check_measuring(config: FitConfig, value_truth: int | None, truth_share: float | None) -> None:
    """`vapo rollouts --value_truth --truth_share`. Raises: UserError naming the option."""
    if value_truth is None:
        if truth_share is not None:
            raise UserError(
                f"--truth_share {truth_share:g} is the share of the groups whose prefixes are "
                "continued: give --value_truth K, too"
            )
        return
    if value_truth < 2:
        raise UserError(
            f"--value_truth {value_truth}: the noise of a value is estimated from at least 2 "
            "continuations; give 4, say"
        )
    if config.value_truth.max_tokens is not None:
        raise UserError(
            "value_truth.max_tokens bounds measurements of vapo validate and vapo fit, not this "
            "file: leave it out, and lower --truth_share"
        )
    if truth_share is not None and not 0 < truth_share <= 1:
        raise UserError(f"--truth_share {truth_share:g} must be above 0 and at most 1")


def check_estimate(config: FitConfig) -> None:
    """Raises: UserError for what `vapo estimate` does not count."""
    if config.critic.head_function is not None:
        raise UserError(
            "vapo estimate does not count a value head of your own: set critic.head_function=null"
        )


def simulated_config(
    config: FitConfig, num_ranks: int | None, tflops: float | None, gb_s: float | None
) -> FitConfig:
    """The config on so many ranks, for `vapo estimate --simulate_ranks`; None: as it is.

    Raises: UserError for what cannot be simulated, or does not divide among the ranks, and for
        rates that no step has a use for.
    """
    if num_ranks is None:
        if gb_s is not None:
            raise UserError("--interconnect_gb_s is of a simulated step: give --simulate_ranks N")
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
    if config.critic.count > 1:
        raise UserError("--simulate_ranks trains one critic: set critic.count=1")
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


def model_config_folder(model_config: Path) -> str:
    """The folder of `vapo estimate --model_config`. Raises: UserError: it has no config.json."""
    folder = model_config.parent if model_config.name == "config.json" else model_config
    if not (folder / "config.json").is_file():
        raise UserError(f"--model_config: no config.json at {model_config}")
    return str(folder)


@contextmanager
def only_config_needed() -> Iterator[None]:
    """Add to the error of a missing model that `vapo estimate` needs its config.json alone."""
    try:
        yield
    except UserError as error:
        raise UserError(
            f"{error}\nOnly the model's config.json is needed: name one with --model_config FILE, "
            "for actor and critic alike"
        ) from error
