"""From rows to prompts: templates, tokens, the budget, and the two sets kept apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.prompts.tokenizers_for_tests import character_tokenizer
from vapo.config.kinds import make
from vapo.config.schema import DataConfig, SourceConfig
from vapo.errors import UserError
from vapo.prompts.load import PromptSplit, load_prompts


def source(folder: Path, name: str, problems: list[Any]) -> SourceConfig:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "answer": "1"}) + "\n" for p in problems))
    return make(SourceConfig, path=str(path))


def both(folder: Path, train: list[Any], heldout: list[Any], **fields: Any) -> DataConfig:
    return DataConfig(
        train=source(folder, "train", train), heldout=source(folder, "heldout", heldout), **fields
    )


def texts(split: PromptSplit) -> tuple[list[str], list[str]]:
    return [p.text for p in split.train], [p.text for p in split.heldout]


def test_template_and_tokens(tmp_path: Path):
    data = both(tmp_path, [r"\frac{1}{2}"], ["b"], prompt_template="Q: {prompt} A:")
    prompt = load_prompts(data, character_tokenizer()).train[0]
    assert prompt.text == r"Q: \frac{1}{2} A:"
    assert len(prompt.prompt_ids) == len(prompt.text)
    tokens = character_tokenizer().convert_ids_to_tokens(list(prompt.prompt_ids))
    assert "".join(tokens) == prompt.text
    assert prompt.prompt_id.endswith("train.jsonl:1")


def test_start_token_is_kept_and_end_token_is_not(tmp_path: Path):
    data = both(tmp_path, ["abc"], ["b"])
    tokenizer = character_tokenizer(adds_bos_and_eos=True)
    ids = load_prompts(data, tokenizer).train[0].prompt_ids
    assert ids[0] == tokenizer.bos_token_id
    assert len(ids) == 4
    assert tokenizer.eos_token_id not in ids


def test_chat_template_with_system_prompt_adds_no_second_start_token(tmp_path: Path):
    data = both(tmp_path, ["hi"], ["b"], chat_template=True, system_prompt="Think.")
    tokenizer = character_tokenizer(chat=True, adds_bos_and_eos=True)
    prompt = load_prompts(data, tokenizer).train[0]
    assert prompt.text == "<|system|>Think.<|end|><|user|>hi<|end|><|assistant|>"
    assert prompt.prompt_ids[0] == tokenizer.convert_tokens_to_ids("<|system|>")
    assert tokenizer.bos_token_id not in prompt.prompt_ids
    assert prompt.prompt_ids[-1] == tokenizer.convert_tokens_to_ids("<|assistant|>")


def test_messages_as_prompt(tmp_path: Path):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    own_system = [{"role": "system", "content": "mine"}, messages[0]]
    data = both(
        tmp_path, [messages, own_system], ["z"], chat_template=True, system_prompt="general"
    )
    first, second = load_prompts(data, character_tokenizer(chat=True)).train
    assert first.text == (
        "<|system|>general<|end|><|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>"
    )
    assert second.text == "<|system|>mine<|end|><|user|>a<|end|><|assistant|>"
    with pytest.raises(UserError, match=r"train\.jsonl:1: the prompt is a list of messages"):
        load_prompts(both(tmp_path, [messages], ["z"]), character_tokenizer())


def test_too_long_prompts_are_left_out_and_counted_never_cut(tmp_path: Path):
    data = both(tmp_path, ["a" * 5, "b" * 6, "c" * 7], ["d" * 6, "e" * 5], max_prompt_tokens=5)
    split = load_prompts(data, character_tokenizer())
    assert texts(split) == (["aaaaa"], ["eeeee"])
    assert split.report.num_too_long == 3
    assert "left out 3 longer than data.max_prompt_tokens" in split.report.describe()
    data.max_prompt_tokens = 4
    with pytest.raises(UserError, match=r"data\.train: none of 3 prompts fits .*= 4; .* 5 tokens"):
        load_prompts(data, character_tokenizer())


def test_held_out_prompts_are_not_trained_on(tmp_path: Path):
    data = both(tmp_path, ["a", "b", "c", "b"], ["b", "z"])
    split = load_prompts(data, character_tokenizer())
    assert texts(split) == (["a", "c"], ["b", "z"])
    assert split.report.num_overlapping == 2
    assert (split.report.num_train, split.report.num_heldout) == (2, 2)
    assert "left out 2 training prompts that are held out too" in split.report.describe()
    with pytest.raises(UserError, match="all 1 training prompts are held out too"):
        load_prompts(both(tmp_path, ["z"], ["z"]), character_tokenizer())


def test_a_source_of_equal_prompts_cannot_be_split(tmp_path: Path):
    data = both(tmp_path, ["a"] * 9, ["z"])
    data.heldout, data.heldout_size = None, 2
    with pytest.raises(UserError, match=r"data\.train: all 7 .* the source repeats the same"):
        load_prompts(data, character_tokenizer())


def test_split_off_the_training_source(tmp_path: Path):
    problems = [f"p{i}" for i in range(50)] + ["p0", "p1", "p2"]
    data = DataConfig(train=source(tmp_path, "train", problems), heldout_size=10)
    split = load_prompts(data, character_tokenizer())
    train, heldout = texts(split)
    assert len(heldout) == 10
    assert not set(train) & set(heldout)
    assert set(train) | set(heldout) == set(problems)
    assert len(train) + split.report.num_overlapping == 43
    assert texts(load_prompts(data, character_tokenizer())) == (train, heldout)
    data.train.seed = 1  # type: ignore[attr-defined]
    assert texts(load_prompts(data, character_tokenizer()))[1] != heldout
    data.heldout_size = 53
    with pytest.raises(UserError, match=r"data\.heldout_size is 53, but data\.train has 53"):
        load_prompts(data, character_tokenizer())


def test_procedural_sets_do_not_overlap():
    train = make(
        SourceConfig,
        kind="procedural",
        task="state_tracking",
        num_examples=3000,
        options={"max_steps": 2},
    )
    heldout = make(
        SourceConfig,
        kind="procedural",
        task="state_tracking",
        num_examples=100,
        seed=1,
        options={"max_steps": 2},
    )
    split = load_prompts(DataConfig(train=train, heldout=heldout), character_tokenizer())
    assert split.report.num_overlapping > 0  # 2000 problems of two swaps: collisions happen
    assert not {p.text for p in split.train} & {p.text for p in split.heldout}
    assert split.train[0].demonstration is not None


def test_unusable_settings(tmp_path: Path):
    plain = character_tokenizer()
    with pytest.raises(UserError, match=r"has no chat template: put .* chat_template\.jinja"):
        load_prompts(both(tmp_path, ["a"], ["b"], chat_template=True), plain)
    with pytest.raises(UserError, match=r"data\.heldout: .* has no rows"):
        load_prompts(both(tmp_path, ["a"], []), plain)
    with pytest.raises(UserError, match=r"data\.train: .* has no rows"):
        load_prompts(both(tmp_path, [], ["a"]), plain)


def test_chat_template_that_refuses_names_the_row(tmp_path: Path):
    tokenizer = character_tokenizer(chat=True)
    tokenizer.chat_template = "{{ raise_exception('user must come first') }}"
    with pytest.raises(UserError, match=r"train\.jsonl:1: .*chat template says: user must"):
        load_prompts(both(tmp_path, ["a"], ["b"], chat_template=True), tokenizer)


def test_character_that_the_tokenizer_cannot_write_names_the_row(tmp_path: Path):
    strict = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1}, unk_token=None))
    strict.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=strict, eos_token="<eos>")
    with pytest.raises(UserError, match=r"train\.jsonl:2: the tokenizer cannot write .*'ab'"):
        load_prompts(both(tmp_path, ["a", "ab"], ["aa"]), tokenizer)
