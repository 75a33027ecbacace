"""How long a run takes on other hardware, from its config and three figures of that hardware.

Arithmetic, not a measurement: what is sampled by the rate of the engine, what is computed by the
rate of the GPUs, one after the other. Evaluation, verdicts, checkpoints and start-up are not
counted, nor what an idle GPU waits for, nor the prompts that dynamic sampling draws again.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig

from vapo.config import FitConfig, resolve
from vapo.diagnostics.memory.sizes import most_continuations, num_processes
from vapo.networks.actor import Actor
from vapo.networks.critic import Critic
from vapo.networks.flops import ForwardFlops
from vapo.networks.meta_device import model_of_config


@dataclass(frozen=True)
class Hardware:
    """Of each GPU: TFLOP/s that training sustains, tokens/s that the engine samples.

    The mean lengths belong to policy and data; where the prompts' is not known, they are counted
    as long as they may be.
    """

    sustained_tflops: float
    sampled_tokens_per_s: float
    mean_response_tokens: float
    mean_prompt_tokens: float | None = None


@dataclass(frozen=True)
class PhaseHours:
    """Hours of one phase: sampling, and passes through the networks."""

    iterations: int
    sampling: float
    networks: float

    @property
    def total(self) -> float:
        return self.sampling + self.networks


def run_hours(
    config: FitConfig,
    hardware: Hardware,
    *,
    actor: PreTrainedConfig,
    critic: PreTrainedConfig | None,
) -> dict[str, PhaseHours]:
    """Hours of value pretraining (if there is any) and of the policy's iterations, by phase."""
    numbers = resolve(config)
    costs = _response_flops(config, hardware, actor, critic)
    responses, gpus = numbers.num_prompts * numbers.group_size, num_processes(config)
    greedy = numbers.num_prompts if config.algorithm.needs_greedy_baseline else 0
    sampled = (responses + greedy) * hardware.mean_response_tokens
    continued = most_continuations(config)
    more = 0.0
    if continued is not None:  # each prefix leaves half of a response, on average
        more = continued.num_responses * hardware.mean_response_tokens / 2

    def phase(iterations: int, tokens: float, flops: float) -> PhaseHours:
        sampling = tokens / (hardware.sampled_tokens_per_s * gpus) / 3600
        networks = responses * flops / (hardware.sustained_tflops * 1e12 * gpus) / 3600
        return PhaseHours(iterations, iterations * sampling, iterations * networks)

    phases = {}
    if critic is not None and numbers.value_pretraining_iterations:
        count = numbers.value_pretraining_iterations
        stored = config.components.value_pretraining.data is not None
        phases["value pretraining"] = phase(count, 0 if stored else sampled, costs["critic"])
    iterations = config.training.num_iterations
    phases["policy"] = phase(iterations, sampled + more, costs["actor"] + costs["critic"])
    return phases


def _response_flops(
    config: FitConfig,
    hardware: Hardware,
    actor: PreTrainedConfig,
    critic: PreTrainedConfig | None,
) -> dict[str, float]:
    """FLOPs that one response costs each network in an iteration.

    Forward passes: the actor's log-probs, a reference's, the values of each critic. Updates:
    three forwards, four where activations are computed again; of several critics one is updated.
    """
    prompt = hardware.mean_prompt_tokens or config.data.max_prompt_tokens
    length = prompt + hardware.mean_response_tokens
    forwards = {"actor": 1 + (config.algorithm.kl.coef > 0), "critic": config.critic.count}
    passes = {"actor": 1, "critic": config.critic.epochs}
    costs = {"actor": 0.0, "critic": 0.0}
    for name, model in (("actor", actor), ("critic", critic)):
        if model is None:
            continue
        options = config.actor if name == "actor" else config.critic
        one = _forward_flops(name, model)
        forward = (
            one.per_token * length
            + one.per_state * hardware.mean_response_tokens
            + one.per_squared_length * length**2
        )
        update = 4 if options.gradient_checkpointing else 3
        costs[name] = forward * (forwards[name] + update * passes[name])
    return costs


def _forward_flops(name: str, model: PreTrainedConfig) -> ForwardFlops:
    settings = {"path": "", "dtype": "float32", "attn_implementation": "auto"}
    if name == "actor":
        return Actor(model_of_config("causal_lm", model, **settings)).forward_flops
    return Critic(model_of_config("value_model", model, **settings)).forward_flops
