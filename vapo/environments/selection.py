"""The environments that the config names."""

from __future__ import annotations

from vapo.config.environments import EnvironmentConfig, FunctionEnvironment, VerifiersEnvironment
from vapo.config.schema import FitConfig
from vapo.environments.contract import Environments
from vapo.environments.processes import ProcessEnvironments
from vapo.environments.settings import HostSettings
from vapo.environments.user_class import KEY
from vapo.system.handed_functions import bytes_of


def make_environments(config: FitConfig, *, output: int | None = None) -> Environments:
    """Start what answers the turns of the config's episodes.

    Args:
        output: file descriptor to which environments print, with the tracebacks of what they
            raise; None: that is discarded.

    Raises:
        UserError: the class cannot be imported, lacks a method, or cannot be called with
            `environment.args`; the environment of the package verifiers cannot be loaded.
    """
    block = config.environment
    return ProcessEnvironments(
        _host_settings(block, shows_errors=output is not None),
        capacity=block.max_processes,
        timeout_s=block.timeout_s,
        output=output,
    )


def _host_settings(block: EnvironmentConfig, *, shows_errors: bool) -> HostSettings:
    if isinstance(block, FunctionEnvironment):
        return HostSettings(
            kind="function",
            name=block.function,
            args=block.args,
            function_folder=block.function_folder,
            function_bytes=bytes_of(block.function, key=KEY),
            shows_errors=shows_errors,
        )
    assert isinstance(block, VerifiersEnvironment), "without a kind there is nothing to start"
    return HostSettings(kind="verifiers", name=block.id, args=block.args, shows_errors=shows_errors)
