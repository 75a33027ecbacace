"""Finds out what a run ran on: commit, versions, host. What cannot be found out is left out."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vapo.system.installation import __version__

_PACKAGES = ("torch", "lightning", "transformers", "mlflow")


def versions() -> dict[str, str]:
    """Return the versions of Python, vapo and the packages that decide a run's numbers."""
    installed = {"python": platform.python_version(), "vapo": __version__}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def provenance_tags() -> dict[str, str]:
    """Return a run's tags `git/...`, `version/...` and `host/...`, as of this process."""
    of_versions = {f"version/{name}": value for name, value in versions().items()}
    of_host = {f"host/{name}": value for name, value in host().items()}
    return git_state(Path.cwd()) | of_versions | of_host


def git_state(folder: Path) -> dict[str, str]:
    """Return the tags `git/commit` and `git/dirty` (uncommitted or untracked files) of a folder.

    Outside a checkout the variable VAPO_COMMIT gives the commit, as in the image that Dockerfile
    builds. Without that variable there are no tags.
    """
    commit = output_of(["git", "-C", str(folder), "rev-parse", "HEAD"])
    if not commit:
        built_from = os.environ.get("VAPO_COMMIT", "").strip()
        tag_names = ("git/commit", "mlflow.source.git.commit") if built_from else ()
        return dict.fromkeys(tag_names, built_from)
    state = {"git/commit": commit, "mlflow.source.git.commit": commit}
    changes = output_of(["git", "-C", str(folder), "status", "--porcelain"])
    if changes is not None:
        state["git/dirty"] = str(bool(changes)).lower()
    return state


def host() -> dict[str, str]:
    """Return this host's processor, number of usable cores, memory and GPUs, as texts."""
    import psutil

    model = None
    with suppress(OSError):
        model = re.search(r"model name\s*:(.*)", Path("/proc/cpuinfo").read_text())
    facts = {
        "cpu": model[1].strip() if model else platform.machine(),
        "num_cpus": str(len(os.sched_getaffinity(0))),
        "memory_gib": f"{psutil.virtual_memory().total / 2**30:.1f}",
    }
    gpus = output_of(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    names = gpus.splitlines() if gpus else []
    facts["num_gpus"] = str(len(names))
    if names:
        facts["gpu"] = ", ".join(sorted(set(names)))
    return facts


def output_of(command: list[str], *, timeout_s: float = 5) -> str | None:
    """Return what a command prints, or None if it fails, takes too long or is not installed."""
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip()
