"""Chooses the size of micro-batches, and which networks recompute activations, by a GPU's memory.

Neither changes a gradient, so the config may leave both to the machine (`auto`). Forward passes of
a few responses show how many bytes autograd keeps for each token. A choice is made only where the
networks are whole on one GPU and nothing samples in the same memory meanwhile. All other runs keep
what `first_microbatching` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from vapo.config import FitConfig
from vapo.config.engines import VllmServerEngine
from vapo.config.schema import AUTO_TOKENS
from vapo.networks.actor_critic import Actor, Critic, members_of
from vapo.networks.build import backbone_of, enable_gradient_checkpointing
from vapo.networks.token_inputs import Layout, TokenInputs, rollout_inputs
from vapo.system.distributed import world_size
from vapo.system.host_memory import GIB, MIB
from vapo.types import RolloutBatch

SIZES = (65_536, 32_768, AUTO_TOKENS, 8_192, 4_096, 2_048, 1_024)
_PROBE_TOKENS = 512  # the least number of tokens in the smaller of two forward passes
_SPARE_SHARE = 0.1  # of the GPU's memory stays free, for gaps between blocks and for workspaces
_SPARE_BYTES = 3 * GIB  # stay free as well, for a chunk of logits and their gradient


class Microbatching(NamedTuple):
    """The token budget of a micro-batch, and the networks that recompute activations."""

    tokens: int
    recomputing: tuple[str, ...]


@dataclass(frozen=True)
class KeptBytes:
    """The bytes that one network's update keeps from the forward to the backward pass.

    `fixed` are those of a micro-batch whatever its size, such as weights in half precision.
    `per_token` are those of each token. Both are given without recomputation and with it.
    `layer_per_token` are the bytes of a token in one layer: a layer that is computed again needs
    them beside the rest.
    """

    fixed: float
    per_token: float
    fixed_recomputing: float
    per_token_recomputing: float
    layer_per_token: float

    def at(self, tokens: int, *, recomputes: bool) -> float:
        """Return the peak bytes of an update of one micro-batch of `tokens` tokens.

        The gradient of a layer's activations is counted as as large as the activations.
        """
        layers = self.layer_per_token * tokens
        if recomputes:
            return self.fixed_recomputing + self.per_token_recomputing * tokens + 2 * layers
        return self.fixed + self.per_token * tokens + layers


def choose_microbatching(
    network_bytes: Mapping[str, KeptBytes],
    room: Mapping[str, float],
    *,
    tokens: int | None,
    recomputes: Mapping[str, bool | None],
    saved: Microbatching | None = None,
) -> Microbatching:
    """Return the largest micro-batch size that fits, and the networks that must recompute for it.

    A network recomputes only if without that it has no room for micro-batches of 16,384 tokens, or
    of the size that the config sets.

    Args:
        network_bytes: what each trained network keeps for its backward pass.
        room: the bytes that each network's update may take.
        tokens: the size of a micro-batch that the config sets; None: it is to be chosen.
        recomputes: whether each network recomputes, if the config sets it; None: it is to be
            chosen.
        saved: the choice of an earlier session of the run. It is returned if it fits and the config
            allows it.
    """

    def fits(size: int, recomputing: tuple[str, ...]) -> bool:
        return all(
            bytes_of.at(size, recomputes=name in recomputing) <= room[name]
            for name, bytes_of in network_bytes.items()
        )

    if saved is not None and fits(*saved) and tokens in (None, saved.tokens):
        fixed_names = [name for name in network_bytes if recomputes[name] is not None]
        if all((name in saved.recomputing) == recomputes[name] for name in fixed_names):
            return saved
    least = tokens or AUTO_TOKENS
    recomputing = tuple(
        name
        for name, bytes_of in network_bytes.items()
        if recomputes[name]
        or (recomputes[name] is None and bytes_of.at(least, recomputes=False) > room[name])
    )
    if tokens is not None:
        return Microbatching(tokens, recomputing)
    size = next((size for size in SIZES if fits(size, recomputing)), SIZES[-1])
    return Microbatching(size, recomputing)


def recomputation_options(config: FitConfig) -> dict[str, bool | Literal["auto"]]:
    """Return each network's `gradient_checkpointing` option: True, False or "auto"."""
    return {
        "actor": config.actor.gradient_checkpointing,
        "critic": config.critic.gradient_checkpointing,
    }


