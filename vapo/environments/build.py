"""The environments that a config names."""

from __future__ import annotations

from vapo.config.environments import EnvironmentConfig, FunctionEnvironment
from vapo.environments.contract import Environments
from vapo.environments.processes import ProcessEnvironments
from vapo.environments.settings import HostSettings
from vapo.environments.user_class import KEY
from vapo.errors import UserError
from vapo.system.handed_functions import bytes_of


def make_environments(config: EnvironmentConfig, *, output: int | None = None) -> Environments:
    """Start what answers the policy's turns.

    Args:
        output: file descriptor to which environments print, with the tracebacks of what they
            raise; None: that is discarded.

    Raises:
        UserError: the class cannot be imported, lacks a method, or cannot be called with
            `environment.args`.
    """
    if not isinstance(config, FunctionEnvironment):
        raise UserError(f"environment.kind {config.kind} is not supported yet")
    settings = HostSettings(
        kind="function",
        name=config.function,
        args=config.args,
        function_folder=config.function_folder,
        function_bytes=bytes_of(config.function, key=KEY),
        shows_errors=output is not None,
    )
    return ProcessEnvironments(
        settings, capacity=config.max_processes, timeout_s=config.timeout_s, output=output
    )
