"""Rules between keys: what no single key's type or range can say.

Each rule reads a whole config and returns a `Problem` or None; `RULES` lists them by schema,
in the order in which a reader would want to hear of them.
"""

from __future__ import annotations

from typing import Any

from vapo.config.algorithm_rules import ALGORITHM_RULES
from vapo.config.continuation_rules import CONTINUATION_RULES
from vapo.config.critic_free_rules import CRITIC_FREE_RULES
from vapo.config.critic_rules import CRITIC_RULES
from vapo.config.critic_training_rules import CRITIC_TRAINING_RULES
from vapo.config.data_rules import DATA_RULES, no_curriculum, one_training_source
from vapo.config.engine_rules import ENGINE_RULES
from vapo.config.engines import VllmEngine, VllmServerEngine
from vapo.config.environment_rules import ENVIRONMENT_RULES, EPISODE_RULES
from vapo.config.function_rules import FUNCTION_RULES, own_environment_is_an_import_path
from vapo.config.hyperparameters import resolve
from vapo.config.pretraining_rules import PRETRAINING_RULES
from vapo.config.problem import Problem, Rule
from vapo.config.reward_rules import REWARD_RULES
from vapo.config.schema import FitConfig, RewardModelConfig, SftConfig, TrainerConfig
from vapo.config.target_rules import TARGET_RULES
from vapo.config.vine_rules import VINE_RULES
from vapo.config.watch_rules import WATCH_RULES


def first_problem(config: Any) -> Problem | None:
    """The first rule of the config's schema that it breaks."""
    for rule in RULES.get(type(config), ()):
        if (problem := rule(config)) is not None:
            return problem
    return None


def pretraining_range(config: FitConfig) -> Problem | None:
    pretraining = config.components.value_pretraining
    most = resolve(config).value_pretraining_iterations
    has_rule = (pretraining.stop_explained_variance, pretraining.stop_value_loss) != (None, None)
    if most == 0 or not has_rule or pretraining.min_iterations <= most:
        return None
    prefix = "components.value_pretraining"
    return Problem(
        (f"{prefix}.min_iterations", f"{prefix}.num_iterations"),
        f"{prefix}.min_iterations {pretraining.min_iterations} is above "
        f"{prefix}.num_iterations {most}",
    )


def minibatches_fill_the_iteration(config: FitConfig) -> Problem | None:
    numbers = resolve(config)
    total = numbers.num_prompts * numbers.group_size
    size = config.training.minibatch_size or total
    if total % size == 0:
        return None
    below = max(n for n in range(1, min(size, total) + 1) if total % n == 0)
    return Problem(
        (
            "training.minibatch_size",
            "components.group_sampling.num_prompts",
            "components.group_sampling.group_size",
        ),
        f"training.minibatch_size {size} does not divide the {total} responses of an iteration "
        f"({numbers.num_prompts} prompts x {numbers.group_size}); the next smaller that does "
        f"is {below}",
    )


def ranks_share_evenly(config: FitConfig) -> Problem | None:
    trainer = config.trainer
    ranks = trainer.devices * trainer.num_nodes
    shares = {
        "components.group_sampling.num_prompts": resolve(config).num_prompts,
        "training.minibatch_size": config.training.minibatch_size or ranks,
    }
    for key, number in shares.items():
        if number % ranks:
            return Problem(
                (key, "trainer.devices", "trainer.num_nodes"),
                f"{key} {number} cannot be shared evenly by trainer.devices x "
                f"trainer.num_nodes = {ranks} processes: make it a multiple of {ranks}",
            )
    return None


def several_ranks_are_sharded(config: FitConfig) -> Problem | None:
    trainer = config.trainer
    ranks = trainer.devices * trainer.num_nodes
    if ranks == 1 or trainer.strategy == "fsdp":
        return None
    return Problem(
        ("trainer.strategy", "trainer.devices", "trainer.num_nodes"),
        f"trainer.devices x trainer.num_nodes = {ranks} processes need trainer.strategy=fsdp",
    )


def lora_is_one_process(config: FitConfig) -> Problem | None:
    if config.actor.lora is None or config.trainer.strategy == "auto":
        return None
    return Problem(
        ("trainer.strategy", "actor.lora"),
        "actor.lora is not supported with trainer.strategy=fsdp: set actor.lora=null, or train in "
        "one process with trainer.strategy=auto",
    )


