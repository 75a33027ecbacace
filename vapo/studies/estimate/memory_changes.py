"""Finds the changes to a config that let its training fit a GPU, the cheapest first.

docs/recipes.md ("When memory is short") has the same changes with what each of them costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vapo.config import FitConfig
from vapo.config.engines import VllmEngine, VllmServerEngine
from vapo.config.layers import read_text
from vapo.config.loading import compose_layers
from vapo.config.options import describe
from vapo.config.overrides import override_of, read_overrides
from vapo.config.written import flatten, to_yaml
from vapo.errors import UserError
from vapo.system.host_memory import GIB

PROBE: dict[str, Any] = {
    "critic.kind": "probe",
    "critic.probe.lr": 1e-3,
    "critic.sampled_logprobs.lr": 0.03,
}
"""A critic without a network. The learning rates are those that language models learned with
(docs/critics_without_a_network.md, conf/worked_sums)."""
_LORA_RANK = 32
_LORA_RATE = 10  # adapters learn at ten times the rate of whole weights


@dataclass(frozen=True)
class MemoryChange:
    """Keys that lower the memory of a GPU, and what they cost in words.

    With `is_of_adapters` they are offered only where the actor trains adapters.
    """

    values: dict[str, Any]
    cost: str
    is_of_adapters: bool = False

    @property
    def overrides(self) -> list[str]:
        return [override_of(key, value) for key, value in self.values.items()]


@dataclass(frozen=True)
class FittingChanges:
    """Changes that together let a config fit, and the peak in bytes after each of them."""

    changes: list[MemoryChange]
    peaks: list[float]


def adapters(config: FitConfig) -> MemoryChange:
    """Return the change to low-rank adapters, with a learning rate that suits them."""
    rate = float(f"{_LORA_RATE * config.actor.optimizer.lr:g}")
    values = {"actor.lora.rank": _LORA_RANK, "actor.optimizer.lr": rate}
    return MemoryChange(values, "the policy moves in fewer directions")


def _kinds_of_change(config: FitConfig) -> list[list[MemoryChange]]:
    """Return the changes that a config may make, by kind; a kind's mildest change is first."""
    pairs: list[tuple[str, list[dict[str, Any]]]] = [
        (
            "a forward pass more in each update",
            [{"actor.gradient_checkpointing": True, "critic.gradient_checkpointing": True}],
        ),
        ("more, smaller micro-batches", _smaller_microbatches(config)),
        ("slower sampling", _smaller_engines(config)),
    ]
    kinds = [[MemoryChange(values, cost) for values in options] for cost, options in pairs]
    if config.actor.lora is None:
        kinds.append([adapters(config)])
    if config.algorithm.has_critic and not config.critic.reads_actor:
        kinds.append([_probe(config)])
    length = config.rollouts.max_response_tokens
    kinds += [
        [MemoryChange({"actor.dtype": "bfloat16"}, "the frozen weights are rounded", True)],
        [MemoryChange({"rollouts.max_response_tokens": length // 2}, "truncated responses")],
        [
            MemoryChange(
                {
                    "trainer.strategy": "fsdp",
                    "trainer.cpu_offload": True,
                    "trainer.reduce_every_microbatch": True,
                },
                "slower: weights are copied from the host, where the optimizer runs",
            )
        ],
    ]
    return kinds


def _smaller_microbatches(config: FitConfig) -> list[dict[str, Any]]:
    is_larger = config.training.first_microbatch_tokens > 2048
    return [{"training.microbatch_tokens": 2048}] if is_larger else []


def _more_gpus(config: FitConfig) -> list[MemoryChange]:
    """Return the change to two, four and eight times as many GPUs, the fewest first."""
    return [
        MemoryChange(
            {"trainer.strategy": "fsdp", "trainer.devices": n * config.trainer.devices}, "more GPUs"
        )
        for n in (2, 4, 8)
    ]


def _probe(config: FitConfig) -> MemoryChange:
    """Return the change to a critic without a network, and without the options of a network."""
    critic = vars(config.critic)
    unread = {f"critic.{name}": None for name in ("layers", "lora") if critic.get(name) is not None}
    return MemoryChange(PROBE | unread, "the critic knows what the actor's states say, no more")


def _smaller_engines(config: FitConfig) -> list[dict[str, Any]]:
    """Return keys that make the sampling engine take less memory; none for a server elsewhere."""
    rollouts = config.rollouts
    if isinstance(rollouts, VllmServerEngine):
        return []
    if isinstance(rollouts, VllmEngine):
        cache = rollouts.vllm.kv_cache_memory_bytes or 0
        key = "rollouts.vllm.kv_cache_memory_bytes"
        return [{key: cache // n} for n in (2, 4) if cache >= n]
    key, current = "rollouts.max_concurrent_sequences", rollouts.max_concurrent_sequences
    return [{key: n} for n in (64, 16) if n < current]


def changes_that_fit(
    config: FitConfig, most_bytes: float, peak_of: Callable[[FitConfig], float]
) -> list[FittingChanges]:
    """Find changes after which the peak is at most `most_bytes`.

    Returns: each single change that is enough on as many GPUs, if there is any; else the fewest of
        them that are enough together, as far as trying one after the other finds them; and last,
        more GPUs. The list is empty if nothing is enough.

    Args:
        peak_of: estimates the most bytes of a GPU that a config needs.
    """
    current = flatten(config)
    kinds = [
        [c for c in kind if any(current.get(k) != v for k, v in c.values.items())]
        for kind in _kinds_of_change(config)
    ]

    def peak_after(changes: Sequence[MemoryChange]) -> float:
        overrides = [text for change in changes for text in change.overrides]
        try:
            changed = _with_overrides(config, overrides)
            if changed.actor.lora is None and any(change.is_of_adapters for change in changes):
                return float("inf")
            return peak_of(changed)
        except UserError:  # the config does not allow them
            return float("inf")

    def mildest_that_fits(kind: list[MemoryChange]) -> Iterator[FittingChanges]:
        for change in kind:
            if (peak := peak_after([change])) <= most_bytes:
                yield FittingChanges([change], [peak])
                return

    on_as_many_gpus = [way for kind in kinds for way in mildest_that_fits(kind)]
    if not on_as_many_gpus:
        on_as_many_gpus = _several_that_fit(kinds, most_bytes, peak_after)
    return [*on_as_many_gpus, *mildest_that_fits(_more_gpus(config))]


def _with_overrides(config: FitConfig, overrides: list[str]) -> FitConfig:
    layers = [
        read_text(to_yaml(config), "the config"),
        read_overrides(overrides, describe(FitConfig)),
    ]
    return compose_layers(FitConfig, layers).config


def _several_that_fit(
    kinds: list[list[MemoryChange]],
    most_bytes: float,
    peak_after: Callable[[Sequence[MemoryChange]], float],
) -> list[FittingChanges]:
    """Take one kind of change after the other until they fit, then leave out what is not needed."""
    choices: list[tuple[list[MemoryChange], MemoryChange]] = []

    def chosen(without: int, instead: MemoryChange | None) -> list[MemoryChange]:
        """The changes so far, with another one in one place, or with none there."""
        changes = [change for _, change in choices]
        changes[without : without + 1] = [] if instead is None else [instead]
        return changes

    peak = float("inf")
    for kind in kinds:
        for change in kind:
            now = peak_after([*(c for _, c in choices), change])
            if now == float("inf"):
                continue
            if choices and choices[-1][0] is kind:
                choices.pop()
            choices.append((kind, change))
            if (peak := now) <= most_bytes:
                break
        if peak <= most_bytes:
            break
    else:
        return []
    for place in reversed(range(len(choices))):
        kind, change = choices[place]
        for milder in (None, *kind[: kind.index(change)]):
            if peak_after(chosen(place, milder)) <= most_bytes:
                choices[place : place + 1] = [] if milder is None else [(kind, milder)]
                break
    changes = [change for _, change in choices]
    peaks = [peak_after(changes[: i + 1]) for i in range(len(changes))]
    return [FittingChanges(changes, peaks)]


def changes_text(fitting: list[FittingChanges]) -> str:
    """What lets a config fit, as a table with the peak of each change and what it costs."""
    if not fitting:
        return (
            "none of the changes of docs/recipes.md (When memory is short) lets it fit, nor eight "
            "times as many GPUs: take a smaller model, or a GPU with more memory"
        )
    alone = [way for way in fitting if len(way.changes) == 1]
    together = [way for way in fitting if len(way.changes) > 1]
    introductions = (
        (together, "these changes together let it fit (the peak is that after each of them):"),
        (
            alone,
            f"{'each of these changes' if len(alone) > 1 else 'this change'} alone lets it fit:",
        ),
    )
    return "\n".join(
        f"{introduction}\n{_table(ways)}" for ways, introduction in introductions if ways
    )


def _table(ways: list[FittingChanges]) -> str:
    rows = [
        (" ".join(change.overrides), f"{peak / GIB:.1f} GiB", change.cost)
        for way in ways
        for change, peak in zip(way.changes, way.peaks, strict=True)
    ]
    width = max(len(keys) for keys, _, _ in rows)
    return "\n".join(f"  {keys:<{width}}  {peak:>9}  {cost}".rstrip() for keys, peak, cost in rows)


def changes_phrase(fitting: list[FittingChanges]) -> str:
    """What lets a config fit, as a part of a sentence."""
    if not fitting:
        return "docs/recipes.md (When memory is short) says what else can be changed"
    ways = [
        f"{' '.join(text for change in way.changes for text in change.overrides)} "
        f"({way.peaks[-1] / GIB:.1f} GiB)"
        for way in fitting
    ]
    return f"what would fit is {' or '.join(ways)}"
