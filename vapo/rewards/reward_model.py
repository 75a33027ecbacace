"""Judges responses by a Hugging Face reward model, whose score is the reward."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from vapo.config.rewards import RewardModelVerifier
from vapo.config.schema import RewardConfig, TrainerConfig
from vapo.errors import UserError
from vapo.networks.actor_critic import Critic
from vapo.networks.loading import load_tokenizer, load_value_model
from vapo.networks.model_configs import read_model_config
from vapo.networks.saved_tokenizers import start_ids, with_start
from vapo.networks.special_tokens import control_ids, special_ids
from vapo.networks.token_inputs import Sequences, TokenInputs, token_inputs
from vapo.rewards.hostile_text import UnsafeTextError
from vapo.rewards.text_judge import OnReply
from vapo.system.libraries import pick_device
from vapo.types import FinishReason, Rollout
from vapo.user_code.process_protocol import reward_problem

BATCH_TOKENS = 16_384
"""The most tokens of a padded batch, padding included. It is also the longest text's length if
the model's config has no `max_position_embeddings`."""


class ModelJudge:
    """Judges a response by a sequence classifier with one label, whose score at the last token of
    prompt + response is the reward. A score above the threshold is correct.

    The classifier reads text, so its tokenizer may differ from the policy's. A response that
    stopped gets the classifier's end token. Special tokens come only from the prompt and from this
    class, never from the response's text.

    The model runs in the main process, on the GPU if there is one, and so never while responses are
    sampled. All waiting rollouts are scored together, once there is nothing to sample or a whole
    batch of responses waits.

    Raises:
        UserError: no path is set, or it is not the folder or hub id of a reward model with one
            label that scores at the last token.
    """

    def __init__(self, rewards: RewardConfig) -> None:
        assert isinstance(rewards, RewardModelVerifier)
        self.config: RewardConfig = rewards
        self.pool = None
        self._threshold, path = rewards.reward_model_threshold, rewards.reward_model_path
        self._waiting: dict[int, tuple[Rollout, OnReply]] = {}
        self._numbers, self._num_enough = itertools.count(), math.inf
        if not path:
            raise UserError(
                "rewards.reward_model_path is not set: verifier `reward_model` needs it"
            )
        try:
            config = read_model_config(path)
            names = config.architectures or []
            is_classifier = any(name.endswith("ForSequenceClassification") for name in names)
            if not is_classifier or config.num_labels != 1:
                raise UserError(
                    f"{path} is {config.architectures} with {config.num_labels} labels, not a "
                    "sequence classifier with one label"
                )
            self.tokenizer = load_tokenizer(path)
            dtype = str(config.dtype or torch.float32).removeprefix("torch.")
            model = load_value_model(path, dtype=dtype, attn_implementation="auto")
        except UserError as error:
            raise UserError(f"rewards.reward_model_path: {error}") from None
        self.device = pick_device(TrainerConfig())
        self.critic = Critic(model).to(self.device).eval()
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        self.max_tokens: int = positions or BATCH_TOKENS
        # a longer text has more tokens than fit, and so is not tokenized
        self._max_chars = self.max_tokens * max(map(len, self.tokenizer.get_vocab()))
        self._start_ids = start_ids(self.tokenizer)
        self._special_ids = special_ids(self.tokenizer)
        self._forbidden_ids = control_ids(self.tokenizer)

    def submit(
        self, rollout: Rollout, on_reply: OnReply, num_responses: int | None
    ) -> Callable[[], object]:
        """Queue a rollout. `poll` scores it and passes the verdict, or a failure, to `on_reply`.

        Args:
            num_responses: the number of responses in a batch; `poll` scores at once when as many
                wait.

        Returns: a function that withdraws the rollout.
        """
        number = next(self._numbers)
        self._waiting[number] = rollout, on_reply
        self._num_enough = math.inf if num_responses is None else num_responses
        return partial(self._waiting.pop, number, None)

    @property
    def deciding(self) -> ModelJudge:
        """The judge that decides whether a response is correct: this judge itself."""
        return self

    def poll(self, timeout_s: float) -> None:
        """Score all waiting rollouts, if a whole batch waits or `timeout_s` is above 0.

        Otherwise return at once.
        """
        if not self._waiting or not (timeout_s > 0 or len(self._waiting) >= self._num_enough):
            return
        waiting = list(self._waiting.values())
        self._waiting.clear()
        scores = self._scores([rollout for rollout, _ in waiting])
        for score, (_, on_reply) in zip(scores, waiting, strict=True):
            if isinstance(score, str) or not math.isfinite(score):
                on_reply({"failure": score if isinstance(score, str) else "nan"})
            elif problem := reward_problem(score):
                on_reply({"failure": f"error: {problem}"})
            else:
                on_reply({"is_correct": score > self._threshold, "reward": score})

    def close(self) -> None: ...

    @torch.no_grad()
    def _scores(self, rollouts: Sequence[Rollout]) -> list[float | str]:
        """Return each rollout's score, which may be NaN, or a text that says why it has none."""
        rows: dict[int, list[int]] = {}
        scores: list[float | str] = [math.nan] * len(rollouts)
        for index, rollout in enumerate(rollouts):
            try:
                rows[index] = self._input_ids(rollout)
            except UnsafeTextError as error:
                scores[index] = str(error)
        for batch in _batches(rows):
            inputs = end_inputs(
                [((), rows[index]) for index in batch], pad_id=int(self.tokenizer.pad_token_id)
            )
            batch_scores = self.critic(inputs.to(self.device)).values.tolist()
            for index, score in zip(batch, batch_scores, strict=True):
                scores[index] = score
        return scores

    def _input_ids(self, rollout: Rollout) -> list[int]:
        """Return the model's input ids for a rollout.

        Raises: UnsafeTextError: the text cannot be scored.
        """
        prompt, response = rollout.prompt.text, rollout.response_text
        if len(prompt) + len(response) > self._max_chars:
            raise UnsafeTextError("too long")
        ids = self._encode(prompt, response)
        if not ids:
            raise UnsafeTextError("no tokens")
        ids = [*with_start(ids, self._start_ids)]
        if rollout.finish_reason is FinishReason.STOP:
            ids = [*ids, int(self.tokenizer.eos_token_id)]
        if len(ids) > self.max_tokens:
            raise UnsafeTextError("too long")
        return ids

    def _encode(self, prompt: str, response: str) -> list[int]:
        """Return the token ids of prompt and response, tokenized as one text.

        If that gives special tokens beyond the prompt's, the response is tokenized by itself, with
        its special tokens spelled in ordinary ones.

        Raises: UnsafeTextError: the tokenizer cannot spell them.
        """
        whole, prompt_ids = self._tokenize(prompt + response), self._tokenize(prompt)
        special_prompt_ids = [token for token in prompt_ids if token in self._special_ids]
        if [token for token in whole if token in self._special_ids] == special_prompt_ids:
            return whole
        spelled = self._tokenize(response, split_special_tokens=True)
        if not self._forbidden_ids.isdisjoint(spelled):
            raise UnsafeTextError("special tokens")
        return prompt_ids + spelled

    def _tokenize(self, text: str, **options: bool) -> list[int]:
        try:
            encoded = self.tokenizer(text, add_special_tokens=False, verbose=False, **options)
        except Exception:  # `tokenizers` raises Exception itself
            raise UnsafeTextError("no tokens") from None
        ids: list[int] = encoded["input_ids"]
        return ids


def _batches(rows: Mapping[int, list[int]]) -> Iterator[list[int]]:
    """Yield batches of row indices, shortest rows first, of up to `BATCH_TOKENS` padded tokens.

    A row that is longer than that is a batch of its own.
    """
    batch: list[int] = []
    for index in sorted(rows, key=lambda index: len(rows[index])):
        if batch and (len(batch) + 1) * len(rows[index]) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def end_inputs(sequences: Sequences, *, pad_id: int) -> TokenInputs:
    """Return padded inputs for which the networks compute one value per row, at its last token.

    Args:
        sequences: prompt ids and response ids of each row.
        pad_id: the token that fills shorter rows.
    """
    inputs = token_inputs(sequences, pad_id=pad_id)
    num_rows = len(sequences)
    return replace(
        inputs,
        response_mask=torch.ones((num_rows, 1), dtype=torch.bool),
        state_rows=torch.arange(num_rows),
        state_columns=torch.tensor([segment.length for segment in inputs.segments]) - 1,
        targets=torch.zeros(num_rows, dtype=torch.long),
    )
