"""Makes tokens of what an environment wrote, which the policy reads between two of its turns.

An observation is tokenized alone: no sampled token is ever tokenized again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from vapo.config.schema import FitConfig
from vapo.errors import UserError
from vapo.networks.special_tokens import special_text
from vapo.prompts.characters import dropped_characters, listed_characters
from vapo.prompts.spelled_text import SpelledText
from vapo.user_code.chat_templates import TemplateRefusal, render_chat

logger = logging.getLogger(__name__)

_KEY = "environment.observation_template"
_MARK = "vapo-observation-mark"


class ObservationTokens:
    """Makes the tokens of what environments write, by a template or as a chat's user message.

    With a chat template the text between two turns is whatever the template writes between an
    assistant's message and the next one's beginning. The end token with which the turn was sampled
    is not repeated. Characters that the tokenizer has no token for are left out; a warning says
    which, the first time that they come. If an observation has the text of a special token, as of a
    turn marker, it is spelled in letters, so that no observation ends its message or opens the
    policy's turn. A warning says so, the first time. Special tokens of the template stay tokens.

    Raises: UserError: the template does not contain {observation}, or the chat template does not
        write every message.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: FitConfig) -> None:
        self._tokenizer = tokenizer
        options = config.environment.episode_options
        self._max_tokens = options.max_observation_tokens
        self._checked_characters: set[str] = set()  # characters that were looked at
        self._special = special_text(tokenizer)
        self._warns = True  # when an observation has a special token's text
        template = options.observation_template
        if template is not None and "{observation}" not in template:
            raise UserError(f"{_KEY} is {template!r}: it must contain {{observation}}")
        self._is_chat = template is None and config.data.chat_template
        arguments = config.data.chat_template_kwargs
        self._spelled = SpelledText(tokenizer, chat=arguments if self._is_chat else None)
        if self._is_chat:
            self._prefix, self._suffix = chat_frame(tokenizer, arguments)
        else:
            frame = "{observation}" if template is None else template
            self._prefix, _, self._suffix = frame.partition("{observation}")

    def __call__(self, observation: str, *, last_id: int | None) -> tuple[int, ...]:
        """Return the tokens of an observation inside of its template.

        A long observation is cut to its beginning; the template stays whole.

        Args:
            last_id: the last token that was sampled; None: the policy has not had a turn yet.
        """
        special = self._spelled.pattern.search(observation)
        ids = tuple(self._spelled.letters(observation)) if special else self._ids(observation)
        text = self._prefix + observation + self._suffix
        self._warn_of_dropped(text)
        if special and self._warns:
            self._warns = False
            logger.warning(
                "an observation has the text of the special token %r in it: the policy reads such "
                "texts as letters, and as tokens only from %s or the chat template",
                special[0],
                _KEY,
            )
        if special or len(ids) > self._max_tokens:
            whole = (*self._ids(self._prefix), *ids[: self._max_tokens], *self._ids(self._suffix))
        else:
            whole = self._ids(text)
        if self._is_chat and whole and whole[0] == last_id:
            whole = whole[1:]
        return whole

    def _warn_of_dropped(self, text: str) -> None:
        """Warn of characters that the tokenizer has no token for, the first time that they come."""
        if self._checked_characters.issuperset(text):
            return
        plain_text = self._special.sub("", text)
        unreadable = dropped_characters(set(plain_text) - self._checked_characters, self._tokenizer)
        self._checked_characters.update(plain_text)
        if unreadable:
            logger.warning(
                "the tokenizer of actor.path has no token for %s: the policy does not read what "
                "observations have of them (%d of %d characters in this one)",
                listed_characters("".join(sorted(unreadable))),
                sum(c in unreadable for c in plain_text),
                len(plain_text),
            )

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def chat_frame(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> tuple[str, str]:
    """Return what a chat template writes before and after a user's message in a conversation.

    The text before begins behind the assistant's last message; the text after opens the assistant's
    next one.

    Args:
        arguments: further variables of the template (`data.chat_template_kwargs`).

    Raises: UserError: the template refuses such a conversation, or does not write every message.
    """
    assistant_text, user_text = f"{_MARK}said", f"{_MARK}asked"
    messages: list[Any] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": assistant_text},
        {"role": "user", "content": user_text},
    ]
    try:
        text = render_chat(tokenizer, messages, add_generation_prompt=True, **arguments)
    except TemplateRefusal as error:
        raise UserError(
            f"the tokenizer's chat template has no conversations of several turns ({error}): set "
            f"{_KEY}"
        ) from None
    prefix, separator, suffix = text.partition(assistant_text)[2].partition(user_text)
    if not separator:
        raise UserError(f"the tokenizer's chat template does not write every message: set {_KEY}")
    return prefix, suffix