def first_microbatching(config: FitConfig) -> Microbatching:
    """Return the micro-batching before anything is measured.

    For `auto` options it is 16,384 tokens and recomputation.
    """
    options = recomputation_options(config)
    names = tuple(name for name, recomputes in options.items() if recomputes)
    return Microbatching(config.training.first_microbatch_tokens, names)


def has_auto(config: FitConfig) -> bool:
    """Whether the free memory decides the micro-batch size or a network's recomputation."""
    return "auto" in (config.training.microbatch_tokens, *recomputation_options(config).values())


def may_choose(config: FitConfig, device: torch.device, *, num_processes: int) -> bool:
    """Whether micro-batching can be chosen by the free memory of the device.

    It can if the networks are whole on one GPU and nothing samples in its memory while they train.
    """
    is_elsewhere = isinstance(config.rollouts, VllmServerEngine)
    samples_beside = config.training.max_staleness > 0 and not is_elsewhere
    is_whole = num_processes == 1 and config.trainer.strategy != "fsdp"
    return is_whole and not samples_beside and device.type == "cuda"


def free_bytes(device: torch.device) -> tuple[float, float]:
    """Return the GPU's bytes that this process could still allocate, and the total."""
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(free + cached), float(total)


class MicrobatchChoice:
    """The micro-batch size of a run (`tokens`), and the networks that recompute (`recomputing`).

    A run begins with `first_microbatching`. What the config leaves open is chosen once, after the
    first rollouts are sampled. A resumed run keeps its earlier choice while that fits. `is_open`
    says whether something is still to be chosen.
    """

    def __init__(self, config: FitConfig) -> None:
        self.tokens, self.recomputing = first_microbatching(config)
        self.is_open = has_auto(config)
        self._saved: Microbatching | None = None

    def state_dict(self) -> dict[str, Any]:
        return {} if self._saved is None else self._saved._asdict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self._saved = Microbatching(int(state["tokens"]), tuple(state["recomputing"]))

    def choose(self, batch: RolloutBatch, measured: Measurement) -> str | None:
        """Choose the micro-batching that the config leaves open. It is called once.

        Returns: a line that describes the choice, or None if nothing could be chosen and the run
        keeps its first micro-batching.
        """
        self.is_open = False
        if not may_choose(measured.config, measured.device, num_processes=world_size()):
            return None
        self._saved, line = measured.chosen(batch, self._saved)
        self.tokens, self.recomputing = self._saved
        return line


