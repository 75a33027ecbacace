"""The environments that the config names."""

from __future__ import annotations

from vapo.config.environments import FunctionEnvironment, VerifiersEnvironment, environment_name
from vapo.config.schema import FitConfig
from vapo.environments.contract import Environments
from vapo.environments.episode_code import EpisodeCode
from vapo.environments.processes import ProcessEnvironments
from vapo.environments.user_class import KEY
from vapo.system.credentials import check_passed, hidden_texts
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
    block = config.environment.episode_options
    return ProcessEnvironments(
        _code(config, shows_errors=output is not None),
        capacity=block.max_processes,
        timeout_s=block.timeout_s,
        output=output,
    )


def _code(config: FitConfig, *, shows_errors: bool) -> EpisodeCode:
    block = config.environment
    assert isinstance(block, (FunctionEnvironment, VerifiersEnvironment)), "there is no kind"
    check_passed(block.variables, key="environment.variables")
    own = block if isinstance(block, FunctionEnvironment) else None
    return EpisodeCode(
        kind="verifiers" if own is None else "function",
        name=environment_name(block),
        args=block.args,
        function_folder=None if own is None else own.function_folder,
        function_bytes=None if own is None else bytes_of(own.function, key=KEY),
        shows_errors=shows_errors,
        passed=tuple(block.variables),
        hidden=hidden_texts(config.from_environment, block.args),
    )
