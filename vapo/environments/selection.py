"""The environments that the config names."""

from __future__ import annotations

from vapo.config.schema import FitConfig
from vapo.environments.contract import Environments


def make_environments(config: FitConfig) -> Environments:
    """Start what answers the turns of the config's episodes.

    Raises: UserError: it cannot be imported or made.
    """
    raise NotImplementedError
