"""Functions of other packages, from their own released source, without installing them.

The wheel is downloaded once into build/peers, by pip and without dependencies. Only the text of the
named functions is run, as it stands: verl itself imports Ray and a dozen more packages that its
arithmetic does not need.
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

PEERS = Path(__file__).parents[2] / "build/peers"


def functions_of(source: str, names: tuple[str, ...], scope: dict[str, Any]) -> dict[str, Any]:
    """The named top-level functions, without decorators, run in `scope`."""
    kept = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    for node in kept:
        node.decorator_list = []
    exec(compile(ast.Module(kept, []), "peer", "exec"), scope)
    return {name: scope[name] for name in names}


@functools.cache
def verl_gae(version: str = "0.9.1") -> Callable[..., Any]:
    """verl's `compute_gae_advantage_return`, which whitens the advantages."""
    import torch

    PEERS.mkdir(parents=True, exist_ok=True)
    wheel = PEERS / f"verl-{version}-py3-none-any.whl"
    if not wheel.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, f"verl=={version}", "-d", str(PEERS)], check=True)
    with zipfile.ZipFile(wheel) as archive:
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
