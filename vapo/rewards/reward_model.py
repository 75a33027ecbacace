"""A Hugging Face reward model as the verifier: its score is the reward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
)

from vapo.errors import UserError
from vapo.models.files import check_weight_files
from vapo.models.saved_tokenizers import read_tokenizer
from vapo.types import FinishReason, Rollout

BATCH_TOKENS = 16_384


class RewardModel:
    """Scores prompt + response with a sequence-classification model of one label.

    It reads text, so its tokenizer may differ from the policy's; a response that stopped gets
    the reward model's end token. Runs in the main process, on the GPU if there is one.

    Raises:
        UserError: no path, or not the folder or hub id of a one-label reward model.
    """

    def __init__(self, path: str | None) -> None:
        if not path:
            raise UserError(
                "rewards.reward_model_path is not set: verifier `reward_model` needs it"
            )
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
            is_classifier = any(
                name.endswith("ForSequenceClassification") for name in config.architectures or []
            )
            if not is_classifier or config.num_labels != 1:
                raise UserError(
                    f"rewards.reward_model_path: {path} is {config.architectures} with "
                    f"{config.num_labels} labels, not a sequence classifier with one label"
                )
            if Path(path).is_dir():
                check_weight_files(Path(path))
            self.tokenizer = read_tokenizer(path)
            self.model = AutoModelForSequenceClassification.from_pretrained(
                path, trust_remote_code=False, use_safetensors=True, dtype="auto"
            )
        except (OSError, ValueError) as error:
            hint = "" if Path(path).is_dir() else " (there is no such folder)"
            raise UserError(
                f"rewards.reward_model_path: cannot load {path}{hint}: {str(error).splitlines()[0]}"
            ) from None
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model.to(self.device).eval()
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        # the model finds a row's last token by its pad id
        self.model.config.pad_token_id = self.tokenizer.pad_token_id
        self.max_tokens: int = getattr(config, "max_position_embeddings", None) or 2**31

    @torch.no_grad()
    def __call__(
        self, rollouts: Sequence[Rollout], *, advance: Callable[[int], None] = lambda n: None
    ) -> list[float]:
        """The score of each rollout; NaN where the text is not one that the model can read."""
        rows = [self._input_ids(rollout) for rollout in rollouts]
        scores = [float("nan")] * len(rows)
        for batch in self._batches(rows):
            padded = self.tokenizer.pad(
                {"input_ids": [rows[index] for index in batch]},
                padding_side="right",
                return_tensors="pt",
            ).to(self.device)
            logits = self.model(
                input_ids=padded["input_ids"], attention_mask=padded["attention_mask"]
            ).logits
            for index, score in zip(batch, logits[:, 0].float().tolist(), strict=True):
                scores[index] = score
            advance(len(batch))
        advance(len(rows) - sum(1 for row in rows if self._fits(row)))
        return scores

    def _fits(self, row: list[int]) -> bool:
        return 0 < len(row) <= self.max_tokens

    def _input_ids(self, rollout: Rollout) -> list[int]:
        text = rollout.prompt.text + rollout.response_text
        try:
            encoded = self.tokenizer(text, add_special_tokens=False, verbose=False)
        except Exception:  # a text that this tokenizer cannot write: no score
            return []
        ids: list[int] = encoded["input_ids"]
        eos = self.tokenizer.eos_token_id
        if rollout.finish_reason is FinishReason.STOP and eos is not None:
            ids = [*ids, eos]
        return ids

    def _batches(self, rows: list[list[int]]) -> Iterator[list[int]]:
        """Rows that fit, by length, cut so that a padded batch stays within the budget."""
        order = sorted(
            (i for i in range(len(rows)) if self._fits(rows[i])), key=lambda i: len(rows[i])
        )
        batch: list[int] = []
        for index in order:
            if batch and (len(batch) + 1) * len(rows[index]) > BATCH_TOKENS:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch
