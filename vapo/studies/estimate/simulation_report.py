"""Write the text of `vapo estimate --simulate_ranks`.

It compares the simulated memory with the estimate of `estimate_memory`, which is called the
arithmetic, and gives a step's work and time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vapo.studies.estimate.memory import MemoryEstimate
from vapo.studies.estimate.simulated_step import Simulation
from vapo.studies.estimate.step_counts import KINDS, StepWork
from vapo.system.host_memory import GIB
from vapo.types import Phase

# row of the table -> the parts of the estimate in it; further parts belong to sampling
_ROWS = {
    "weights": ("actor weights", "critic weights", "reference weights"),
    "gathered weights": ("gathered weights",),
    "gradients": ("gradients", "gradients in reduction"),
    "optimizer states": ("optimizer states",),
    "activations, temporaries": ("activations", "logits, temporaries"),
}
_POLICY = Phase.POLICY_OPTIMIZATION.value


@dataclass(frozen=True)
class Rates:
    """Rates of each GPU: the TFLOP/s that it sustains, and the GB/s between it and the others."""

    sustained_tflops: float
    interconnect_gb_s: float


@dataclass(frozen=True)
class StepSeconds:
    """The seconds of one optimizer step of all networks, for computing and for sending.

    Both may overlap.
    """

    computing: float
    sending: float

    @property
    def bound_by(self) -> str:
        return "computing" if self.computing >= self.sending else "sending"


def arithmetic_parts(estimate: MemoryEstimate, stage: str) -> dict[str, float]:
    """Return the estimated bytes of a stage for each row of the table, without those of
    sampling.
    """
    parts = estimate.stages[stage]
    return {row: sum(parts.get(name, 0.0) for name in names) for row, names in _ROWS.items()}


def stage_bytes(simulation: Simulation, estimate: MemoryEstimate) -> dict[str, tuple[float, float]]:
    """Return for each stage of a policy step its simulated bytes and its estimated bytes."""
    return {
        stage: (sum(parts.values()), sum(arithmetic_parts(estimate, stage).values()))
        for stage in estimate.stages
        if (parts := simulation.peaks.get((_POLICY, stage))) is not None
    }


def step_seconds(works: Mapping[str, StepWork], num_ranks: int, rates: Rates) -> StepSeconds:
    """Return the seconds of one optimizer step of these networks, one after the other.

    Collectives are rings. In a gather or a scatter a rank sends (N - 1) / N of the whole tensor, in
    an all-reduce twice as much, and in any other collective the whole tensor.

    Args:
        works: network -> the work of its optimizer step.
    """
    share = (num_ranks - 1) / num_ranks
    times = {"all-gather": share, "reduce-scatter": share, "all-reduce": 2 * share}
    num_bytes = sum(times.get(k, 1.0) * b for work in works.values() for k, b in work.bytes.items())
    flops = sum(work.flops for work in works.values())
    return StepSeconds(
        flops / (rates.sustained_tflops * 1e12), num_bytes / (rates.interconnect_gb_s * 1e9)
    )


def policy_works(simulation: Simulation) -> dict[str, StepWork]:
    """Return network -> the work of its optimizer step during policy optimization."""
    works = {name: work for (phase, name), work in simulation.work.items() if phase == _POLICY}
    return dict(sorted(works.items()))


def simulation_lines(simulation: Simulation, estimate: MemoryEstimate, rates: Rates | None) -> str:
    """Return a text with tables of memory and work, a step's time, and both peaks with their ratio.

    Args:
        rates: the GPU's rates; None leaves the time out.
    """
    ranks = simulation.num_ranks
    stages = stage_bytes(simulation, estimate)
    lines = [
        "",
        f"one training step on fake tensors, as one of {ranks} ranks (not measured on a GPU); "
        "GiB in each process, simulated | arithmetic:",
        f"{'':<24}  " + "  ".join(f"{stage:>16}" for stage in stages),
    ]
    for row in _ROWS:
        cells = [
            (simulation.peaks[_POLICY, stage][row], arithmetic_parts(estimate, stage)[row])
            for stage in stages
        ]
        lines.append(f"{row:<24}  " + "  ".join(_pair(*cell) for cell in cells))
    lines.append(f"{'total':<24}  " + "  ".join(_pair(*total) for total in stages.values()))
    pretraining = [
        sum(parts.values()) for (phase, _), parts in simulation.peaks.items() if phase != _POLICY
    ]
    if pretraining:
        lines.append(f"value pretraining: at most {max(pretraining) / GIB:.1f} GiB")
    works = policy_works(simulation)
    for name, work in works.items():
        kinds = ", ".join(
            f"{work.numbers[kind]} x {kind} {work.bytes[kind] / GIB:.1f} GiB"
            for kind in work.numbers
        )
        lines.append(
            f"{name}, one optimizer step of {simulation.microbatches[name]} micro-batches: "
            f"{work.flops / 1e12:.1f} TFLOP; {kinds or 'no collectives'}"
        )
    unknown = sorted({kind for work in works.values() for kind in work.numbers} - KINDS)
    if unknown:
        lines.append(
            f"not known here: {', '.join(unknown)}; counted by the largest of what each takes and "
            "returns, which need not be what it sends"
        )
    lines.append(f"a checkpoint: {simulation.checkpoint / GIB:.1f} GiB from this rank")
    if rates is not None:
        lines.append(_time_line(step_seconds(works, ranks, rates), rates))
    peak, arithmetic = (max(sizes) for sizes in zip(*stages.values(), strict=True))
    return "\n".join(
        [
            *lines,
            f"simulated peak {peak / GIB:.1f} GiB, arithmetic {arithmetic / GIB:.1f} GiB, "
            f"ratio {arithmetic / peak:.2f}",
        ]
    )


def _pair(simulated: float, arithmetic: float) -> str:
    return f"{simulated / GIB:>7.2f}|{arithmetic / GIB:>8.2f}"


def _time_line(step: StepSeconds, rates: Rates) -> str:
    shortest, longest = max(step.computing, step.sending), step.computing + step.sending
    return (
        f"a step at {rates.sustained_tflops:g} TFLOP/s and {rates.interconnect_gb_s:g} GB/s: "
        f"{shortest:.1f} to {longest:.1f} s, as computing ({step.computing:.1f} s) and sending "
        f"({step.sending:.1f} s) overlap; bound by {step.bound_by}"
    )
