"""What happens around every command with a config, from the shell and from Python alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vapo.commands.command_table import COMMANDS
from vapo.config.environment_variables import values_of
from vapo.config.other_models import check_learning_rates
from vapo.errors import StoppedRun, UserError
from vapo.system.credentials import hidden_texts
from vapo.system.shown_text import hide, redacted


@contextmanager
def checked(command: str, config: Any, options: Mapping[str, Any]) -> Iterator[None]:
    """Check what the command reads and writes before torch is loaded, then let it run.

    Its errors, and those of the checks, have no values of secret variables in them.

    Raises: UserError: whatever is wrong; StoppedRun: what the command raises.
    """
    from vapo.commands.early_checks import check_early

    hide(hidden_texts(config.from_environment, values_of(config)))
    try:
        check_early(command, config, options)
        if COMMANDS[command].trains_networks:
            check_learning_rates(config)
        yield
    except (UserError, StoppedRun) as error:
        error.args = (redacted(config.from_environment.redact(str(error))),)
        raise
