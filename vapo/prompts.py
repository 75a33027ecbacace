"""Prompts: rows of a source -> templated, tokenized `Prompt`s, split into training and held-out.

`load_prompts` reads, templates, leaves out what is too long, and keeps the two sets apart.
`group_sampling` says which prompts an iteration trains on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

from transformers import PreTrainedTokenizerBase

from vapo.config.schema import DataConfig
from vapo.errors import UserError
from vapo.sources import Row, read_rows
from vapo.types import Prompt


@dataclass(frozen=True)
class PromptReport:
    """How many prompts there are, and how many were left out and why."""

    num_train: int
    num_heldout: int
    num_too_long: int
    num_overlapping: int
    num_without_answer: int = 0
    num_contradicting: int = 0

    def describe(self) -> str:
        """One line for the console."""
        text = f"{self.num_train} training prompts, {self.num_heldout} held out"
        if self.num_too_long:
            text += f"; left out {self.num_too_long} longer than data.max_prompt_tokens"
        if self.num_overlapping:
            text += f"; left out {self.num_overlapping} training prompts that are held out too"
        if self.num_without_answer:
            text += (
                f"; {self.num_without_answer} have an empty answer, which no verifier but your own "
                "calls correct"
            )
        if self.num_contradicting:
            text += f"; {self.num_contradicting} ask what another one answers differently"
        return text


@dataclass(frozen=True)
class PromptSplit:
    """Prompts to train on and prompts to evaluate on; no text is in both."""

    train: list[Prompt]
    heldout: list[Prompt]
    report: PromptReport


def load_prompts(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSplit:
    """Reads both sets; a training prompt whose text is held out is left out and counted.

    If `data.heldout` is null, `heldout_size` prompts are drawn from the training source with
    the seed `data.train.seed`, so every run on this data holds out the same ones.

    Raises:
        UserError: a source or row is unusable, or a set is empty; names the key, file and row.
    """
    _check_templates(data, tokenizer)
    train, too_long = _read_prompts(data, "train", tokenizer)
    if data.heldout is None:
        train, heldout = _split(train, data)
    else:
        heldout, heldout_too_long = _read_prompts(data, "heldout", tokenizer)
        too_long += heldout_too_long
    heldout_texts = {prompt.text for prompt in heldout}
    kept = [prompt for prompt in train if prompt.text not in heldout_texts]
    overlapping = len(train) - len(kept)
    if not kept:
        raise UserError(
            f"data.train: all {len(train)} training prompts are held out too; use another source "
            "or seed for data.heldout"
        )
    unanswered = sum(not p.answer.strip() for p in [*kept, *heldout] if not p.metadata)
    first = {prompt.text: prompt.answer for prompt in reversed(kept)}
    contradicting = sum(first[prompt.text] != prompt.answer for prompt in kept)
    report = PromptReport(len(kept), len(heldout), too_long, overlapping, unanswered, contradicting)
    return PromptSplit(kept, heldout, report)


def _check_templates(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    if "{prompt}" not in data.prompt_template:
        raise UserError(
            f"data.prompt_template is {data.prompt_template!r}: it must contain {{prompt}}"
        )
    if data.system_prompt is not None and not data.chat_template:
        raise UserError("data.system_prompt needs data.chat_template: true")
    if data.chat_template and not tokenizer.chat_template:
        raise UserError(
            "data.chat_template is true, but the tokenizer of actor.path has no chat template: "
            "set it to false and use data.prompt_template"
        )


def _read_prompts(
    data: DataConfig, name: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Prompt], int]:
    """The prompts of one source that fit, and the number that were too long."""
    key = f"data.{name}"
    rows = read_rows(getattr(data, name), key=key)
    if not rows:
        raise UserError(f"{key}: the source has no rows")
    texts = [_render(row, data, tokenizer) for row in rows]
    # a text of so many characters has more tokens than fit: tokenizing it could take hours
    longest_token = max(map(len, tokenizer.get_vocab()), default=1)
    max_chars = data.max_prompt_tokens * longest_token
    num_rows = len(rows)
    shown = [index for index, text in enumerate(texts) if len(text) <= max_chars]
    if not shown:
        raise UserError(
            f"{key}: none of {num_rows} prompts fits data.max_prompt_tokens = "
            f"{data.max_prompt_tokens}; the shortest has {min(map(len, texts))} characters"
        )
    rows, texts = [rows[index] for index in shown], [texts[index] for index in shown]
    prompts = [
        Prompt(
            prompt_id=row.place,
            text=text,
            prompt_ids=ids,
            answer=row.answer,
            demonstration=row.demonstration,
            metadata=row.metadata,
        )
        for row, text, ids in zip(rows, texts, _tokenize(rows, texts, data, tokenizer), strict=True)
    ]
    fitting = [p for p in prompts if len(p.prompt_ids) <= data.max_prompt_tokens]
    if not fitting:
        shortest = min(len(p.prompt_ids) for p in prompts)
        raise UserError(
            f"{key}: none of {num_rows} prompts fits data.max_prompt_tokens = "
            f"{data.max_prompt_tokens}; the shortest has {shortest} tokens"
        )
    return fitting, num_rows - len(fitting)


def _render(row: Row, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text that the policy reads. `prompt_template` is for plain text, not for messages."""
    if isinstance(row.problem, str):
        text = data.prompt_template.replace("{prompt}", row.problem)  # problems contain braces
        if not data.chat_template:
            return text
        messages: list[Any] = [{"role": "user", "content": text}]
    elif not data.chat_template:
        raise UserError(f"{row.place}: the prompt is a list of messages; set data.chat_template")
    else:
        messages = list(row.problem)
    if data.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": data.system_prompt}, *messages]
    try:
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # templates raise what their authors chose
        raise UserError(f"{row.place}: the tokenizer's chat template says: {error}") from None
    return str(rendered)


