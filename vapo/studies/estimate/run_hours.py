"""Estimate how long a run takes on other hardware, from its config and figures of that hardware.

This is arithmetic, not a measurement: the tokens to sample divided by the engine's rate, plus the
FLOPs divided by the GPUs' rate. Evaluation, verdicts, checkpoints and start-up are not counted,
nor the time in which a GPU waits, nor the prompts that dynamic sampling draws again.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedConfig

from vapo.config import FitConfig, resolve
from vapo.config.continuation_rules import most_continuations
from vapo.config.hyperparameters import reads_old_logprobs
from vapo.networks.actor_critic import Actor, ForwardFlops
from vapo.networks.critics_on_actors import critic_of
from vapo.networks.meta_device import Kind, model_of_config
from vapo.networks.model_configs import cut_layers
from vapo.networks.probe import layer_numbers
from vapo.studies.estimate.shapes import frozen_base
from vapo.studies.estimate.sizes import local_minibatch, num_processes
from vapo.studies.estimate.waiting_states import read_layers


@dataclass(frozen=True)
class Hardware:
    """The speed of each GPU, and the mean lengths of responses and prompts in tokens.

    Attributes:
        sustained_tflops: TFLOP/s of a GPU in training.
        sampled_tokens_per_s: tokens/s of the engine on a GPU.
        mean_prompt_tokens: None counts every prompt as `data.max_prompt_tokens` long.
    """

    sustained_tflops: float
    sampled_tokens_per_s: float
    mean_response_tokens: float
    mean_prompt_tokens: float | None = None


@dataclass(frozen=True)
class PhaseHours:
    """The hours that one phase spends on sampling, and on passes through the networks."""

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
    shares_prompts: bool = False,
) -> dict[str, PhaseHours]:
    """Return phase -> its hours: "value pretraining", if there is any, and "policy".

    Args:
        actor, critic: the model configs (config.json). `critic` is None without a critic.
        shares_prompts: whether the responses of a pass share one forward of their prompt.
    """
    numbers = resolve(config)
    costs = _response_flops(config, hardware, actor, critic, shares_prompts)
    responses, gpus = numbers.num_prompts * numbers.group_size, num_processes(config)
    greedy = numbers.num_prompts if config.algorithm.needs_greedy_baseline else 0
    sampled = (responses + greedy) * hardware.mean_response_tokens
    continued = most_continuations(config)
    continuation_tokens = 0.0
    if continued is not None:  # each prefix leaves half of a response, on average
        continuation_tokens = continued.num_responses * hardware.mean_response_tokens / 2

    def phase(iterations: int, tokens: float, flops: float) -> PhaseHours:
        sampling = tokens / (hardware.sampled_tokens_per_s * gpus) / 3600
        networks = responses * flops / (hardware.sustained_tflops * 1e12 * gpus) / 3600
        return PhaseHours(iterations, iterations * sampling, iterations * networks)

    phases = {}
    if critic is not None and numbers.value_pretraining_iterations:
        count = numbers.value_pretraining_iterations
        stored = config.components.value_pretraining.data is not None
        states = 0.0 if stored else costs["states"]
        phases["value pretraining"] = phase(
            count, 0 if stored else sampled, states + costs["critic"]
        )
    iterations = config.training.num_iterations
    phases["policy"] = phase(
        iterations, sampled + continuation_tokens, costs["actor"] + costs["critic"]
    )
    return phases


def _response_flops(
    config: FitConfig,
    hardware: Hardware,
    actor: PreTrainedConfig,
    critic: PreTrainedConfig | None,
    shares_prompts: bool,
) -> dict[str, float]:
    """Return the FLOPs that one response costs in an iteration: "actor", "critic" and "states".

    Forward passes: the actor's log-probs if they are read, and once more with the answer for OPPO;
    the reference's log-probs; each critic's values. If a critic reads the actor's states and the
    log-probs are not read, the actor runs for the states alone: without the output layer, and
    without the layers after those that are read. An update costs three forwards, four with gradient
    checkpointing; a response updates one of several critics.
    """
    prompt = hardware.mean_prompt_tokens or config.data.max_prompt_tokens
    response, numbers = hardware.mean_response_tokens, resolve(config)
    num_responses = numbers.num_prompts * numbers.group_size

    def flops(forward: ForwardFlops, rows: int) -> float:
        """Return the FLOPs of a response in a pass over `rows` responses that are drawn at
        random.
        """
        prompts = float(num_responses)
        if shares_prompts:  # those with a response among the rows
            row_share = rows / num_responses
            prompts = numbers.num_prompts * (1 - (1 - row_share) ** numbers.group_size) / row_share
        share = prompts / num_responses
        return (
            forward.per_token * (share * prompt + response)
            + forward.per_state * response
            + share * forward.attention(prompt)
            + forward.attention(response, num_earlier=prompt)
        )

    on_base = config.critic.kind == "adapters"
    reads_old = reads_old_logprobs(config)
    actor_forwards = int(reads_old) + int(config.algorithm.kl.coef > 0)
    actor_forwards += int(config.algorithm.reads_answers)
    plain: dict[str, Any] = {"path": "", "dtype": "float32", "attn_implementation": "auto"}
    costs = {"actor": 0.0, "critic": 0.0, "states": 0.0}
    for name, model, options, num_forwards, num_passes in (
        ("actor", actor, config.actor, actor_forwards, 1),
        ("critic", critic, config.critic, config.critic.count, config.critic.epochs),
    ):
        if model is None:
            continue
        kind: Kind = "causal_lm" if name == "actor" else "value_model"
        empty = model_of_config(kind, model, **plain)
        base = frozen_base(actor, dtype="float32") if on_base and name == "critic" else None
        forward = (Actor(empty) if name == "actor" else critic_of(empty, base)).forward_flops
        minibatch = local_minibatch(config, name) * num_processes(config)
        update = 4 if options.gradient_checkpointing else 3
        costs[name] = num_forwards * flops(forward, num_responses)
        costs[name] += update * num_passes * flops(forward, minibatch)
    if critic is not None and config.critic.reads_actor:
        part = _up_to_layers(actor, read_layers(config))
        forward = Actor(model_of_config("causal_lm", part, **plain)).forward_flops
        costs["states"] = flops(replace(forward, per_state=0), num_responses)
        costs["actor"] += 0.0 if reads_old else costs["states"]
    return costs


def _up_to_layers(actor: PreTrainedConfig, layers: Sequence[int]) -> PreTrainedConfig:
    """Return an actor's model config, cut after the last layer whose states are read."""
    part = deepcopy(actor)
    text = part.get_text_config(decoder=True)
    numbers = layer_numbers(layers, text.num_hidden_layers)
    if -1 not in numbers:
        cut_layers(part, max(numbers))
    return part
