"""`vapo sft` and long rows: refused before anything is trained, with a count and a name."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.networks.chat_tokenizers import chat_tokenizer, text_of
from tests.rollouts.test_ends_of_turns import folder
from vapo.commands import sft
from vapo.config import SftConfig
from vapo.config.loading import load_config
from vapo.errors import UserError
from vapo.networks.loading import load_tokenizer


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of 128 positions, whose tokenizer has a token for each letter."""
    return folder(tmp_path_factory.mktemp("policy"), chat_tokenizer("qwen_base"))


def config_of(tmp_path: Path, policy: Path, worked: list[str], *overrides: str) -> SftConfig:
    rows = [{"prompt": f"{i}", "answer": "1", "worked": text} for i, text in enumerate(worked)]
    for name, some in (("train", rows), ("heldout", [{"prompt": "x" * 20, "answer": "1"}])):
        lines = "".join(f"{json.dumps(row)}\n" for row in some)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    own = [
        *(f"data.train.path={tmp_path / 'train.jsonl'}", "data.train.demonstration_column=worked"),
        *(f"data.heldout={{kind: jsonl, path: {tmp_path / 'heldout.jsonl'}}}",),
        *("data.train.kind=jsonl", f"model_path={policy}", f"export_dir={tmp_path / 'out'}"),
        *("rewards.verifier=exact", "rollouts.max_response_tokens=100", "trainer.num_threads=1"),
        *("evaluation.k=1", "num_steps=1", "batch_size=2"),
        f"tracking.uri=sqlite:///{tmp_path / 'mlflow.db'}",
    ]
    return load_config(SftConfig, [], [*own, *overrides])


def refused(monkeypatch: pytest.MonkeyPatch, config: SftConfig) -> str:
    def trained(*_: Any, **__: Any) -> None:
        raise AssertionError("trained")

    monkeypatch.setattr(sft, "train_supervised", trained)
    with pytest.raises(UserError) as error:
        sft.run(config)
    assert not Path(config.export_dir).exists()
    return str(error.value)


def test_rows_that_have_no_position(
    tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """127 letters, the prompt's one and the end token are 129."""
    config = config_of(
        tmp_path, policy, ["a", "b" * 127, "c" * 140], "rollouts.max_response_tokens=999"
    )
    said = refused(monkeypatch, config)
    assert "2 of 3 rows are too long" in said
    assert f"the longest is {tmp_path / 'train.jsonl'}:3 with 142 tokens" in said
    assert "128 positions" in said


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("rollouts.max_response_tokens=10",), "rollouts.max_response_tokens is 10"),
        (("evaluation.max_response_tokens=10",), "evaluation.max_response_tokens is 10"),
    ],
)
def test_demonstrations_that_the_evaluation_has_no_room_for(
    tmp_path: Path,
    policy: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    key: str,
) -> None:
    config = config_of(tmp_path, policy, ["b" * 9, "c" * 10], *overrides)
    said = refused(monkeypatch, config)
    assert "1 of 2 rows are too long" in said
    assert "train.jsonl:2 with 11 tokens" in said
    assert key in said


def test_a_held_out_prompt_that_leaves_no_position(
    tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its evaluation would be refused, after the training."""
    config = config_of(tmp_path, policy, ["a"], "rollouts.max_response_tokens=109")
    assert "heldout.jsonl:1 has 20 tokens; with 109 of response" in refused(monkeypatch, config)


def test_rows_that_just_fit_are_trained_and_the_folder_names_their_end(
    tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base model's generation config had the tokenizer's alone: sampling would go on."""
    trained: list[Any] = []

    def train(module: Any, batches: Any, **_: Any) -> None:
        trained.extend(batches)

    logger = Mock(describe=lambda: "")
    measured = Mock(metrics={"eval/avg_at_k": 1.0})
    monkeypatch.setattr(sft, "recorded_run", lambda *_: nullcontext((Mock(), Mock(), logger)))
    monkeypatch.setattr(sft, "train_supervised", train)
    monkeypatch.setattr(sft, "policy_player_of", lambda *_: nullcontext(Mock()))
    monkeypatch.setattr(sft, "evaluate", lambda *_, **__: measured)
    options = ("rollouts.max_response_tokens=60", "data.chat_template=true")
    sft.run(config_of(tmp_path, policy, ["b" * 59] * 2, *options))
    assert len(trained) == 1
    tokenizer = load_tokenizer(str(tmp_path / "out"))
    named = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    assert [text_of([end], tokenizer) for end in named] == ["<|endoftext|>", "<|im_end|>"]
