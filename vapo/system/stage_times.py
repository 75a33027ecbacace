"""Where an iteration's time goes, and what it comes to in tokens and operations a second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class IterationTimes:
    """Seconds of an iteration.

    `stages` follow one another; `updates`, one for each network, lie inside the stage `training`.
    What is left of the wall clock is idle: metrics, minibatches, checkpoints.
    """

    stages: Mapping[str, float]
    updates: Mapping[str, float]
    iteration_s: float

    @property
    def idle_s(self) -> float:
        return max(0.0, self.iteration_s - sum(self.stages.values()))

    def seconds(self) -> dict[str, float]:
        return {**self.stages, **self.updates, "idle": self.idle_s}

    def metrics(self) -> dict[str, float]:
        """Seconds, and shares of the iteration."""
        seconds = self.seconds()
        metrics = {f"time/{name}_s": value for name, value in seconds.items()}
        metrics["time/iteration_s"] = self.iteration_s
        if self.iteration_s > 0:
            metrics |= {f"time/{k}_share": v / self.iteration_s for k, v in seconds.items()}
        return metrics


def num_tokens(metrics: Mapping[str, float]) -> float:
    """Prompt and response tokens of an iteration, over all ranks."""
    return metrics["rollout/num_prompt_tokens"] + metrics["rollout/num_tokens"]


def throughput_metrics(
    times: IterationTimes,
    metrics: Mapping[str, float],
    flops_per_rank: float,
    peak_tflops: float | None,
) -> dict[str, float]:
    """Tokens a second of the stages and the whole; operations a second of the updates."""
    throughput: dict[str, float] = {}
    for stage in ("rollout", "training"):
        if times.stages.get(stage):
            throughput[f"throughput/{stage}_tokens_per_s"] = (
                metrics["rollout/num_tokens"] / times.stages[stage]
            )
    if times.iteration_s > 0:
        throughput["throughput/tokens_per_s"] = num_tokens(metrics) / times.iteration_s
    if updates_s := sum(times.updates.values()):
        tflops_per_s = flops_per_rank / updates_s / 1e12
        throughput["throughput/training_tflops_per_s"] = tflops_per_s
        if peak_tflops is not None:
            throughput["throughput/training_mfu"] = tflops_per_s / peak_tflops
    return throughput


@dataclass
class RunProfile:
    """The same over a whole run."""

    stages: dict[str, float] = field(default_factory=dict)
    updates: dict[str, float] = field(default_factory=dict)
    total_s: float = 0.0
    tokens: float = 0.0
    flops_per_rank: float = 0.0
    peak_tflops: float | None = None

    def add(
        self, times: IterationTimes, tokens: float, flops_per_rank: float, peak: float | None
    ) -> None:
        _add(self.stages, {**times.stages, "idle": times.idle_s})
        _add(self.updates, times.updates)
        self.total_s += times.iteration_s
        self.tokens += tokens
        self.flops_per_rank += flops_per_rank
        self.peak_tflops = peak

    def describe(self) -> str:
        """One line: shares, largest first, tokens a second, MFU where the peak is known.

        The updates are in brackets after `training`, because they are parts of it.
        """
        if self.total_s <= 0:
            return "no iteration"
        shares = self._shares(self.stages)
        if self.updates and "training" in shares:
            shares["training"] += f" ({', '.join(self._shares(self.updates).values())})"
        parts = [", ".join(shares.values()), f"{self.tokens / self.total_s:,.0f} tokens/s"]
        updates_s = sum(self.updates.values())
        if updates_s and self.peak_tflops is not None:
            mfu = self.flops_per_rank / updates_s / 1e12 / self.peak_tflops
            parts.append(f"MFU of the updates {mfu:.1%}")
        return "; ".join(parts)

    def _shares(self, seconds: Mapping[str, float]) -> dict[str, str]:
        largest_first = sorted(seconds.items(), key=lambda item: -item[1])
        return {name: f"{name} {s / self.total_s:.0%}" for name, s in largest_first}


def _add(total: dict[str, float], seconds: Mapping[str, float]) -> None:
    for name, value in seconds.items():
        total[name] = total.get(name, 0.0) + value
