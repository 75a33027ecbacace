"""What is pushed to an engine: each weight in the engine's dtype, one tensor at a time."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.tiny_model import tiny_model
from vapo.rollouts.engines.sampler import CastWeights, EngineSampler
from vapo.rollouts.engines.selection import float32_name_parts

THIRD = torch.tensor(1 / 3)


class Receiver:
    """An engine that notes what it gets, and keeps none of it."""

    has_weights = True

    def __init__(self) -> None:
        self.pushed: dict[str, tuple[torch.dtype, float]] = {}
        self.most_alive = 0
        self._alive: list[weakref.ref[Tensor]] = []

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.pushed[name] = tensor.dtype, float(tensor.flatten()[0])
            self._alive.append(weakref.ref(tensor))
            self.most_alive = max(self.most_alive, sum(r() is not None for r in self._alive))


def pushed(weights: dict[str, Tensor], *in_float32: str) -> tuple[Receiver, tuple[int, ...]]:
    engine, sums = Receiver(), list[tuple[int, ...]]()

    def check(engine: Any, found: tuple[int, ...]) -> float:
        sums.append(found)
        return 0.0

    made: Any = EngineSampler
    cast = CastWeights(torch.bfloat16, in_float32)
    sampler = made(engine, end_ids=frozenset(), weights=dict, convert=cast, check=check)
    sampler.sync(iter(weights.items()))
    return engine, sums[0]


def test_half_the_bytes_are_pushed_and_only_one_cast_tensor_lives() -> None:
    weights = {f"layers.{n}.weight": THIRD.repeat(4) for n in range(6)}
    engine, _ = pushed(weights)
    third = float(THIRD.bfloat16())
    assert engine.pushed == dict.fromkeys(weights, (torch.bfloat16, third))
    assert engine.most_alive <= 2, "that which is pushed, and the one before it"


def test_what_the_architecture_keeps_in_float32_is_pushed_as_it_is() -> None:
    weights = {"mixer.A_log": THIRD, "mixer.weight": THIRD, "steps": torch.tensor(3)}
    engine, _ = pushed(weights, "A_log")
    assert engine.pushed == {
        "mixer.A_log": (torch.float32, float(THIRD)),
        "mixer.weight": (torch.bfloat16, float(THIRD.bfloat16())),
        "steps": (torch.int64, 3.0),
    }
    model = tiny_model()
    assert float32_name_parts(model) == frozenset()
    model._keep_in_fp32_modules = ["A_log"]
    model._keep_in_fp32_modules_strict = ["gate.bias"]
    assert float32_name_parts(model) == {"A_log", "gate.bias"}


def test_sums_are_of_the_bits_that_are_pushed() -> None:
    """1.0 is 0x3F80 in bfloat16. A step below its rounding leaves the sum as it was."""
    _, ones = pushed({"w": torch.ones(3)})
    assert ones == (3 * 0x3F80,)
    _, same = pushed({"w": torch.ones(3) + 1e-4})
    assert same == ones
    _, float32 = pushed({"w": torch.ones(3) + 1e-4}, "w")
    assert float32 != (3 * 0x3F800000,)
