"""The token that ends a policy's turn, where the tokenizer's own end token is another one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from transformers import PreTrainedTokenizerFast

from tests.config.fits import fit_config
from tests.networks.chat_tokenizers import SHAPES, chat_tokenizer, ids_of, made_tokenizer, text_of
from tests.rollouts.scripted_episodes import ScriptedEnvironments
from tests.rollouts.test_episodes import config, counting
from tests.rollouts.test_stored_rollouts import foreign
from tests.tiny_model import tiny_model
from vapo.commands.sft import prompt_example
from vapo.networks.end_tokens import folder_end_tokens
from vapo.networks.importing import Source, read_source
from vapo.networks.loading import load_tokenizer
from vapo.rollouts.demonstrated_episodes import play_demonstrations
from vapo.rollouts.stored_rollouts import read_rollouts
from vapo.studies.inspection import truth
from vapo.studies.inspection.findings import Findings
from vapo.studies.inspection.responses import InspectedResponse
from vapo.studies.inspection.text_tokens import TextTokens
from vapo.types import FinishReason, Prompt

TURN_ENDS = {
    "qwen_base": "<|im_end|>",
    "gemma": "<end_of_turn>",
    "phi3": "<|end|>",
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
}


def folder(
    path: Path, tokenizer: PreTrainedTokenizerFast, ends: int | list[int] | None = None
) -> Path:
    """A policy's folder, whose generation config names these end tokens, or the tokenizer's."""
    model: Any = tiny_model(vocab_size=len(tokenizer), bos_token_id=None)
    model.generation_config.eos_token_id = tokenizer.eos_token_id if ends is None else ends
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def taught(demonstration: str, tokenizer: PreTrainedTokenizerFast) -> str:
    prompt = Prompt("p", "a", (65,), "1", demonstration=demonstration)
    _, response_ids, has_loss = prompt_example(prompt, tokenizer)
    assert has_loss == (True,) * len(response_ids)
    return text_of(response_ids, tokenizer)


@pytest.mark.parametrize(("name", "end"), TURN_ENDS.items())
def test_a_demonstration_ends_as_the_template_ends_a_turn(name: str, end: str) -> None:
    """Or as it does already; what stands behind its end nobody would sample."""
    tokenizer = chat_tokenizer(name)
    own = str(tokenizer.eos_token)
    assert taught("one", tokenizer) == f"one{end}"
    for written in (f"one{end}", f"one{end}\n", f"one{end}{end}", f"one{end} \n{own}\n"):
        assert taught(written, tokenizer) == f"one{end}"
    assert taught(f"one{own}", tokenizer) == f"one{own}"
    assert taught(f"a{end}b", tokenizer).endswith(f"b{end}"), "not in the middle"
    assert taught("one\n", tokenizer) == f"one\n{end}"
    assert taught("", tokenizer) == end


@pytest.mark.parametrize("name", TURN_ENDS)
def test_without_a_chat_template_it_is_the_tokenizers_own(name: str) -> None:
    shape = replace(SHAPES[name], template="")
    tokenizer = made_tokenizer(shape)
    assert taught("one", tokenizer) == f"one{tokenizer.eos_token}"


def test_a_template_that_ends_turns_with_text_leaves_the_tokenizers_own() -> None:
    """Or that writes no assistant's message, or refuses one without a system message."""
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    first = "<|im_start|>{{ messages[0].content }}<|im_end|>"
    strict = (
        "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}"
        + SHAPES["qwen_base"].template
    )
    own = "<|endoftext|>"
    for template, end in ((plain, own), (first, own), (strict, "<|im_end|>")):
        tokenizer = made_tokenizer(replace(SHAPES["qwen_base"], template=template))
        assert taught("one", tokenizer) == f"one{end}"


