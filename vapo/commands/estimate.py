"""`vapo estimate`: the memory that a config needs on each GPU, from config.json files alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedConfig

from vapo.commands.estimate_checks import (
    model_config_folder,
    only_config_needed,
    simulated_config,
)
from vapo.config import FitConfig, resolve
from vapo.config.continuation_rules import MostContinuations, most_continuations
from vapo.config.engines import VllmEngine, VllmServerEngine
from vapo.errors import DoesNotFit, UserError
from vapo.errors.shown_text import say, shown_size
from vapo.networks.critic_folders import critic_path
from vapo.networks.model_configs import as_critic, check_supported, read_model_config
from vapo.networks.precision import expected_precision
from vapo.runs.checkpoint_saving import num_kept
from vapo.studies.estimate.memory import MemoryEstimate, estimate_memory
from vapo.studies.estimate.memory_changes import changes_text, changes_that_fit
from vapo.studies.estimate.run_hours import Hardware, PhaseHours, run_hours
from vapo.system.host_memory import GIB
from vapo.system.libraries import quiet_libraries

# what CUDA, its libraries and NCCL take before the first tensor; an assumption, not measured
_CONTEXT_GIB = 1.5


def run(
    config: FitConfig,
    *,
    gpu_memory_gib: float | None = None,
    model_config: Path | None = None,
    sustained_tflops: float | None = None,
    sampled_tokens_per_s: float | None = None,
    mean_response_tokens: float | None = None,
    mean_prompt_tokens: float | None = None,
    simulate_ranks: int | None = None,
    interconnect_gb_s: float | None = None,
) -> MemoryEstimate:
    """Print the memory of a GPU that each stage of a config's training needs.

    With `gpu_memory_gib`, also print whether it fits, and the smallest changes that let it fit
    where it does not. With `sustained_tflops`,
    `sampled_tokens_per_s` and `mean_response_tokens`, print the hours of a run. With
    `simulate_ranks`, run a training step on fake tensors and print its memory, and its time if
    `sustained_tflops` and `interconnect_gb_s` are given.

    Raises: DoesNotFit: the peak is above `gpu_memory_gib`. All is printed before.
    """
    rates = [sustained_tflops, sampled_tokens_per_s, mean_response_tokens]
    config = simulated_config(config, simulate_ranks, sustained_tflops, interconnect_gb_s)
    if simulate_ranks is not None and not any((*rates[1:], mean_prompt_tokens)):
        rates = []  # the rate is for the step alone
    hardware = _hardware(rates, mean_prompt_tokens, config)
    quiet_libraries()
    path = None if model_config is None else model_config_folder(model_config)
    given_config = config
    config, estimate, actor, critic = estimate_config(config, path)
    say(stage_table(estimate))
    if critic is not None and config.critic.prompt.kind == "privileged":
        say(_own_prompts_line("the critic's own prompts (critic.prompt.template)"))
    if config.algorithm.reads_answers:
        say(_own_prompts_line("the prompts with the answer (algorithm.oppo.template)"))
    if (continued := most_continuations(config)) is not None:
        say(continuations_line(config, continued))
    say(disk_line(config, estimate))
    does_not_fit = gpu_memory_gib is not None and missing_bytes(estimate, gpu_memory_gib) > 0
    if gpu_memory_gib is not None:
        say(memory_verdict(estimate, gpu_memory_gib))
        if does_not_fit:
            say(_changes_lines(given_config, path, gpu_memory_gib))
    if hardware is not None:
        shares = estimate.shares_prompts
        phases = run_hours(config, hardware, actor=actor, critic=critic, shares_prompts=shares)
        say(hours_lines(phases, hardware, config))
    if simulate_ranks is not None:
        _say_simulation(
            config,
            estimate,
            path,
            sustained_tflops,
            interconnect_gb_s,
        )
    if does_not_fit:
        raise DoesNotFit
    return estimate


def _changes_lines(config: FitConfig, model: str | None, gpu_memory_gib: float) -> str:
    """Say which changes let the config fit. `model` replaces the models of both networks."""
    say("looking for the smallest changes that let it fit ...")
    most_bytes = (gpu_memory_gib - _CONTEXT_GIB) * GIB
    return changes_text(changes_that_fit(config, most_bytes, partial(peak_bytes, path=model)))


def peak_bytes(config: FitConfig, path: str | None = None) -> float:
    """Return the bytes that a config needs at its peak, and print nothing.

    `path` is a folder with a config.json, which replaces the models of both networks.
    """
    return estimate_config(config, path=path, tell=lambda line: None)[1].peak


def estimate_config(
    config: FitConfig, path: str | None = None, *, tell: Callable[[str], None] = say
) -> tuple[FitConfig, MemoryEstimate, PreTrainedConfig, PreTrainedConfig | None]:
    """Estimate the memory that training with a config needs.

    Returns: the config with its precision settled, the estimate, and the model configs of actor and
        critic (None without a critic).

    Args:
        path: the model of both networks, instead of the config's own models.
        tell: gets a line on which precision `auto` became.
    """
    actor = _read(path or config.actor.path)
    check_supported(path or config.actor.path, actor)
    if config.trainer.precision == "auto":
        expected = expected_precision(config.trainer, actor.get_text_config().hidden_size)
        config = replace(config, trainer=replace(config.trainer, precision=expected.name))
        tell(expected.line())
    critic = None
    if config.algorithm.has_critic:
        critic = _read(folder := path or critic_path(config))
        critic = as_critic(critic, folder, config.critic)
    return config, estimate_memory(config, actor=actor, critic=critic), actor, critic


def _own_prompts_line(prompts: str) -> str:
    return f"{prompts} are counted as long as data.max_prompt_tokens"


def _say_simulation(
    config: FitConfig,
    estimate: MemoryEstimate,
    model: str | None,
    sustained_tflops: float | None,
    interconnect_gb_s: float | None,
) -> None:
    """Simulate a training step and print its memory and time.

    `model` replaces the models of both networks.
    """
    from vapo.studies.estimate.simulated_step import simulate
    from vapo.studies.estimate.simulation_report import Rates, simulation_lines

    if model is not None:
        actor, critic = replace(config.actor, path=model), replace(config.critic, init="policy")
        config = replace(config, actor=actor, critic=critic)
    rates = None
    if sustained_tflops is not None and interconnect_gb_s is not None:
        rates = Rates(sustained_tflops, interconnect_gb_s)
    say(f"simulating a training step as one of {config.trainer.num_ranks} ranks ...")
    say(simulation_lines(simulate(config), estimate, rates))


def _hardware(
    rates: list[float | None], mean_prompt_tokens: float | None, config: FitConfig
) -> Hardware | None:
    """Return the rates and means for computing a run's hours; None if none of them is given.

    Raises: UserError: a rate is missing, a number is not finite or not above 0, or a mean is above
        its maximum.
    """
    figures = [figure for figure in (*rates, mean_prompt_tokens) if figure is not None]
    if not figures:
        return None
    if None in rates or not all(0 < figure < math.inf for figure in figures):
        raise UserError(
            "the hours need --sustained_tflops, --sampled_tokens_per_s and "
            "--mean_response_tokens, each a finite number above 0, as --mean_prompt_tokens if it "
            "is given"
        )
    tflops, rate, length = figures[:3]
    means = (
        ("--mean_response_tokens", length, "rollouts", config.rollouts.max_response_tokens),
        ("--mean_prompt_tokens", mean_prompt_tokens, "data", config.data.max_prompt_tokens),
    )
    for name, mean, block, maximum in means:
        if mean is not None and mean > maximum:
            key = f"{block}.max_{name.removeprefix('--mean_')}"
            raise UserError(f"{name} {mean:g} is above {key}, which is {maximum}: give a mean")
    return Hardware(tflops, rate, length, mean_prompt_tokens)


def hours_lines(phases: dict[str, PhaseHours], hardware: Hardware, config: FitConfig) -> str:
    """Return a text with the hours of each phase and of the run, and what they assume."""
    left_out = "evaluation and verdicts"
    if config.algorithm.dynamic_sampling_attempts > 1:
        left_out = (
            "evaluation, verdicts, and what algorithm.dynamic_sampling_attempts samples beyond "
            "the first attempt"
        )
    lines = [
        f"hours at {hardware.sustained_tflops:g} TFLOP/s sustained and "
        f"{hardware.sampled_tokens_per_s:g} sampled tokens/s in each process, responses of "
        f"{hardware.mean_response_tokens:g} tokens on average (computed, not measured; without "
        f"{left_out}):"
    ]
    for name, phase in phases.items():
        lines.append(
            f"  {name}, {phase.iterations} iterations: {phase.total:.1f} h "
            f"(sampling {phase.sampling:.1f}, networks {phase.networks:.1f})"
        )
    lines.append(f"  in all: {sum(phase.total for phase in phases.values()):.1f} h")
    return "\n".join(lines)


def _read(path: str) -> PreTrainedConfig:
    with only_config_needed():
        return read_model_config(path)


def stage_table(estimate: MemoryEstimate) -> str:
    """Return a table of GiB per process as text: a row for each part, a column for each stage."""
    stages = estimate.stages
    parts = list(dict.fromkeys(part for parts in stages.values() for part in parts))
    rows = [
        (part, [stages[stage].get(part, 0.0) for stage in stages])
        for part in parts
        if any(stages[stage].get(part) for stage in stages)
    ]
    rows.append(("total", [sum(stages[stage].values()) for stage in stages]))
    table = [("GiB in each process", list(stages)), *((p, list(map(_gib, v))) for p, v in rows)]
    label, widths = max(len(part) for part, _ in table), [max(len(stage), 8) for stage in stages]
    lines = [
        "  ".join([f"{part:<{label}}", *map(str.rjust, cells, widths)]) for part, cells in table
    ]
    counts = ", ".join(parameter_counts(estimate))
    where = "1 process" if estimate.num_processes == 1 else f"{estimate.num_processes} processes"
    host = [f"{part} {_gib(value)}" for part, value in estimate.host.items()]
    if host:  # cpu_offload, and saving in the background
        total = _gib(sum(estimate.host.values()))
        host = [f"host memory, GiB of each process: {total} ({', '.join(host)})"]
    peak = max(stages, key=lambda stage: sum(stages[stage].values()))
    return "\n".join(
        [
            f"parameters: {counts}; {where}",
            "",
            *lines,
            "",
            f"peak: {_gib(estimate.peak)} GiB, in the stage {peak}. Prompts and responses are "
            "taken as long as they may be.",
            *host,
        ]
    )


def parameter_counts(estimate: MemoryEstimate) -> Iterator[str]:
    """Yield for each network how many parameters it has.

    If fewer of them compute a token (mixture of experts), their number follows.
    """
    for name, total in estimate.parameters.items():
        active = estimate.active.get(name, total)
        of_a_token = "" if active == total else f" ({active / 1e6:,.1f} M for a token)"
        yield f"{name} {total / 1e6:,.1f} M{of_a_token}"


def continuations_line(config: FitConfig, continued: MostContinuations) -> str:
    """Return a sentence on what estimator vine samples in addition to the responses.

    It also says where the memory of this is counted.
    """
    numbers, length = resolve(config), config.rollouts.max_response_tokens
    num_response_tokens = numbers.num_prompts * numbers.group_size * length
    where = "the stage sampling counts them, prefixes as long as they may be"
    if isinstance(config.rollouts, VllmEngine):
        where = "vLLM's KV cache is of a fixed size, so they change nothing of the peak"
    elif isinstance(config.rollouts, VllmServerEngine):
        where = "the servers' memory is not counted"
    return (
        f"vine: up to {continued.num_steps} steps of a response, so {continued.num_prefixes:,} "
        f"prefixes, {continued.num_responses:,} continuations and {continued.num_tokens:,} more "
        f"sampled tokens an iteration, {continued.num_tokens / num_response_tokens:.1f} times the "
        f"responses' own {num_response_tokens:,}, where responses are as long as they may be and "
        f"steps evenly spread; {where}"
    )


def disk_line(config: FitConfig, estimate: MemoryEstimate) -> str:
    """Return a sentence on the disk space that checkpoints take in `output_dir`."""
    num_checkpoints = num_kept(config.checkpoints.keep, estimate.checkpoint)
    max_size = shown_size((num_checkpoints + 2) * estimate.checkpoint)
    return (
        f"disk: {shown_size(estimate.checkpoint)} for a checkpoint, up to {max_size} in output_dir "
        f"for the newest {num_checkpoints} (checkpoints.keep), the best and one that is being "
        "written"
    )


def missing_bytes(estimate: MemoryEstimate, gpu_memory_gib: float) -> float:
    """Return how many bytes the peak is above what CUDA leaves of a GPU; negative if it fits."""
    return estimate.peak - (gpu_memory_gib - _CONTEXT_GIB) * GIB


def memory_verdict(estimate: MemoryEstimate, gpu_memory_gib: float) -> str:
    """Return a sentence on whether the peak fits into the memory that CUDA leaves of a GPU's."""
    spare = -missing_bytes(estimate, gpu_memory_gib) / GIB
    budget = f"{gpu_memory_gib:g} GiB, of which {_CONTEXT_GIB:g} are left to CUDA and its libraries"
    if spare >= 0:
        return (
            f"fits in {budget}: {spare:.1f} GiB to spare (the allocator's gaps come out of these)"
        )
    return f"does not fit in {budget}: {-spare:.1f} GiB are missing"


def _gib(value: float) -> str:
    if value == 0:
        return "-"
    gib = value / GIB
    return f"{gib:.1f}" if gib >= 10 else f"{gib:.2f}" if gib >= 0.1 else f"{gib:.4f}"
