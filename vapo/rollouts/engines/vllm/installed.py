"""Is vLLM installed? Asked without importing it, or torch."""

from __future__ import annotations

from importlib.util import find_spec

from vapo.errors import UserError
from vapo.system.installation import install_command

INSTALL = (
    f"on a GPU machine `{install_command('vllm')}`, without a GPU `make vllm` (docs/rollouts.md)"
)


def check_installed() -> None:
    """Raises: UserError: vLLM is missing."""
    if find_spec("vllm") is None:
        raise UserError(f"rollouts.engine=vllm: vLLM is not installed; {INSTALL}")