def _tokenize(
    rows: list[Row], texts: list[str], data: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[int, ...]]:
    """Token ids. A chat template writes its own special tokens; else the tokenizer's start
    token is added, and never its end token, after which a policy has nothing to say."""
    prefix = () if data.chat_template else _start_ids(tokenizer)
    encoded = []
    for row, text in zip(rows, texts, strict=True):
        try:
            # verbose: prompts above the tokenizer's own limit are counted, not warned about
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        except Exception as error:  # `tokenizers` raises Exception itself
            raise UserError(
                f"{row.place}: the tokenizer cannot write the prompt {text!r:.60}: {error}"
            ) from None
        if not ids:
            raise UserError(f"{row.place}: the tokenizer makes nothing of the prompt {text!r:.60}")
        encoded.append((*prefix, *ids))
    return encoded


def _start_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    bos = tokenizer.bos_token_id
    with_special = tokenizer("")["input_ids"]
    return (bos,) if bos is not None and bos in with_special[:1] else ()


def _split(prompts: list[Prompt], data: DataConfig) -> tuple[list[Prompt], list[Prompt]]:
    if len(prompts) <= data.heldout_size:
        raise UserError(
            f"data.heldout_size is {data.heldout_size}, but data.train has {len(prompts)} usable "
            "prompts: lower it, or set data.heldout"
        )
    order = list(range(len(prompts)))
    Random(f"heldout/{data.train.seed}").shuffle(order)
    held = set(order[: data.heldout_size])
    train = [prompt for index, prompt in enumerate(prompts) if index not in held]
    return train, [prompts[index] for index in sorted(held)]


def group_sampling(
    prompts: Sequence[Prompt],
    *,
    num_prompts: int,
    seed: int,
    iteration: int,
    rank: int = 0,
    world_size: int = 1,
) -> list[Prompt]:
    """The prompts of one iteration, this rank's share: a pure function of its arguments.

    The iterations walk seeded permutations of the whole set, one after the other: iteration i
    takes places [i * num_prompts, (i + 1) * num_prompts) of that walk, so no prompt comes
    again before all were used. Rank r has the r-th of `world_size` equal slices. The sampler
    completes each prompt to its group of G responses.

    Source: VAPO section 4.3 (fewer prompts, each sampled G times); off is N * G prompts, G = 1.

    Raises:
        UserError: `num_prompts` cannot be split evenly over the ranks.
    """
    if num_prompts % world_size:
        raise UserError(
            f"components.group_sampling.num_prompts is {num_prompts}, which {world_size} "
            f"processes cannot share evenly: use a multiple of {world_size}"
        )
    share = num_prompts // world_size
    first = iteration * num_prompts + rank * share
    picked = []
    for place in range(first, first + share):
        epoch, index = divmod(place, len(prompts))
        picked.append(prompts[_permutation(len(prompts), seed, epoch)[index]])
    return picked


@lru_cache(maxsize=4)
def _permutation(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(size))
    Random(f"group_sampling/{seed}/{epoch}").shuffle(order)
    return tuple(order)
