"""Rules of batch sizes, of the number of processes, and of engines that sample beside training."""

from __future__ import annotations

from typing import Any

from vapo.config.engines import VllmEngine, VllmServerEngine
from vapo.config.hyperparameters import resolve
from vapo.config.rules import Problem, Problems, Rule, value_at, without_effect
from vapo.config.schema import FitConfig, RewardModelConfig, SftConfig

_RANKS = ("trainer.devices", "trainer.num_nodes")


def minibatches_fill_the_iteration(config: FitConfig) -> Problems:
    numbers, critic = resolve(config), config.critic
    group = "components.group_sampling"
    total = numbers.num_responses
    if critic.minibatch_size is not None and critic.num_minibatches is not None:
        yield Problem(
            "critic.minibatch_size and critic.num_minibatches say the same in two ways: set one of "
            "them to null"
        )
    for key in ("training.minibatch_size", "critic.minibatch_size", "critic.num_minibatches"):
        size = value_at(config, key) or total
        if total % size:
            below = max(n for n in range(1, min(size, total) + 1) if total % n == 0)
            yield Problem(
                f"{key} {size} does not divide the {total} responses of an iteration "
                f"({numbers.num_prompts} prompts x {numbers.group_size}); the next smaller that "
                f"does is {below}",
                (key, f"{group}.num_prompts", f"{group}.group_size"),
            )


def ranks_share_evenly(config: FitConfig) -> Problems:
    numbers, critic, ranks = resolve(config), config.critic, config.trainer.num_ranks
    by = f"cannot be shared evenly by trainer.devices x trainer.num_nodes = {ranks} processes"
    size, key = critic.minibatch_size or ranks, "critic.minibatch_size"
    if critic.num_minibatches is not None:
        key = "critic.num_minibatches"
        size = numbers.num_responses // critic.num_minibatches
    if size % ranks:
        yield Problem(
            f"{key}: minibatches of {size} responses {by}: make {size} a multiple of {ranks}"
        )
    shares = {
        "components.group_sampling.num_prompts": numbers.num_prompts,
        "training.minibatch_size": config.training.minibatch_size or ranks,
    }
    for key, number in shares.items():
        if number % ranks:
            yield Problem(f"{key} {number} {by}: make it a multiple of {ranks}")


def several_ranks_are_sharded(config: FitConfig) -> Problems:
    trainer = config.trainer
    if trainer.num_ranks > 1 and trainer.strategy != "fsdp":
        yield Problem(
            f"trainer.devices x trainer.num_nodes = {trainer.num_ranks} processes need "
            "trainer.strategy=fsdp"
        )
    if trainer.strategy != "auto" and config.critic.head_function is not None:
        yield Problem(
            "critic.head_function is not supported with trainer.strategy=fsdp: set "
            "critic.head_function=null, or train in one process with trainer.strategy=auto"
        )


def sharding_options_have_shards(config: Any) -> Problems:
    trainer = config.trainer
    if trainer.strategy == "fsdp":
        if trainer.cpu_offload and trainer.accelerator == "cpu":
            yield Problem(
                "trainer.cpu_offload has no effect with trainer.accelerator=cpu: set "
                "trainer.cpu_offload=false"
            )
        return
    for name in ("sharded_checkpoints", "reduce_every_microbatch", "cpu_offload"):
        if getattr(trainer, name):
            yield Problem(
                f"trainer.{name} has no effect without trainer.strategy=fsdp: set that, or "
                f"trainer.{name}=false"
            )


def one_process(config: SftConfig | RewardModelConfig) -> Problems:
    if not config.trainer.is_one_process:
        yield Problem(
            "this command trains in one process: set trainer.devices=1, trainer.num_nodes=1 and "
            "trainer.strategy=auto"
        )


def an_average_is_made_in_one_process(config: FitConfig) -> Problems:
    key = "evaluation.average_policies"
    if config.evaluation.average_policies is None:
        why = f"{key} is null, so that no weights are averaged"
        yield from without_effect(config, ["evaluation.export_average"], why)
    elif not config.trainer.is_one_process:
        yield Problem(
            f"{key} adds up whole weights in one process: set {key}=null, or trainer.devices=1, "
            "trainer.num_nodes=1 and trainer.strategy=auto"
        )


def one_model_is_evaluated(config: SftConfig) -> Problems:
    keys = ["evaluation.average_policies", "evaluation.export_average"]
    yield from without_effect(config, keys, "this command scores the model that it has trained")


def sampling_beside_training_has_an_engine(config: FitConfig) -> Problems:
    """Check that sampling beside training (max_staleness above 0) has an engine of its own."""
    if config.training.max_staleness == 0:
        return
    above = "training.max_staleness above 0"
    if isinstance(config.rollouts, VllmEngine):
        yield Problem(
            f"{above} samples while the networks train, and a colocated engine shares their "
            "process and device: set rollouts.engine=vllm_server, rollouts.engine=transformers, or "
            "training.max_staleness=0"
        )
    elif not isinstance(config.rollouts, VllmServerEngine) and not config.trainer.is_one_process:
        yield Problem(
            f"{above} samples while the networks train, and with several processes the "
            "transformers engine gathers their shards in between: set rollouts.engine to "
            "vllm_server (`vapo serve`), training.max_staleness=0, or trainer.devices=1, "
            "trainer.num_nodes=1 and trainer.strategy=auto"
        )
    if config.algorithm.dynamic_sampling_attempts > 0 and config.trainer.num_ranks > 1:
        yield Problem(
            f"with {above} each process samples on its own, and with dynamic sampling all must "
            "make equally many attempts: set algorithm.dynamic_sampling_attempts=0, "
            "training.max_staleness=0, or one process",
            ("training.max_staleness", "algorithm.dynamic_sampling_attempts", *_RANKS),
        )


def engines_can_be_used(config: Any) -> Problems:
    """Check the addresses, devices and temperatures of a vLLM engine."""
    rollouts, key = config.rollouts, "rollouts.servers.urls"
    urls = rollouts.servers.urls.split(",") if isinstance(rollouts, VllmServerEngine) else []
    if any("@" in url for url in urls):  # which is not quoted
        yield Problem(
            f"{key} has a user or password in it: give addresses alone, as http://gpu2:8100"
        )
    for url in urls:
        scheme, _, rest = url.strip().partition("://")
        if scheme != "http" or not rest.partition(":")[2].isdigit():
            yield Problem(f"{key}: {url.strip()!r} is not like http://gpu2:8100")
    devices = config.trainer.devices
    if isinstance(rollouts, VllmEngine) and devices % rollouts.vllm.tensor_parallel_size:
        yield Problem(
            f"rollouts.vllm.tensor_parallel_size {rollouts.vllm.tensor_parallel_size} does not "
            f"divide trainer.devices {devices}: the processes of a host are shared out to engines "
            "without remainder"
        )
    is_vllm = isinstance(rollouts, VllmEngine | VllmServerEngine)
    for section in ("rollouts", "evaluation") if is_vllm else ():
        # vLLM raises a lower temperature to 0.01, also on a server.
        part = getattr(config, section, None)
        if part is not None and part.temperature < 0.01:
            yield Problem(
                f"{section}.temperature {part.temperature:g} is below 0.01, the least that vLLM "
                "samples at",
                (f"{section}.temperature", "rollouts.engine"),
            )


BATCH_RULES: tuple[Rule, ...] = (
    minibatches_fill_the_iteration,
    several_ranks_are_sharded,
    sharding_options_have_shards,
    ranks_share_evenly,
    sampling_beside_training_has_an_engine,
    an_average_is_made_in_one_process,
)
