"""The arithmetic and the tables of `training_steps.py`: it computes nothing on a device."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
SHORTEST = 32  # drawn tokens of a response


@dataclass(frozen=True)
class Operation:
    """One call of the profiler's trace: when it began, and what it took without its parts."""

    name: str
    start_us: float
    end_us: float
    host_us: float = 0.0
    device_us: float = 0.0


@dataclass
class StageOperations:
    """The calls that began within a stage."""

    host_us: dict[str, float] = field(default_factory=dict)
    device_us: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def add(self, operation: Operation) -> None:
        name = operation.name
        self.host_us[name] = self.host_us.get(name, 0.0) + operation.host_us
        self.device_us[name] = self.device_us.get(name, 0.0) + operation.device_us
        self.calls[name] = self.calls.get(name, 0) + 1

    def count(self, names: Sequence[str]) -> int:
        """How often any of these was called, whatever follows in the name."""
        return sum(count for name, count in self.calls.items() if name.startswith(tuple(names)))

    def largest(self, microseconds: Mapping[str, float], number: int) -> list[dict[str, Any]]:
        """The operations with most of these microseconds: milliseconds, share and calls."""
        total = sum(microseconds.values())
        names = sorted(microseconds, key=lambda name: -microseconds[name])[:number]
        return [
            {
                "operation": name,
                "ms": microseconds[name] / 1000,
                "share": microseconds[name] / total,
                "calls": self.calls[name],
            }
            for name in names
            if microseconds[name] > 0
        ]

    def record(self, number: int) -> dict[str, Any]:
        """The figures for JSON. On a CPU there is no device time."""
        return {
            "host_ms": sum(self.host_us.values()) / 1000,
            "device_ms": sum(self.device_us.values()) / 1000,
            "torch_calls": self.count(("aten::",)),
            "kernel_launches": self.count(LAUNCHES),
            "waits_for_the_device": self.count(WAITS),
            "host_reads": self.count(("aten::_local_scalar_dense", "aten::nonzero")),
            "by_device": self.largest(self.device_us, number),
            "by_host": self.largest(self.host_us, number),
        }


def by_stage(
    operations: Iterable[Operation], stages: Mapping[str, str]
) -> dict[str, StageOperations]:
    """Assign every operation to the innermost stage within which it began.

    A kernel counts where its operation was called, whenever it ran. What began in no stage is under
    `between`.

    Args:
        stages: the name of a range in the trace -> the stage; ranges may lie within each other.
    """
    all_operations = list(operations)
    ranges = [o for o in all_operations if o.name in stages]
    ranges.sort(key=lambda o: o.end_us - o.start_us)  # the innermost first
    by_name = {stage: StageOperations() for stage in [*stages.values(), "between"]}
    for operation in all_operations:
        if operation.name in stages:
            continue
        around = next((r for r in ranges if r.start_us <= operation.start_us < r.end_us), None)
        by_name["between" if around is None else stages[around.name]].add(operation)
    return by_name


def stage_figures(
    seconds: float, tokens: float, flops: float, peak_tflops: float | None
) -> dict[str, float | None]:
    """Seconds, tokens/s, TFLOP/s and MFU of a stage; MFU is None where no peak is known.

    >>> stage_figures(2.0, 1000, 8e12, 100.0)
    {'seconds': 2.0, 'tokens_per_s': 500.0, 'tflops_per_s': 4.0, 'mfu': 0.04}
    """
    tflops = flops / seconds / 1e12 if seconds else 0.0
    return {
        "seconds": seconds,
        "tokens_per_s": tokens / seconds if seconds else 0.0,
        "tflops_per_s": tflops,
        "mfu": None if peak_tflops is None else tflops / peak_tflops,
    }


def response_lengths(kind: str, rows: int, longest: int, *, seed: int = 0) -> list[int]:
    """The responses' lengths: all `longest` if `equal`, else drawn evenly from 32 to `longest`."""
    if kind == "equal":
        return [longest] * rows
    draw = random.Random(seed)
    return [draw.randint(min(SHORTEST, longest), longest) for _ in range(rows)]


def stage_table(stages: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each stage that was timed."""
    columns = ("stage", "seconds", "tokens/s", "TFLOP/s", "MFU")
    rows = [
        [
            name,
            f"{figures['seconds']:.3f}",
            f"{figures['tokens_per_s']:,.0f}" if figures["tokens_per_s"] else "",
            f"{figures['tflops_per_s']:.1f}" if figures["tflops_per_s"] else "",
            f"{figures['mfu']:.1%}" if figures["mfu"] else "",
        ]
        for name, figures in stages.items()
    ]
    return table(columns, rows)


def operation_tables(operations: Mapping[str, Mapping[str, Any]]) -> str:
    """What was called in each stage, and its operations with most device or host time."""
    columns: tuple[str, ...] = (
        *("stage", "host ms", "device ms"),
        *("torch calls", "launches", "waits", "host reads"),
    )
    keys = ("torch_calls", "kernel_launches", "waits_for_the_device", "host_reads")
    counts = [
        [
            name,
            f"{stage['host_ms']:.1f}",
            f"{stage['device_ms']:.1f}",
            *(f"{stage[k]:,}" for k in keys),
        ]
        for name, stage in operations.items()
    ]
    parts = [table(columns, counts)]
    for key, title in (("by_device", "device"), ("by_host", "host")):
        rows = [
            [name, f"`{o['operation']}`", f"{o['ms']:.1f}", f"{o['share']:.0%}", f"{o['calls']:,}"]
            for name, stage in operations.items()
            for o in stage[key]
        ]
        if rows:
            columns = ("stage", "operation", f"{title} ms", "share of the stage", "calls")
            parts.append(table(columns, rows))
    return "\n\n".join(parts)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def median(values: Sequence[Mapping[str, float]], key: Callable[[str], bool]) -> dict[str, float]:
    """The median over iterations of each figure whose name is wanted; one that is not there is 0.

    >>> median([{"a": 1.0}, {"a": 5.0}, {"a": 2.0, "b": 7.0}], lambda name: True)
    {'a': 2.0, 'b': 0.0}
    """
    names = [n for n in dict.fromkeys(name for iteration in values for name in iteration) if key(n)]
    return {
        n: sorted(iteration.get(n, 0.0) for iteration in values)[len(values) // 2] for n in names
    }
