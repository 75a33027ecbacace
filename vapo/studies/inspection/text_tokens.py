"""Make tokens of texts, and texts of tokens, for responses whose file has only one of them."""

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
from vapo.user_code.chat_templates import TemplateRefusal, render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPEAKER = re.compile(r"^(system|user|assistant|tool|model)\n", re.MULTILINE)
_MAX_SHOWN_IDS = 12
_MAX_CACHED_TOKENS = 1_000_000  # tokens of prompts, about 40 bytes each


class TextTokens:
    """Fills in responses' missing tokens or texts with a tokenizer, and counts the cases.

    Args:
        num_ids: the number of token ids that the model which will read the responses knows; None if
            it is unknown.
        chat_template_kwargs: further variables of the chat template.

    Attributes:
        num_encoded: responses whose tokens were made of their text.
        num_without_text: responses that got no tokens, because the text as generated is not in the
            file.
        num_rebuilt: prompts to which the chat template was applied again. Without special tokens
            the result is the file's text.
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
        self._num_cached_tokens = 0
        self.num_encoded = self.num_without_text = self.num_rebuilt = self.num_unlike = 0

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return a conversation as the text that the policy reads, made by the chat template.

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
        """Return the response with its missing token ids, or its missing texts, filled in.

        Raises: RowError: the tokenizer refuses a text, or a token id is not the model's.
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
        self.num_without_text += response.response_ids is None and not response.is_verbatim
        return response

    def _prompt_ids(self, text: str) -> tuple[int, ...]:
        digest = blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
        if digest not in self._prompts:
            if self._num_cached_tokens > _MAX_CACHED_TOKENS:  # prompts repeat within a step alone
                self._prompts.clear()
                self._num_cached_tokens = 0
            from vapo.networks.saved_tokenizers import with_start

            rebuilt = self._rebuilt(text)
            ids = self._encode(text if rebuilt is None else rebuilt)
            ids = with_start(ids, self._start)
            self._prompts[digest] = ids
            self._num_cached_tokens += len(ids)
            self.num_rebuilt += rebuilt is not None
        return self._prompts[digest]

    def _response_ids(self, response: InspectedResponse) -> tuple[int, ...] | None:
        """Return the token ids of the response's text; None if their number is not the file's.

        If the file's lists are one entry longer, the end token is appended.
        """
        ids = self._encode(response.response)
        columns = (getattr(response, name) for name in PER_TOKEN)
        length = next((len(column) for column in columns if column is not None), len(ids))
        if length == len(ids) + 1 and self._tokenizer.eos_token_id is not None:
            ids = (*ids, self._end)
        if length != len(ids):
            self.num_unlike += 1
            return None
        self.num_encoded += 1
        return ids

    @cached_property
    def _end(self) -> int:
        """The id of the token that ends a response, for texts that do not show it."""
        from vapo.networks.end_tokens import end_tokens

        try:
            return end_tokens(self._tokenizer).imitated_id
        except UserError as error:
            raise RowError(str(error)) from None

    def _encode(self, text: str) -> tuple[int, ...]:
        try:
            encoding = self._tokenizer(text, add_special_tokens=False, verbose=False)
        except Exception as error:  # `tokenizers` raises Exception itself
            raise RowError(f"the tokenizer cannot write {text!r:.60}: {error}") from None
        return tuple(encoding["input_ids"])

    def _rebuilt(self, text: str) -> str | None:
        """Apply the chat template again to a prompt that was written without special tokens.

        verl writes prompts in this way. Return the prompt with its special tokens. The result is
        None if, without them, it would not be exactly the given text.
        """
        pieces = _SPEAKER.split(text)
        if not self._tokenizer.chat_template or len(pieces) < 3 or pieces[0].strip():
            return None
        turns = [
            {"role": role, "content": content.removesuffix("\n")}
            for role, content in zip(pieces[1::2], pieces[2::2], strict=True)
        ]
        if turns[-1]["role"] not in ("assistant", "model"):
            return None
        try:
            rendered = self.render(turns[:-1])
        except RowError:
            return None
        plain = self._tokenizer.decode(list(self._encode(rendered)), skip_special_tokens=True)
        return rendered if plain == text else None


def without_tokenizer(response: InspectedResponse) -> InspectedResponse:
    """Return the response; if it has only token ids, with a list of them as its texts.

    A file with ids alone is shown in this way if no tokenizer was given.
    """
    if response.prompt or response.response or response.response_ids is None:
        return response
    return replace(
        response,
        prompt=_numbers(response.prompt_ids or ()),
        response=_numbers(response.response_ids),
    )


def _numbers(ids: Sequence[int]) -> str:
    ellipsis = " ..." if len(ids) > _MAX_SHOWN_IDS else ""
    return f"tokens {' '.join(map(str, ids[:_MAX_SHOWN_IDS]))}{ellipsis}"
