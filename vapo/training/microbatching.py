"""How large micro-batches are, and which networks recompute activations, by the memory that a GPU
has.

Neither changes a gradient, so both may be chosen by a machine (`auto`). A forward pass of a few
responses says which bytes autograd keeps for each token. Every choice is for networks that are
whole on one GPU: shards, and a thread that samples in the same memory meanwhile, keep the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vapo.config import FitConfig
from vapo.config.engines import VllmServerEngine
from vapo.config.schema import AUTO_TOKENS
from vapo.networks.actor_critic import Actor, Critic, members_of
from vapo.networks.build import backbone_of, enable_gradient_checkpointing
from vapo.networks.token_inputs import Layout, TokenInputs, rollout_inputs
from vapo.system.distributed import world_size
from vapo.types import RolloutBatch

SIZES = (65_536, 32_768, AUTO_TOKENS, 8_192, 4_096, 2_048, 1_024)
MIB, GIB = 2**20, 2**30
_PROBE_TOKENS = 512  # at least, of the smaller of two forward passes
_SPARE_SHARE = 0.1  # of the GPU's memory: gaps between blocks, workspaces
_SPARE_BYTES = 3 * GIB  # logits and their gradient, chunk by chunk


class Microbatching(NamedTuple):
    """The budget of a micro-batch, and the networks whose activations are computed again."""

    tokens: int
    recomputing: tuple[str, ...]


@dataclass(frozen=True)
class KeptBytes:
    """What one network's update keeps from the forward to the backward pass: bytes of every
    micro-batch (such as weights in half precision), and of each token. `layer_per_token` is what
    one layer keeps, which a layer that is computed again needs beside the rest."""

    fixed: float
    per_token: float
    fixed_recomputing: float
    per_token_recomputing: float
    layer_per_token: float

    def at(self, tokens: int, *, recomputes: bool) -> float:
        """The most at any time. The gradient of a layer's activations is as large as they are."""
        layers = self.layer_per_token * tokens
        if recomputes:
            return self.fixed_recomputing + self.per_token_recomputing * tokens + 2 * layers
        return self.fixed + self.per_token * tokens + layers


def choose_microbatching(
    kept: Mapping[str, KeptBytes],
    room: Mapping[str, float],
    *,
    tokens: int | None,
    recomputes: Mapping[str, bool | None],
    saved: Microbatching | None = None,
) -> Microbatching:
    """The largest micro-batches that fit without recomputation, of 16,384 tokens or more; a network
    that has no room for these recomputes, and then the largest that fit.

    Args:
        kept: of each network that is trained.
        room: the bytes that each update may take.
        tokens, recomputes: what the config names; None: to be chosen.
        saved: an earlier session's choice, which stays while it fits.
    """

    def fits(size: int, recomputing: tuple[str, ...]) -> bool:
        return all(
            own.at(size, recomputes=name in recomputing) <= room[name] for name, own in kept.items()
        )

    if saved is not None and fits(*saved) and tokens in (None, saved.tokens):
        wanted = [n for n, own in recomputes.items() if own is not None and n in kept]
        if all((n in saved.recomputing) == recomputes[n] for n in wanted):
            return saved
    least = tokens or AUTO_TOKENS
    recomputing = tuple(
        name
        for name, own in kept.items()
        if recomputes[name]
        or (recomputes[name] is None and own.at(least, recomputes=False) > room[name])
    )
    if tokens is not None:
        return Microbatching(tokens, recomputing)
    size = next((size for size in SIZES if fits(size, recomputing)), SIZES[-1])
    return Microbatching(size, recomputing)


def first_microbatching(config: FitConfig) -> Microbatching:
    """What a run begins with: `auto` recomputes, in micro-batches of 16,384 tokens."""
    options = {
        "actor": config.actor.gradient_checkpointing,
        "critic": config.critic.gradient_checkpointing,
    }
    names = tuple(name for name, recomputes in options.items() if recomputes)
    return Microbatching(config.training.first_microbatch_tokens, names)


def has_auto(config: FitConfig) -> bool:
    """Whether the config leaves anything to the memory."""
    return "auto" in (
        config.training.microbatch_tokens,
        config.actor.gradient_checkpointing,
        config.critic.gradient_checkpointing,
    )


def may_choose(config: FitConfig, device: torch.device, *, num_processes: int) -> bool:
    """Whether the networks are whole on one GPU, in which nothing samples while they train."""
    is_elsewhere = isinstance(config.rollouts, VllmServerEngine)
    samples_beside = config.training.max_staleness > 0 and not is_elsewhere
    is_whole = num_processes == 1 and config.trainer.strategy != "fsdp"
    return is_whole and not samples_beside and device.type == "cuda"


def free_bytes(device: torch.device) -> tuple[float, float]:
    """The memory that this process could allocate on the GPU, and all that the GPU has."""
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(free + cached), float(total)


