"""The profile of decoding steps: its tables by hand, and the script itself on the real engine."""

from __future__ import annotations

import json
import pstats
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "experiments/gpu/decoding_steps.py"


@pytest.fixture(scope="module")
def steps() -> Any:
    spec = spec_from_file_location("decoding_steps", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def event(key: str, count: int, host_us: float, device_us: float) -> SimpleNamespace:
    return SimpleNamespace(
        key=key, count=count, self_cpu_time_total=host_us, self_device_time_total=device_us
    )


def test_operations_are_ordered_by_the_device_where_there_is_one(steps: Any) -> None:
    """100 steps: 200 calls are 2 a step, 50,000 us are 0.5 ms a step."""
    events = [event("host", 200, 50_000, 0), event("kernel", 100, 1_000, 20_000)]
    first, second = steps.top_operations(events, 100)
    assert first == {"operation": "kernel", "calls_a_step": 1, "host_ms": 0.01, "device_ms": 0.2}
    assert second == {"operation": "host", "calls_a_step": 2, "host_ms": 0.5, "device_ms": 0}
    on_cpu = [event("small", 1, 10, 0), event("large", 1, 20, 0)]
    assert [row["operation"] for row in steps.top_operations(on_cpu, 1)] == ["large", "small"]
    assert len(steps.top_operations([event(str(i), 1, i, 0) for i in range(40)], 1)) == 12


def test_functions_have_their_own_time(steps: Any) -> None:
    stats = pstats.Stats()
    stats.stats = {  # type: ignore[attr-defined]
        ("/a/b.py", 7, "slow"): (50, 50, 0.2, 0.9, {}),
        ("~", 0, "<built-in>"): (100, 100, 0.4, 0.4, {}),
    }
    assert steps.top_functions(stats, 50) == [
        {"function": "<built-in>", "calls_a_step": 2, "ms": 8.0},
        {"function": "b.py:7 slow", "calls_a_step": 1, "ms": 4.0},
    ]


def test_a_row_of_the_summary(steps: Any) -> None:
    def found(step_ms: float, tokens_per_s: float) -> dict[str, float]:
        rest = {"outside_ms": 0.25, "processor_ms": 4, "device_ms": 3}
        return {"step_ms": step_ms, "tokens_per_s": tokens_per_s, **rest}

    table = steps.summary_table({"vllm": found(5, 2000), "ours": found(5.5, 1800)})
    assert table.splitlines()[2:] == [
        "| vllm | 5.00 | 0.25 | 4.00 | 3.00 | 2,000 | 1.00 |",
        "| ours | 5.50 | 0.25 | 4.00 | 3.00 | 1,800 | 0.90 |",
    ]
    assert steps.summary_table({"ours": found(5.5, 1800)}).endswith("| 1,800 |  |")


@pytest.mark.vllm
def test_the_script_writes_both_sides(tmp_path: Path) -> None:
    out = tmp_path / "steps.json"
    command = [sys.executable, str(SCRIPT), "--tiny", "--rows", "3", "--tokens", "5"]
    done = subprocess.run(
        [*command, "--parts", "vllm, seeds", "ours, pushed", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    report = json.loads(out.read_text())
    assert set(report["parts"]) == {"vllm, seeds", "ours, pushed"}
    for part in report["parts"].values():
        assert part["steps"] == 5
        assert 0 < part["outside_ms"] < part["step_ms"]
        assert part["operations"]
        assert part["functions"]
    assert report["machine"]["versions"]["torch"]
    assert "| ours, pushed |" in done.stdout
