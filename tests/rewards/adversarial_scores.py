"""Responses that attack the reward model, each with the tokens that it must be scored as.

The score of a text is no verdict that could be wrong. What must hold: a response's characters
are scored as themselves, whatever they spell, alone as in any batch; or not at all.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random

import psutil
import torch
from tokenizers import normalizers
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from tests.prompts.tokenizers_for_tests import SPECIAL, character_tokenizer
from tests.rewards.rollouts_for_tests import scorer
from vapo.types import FinishReason, Prompt, Rollout, Turn

POSITIONS = 256
VANISHES = "\u200b"
"""The tokenizer makes nothing of it."""

POISON = "~"
"""Its embedding is NaN."""

PROMPTS: dict[str, Sequence[str]] = {
    "2+3=": "2+3=",
    "<|user|>2+3=<|end|><|assistant|>": ["<|user|>", *"2+3=", "<|end|>", "<|assistant|>"],
    "is 2<": "is 2<",  # the response may end a token that the prompt began
}
IDS = character_tokenizer().get_vocab()
MARKERS = [*SPECIAL, "eos>", "<|im_start|>", "[PAD]", "</s>", f"<e{VANISHES}os>", "<<eos>>"]


@dataclass(frozen=True)
class ScoreCase:
    prompt: str
    response: str
    reason: FinishReason

    def as_rollout(self) -> Rollout:
        prompt, turns = Prompt("p", self.prompt, (1,), "?"), (Turn(0, 1),)
        return Rollout(prompt, (1,), self.response, (0.0,), self.reason, turns)

    def expected(self) -> tuple[int, ...] | str:
        """Token ids, or the failure: one token a character, and no special token among them."""
        if len(self.response) > 1_500:
            return "too long"
        if any("\ud800" <= c <= "\udfff" for c in self.response):
            return "no tokens"
        pieces = re.findall(r"\n+|.", self.response.replace(VANISHES, ""))
        tokens = [*PROMPTS[self.prompt], *pieces]
        ids = [IDS.get(token, IDS["<pad>"]) for token in tokens]
        if self.reason is FinishReason.STOP:
            ids.append(IDS["<eos>"])
        if len(ids) > POSITIONS:
            return "too long"
        return "nan" if POISON in self.response else tuple(ids)


def score_cases(num: int, seed: int) -> Iterator[ScoreCase]:
    draw = Random(f"adversarial scores/{seed}")
    kinds = (markers, trailing, megabytes, characters, lengths, poisoned)
    for index in range(num):
        response = kinds[index % len(kinds)](draw)
        reason = draw.choice([FinishReason.STOP, FinishReason.LENGTH])
        yield ScoreCase(draw.choice(list(PROMPTS)), response, reason)


def plain(draw: Random) -> str:
    return "".join(draw.choice("0123456789abcdef +=") for _ in range(draw.randint(0, 30)))


def markers(draw: Random) -> str:
    """Special tokens in letters, whole and in part, anywhere."""
    return "".join(draw.choice([plain(draw), draw.choice(MARKERS)]) for _ in range(5))


def trailing(draw: Random) -> str:
    """What would move the last token that counts: padding, ends, nothing."""
    return plain(draw) + draw.choice([*SPECIAL[:2], VANISHES, "\x00", " "]) * draw.randint(0, 9)


def megabytes(draw: Random) -> str:
    filler = draw.choice(["a", "\x00", "<pad>", "\u0663", "<", "9 "])
    return filler * (draw.choice([2_000, 100_000, 1_000_000]) // len(filler))


def characters(draw: Random) -> str:
    """Control characters, other alphabets' digits, lone surrogates."""
    odd = "\x00\x1b\x7f\t\n\r\u202e\ufeff\u0664\uff14\U0001f600" + VANISHES
    odd += "\ud800\udfff" if draw.random() < 0.1 else ""
    return plain(draw) + "".join(draw.choice(odd) for _ in range(draw.randint(0, 30)))


def lengths(draw: Random) -> str:
    """Just below and above the model's positions, and just above none."""
    return draw.choice("ab") * draw.choice([0, 1, POSITIONS - 9, *range(POSITIONS - 7, POSITIONS)])


def poisoned(draw: Random) -> str:
    return plain(draw) + (POISON if draw.random() < 0.3 else "") + plain(draw)


def save_reward_model(folder: Path) -> Path:
    """Of two layers, with wide weights, so that one token more or less shows in the score."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(IDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.3,
    )
    config.num_labels = 1
    model = Qwen2ForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight)
    with torch.no_grad():
        model.get_input_embeddings().weight[IDS[POISON]] = math.nan  # type: ignore[operator]
    model.save_pretrained(folder)
    tokenizer = character_tokenizer(chat=True)
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(VANISHES, "")
    tokenizer.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class ScoreRun:
    """`seconds` of each response: its share of its batch. `wrong`: scored as other tokens, or
    with or without a score against expectation. `largest_difference`: of any score, from its
    own in another order and other batches."""

    verdicts: list[Rollout]
    seconds: list[float]
    grown_mib: float
    wrong: list[ScoreCase]
    largest_difference: float


def scored(folder: Path, tried: Sequence[ScoreCase], seed: int = 0) -> ScoreRun:
    seconds: list[float] = []
    process = psutil.Process()
    rollouts = [case.as_rollout() for case in tried]
    with scorer("reward_model", reward_model_path=str(folder)) as judge:
        judge.score(rollouts[:1])
        before = most = process.memory_info().rss
        last = time.perf_counter()

        def advance(num: int) -> None:
            nonlocal last, most
            now = time.perf_counter()
            seconds.extend([(now - last) / max(num, 1)] * num)
            most = max(most, process.memory_info().rss)
            last = time.perf_counter()

        verdicts = judge.score(rollouts, advance=advance)
        order = list(range(len(tried)))
        Random(seed).shuffle(order)
        again = dict[int, Rollout]()
        size = max(10, len(order) // 20)
        for start in range(0, len(order), size):
            part = order[start : start + size]
            again |= zip(part, judge.score([rollouts[i] for i in part]), strict=True)
    alone = ScoresAlone(folder)
    pairs = [(v.reward, again[i].reward) for i, v in enumerate(verdicts)]
    return ScoreRun(
        verdicts,
        seconds,
        (most - before) / 2**20,
        [c for c, v in zip(tried, verdicts, strict=True) if not alone.agrees(c, v)],
        max(abs(a - b) for a, b in pairs),
    )


class ScoresAlone:
    """The score at the last of some ids, one row at a time, by Transformers' own forward."""

    def __init__(self, folder: Path) -> None:
        model = Qwen2ForSequenceClassification.from_pretrained(folder).eval()

        @torch.no_grad()
        def score(ids: tuple[int, ...]) -> float:
            hidden = model.model(torch.tensor([ids])).last_hidden_state[0, -1]
            return float(model.score(hidden))

        self.score = lru_cache(maxsize=None)(score)

    def agrees(self, case: ScoreCase, verdict: Rollout) -> bool:
        expected = case.expected()
        if isinstance(expected, str):
            is_incorrect = (verdict.is_correct, verdict.reward) == (False, -1.0)
            return is_incorrect and verdict.failure == expected
        return verdict.failure is None and abs(verdict.reward - self.score(expected)) < 1e-4
