"""Write the text that ends a smoke test: seconds and memory by stage, and the forecast. No
torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from vapo.config import FitConfig
from vapo.errors.shown_text import shown_size
from vapo.studies.smoke.forecast import (
    OTHER,
    POLICY,
    PRETRAINING,
    Forecast,
    RunPart,
    Session,
)
from vapo.system.host_memory import GIB

_COLUMNS = {"start": "start", PRETRAINING: "pretraining", POLICY: "policy"}
"""A part's name -> its title in the table. The start of the second session is titled "resume"."""
_STAGES = {
    "loading": "loading networks",
    "engine_start": "engine's start",
    "logprobs_values": "log-probs, values",
    "weight_sync": "weights to engine",
    "value_page": "value page",
    "rollout_wait": "waiting for rollouts",
}
"""A stage's name in a run's records -> its title in the table, if they differ."""


def seconds_table(sessions: Sequence[Session]) -> str:
    """Return a table of seconds. A row is a stage; a column is a session's start or one iteration.

    The last columns are each stage's peak of memory over all of these, and the GPU's only if it was
    measured. The last row has sums of seconds. A stage whose seconds round to 0.0 in every column
    has no row.
    """
    parts = [part for session in sessions for part in session.parts]
    names = [_COLUMNS[part.name] for part in parts]
    for session in sessions[1:]:
        names[parts.index(session.parts[0])] = "resume"
    stages = dict.fromkeys(stage for part in parts for stage in part.seconds)
    ordered = [stage for stage in stages if stage != OTHER] + [OTHER]
    has_gpu = any(part.gpu for part in parts)
    memories = ["host GiB", *(["GPU GiB"] if has_gpu else [])]
    head = ["seconds", *names, *memories]
    rows = []
    for stage in ordered:
        seconds = [_seconds(part.seconds.get(stage)) for part in parts]
        peaks = _peaks(parts, stage, has_gpu=has_gpu)
        if set(seconds) - {"", "0.0"}:
            rows.append([_STAGES.get(stage, stage), *seconds, *peaks])
    totals = [_seconds(sum(part.seconds.values())) for part in parts]
    rows.append(["in all", *totals, *_peaks(parts, None, has_gpu=has_gpu)])
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in [head, *rows]
    )


def whole_run(config: FitConfig, prediction: Forecast, sessions: Sequence[Session]) -> str:
    """Return as text what the whole run will need: time, responses, disk space and memory.

    A last line says why the run may need something else.
    """
    lines = [f"time: about {duration(prediction.seconds)}"]
    lines += [
        f"  {item.times:>6,} x {item.name}, {duration(item.seconds)} each: {duration(item.total)}"
        for item in prediction.items
    ]
    counts = [f"{number:,} of {name}" for name, number in prediction.responses.items() if number]
    lines.append(f"responses: {sum(prediction.responses.values()):,} ({', '.join(counts)})")
    size = shown_bytes(max(session.checkpoint_bytes for session in sessions))
    all_saves, at_once = map(shown_bytes, (prediction.disk_written, prediction.disk_held))
    lines.append(
        f"disk: a checkpoint has {size}; the run writes up to {all_saves}, and holds up to "
        f"{at_once} of that at a time"
    )
    on_gpu = sessions[0].gpu_bytes is not None
    return "\n".join([*lines, *_memory(sessions), *_limits(config, on_gpu=on_gpu)])


def _memory(sessions: Sequence[Session]) -> list[str]:
    """Return a line on the largest memory that was in use; [] if the host's was not measured.

    The line has the GPU's memory, too, if that was measured.
    """
    parts = [part for session in sessions for part in session.parts]
    host, gpu = (
        max((n for peaks in by_part for n in peaks.values()), default=0)
        for by_part in ([part.host for part in parts], [part.gpu for part in parts])
    )
    if not host:
        return []
    total = sessions[0].gpu_bytes
    on_gpu = f", and {shown_bytes(gpu)} of the GPU's {shown_bytes(total)}" if gpu and total else ""
    return [f"memory: up to {shown_bytes(host)} of the host{on_gpu}"]


def _limits(config: FitConfig, *, on_gpu: bool) -> list[str]:
    """Return a line on why this run may take another time than the forecast."""
    pretraining, limits = config.components.value_pretraining, []
    limits.append("the policy's responses become longer or shorter while it learns")
    stops = pretraining.stop_explained_variance, pretraining.stop_value_loss
    has_passes = pretraining.epochs is not None or pretraining.patience is not None
    if config.algorithm.has_critic and (stops != (None, None) or has_passes):
        limits.append("value pretraining may end early, and counts in full here")
    if config.training.max_staleness:
        limits.append(
            "later iterations are sampled while one trains (training.max_staleness), which the "
            "first ones cannot show, so the time is an upper limit"
        )
    in_background = config.checkpoints.save_in_background
    if in_background or (in_background is None and on_gpu):
        limits.append("a checkpoint that is saved in the background costs less than it took here")
    return [f"what may differ: {'; '.join(limits)}"]


def duration(seconds: float) -> str:
    """Return a duration as text: in seconds below 2 minutes, in minutes below 2 hours, else hours.

    >>> [duration(s) for s in (0.25, 42.4, 600, 175_000)]
    ['0.25 s', '42 s', '10.0 minutes', '48.6 hours']
    """
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def shown_bytes(num_bytes: float) -> str:
    """Return a size as text, in MiB, GiB or TiB."""
    in_tib = num_bytes / (1024 * GIB)
    return shown_size(num_bytes) if in_tib < 1 else f"{in_tib:.1f} TiB"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f}" if seconds < 1000 else f"{seconds:,.0f}"


def _peaks(parts: Sequence[RunPart], stage: str | None, *, has_gpu: bool) -> list[str]:
    """Return the host's peak of memory in a stage as text in GiB, and with `has_gpu` the GPU's.

    The text is "" if nothing was measured.

    Args:
        parts: the starts and iterations over which the peaks are taken.
        stage: None takes the peaks over all stages.
    """
    texts = []
    for peaks_of_parts in ([part.host for part in parts], [part.gpu for part in parts]):
        num_bytes_used = [
            num_bytes
            for peaks in peaks_of_parts
            for name, num_bytes in peaks.items()
            if stage in (None, name)
        ]
        texts.append(f"{max(num_bytes_used) / GIB:.2f}" if num_bytes_used else "")
    return texts if has_gpu else texts[:1]