@dataclass(frozen=True)
class Measurement:
    """Measures the memory that a run's networks need, and chooses the micro-batching by it.

    Args:
        networks: the networks that the run trains on tokens, by name.
        layout: the layout of their micro-batches.
        pad_id: the token that fills padded rows.
        device: the GPU that holds the networks.
    """

    config: FitConfig
    networks: Mapping[str, Actor | Critic]
    layout: Layout
    pad_id: int
    device: torch.device

    def chosen(self, batch: RolloutBatch, saved: Microbatching | None) -> tuple[Microbatching, str]:
        """Choose the micro-batching and apply it; return it and a line that describes it."""
        free, total = free_bytes(self.device)
        spare = _SPARE_BYTES + _SPARE_SHARE * total
        room = {name: free - spare - gradients(net) for name, net in self.networks.items()}
        options = recomputation_options(self.config)
        tokens = self.config.training.microbatch_tokens
        network_bytes: dict[str, KeptBytes] = {}
        try:
            network_bytes = {name: self.kept_bytes(name, batch) for name in self.networks}
        except torch.OutOfMemoryError:  # the run may fit all the same, as it would without `auto`
            choice = first_microbatching(self.config)
        else:
            choice = choose_microbatching(
                network_bytes,
                room,
                tokens=None if tokens == "auto" else tokens,
                recomputes={
                    n: None if option == "auto" else option for n, option in options.items()
                },
                saved=saved,
            )
        if len({id(backbone_of(first_of(n))) for n in self.networks.values()}) == 1:
            both = tuple(self.networks) if choice.recomputing else ()  # one model, one choice
            choice = choice._replace(recomputing=both)
        for name, network in self.networks.items():
            set_recomputation(network, name, name in choice.recomputing)
        return choice, describe_choice(choice, network_bytes, free)

    def kept_bytes(self, name: str, batch: RolloutBatch) -> KeptBytes:
        """Return the bytes that a network's update keeps, measured by forward passes of the batch's
        longest responses. If these do not fit into memory, the shortest are measured.

        Raises: torch.OutOfMemoryError: there is no room for the shortest either.
        """
        lengths = [len(r.prompt.prompt_ids) + len(r.response_ids) for r in batch.rollouts]
        longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        with suppress(torch.OutOfMemoryError):
            return self._kept_bytes_of(name, batch, longest_first, lengths[longest_first[0]])
        return self._kept_bytes_of(name, batch, longest_first[::-1], lengths[longest_first[-1]])

    def _kept_bytes_of(
        self, name: str, batch: RolloutBatch, order: list[int], first_length: int
    ) -> KeptBytes:
        """Return the bytes that a network's update keeps, measured with recomputation and without.

        Two forward passes of different sizes tell the bytes of each token from the fixed ones.

        Args:
            order: rows of the batch; as many of the first ones as the passes need are used.
            first_length: the number of tokens of the first row, prompt included.
        """
        network = self.networks[name]
        count = -(-_PROBE_TOKENS // first_length)
        inputs = []
        for number in (count, 2 * count):
            rows = [order[index % len(order)] for index in range(number)]
            options: Any = {"pad_id": self.pad_id, "layout": self.layout}
            on_host = rollout_inputs(batch, rows, for_critic=name == "critic", **options)
            inputs.append(on_host.to(self.device))
        measured = []
        for recomputes in (True, False):
            set_recomputation(network, name, recomputes)
            few, more = (
                bytes_kept(partial(self.forward, name, tokens), self.device) for tokens in inputs
            )
            per_token = (more - few) / (inputs[1].input_ids.numel() - inputs[0].input_ids.numel())
            measured += [max(few - per_token * inputs[0].input_ids.numel(), 0.0), per_token]
        fixed_recomputing, per_token_recomputing, fixed, per_token = measured
        config: Any = backbone_of(first_of(network)).config.get_text_config(decoder=True)
        layer = per_token / config.num_hidden_layers
        return KeptBytes(fixed, per_token, fixed_recomputing, per_token_recomputing, layer)

    def forward(self, name: str, inputs: TokenInputs) -> Tensor:
        """Return the actor's log-probs or the critic's values, as tensors that autograd tracks.

        Of several critics the first computes the values.
        """
        network = first_of(self.networks[name])
        if isinstance(network, Actor):
            logprobs: Tensor = network(inputs, temperature=1.0).logprobs
            return logprobs
        values: Tensor = network(inputs).values
        return values


def first_of(network: Actor | Critic) -> Actor | Critic:
    """Return the network itself, or the first of several critics.

    Several critics train one after the other, each on micro-batches of its own, so one is measured.
    """
    return network if isinstance(network, Actor) else members_of(network)[0]


def gradients(network: nn.Module) -> float:
    """Return the bytes of the gradients that an update will still allocate."""
    trained = (p for p in network.parameters() if p.requires_grad and p.grad is None)
    return float(sum(p.numel() * p.element_size() for p in trained))


def set_recomputation(network: Actor | Critic, name: str, recomputes: bool) -> None:
    """Switch on or off that a network recomputes its activations in the backward pass."""
    parts = [network] if isinstance(network, Actor) else members_of(network)
    for part in parts:
        if recomputes:
            enable_gradient_checkpointing(part, name)
        else:
            backbone_of(part).gradient_checkpointing_disable()


def bytes_kept(forward: Callable[[], Tensor], device: torch.device) -> float:
    """Return the bytes of GPU memory that a forward pass holds until its output is deleted."""
    previous_bytes = allocated_bytes(device)
    output = forward()
    after = allocated_bytes(device)
    del output
    return after - previous_bytes


def allocated_bytes(device: torch.device) -> float:
    """Return the bytes of all tensors on the GPU. (Blocks that torch caches are not counted.)"""
    return float(torch.cuda.memory_allocated(device))


def describe_choice(
    choice: Microbatching, network_bytes: Mapping[str, KeptBytes], free: float
) -> str:
    """Return one line that describes the choice and the measured bytes per token.

    `network_bytes` is empty if nothing could be measured, and the line says so. `free` is in bytes.
    """
    parts = [] if network_bytes else ["there was no room to measure what the networks keep"]
    for name, bytes_of in network_bytes.items():
        recomputes = name in choice.recomputing
        per_token = bytes_of.per_token_recomputing if recomputes else bytes_of.per_token
        how = "computes its layers again" if recomputes else "keeps its activations"
        parts.append(f"the {name} {how}, {per_token / MIB:.2f} MiB a token")
    return (
        f"micro-batches of {choice.tokens:,} tokens: {'; '.join(parts)}; "
        f"{free / GIB:.1f} GiB were free (training.microbatch_tokens, gradient_checkpointing)"
    )
