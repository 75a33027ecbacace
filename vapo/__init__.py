"""VAPO (arXiv 2504.05118): value-based reinforcement learning for reasoning models.

The names below are stable. They are loaded when they are first used, so that `import vapo`, and
with it the commands, does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vapo.api import (
        Run,
        fit,
        inspect,
        load_config,
        open_run,
        report,
        run_sweep,
        training_parts,
        validate,
    )
    from vapo.config import FitConfig
    from vapo.errors import UserError
    from vapo.system.installation import __version__
    from vapo.training.datamodule import RolloutDataModule
    from vapo.training.module import VapoModule

__all__ = [
    "FitConfig",
    "RolloutDataModule",
    "Run",
    "UserError",
    "VapoModule",
    "__version__",
    "fit",
    "inspect",
    "load_config",
    "open_run",
    "report",
    "run_sweep",
    "training_parts",
    "validate",
]

_ELSEWHERE = {
    "FitConfig": "vapo.config",
    "RolloutDataModule": "vapo.training.datamodule",
    "UserError": "vapo.errors",
    "VapoModule": "vapo.training.module",
    "__version__": "vapo.system.installation",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'vapo' has no attribute {name!r}")
    return getattr(import_module(_ELSEWHERE.get(name, "vapo.api")), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
