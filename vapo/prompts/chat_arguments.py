"""Checks that the chat template reads the variables that the config sets for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from vapo.errors import UserError
from vapo.errors.suggestions import did_you_mean
from vapo.user_code.chat_templates import TemplateRefusal, template_arguments

_KEY = "data.chat_template_kwargs"
_MOST_LISTED = 20


def check_template_variables(
    arguments: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, *, key: str = _KEY
) -> None:
    """Check that the tokenizer's chat template reads each of the variables that it is given.

    A variable that the template does not read would silently change nothing.

    Args:
        arguments: the variables by name.
        key: the config key or option that sets them, for the error.

    Raises: UserError: the template does not read a variable. The error lists the ones that it
        reads.
    """
    if not arguments:
        return
    try:
        names = template_arguments(tokenizer)
    except TemplateRefusal as error:
        raise UserError(f"{key}: the tokenizer's chat template says: {error}") from None
    for name in arguments:
        if name in names:
            continue
        hint = did_you_mean(str(name), names)
        listed = ", ".join(f"{name:.60}" for name in names[:_MOST_LISTED])
        more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
        reads = f"it reads {listed}{more}" if names else "it reads none that can be set"
        raise UserError(
            f"{key}.{name}: the chat template of {tokenizer.name_or_path or 'the tokenizer'} "
            f"does not read this variable, so it would change nothing; {reads}{hint}"
        )
