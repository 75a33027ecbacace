"""Other packages to measure against, from their released wheels, never in our environment.

`peer_python` makes an environment with a package in it. `verl_gae` runs the text of single
functions as it stands: verl itself imports Ray and a dozen more packages that its arithmetic does
not need. Both keep what they fetched in build/peers.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "build/peers"


def peer_python(package: str, version: str) -> Path:
    """The Python of an environment that has the package, with our versions of what both use."""
    environment = PEERS / f"{package}-{version}"
    python, marker = environment / "bin/python", environment / "installed"
    if not marker.exists():
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "-c", "constraints.txt"]
        subprocess.run([*install, f"{package}=={version}", "requests"], check=True, cwd=ROOT)
        marker.touch()
    return python


def functions_of(source: str, names: tuple[str, ...], scope: dict[str, Any]) -> dict[str, Any]:
    """The named top-level functions, without decorators, run in `scope`."""
    functions = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    for node in functions:
        node.decorator_list = []
    exec(compile(ast.Module([*functions], []), "peer", "exec"), scope)
    return {name: scope[name] for name in names}


def wheel(package: str, version: str) -> zipfile.ZipFile:
    """A released wheel, downloaded once."""
    path = PEERS / f"{package}-{version}-py3-none-any.whl"
    if not path.exists():
        PEERS.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, f"{package}=={version}", "-d", str(PEERS)], check=True)
    return zipfile.ZipFile(path)


@functools.cache
def verl_gae(version: str = "0.9.1") -> Callable[..., Any]:
    """verl's `compute_gae_advantage_return`, which whitens the advantages."""
    import torch

    with wheel("verl", version) as archive:
        math = archive.read("verl/utils/torch_functional.py").decode()
        core = archive.read("verl/trainer/ppo/core_algos.py").decode()
    names = ("masked_sum", "masked_mean", "masked_var", "masked_whiten")
    math_scope: dict[str, Any] = {"torch": torch}
    functions = functions_of(math, names, math_scope)
    scope = {"torch": torch, "verl_F": SimpleNamespace(**functions)}
    gae: Callable[..., Any] = functions_of(core, ("compute_gae_advantage_return",), scope)[
        "compute_gae_advantage_return"
    ]
    return gae


@functools.cache
def trl_logprobs(version: str = "1.16.0") -> Callable[..., Any]:
    """TRL's `selective_log_softmax_and_entropy` as it runs without Triton: on a CPU."""
    import torch

    with wheel("trl", version) as archive:
        source = archive.read("trl/trainer/utils.py").decode()
    scope = {
        "torch": torch,
        "F": torch.nn.functional,
        "is_triton_available": lambda: False,
    }
    names = ("selective_log_softmax", "entropy_from_logits", "selective_log_softmax_and_entropy")
    both: Callable[..., Any] = functions_of(source, names, scope)[names[-1]]
    return both
