"""What the benchmarks share: their options, the clock, alternating sides, and the report."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Claim:
    """One row of the table of all benchmarks: a target, and what was measured."""

    quantity: str
    against: str
    target: str
    measured: str
    met: bool

    def row(self) -> str:
        met = "yes" if self.met else "no"
        return f"| {self.quantity} | {self.against} | {self.target} | {self.measured} | {met} |"


CLAIM_COLUMNS = ("what", "against", "target", "measured", "met")


@dataclass(frozen=True)
class Report:
    """What one benchmark found: its own table, and its claims."""

    title: str
    setting: str
    columns: Sequence[str]
    rows: Sequence[str]
    claims: list[Claim] = field(default_factory=list)

    def text(self) -> str:
        parts = [self.setting, "\n".join([heading(self.columns), *self.rows])]
        if self.claims:
            rows = [claim.row() for claim in self.claims]
            parts.append("\n".join([heading(CLAIM_COLUMNS), *rows]))
        return "\n\n".join(parts)


def heading(columns: Sequence[str]) -> str:
    return f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|"


def arguments(doc: str | None, *, repeats: int = 5) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1, help="torch's, on each side")
    parser.add_argument("--repeats", type=int, default=repeats, help="the median of so many")
    parser.add_argument("--toy", action="store_true", help="sizes that only try the script")
    return parser


def start(options: argparse.Namespace) -> torch.device:
    torch.set_num_threads(options.threads)
    return torch.device(options.device)


def setting(options: argparse.Namespace, *more: str) -> str:
    """The machine, the versions and the clock, for the line above a table."""
    machine = f"{os.cpu_count()} CPU cores" if options.device == "cpu" else gpu_name()
    clock = "CPU seconds of the process" if counts_cpu(options.device) else "wall-clock seconds"
    return ", ".join(
        [
            f"torch {torch.__version__}, {platform.machine()}, {machine}",
            f"{options.threads} thread" + ("s" if options.threads > 1 else ""),
            f"{clock}, median of {options.repeats}, sides alternating",
            *more,
        ]
    )


def gpu_name() -> str:
    return torch.cuda.get_device_name()


def counts_cpu(device: str) -> bool:
    """On one thread of a CPU the process's own seconds: other processes do not count."""
    return device == "cpu" and torch.get_num_threads() == 1


def timed(call: Callable[[], object], device: torch.device) -> float:
    clock = time.process_time if counts_cpu(device.type) else time.perf_counter
    begin = clock()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - begin


def alternate(
    sides: Mapping[str, Callable[[], object]], *, repeats: int, device: torch.device
) -> dict[str, float]:
    """Median seconds of each side, in turns, so that a busy machine slows all of them.

    A first call of each warms up and does not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(repeats + 1):
        for name, call in sides.items():
            took = timed(call, device)
            if round_:
                seconds[name].append(took)
    return {name: statistics.median(values) for name, values in seconds.items()}