def sampling_beside_training_has_an_engine(config: FitConfig) -> Problem | None:
    """A thread samples: what it uses is not the trainer's, and none of it is a collective."""
    rollouts = config.rollouts
    if config.training.max_staleness == 0:
        return None
    if isinstance(rollouts, VllmServerEngine):
        return None
    if isinstance(rollouts, VllmEngine):
        return Problem(
            ("training.max_staleness", "rollouts.engine"),
            "training.max_staleness above 0 samples while the networks train, and a colocated "
            "engine shares their process and device: set rollouts.engine=vllm_server, "
            "rollouts.engine=transformers, or training.max_staleness=0",
        )
    if config.trainer.is_one_process:
        return None
    return Problem(
        ("training.max_staleness", "rollouts.engine", "trainer.strategy", "trainer.devices"),
        "training.max_staleness above 0 samples while the networks train, and with several "
        "processes the transformers engine gathers their shards in between: set "
        "rollouts.engine to vllm_server (`vapo serve`), training.max_staleness=0, or "
        "trainer.devices=1, trainer.num_nodes=1 and trainer.strategy=auto",
    )


def stale_dynamic_sampling_is_one_process(config: FitConfig) -> Problem | None:
    trainer = config.trainer
    if config.training.max_staleness == 0 or config.algorithm.dynamic_sampling_attempts == 0:
        return None
    if trainer.devices * trainer.num_nodes == 1:
        return None
    return Problem(
        ("training.max_staleness", "algorithm.dynamic_sampling_attempts", "trainer.devices"),
        "with training.max_staleness above 0 each process samples on its own, and with dynamic "
        "sampling all must make equally many attempts: set "
        "algorithm.dynamic_sampling_attempts=0, training.max_staleness=0, or one process",
    )


def sharding_options_have_shards(config: Any) -> Problem | None:
    trainer = config.trainer
    if trainer.strategy == "fsdp":
        return offload_has_a_gpu(trainer)
    for name in ("sharded_checkpoints", "reduce_every_microbatch", "cpu_offload"):
        if getattr(trainer, name):
            key = f"trainer.{name}"
            return Problem(
                (key, "trainer.strategy"), f"{key} has no effect without trainer.strategy=fsdp"
            )
    return None


def offload_has_a_gpu(trainer: TrainerConfig) -> Problem | None:
    if not trainer.cpu_offload or trainer.accelerator != "cpu":
        return None
    return Problem(
        ("trainer.cpu_offload", "trainer.accelerator"),
        "trainer.cpu_offload has no effect with trainer.accelerator=cpu",
    )


def one_process(config: SftConfig | RewardModelConfig) -> Problem | None:
    if config.trainer.is_one_process:
        return None
    return Problem(
        ("trainer.devices", "trainer.num_nodes", "trainer.strategy"),
        "this command trains in one process: set trainer.devices=1, trainer.num_nodes=1 and "
        "trainer.strategy=auto",
    )


def prompt_template_has_a_place(config: Any) -> Problem | None:
    template = config.data.prompt_template
    if "{prompt}" in template:
        return None
    return Problem(
        ("data.prompt_template",),
        f"data.prompt_template {template!r} must contain {{prompt}}, where the problem goes",
    )


def system_prompt_is_used(config: Any) -> Problem | None:
    if config.data.system_prompt is None or config.data.chat_template:
        return None
    return Problem(
        ("data.system_prompt", "data.chat_template"),
        "data.system_prompt has no effect without data.chat_template=true",
    )


_COMMON: tuple[Rule, ...] = (
    *DATA_RULES,
    prompt_template_has_a_place,
    system_prompt_is_used,
    *REWARD_RULES,
    *ENGINE_RULES,
)
RULES: dict[type, tuple[Rule, ...]] = {
    FitConfig: (
        *FUNCTION_RULES,
        *ENVIRONMENT_RULES,
        *ALGORITHM_RULES,
        *CRITIC_FREE_RULES,
        *CRITIC_RULES,
        *CRITIC_TRAINING_RULES,
        *TARGET_RULES,
        *PRETRAINING_RULES,
        *VINE_RULES,
        *WATCH_RULES,
        *CONTINUATION_RULES,
        pretraining_range,
        minibatches_fill_the_iteration,
        several_ranks_are_sharded,
        sharding_options_have_shards,
        ranks_share_evenly,
        lora_is_one_process,
        sampling_beside_training_has_an_engine,
        stale_dynamic_sampling_is_one_process,
        *_COMMON,
    ),
    SftConfig: (
        one_process,
        sharding_options_have_shards,
        one_training_source,
        no_curriculum,
        own_environment_is_an_import_path,
        *EPISODE_RULES,
        *_COMMON,
    ),
    RewardModelConfig: (
        one_process,
        sharding_options_have_shards,
        no_curriculum,
        *_COMMON,
    ),
}
