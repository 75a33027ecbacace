"""The environments that a config names."""

from __future__ import annotations

from vapo.config.environments import EnvironmentConfig, FunctionEnvironment, VerifiersEnvironment
from vapo.environments.contract import Environments
from vapo.environments.processes import ProcessEnvironments
from vapo.environments.settings import HostSettings
from vapo.environments.user_class import KEY
from vapo.system.handed_functions import bytes_of


def make_environments(config: EnvironmentConfig, *, output: int | None = None) -> Environments:
    """Start what answers the policy's turns.

    Args:
        output: file descriptor to which environments print, with the tracebacks of what they
            raise; None: that is discarded.

    Raises:
        UserError: the class cannot be imported, lacks a method, or cannot be called with
            `environment.args`; the environment of the package cannot be loaded.
    """
    shows_errors = output is not None
    if isinstance(config, FunctionEnvironment):
        settings = HostSettings(
            kind="function",
            name=config.function,
            args=config.args,
            function_folder=config.function_folder,
            function_bytes=bytes_of(config.function, key=KEY),
            shows_errors=shows_errors,
        )
    elif isinstance(config, VerifiersEnvironment):
        settings = HostSettings(
            kind="verifiers", name=config.id, args=config.args, shows_errors=shows_errors
        )
    else:
        raise ValueError("environment.kind is null: there is nothing to start")
    return ProcessEnvironments(
        settings, capacity=config.max_processes, timeout_s=config.timeout_s, output=output
    )
