"""Measures the seconds of an iteration's stages, and its tokens and operations per second."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class StageTimes:
    """The seconds of one or several iterations, and the tokens and operations done in them.

    `stages` follow one another. `updates`, one for each network, are parts of the stage `training`.
    What is left of the wall clock is idle time: metrics, minibatches, checkpoints. Tokens are
    counted over all ranks. Floating-point operations are those of the updates on one rank.
    """

    stages: Mapping[str, float] = field(default_factory=dict)
    updates: Mapping[str, float] = field(default_factory=dict)
    total_s: float = 0.0
    num_response_tokens: float = 0.0
    num_tokens: float = 0.0
    flops_per_rank: float = 0.0
    peak_tflops: float | None = None
    idle_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.idle_s = max(0.0, self.total_s - sum(self.stages.values()))

    def add(self, other: StageTimes) -> None:
        """Add the times and work of another iteration."""
        self.stages = _sums(self.stages, other.stages)
        self.updates = _sums(self.updates, other.updates)
        self.idle_s += other.idle_s
        self.total_s += other.total_s
        self.num_response_tokens += other.num_response_tokens
        self.num_tokens += other.num_tokens
        self.flops_per_rank += other.flops_per_rank
        self.peak_tflops = other.peak_tflops

    def metrics(self) -> dict[str, float]:
        """Return the metrics: seconds, shares of the total, tokens and operations per second."""
        seconds = {**self.stages, **self.updates, "idle": self.idle_s}
        metrics = {f"time/{name}_s": value for name, value in seconds.items()}
        metrics["time/iteration_s"] = self.total_s
        for stage in ("rollout", "training"):
            if self.stages.get(stage):
                rate = self.num_response_tokens / self.stages[stage]
                metrics[f"throughput/{stage}_tokens_per_s"] = rate
        if self.total_s > 0:
            metrics |= {f"time/{name}_share": s / self.total_s for name, s in seconds.items()}
            metrics["throughput/tokens_per_s"] = self.num_tokens / self.total_s
        if (tflops_per_s := self._tflops_per_s()) is not None:
            metrics["throughput/training_tflops_per_s"] = tflops_per_s
            if self.peak_tflops is not None:
                metrics["throughput/training_mfu"] = tflops_per_s / self.peak_tflops
        return metrics

    def describe(self) -> str:
        """Return one line: shares of the time, tokens per second, and MFU if the peak is known.

        The updates are in brackets after `training`, because they are parts of it.
        """
        if self.total_s <= 0:
            return "no iteration"
        shares = self._shares({**self.stages, "idle": self.idle_s})
        if self.updates and "training" in shares:
            shares["training"] += f" ({', '.join(self._shares(self.updates).values())})"
        parts = [", ".join(shares.values()), f"{self.num_tokens / self.total_s:,.0f} tokens/s"]
        if (tflops_per_s := self._tflops_per_s()) is not None and self.peak_tflops is not None:
            parts.append(f"MFU of the updates {tflops_per_s / self.peak_tflops:.1%}")
        return "; ".join(parts)

    def _tflops_per_s(self) -> float | None:
        updates_s = sum(self.updates.values())
        return self.flops_per_rank / updates_s / 1e12 if updates_s else None

    def _shares(self, seconds: Mapping[str, float]) -> dict[str, str]:
        largest_first = sorted(seconds.items(), key=lambda item: -item[1])
        return {name: f"{name} {s / self.total_s:.0%}" for name, s in largest_first}


def _sums(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {name: a.get(name, 0.0) + b.get(name, 0.0) for name in {**a, **b}}


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds that the block takes to `seconds[name]`.

    GPU work that the block starts but does not wait for is not measured. So the block must end with
    a number read from the GPU, such as the gradient's norm.
    """
    start = time.monotonic()
    with torch.profiler.record_function(name):
        yield
    seconds[name] = seconds.get(name, 0.0) + time.monotonic() - start
