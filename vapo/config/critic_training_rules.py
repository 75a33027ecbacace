"""Rules between the keys of the critic, and between them and those around it."""

from __future__ import annotations

from vapo.config.hyperparameters import resolve
from vapo.config.problem import Problem, Rule
from vapo.config.schema import FitConfig


def critic_minibatches_have_one_size(config: FitConfig) -> Problem | None:
    critic = config.critic
    if critic.minibatch_size is None or critic.num_minibatches is None:
        return None
    return Problem(
        ("critic.minibatch_size", "critic.num_minibatches"),
        "critic.minibatch_size and critic.num_minibatches say the same in two ways: set one of "
        "them to null",
    )


def critic_minibatches_fill_the_iteration(config: FitConfig) -> Problem | None:
    numbers = resolve(config)
    total = numbers.num_prompts * numbers.group_size
    sizes = {
        "critic.minibatch_size": config.critic.minibatch_size,
        "critic.num_minibatches": config.critic.num_minibatches,
    }
    for key, size in sizes.items():
        if size is None or total % size == 0:
            continue
        below = max(n for n in range(1, min(size, total) + 1) if total % n == 0)
        return Problem(
            (
                key,
                "components.group_sampling.num_prompts",
                "components.group_sampling.group_size",
            ),
            f"{key} {size} does not divide the {total} responses of an iteration "
            f"({numbers.num_prompts} prompts x {numbers.group_size}); the next smaller that does "
            f"is {below}",
        )
    return None


def ranks_share_critic_minibatches(config: FitConfig) -> Problem | None:
    numbers, critic = resolve(config), config.critic
    ranks = config.trainer.devices * config.trainer.num_nodes
    size, key = critic.minibatch_size, "critic.minibatch_size"
    if critic.num_minibatches is not None:
        key = "critic.num_minibatches"
        size = numbers.num_prompts * numbers.group_size // critic.num_minibatches
    if size is None or size % ranks == 0:
        return None
    return Problem(
        (key, "trainer.devices", "trainer.num_nodes"),
        f"{key}: minibatches of {size} responses cannot be shared evenly by trainer.devices x "
        f"trainer.num_nodes = {ranks} processes: make {size} a multiple of {ranks}",
    )


def adapters_are_not_frozen(config: FitConfig) -> Problem | None:
    critic = config.critic
    if critic.lora is None or not critic.frozen:
        return None
    return Problem(
        ("critic.frozen", "critic.lora"),
        "critic.lora freezes all weights but its adapters and the head already, and critic.frozen "
        "would take adapters from it: set critic.frozen=[] and choose modules with "
        "critic.lora.target_modules, or set critic.lora=null",
    )


def critic_lora_is_one_process(config: FitConfig) -> Problem | None:
    if config.critic.lora is None or config.trainer.strategy == "auto":
        return None
    return Problem(
        ("trainer.strategy", "critic.lora"),
        "critic.lora is not supported with trainer.strategy=fsdp: set critic.lora=null, or train "
        "in one process with trainer.strategy=auto",
    )


def several_critics_are_one_process(config: FitConfig) -> Problem | None:
    if config.critic.count == 1 or config.trainer.strategy == "auto":
        return None
    return Problem(
        ("critic.count", "trainer.strategy"),
        f"critic.count {config.critic.count} is not supported with trainer.strategy=fsdp: each "
        "forward pass of a sharded critic needs all processes, and theirs would be of different "
        "critics; set critic.count=1, or train in one process with trainer.strategy=auto",
    )


def agreement_needs_several_critics(config: FitConfig) -> Problem | None:
    if config.critic.count > 1:
        return None
    for name in ("agreement_mask_share", "disagreement_mask_share"):
        key = f"algorithm.{name}"
        if getattr(config.algorithm, name) > 0:
            return Problem(
                (key, "critic.count"),
                f"{key} compares several critics, and there is one: set critic.count to 2 or "
                f"more, or {key}=0",
            )
    return None


def entropy_mask_has_a_bonus(config: FitConfig) -> Problem | None:
    algorithm = config.algorithm
    if algorithm.disagreement_mask_share == 0 or algorithm.entropy_coef > 0:
        return None
    return Problem(
        ("algorithm.disagreement_mask_share", "algorithm.entropy_coef"),
        "algorithm.disagreement_mask_share takes tokens from the entropy bonus, and "
        "algorithm.entropy_coef is 0, so it has no effect: set algorithm.entropy_coef above 0, or "
        "algorithm.disagreement_mask_share=0",
    )


CRITIC_TRAINING_RULES: tuple[Rule, ...] = (
    critic_minibatches_have_one_size,
    critic_minibatches_fill_the_iteration,
    ranks_share_critic_minibatches,
    adapters_are_not_frozen,
    critic_lora_is_one_process,
    several_critics_are_one_process,
    agreement_needs_several_critics,
    entropy_mask_has_a_bonus,
)