class MicrobatchChoice:
    """What a run does. It begins as the config says, and chooses what that leaves open once, when
    there are rollouts. A resumed run takes what it had, while that fits.

    `is_open`: whether there is something to choose, and it has not been chosen.
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
        """Choose; a line that says what was chosen. None: it stays as it began."""
        self.is_open = False
        if not may_choose(measured.config, measured.device, num_processes=world_size()):
            return None
        self._saved, line = measured.chosen(batch, self._saved)
        self.tokens, self.recomputing = self._saved
        return line


@dataclass(frozen=True)
class Measurement:
    """Chooses for the networks of a run by the memory that they keep.

    Args:
        networks: those that the run trains on tokens, by name.
    """

    config: FitConfig
    networks: Mapping[str, Actor | Critic]
    layout: Layout
    pad_id: int
    device: torch.device

    def chosen(self, batch: RolloutBatch, saved: Microbatching | None) -> tuple[Microbatching, str]:
        """The choice, which is put into effect, and a line that says it."""
        free, total = free_bytes(self.device)
        spare = _SPARE_BYTES + _SPARE_SHARE * total
        kept = {name: self.kept_bytes(name, batch) for name in self.networks}
        room = {name: free - spare - gradients(own) for name, own in self.networks.items()}
        as_named = {
            "actor": self.config.actor.gradient_checkpointing,
            "critic": self.config.critic.gradient_checkpointing,
        }
        tokens = self.config.training.microbatch_tokens
        choice = choose_microbatching(
            kept,
            room,
            tokens=None if tokens == "auto" else tokens,
            recomputes={n: None if own == "auto" else own for n, own in as_named.items()},
            saved=saved,
        )
        if len({id(backbone_of(first_of(n))) for n in self.networks.values()}) == 1:
            both = tuple(self.networks) if choice.recomputing else ()  # one model, one choice
            choice = choice._replace(recomputing=both)
        for name, network in self.networks.items():
            set_recomputation(network, name, name in choice.recomputing)
        return choice, describe_choice(choice, kept, free)

    def kept_bytes(self, name: str, batch: RolloutBatch) -> KeptBytes:
        """By forward passes of the longest responses, with recomputation and without."""
        network = self.networks[name]
        lengths = [len(r.prompt.prompt_ids) + len(r.response_ids) for r in batch.rollouts]
        longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        count = -(-_PROBE_TOKENS // lengths[longest_first[0]])
        inputs = []
        for number in (count, 2 * count):
            rows = [longest_first[index % len(lengths)] for index in range(number)]
            options: Any = {"pad_id": self.pad_id, "layout": self.layout}
            made = rollout_inputs(batch, rows, for_critic=name == "critic", **options)
            inputs.append(made.to(self.device))
        found = []
        for recomputes in (True, False):
            set_recomputation(network, name, recomputes)
            few, more = (
                bytes_kept(partial(self.forward, name, own), self.device) for own in inputs
            )
            per_token = (more - few) / (inputs[1].input_ids.numel() - inputs[0].input_ids.numel())
            found += [max(few - per_token * inputs[0].input_ids.numel(), 0.0), per_token]
        fixed_recomputing, per_token_recomputing, fixed, per_token = found
        config: Any = backbone_of(first_of(network)).config.get_text_config(decoder=True)
        layer = per_token / config.num_hidden_layers
        return KeptBytes(fixed, per_token, fixed_recomputing, per_token_recomputing, layer)

    def forward(self, name: str, inputs: TokenInputs) -> Tensor:
        network = first_of(self.networks[name])
        if isinstance(network, Actor):
            logprobs: Tensor = network(inputs, temperature=1.0).logprobs
            return logprobs
        values: Tensor = network(inputs).values
        return values


def first_of(network: Actor | Critic) -> Actor | Critic:
    """Of several critics the first: each has micro-batches of its own."""
    return network if isinstance(network, Actor) else members_of(network)[0]


def gradients(network: nn.Module) -> float:
    """Bytes of the gradients of a network's update, which are not there yet."""
    trained = (p for p in network.parameters() if p.requires_grad and p.grad is None)
    return float(sum(p.numel() * p.element_size() for p in trained))


def set_recomputation(network: Actor | Critic, name: str, recomputes: bool) -> None:
    """Let a network compute its layers again in the backward pass, or keep what they computed."""
    parts = [network] if isinstance(network, Actor) else members_of(network)
    for part in parts:
        if recomputes:
            enable_gradient_checkpointing(part, name)
        else:
            backbone_of(part).gradient_checkpointing_disable()


def bytes_kept(forward: Callable[[], Tensor], device: torch.device) -> float:
    """What a forward pass leaves in memory for its backward pass, and its output."""
    before = allocated_bytes(device)
    output = forward()
    after = allocated_bytes(device)
    del output
    return after - before


def allocated_bytes(device: torch.device) -> float:
    return float(torch.cuda.memory_allocated(device))


def describe_choice(choice: Microbatching, kept: Mapping[str, KeptBytes], free: float) -> str:
    """One line: what was chosen, and by which figures."""
    parts = []
    for name, own in kept.items():
        recomputes = name in choice.recomputing
        per_token = own.per_token_recomputing if recomputes else own.per_token
        how = "computes its layers again" if recomputes else "keeps its activations"
        parts.append(f"the {name} {how}, {per_token / MIB:.2f} MiB a token")
    return (
        f"micro-batches of {choice.tokens:,} tokens: {'; '.join(parts)}; "
        f"{free / GIB:.1f} GiB were free (training.microbatch_tokens, gradient_checkpointing)"
    )
