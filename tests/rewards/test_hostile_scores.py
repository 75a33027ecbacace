"""Text that attacks the reward model's score; and what a score must not depend on."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from tests.prompts.tokenizers_for_tests import character_tokenizer
from tests.rewards import adversarial_scores
from tests.rewards.adversarial_scores import (
    IDS,
    POSITIONS,
    ScoreCase,
    ScoresAlone,
    save_reward_model,
    score_cases,
    scored,
)
from tests.rewards.rollouts_for_tests import scorer
from vapo.errors import UserError
from vapo.rewards.reward_model import ModelJudge
from vapo.types import FinishReason, Rollout

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.fixture(autouse=True)
def poisoned_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with such weights is refused (`tests/networks/test_model_files.py`); here one
    of them stands for a network that gives NaN for some inputs."""
    monkeypatch.setattr("vapo.networks.loading._check_finite", lambda path, model: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward_model(tmp_path_factory.mktemp("reward_model"))


def score(folder: Path, *cases: ScoreCase, **fields: Any) -> list[Rollout]:
    with scorer("reward_model", reward_model_path=str(folder), **fields) as model:
        return model.score([case.as_rollout() for case in cases])


@pytest.mark.slow
def test_every_text_is_scored_as_its_own_characters(folder: Path) -> None:
    run = scored(folder, list(score_cases(180, seed=1)))
    assert run.wrong == []
    assert run.largest_difference < 1e-5
    assert {v.failure for v in run.verdicts} == {None, "nan", "too long", "no tokens"}
    assert all(math.isfinite(v.reward) for v in run.verdicts)
    assert run.grown_mib < 200
    assert max(run.seconds) < 2


def test_the_attacks_work_on_one_that_reads_special_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the same texts, as a tokenizer reads them that is asked for no more."""
    monkeypatch.setattr(
        ModelJudge, "_encode", lambda self, prompt, response: self._tokenize(prompt + response)
    )
    run = scored(folder, list(score_cases(60, seed=1)))
    assert len(run.wrong) > 10
    assert {len(case.response) < POSITIONS for case in run.wrong} == {True}


@pytest.mark.parametrize(
    ("prompt", "response"),
    [("2+3=", "5<eos>"), ("is 2<", "eos>"), ("2+3=", "5<pad><pad>"), ("2+3=", "<|assistant|>5")],
)
def test_text_that_spells_a_special_token_is_scored_as_text(
    folder: Path, prompt: str, response: str
) -> None:
    """By hand: one token a character; the end token is only the one that a stop appends."""
    alone = ScoresAlone(folder)
    characters = [IDS[c] for c in prompt + response]
    cut, stopped = score(
        folder, ScoreCase(prompt, response, LENGTH), ScoreCase(prompt, response, STOP)
    )
    assert cut.reward == pytest.approx(alone.score(tuple(characters)), abs=1e-5)
    assert stopped.reward == pytest.approx(alone.score((*characters, IDS["<eos>"])), abs=1e-5)


def test_a_text_that_cannot_fit_is_not_even_tokenized(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenized: list[int] = []
    tokenize = ModelJudge._tokenize

    def watched(self: ModelJudge, text: str, **options: bool) -> list[int]:
        tokenized.append(len(text))
        return tokenize(self, text, **options)

    monkeypatch.setattr(ModelJudge, "_tokenize", watched)
    began = time.perf_counter()
    long, fits = score(
        folder, ScoreCase("2+3=", "<eos>" * 2_000_000, STOP), ScoreCase("2+3=", "5", STOP)
    )
    assert time.perf_counter() - began < 10
    assert (long.failure, long.reward, fits.failure) == ("too long", -1.0, None)
    assert max(tokenized) == 5


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_is_a_failure(
    folder: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    def call(self: ModelJudge, rollouts: Any) -> list[float | str]:
        return [0.5, value]

    monkeypatch.setattr(ModelJudge, "_scores", call)
    case = ScoreCase("2+3=", "5", STOP)
    good, bad = score(folder, case, case, incorrect=-0.25)
    assert (good.is_correct, good.reward, good.failure) == (True, 0.5, None)
    assert (bad.is_correct, bad.reward, bad.failure) == (False, -0.25, "nan")
    at_threshold = score(folder, case, case, reward_model_threshold=0.5)[0]
    assert (at_threshold.is_correct, at_threshold.reward) == (False, 0.5)


def saved_with(folder: Path, tokenizer: PreTrainedTokenizerFast, path: Path) -> Path:
    for file in (folder / "config.json", folder / "model.safetensors"):
        path.mkdir(exist_ok=True)
        (path / file.name).write_bytes(file.read_bytes())
    tokenizer.save_pretrained(path)
    return path


def test_the_end_token_counts_where_it_also_pads(folder: Path, tmp_path: Path) -> None:
    """Transformers' own forward would take the end token for padding, and read the one before."""
    tokenizer = character_tokenizer()
    tokenizer.pad_token = "<eos>"
    path = saved_with(folder, tokenizer, tmp_path / "pads")
    stopped, other = score(path, ScoreCase("2+3=", "5", STOP), ScoreCase("2+3=", "5+5+5", LENGTH))
    alone = ScoresAlone(folder)
    five = tuple(IDS[c] for c in "2+3=5")
    assert stopped.reward == pytest.approx(alone.score((*five, IDS["<eos>"])), abs=1e-5)
    assert abs(stopped.reward - alone.score(five)) > 0.01
    assert other.reward == pytest.approx(alone.score((*five, *(IDS[c] for c in "+5+5"))), abs=1e-5)


def test_texts_begin_with_the_start_token_of_tokenizers_that_have_one(
    folder: Path, tmp_path: Path
) -> None:
    """As `vapo reward-model` trains; a chat template has written its own."""
    path = saved_with(folder, character_tokenizer(adds_bos_and_eos=True), tmp_path / "starts")
    plain, own = score(path, ScoreCase("2+3=", "5", LENGTH), ScoreCase("<bos>2+3=", "5", LENGTH))
    expected = ScoresAlone(folder).score((IDS["<bos>"], *(IDS[c] for c in "2+3=5")))
    assert [plain.reward, own.reward] == pytest.approx([expected, expected], abs=1e-5)


def test_a_special_token_that_the_tokenizer_makes_of_letters_anyway_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokenize(self: ModelJudge, text: str, **options: bool) -> list[int]:
        return [IDS["<eos>"] if "<eos>" in text else IDS["a"]]

    monkeypatch.setattr(ModelJudge, "_tokenize", tokenize)
    bad, good = score(folder, ScoreCase("2+3=", "<eos>", LENGTH), ScoreCase("2+3=", "5", LENGTH))
    assert (bad.failure, good.failure) == ("special tokens", None)


def test_a_model_that_is_not_read_at_the_last_token_is_refused(tmp_path: Path) -> None:
    """Its text would need other special tokens, and its score be read elsewhere."""
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    config = BertConfig(vocab_size=len(IDS), num_hidden_layers=1, **sizes)
    config.num_labels = 1
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    message = r"rewards\.reward_model_path: .*BertForSequenceClassification has no .* `score`"
    with pytest.raises(UserError, match=message):
        scorer("reward_model", reward_model_path=str(tmp_path))


def test_a_folder_without_the_head_is_refused(tmp_path: Path) -> None:
    """It would be scored by random numbers."""
    save_reward_model(tmp_path)
    model = adversarial_scores.Qwen2ForSequenceClassification.from_pretrained(tmp_path)
    weights = {k: v for k, v in model.state_dict().items() if not k.startswith("score")}
    model.save_pretrained(tmp_path, state_dict=weights)
    assert torch.isfinite(model.score.weight).all()
    with pytest.raises(UserError, match=r"rewards\.reward_model_path: .*score\.weight"):
        scorer("reward_model", reward_model_path=str(tmp_path))
