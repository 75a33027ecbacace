"""Tokens of texts, and texts of tokens, for responses whose file has only one of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from vapo.errors import UserError
from vapo.studies.inspection.fields import PER_TOKEN, RowError, conversation
from vapo.studies.inspection.responses import InspectedResponse
from vapo.system.chat_templates import TemplateRefusal, render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPEAKER = re.compile(r"^(system|user|assistant|tool|model)\n", re.MULTILINE)
_MOST_SHOWN = 12
_MOST_HELD = 1_000_000  # tokens of prompts, about 40 bytes each


class TextTokens:
    """Fills in what one tokenizer tells, and counts what it could not.

    Args:
        num_ids: the tokens of the model that is to read them; None: it is not known.
        chat_template_kwargs: further variables of the chat template.

    Attributes:
        num_encoded: responses whose tokens were made of their text.
        num_turns: responses whose words are not in the file, so that no tokens were made.
        num_rebuilt: prompts whose chat template was put back, and reads the same without it.
        num_unlike: responses whose text has another number of tokens than the file's lists.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_ids: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        from vapo.networks.saved_tokenizers import start_ids

        self._tokenizer, self._num_ids = tokenizer, num_ids
        self._variables = dict(chat_template_kwargs or {})
        self._start = start_ids(tokenizer)
        self._prompts: dict[bytes, tuple[int, ...]] = {}
        self._num_held = 0  # tokens of these
        self.num_encoded = self.num_turns = self.num_rebuilt = self.num_unlike = 0

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """A conversation as the policy reads it.

        Raises: RowError: the chat template refuses it.
        """
        if not self._tokenizer.chat_template:
            return conversation(messages)
        try:
            return render_chat(
                self._tokenizer, messages, add_generation_prompt=True, **self._variables
            )
        except TemplateRefusal as error:
            raise RowError(f"the chat template says: {error}") from None

    def complete(self, response: InspectedResponse) -> InspectedResponse:
        """The response with its tokens, or with texts of them.

        Raises: RowError: the tokenizer refuses a text, or the model has no such token.
        """
        for name in ("prompt_ids", "response_ids"):
            largest = max(getattr(response, name) or (), default=0)
            if self._num_ids is not None and largest >= self._num_ids:
                raise RowError(
                    f"{name} has {largest}, and the model that is given has {self._num_ids} "
                    "tokens: it belongs to other rollouts"
                )
        if not response.prompt and not response.response and response.response_ids:
            decode = self._tokenizer.decode
            response = replace(
                response,
                prompt=str(decode(list(response.prompt_ids or ()))),
                response=str(decode(list(response.response_ids))),
            )
        if response.prompt_ids is None:
            response = replace(response, prompt_ids=self._prompt_ids(response.prompt))
        if response.response_ids is None and response.is_verbatim:
            response = replace(response, response_ids=self._response_ids(response))
        self.num_turns += response.response_ids is None and not response.is_verbatim
        return response

    def _prompt_ids(self, text: str) -> tuple[int, ...]:
        digest = blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
        if digest not in self._prompts:
            if self._num_held > _MOST_HELD:  # those of one step come together
                self._prompts.clear()
                self._num_held = 0
            from vapo.networks.saved_tokenizers import with_start

            rebuilt = self._rebuilt(text)
            ids = self._encode(text if rebuilt is None else rebuilt)
            ids = with_start(ids, self._start)
            self._prompts[digest] = ids
            self._num_held += len(ids)
            self.num_rebuilt += rebuilt is not None
        return self._prompts[digest]

    def _response_ids(self, response: InspectedResponse) -> tuple[int, ...] | None:
        ids = self._encode(response.response)
        lists = (getattr(response, name) for name in PER_TOKEN)
        length = next((len(found) for found in lists if found is not None), len(ids))
        if length == len(ids) + 1 and self._tokenizer.eos_token_id is not None:
            ids = (*ids, self._end)
        if length != len(ids):
            self.num_unlike += 1
            return None
        self.num_encoded += 1
        return ids

    @cached_property
    def _end(self) -> int:
        """The token that ended responses whose text does not show it."""
        from vapo.networks.end_tokens import end_tokens

        try:
            return end_tokens(self._tokenizer).taught
        except UserError as error:
            raise RowError(str(error)) from None

    def _encode(self, text: str) -> tuple[int, ...]:
        try:
            found = self._tokenizer(text, add_special_tokens=False, verbose=False)
        except Exception as error:  # `tokenizers` raises Exception itself
            raise RowError(f"the tokenizer cannot write {text!r:.60}: {error}") from None
        return tuple(found["input_ids"])

    def _rebuilt(self, text: str) -> str | None:
        """The prompt with its chat template, where the text is what is left without its special
        tokens, as verl writes it; None where that is not so, to the letter."""
        parts = _SPEAKER.split(text)
        if not self._tokenizer.chat_template or len(parts) < 3 or parts[0].strip():
            return None
        turns = [
            {"role": role, "content": said.removesuffix("\n")}
            for role, said in zip(parts[1::2], parts[2::2], strict=True)
        ]
        if turns[-1]["role"] not in ("assistant", "model"):
            return None
        try:
            whole = self.render(turns[:-1])
        except RowError:
            return None
        plain = self._tokenizer.decode(list(self._encode(whole)), skip_special_tokens=True)
        return whole if plain == text else None


def without_tokenizer(response: InspectedResponse) -> InspectedResponse:
    """A response without text, named by its tokens."""
    if response.prompt or response.response or response.response_ids is None:
        return response
    return replace(
        response,
        prompt=_numbers(response.prompt_ids or ()),
        response=_numbers(response.response_ids),
    )


def _numbers(ids: Sequence[int]) -> str:
    more = " ..." if len(ids) > _MOST_SHOWN else ""
    return f"tokens {' '.join(map(str, ids[:_MOST_SHOWN]))}{more}"