def test_turns_of_a_demonstrated_episode_end_so() -> None:
    """The template's text between two turns has one end token, which was sampled."""
    tokenizer = chat_tokenizer("qwen_base")
    rows = [
        Prompt("p", "a", (65,), "2", demonstration=turns)
        for turns in (("one", "two"), ("one<|im_end|>\n", "two<|im_end|>"))
    ]
    options = config()
    options.data.chat_template = True
    options.rollouts.max_response_tokens = 200
    for episode in play_demonstrations(
        rows, ScriptedEnvironments(counting), config=options, tokenizer=tokenizer
    ):
        text = text_of(episode.response_ids, tokenizer)
        assert text.endswith(
            "one<|im_end|>\n<|im_start|>user\no1<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>"
        )
        assert text.count("one<|im_end|>") == 1


def test_stored_rows_end_with_any_end_token(tmp_path: Path) -> None:
    """Of the tokenizer, the generation config or the template; text gets the template's."""
    tokenizer = chat_tokenizer("llama3")
    also = ids_of("<|python_tag|>", tokenizer)[0]
    policy = folder(tmp_path / "policy", tokenizer, [tokenizer.eos_token_id, also])
    texts = ["1<|end_of_text|>", "1<|eot_id|>", "1<|python_tag|>", "1", "1<|start_header_id|>"]
    written: list[dict[str, Any]] = [
        {"group": i, "prompt_ids": [65], "response_ids": ids_of(text, tokenizer), "reward": 1.0}
        for i, text in enumerate(texts)
    ]
    written += [
        {"group": i, "prompt_ids": [65], "response": text, "reward": 1.0}
        for i, text in enumerate(("1", "1<|eot_id|>", "1<|end_of_text|>\n"), start=9)
    ]
    rows = foreign(tmp_path / "f.parquet", written)

    def read(is_chat: bool) -> list[tuple[str, bool]]:
        options = fit_config(
            tmp_path,
            f"actor.path={policy}",
            f"data.chat_template={str(is_chat).lower()}",
            "rollouts.max_response_tokens=60",
        )
        stored, _ = read_rollouts(options, rows, load_tokenizer(str(policy)))
        return [
            (
                text_of(one.rollout.response_ids, tokenizer),
                one.rollout.finish_reason is FinishReason.STOP,
            )
            for one in stored
        ]

    stops = [True, True, True, False, False]
    in_chat = [("1<|eot_id|>", True), ("1<|eot_id|>", True), ("1<|end_of_text|>", True)]
    assert read(True) == [*zip(texts, stops, strict=True), *in_chat]
    assert [has_ended for _, has_ended in read(False)[:5]] == [True, False, True, False, False]
    assert read(False)[5] == ("1<|end_of_text|>", True)


def test_an_end_that_a_dump_lost_is_the_templates() -> None:
    tokenizer = chat_tokenizer("gemma")
    row = InspectedResponse("x, row 1", "a", "one", 1.0, "0", values=(0.0,) * 4)
    completed = TextTokens(tokenizer).complete(row)
    assert text_of(completed.response_ids or (), tokenizer) == "one<end_of_turn>"


@pytest.mark.parametrize(
    ("said", "text", "reason"),
    [
        ("1<end_of_turn>", "1", FinishReason.STOP),
        ("1<eos>", "1", FinishReason.STOP),
        ("1<end_of_turn><eos><pad>", "1", FinishReason.STOP),
        ("1<start_of_turn>2", "1<start_of_turn>2", FinishReason.LENGTH),
    ],
)
def test_others_responses_are_continued_from_where_they_ended(
    tmp_path: Path, said: str, text: str, reason: FinishReason
) -> None:
    tokenizer = chat_tokenizer("gemma")
    response_ids = tuple(ids_of(said, tokenizer))
    row = InspectedResponse("x", "a", said, 1.0, "0", prompt_ids=(65,), response_ids=response_ids)
    ends = folder_end_tokens(str(folder(tmp_path / "policy", tokenizer)), tokenizer)
    findings = Mock(spec=Findings, is_right=lambda _: True)
    made = truth._rollout(row, findings, tokenizer, ends.ids, keeps_special=True)
    assert (made.response_text, made.finish_reason) == (text, reason)


def test_import_names_every_end_token(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("llama3")
    read = read_source(Source(str(folder(tmp_path / "policy", tokenizer))), "float32")
    named: Any = read.model.generation_config
    assert named.eos_token_id == [tokenizer.eos_token_id, *ids_of("<|eot_id|>", tokenizer)]
