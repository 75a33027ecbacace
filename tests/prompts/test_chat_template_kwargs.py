"""`data.chat_template_kwargs`: given in any way, read wherever the template is, never ignored."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.config.fits import fit_config
from tests.networks.chat_tokenizers import text_of
from tests.prompts.test_load_prompts import both
from tests.prompts.thinking_chat import ASKS, NO_THOUGHTS, OFF, TEMPLATE, thinking_tokenizer
from tests.user_code.test_chat_templates import THINKING, with_template
from vapo.commands.python_values import as_overrides
from vapo.config import FitConfig, RewardModelConfig, SftConfig
from vapo.config.loading import from_yaml, load_config
from vapo.config.options import describe, describe_keys
from vapo.config.schema import DataConfig
from vapo.config.written import flatten, to_yaml
from vapo.errors import UserError
from vapo.networks.end_tokens import end_tokens, template_end
from vapo.prompts.chat_arguments import check_template_variables
from vapo.prompts.critic_prompts import render
from vapo.prompts.load import load_prompts
from vapo.prompts.spelled_text import SpelledText
from vapo.rollouts.observations import ObservationTokens, chat_frame
from vapo.runs.run_dirs import identity_of
from vapo.user_code.chat_templates import template_arguments

KEY = "data.chat_template_kwargs"
CHAT = "data.chat_template=true"


def prompt_of(tmp_path: Path, problem: Any = "1+1?", **fields: Any) -> Any:
    data = both(tmp_path, [problem], ["z"], chat_template=True, **fields)
    return load_prompts(data, thinking_tokenizer()).train[0]


@pytest.mark.parametrize(
    ("arguments", "opening"),
    [
        ({}, ""),
        (OFF, NO_THOUGHTS),
        ({"enable_thinking": True}, ""),
        ({"opens_thoughts": 1}, "<think>\n"),
    ],
)
def test_prompts_are_those_of_transformers_with_the_same_variables(
    tmp_path: Path, arguments: dict[str, Any], opening: str
) -> None:
    prompt = prompt_of(tmp_path, chat_template_kwargs=arguments)
    assert prompt.text == ASKS.format("1+1?") + opening
    messages = [{"role": "user", "content": "1+1?"}]
    options: dict[str, Any] = {"add_generation_prompt": True, **arguments}
    tokenizer = thinking_tokenizer()
    assert prompt.text == tokenizer.apply_chat_template(messages, tokenize=False, **options)
    assert list(prompt.prompt_ids) == tokenizer(prompt.text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    "value", ["1", "true", "null", 1, 1.5, None, [1, "1", {"a": None}], {"b": "2"}]
)
def test_values_stay_what_they_are(tmp_path: Path, value: Any) -> None:
    """A text that looks like a number is text to the template, too; by all ways to give it."""
    written = json.dumps(value)
    from_files = fit_config(
        tmp_path,
        overlay=f"data: {{chat_template: true, chat_template_kwargs: {{note: {written}}}}}",
    )
    by_key = fit_config(tmp_path, CHAT, f"{KEY}.note={written}")
    by_mapping = fit_config(tmp_path, CHAT, f"{KEY}={{note: {written}}}")
    python = {"data.chat_template": True, KEY: {"note": value}}
    from_python = fit_config(tmp_path, *as_overrides(python))
    for config in (from_files, by_key, by_mapping, from_python):
        assert config.data.chat_template_kwargs == {"note": value}
        assert type(config.data.chat_template_kwargs["note"]) is type(value)
        recorded = from_yaml(FitConfig, to_yaml(config), source="config.yaml")
        assert recorded.data.chat_template_kwargs == {"note": value}
    text = prompt_of(tmp_path, chat_template_kwargs={"note": value}).text
    assert text.endswith(f"assistant\n{value}|{isinstance(value, str)}")


def test_they_are_in_the_runs_identity(tmp_path: Path) -> None:
    on, off, again = (
        fit_config(tmp_path, CHAT, f"{KEY}.enable_thinking={value}")
        for value in ("true", "false", "false")
    )
    assert identity_of(on) != identity_of(off) == identity_of(again)
    assert flatten(off)[f"{KEY}.enable_thinking"] is False


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["{}.enable_thinking=false"], r"has no effect without data\.chat_template=true"),
        ([CHAT, "{}.messages=[]"], r"kwargs\.messages cannot be set: the messages are those"),
        ([CHAT, "{}.add_generation_prompt=false"], "add_generation_prompt cannot be set"),
        ([CHAT, "{}.tokenize=true"], "tokenize cannot be set: it is an argument of the tokenizer"),
        ([CHAT, "{}.return_dict=true"], "return_dict cannot be set"),
        ([CHAT, "{}.bos_token=x"], r"bos_token cannot be set: it is the tokenizer's"),
        ([CHAT, "{}.tools=[]"], "tools cannot be set"),
        ([CHAT, "{}=false"], "expects mapping"),
        (["data.enable_thinking=false"], "did you mean 'data.chat_template_kwargs'"),
        (["apply_chat_template_kwargs={{a: 1}}"], "did you mean 'data.chat_template_kwargs'"),
    ],
)
def test_what_the_config_refuses(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        fit_config(tmp_path, *(text.format(KEY) for text in overrides))


def test_the_other_commands_have_the_key(tmp_path: Path) -> None:
    given = [CHAT, f"{KEY}.enable_thinking=false", "data.train.path=x.jsonl", "export_dir=out"]
    for_reward_model = [*given, "policy_path=p"]
    assert load_config(SftConfig, [], given).data.chat_template_kwargs == OFF
    assert load_config(RewardModelConfig, [], for_reward_model).data.chat_template_kwargs == OFF
    with pytest.raises(UserError, match="has no effect without"):
        load_config(SftConfig, [], given[1:])
    with pytest.raises(UserError, match="has no effect without"):
        load_config(RewardModelConfig, [], for_reward_model[1:])


def test_a_variable_that_the_template_does_not_read(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=rf"^{KEY}\.enable_thinkin: .*; it reads enable_thinking, "
    ) as told:
        prompt_of(tmp_path, chat_template_kwargs={"enable_thinkin": False})
    assert "enable_thinking, note, opens_thoughts; did you mean 'enable_thinking'?" in str(
        told.value
    )
    data = both(tmp_path, ["a"], ["z"], chat_template=True, chat_template_kwargs=OFF)
    with pytest.raises(UserError, match=r"data\.chat_template is true, but .* no chat template"):
        load_prompts(data, with_template(None))
    with pytest.raises(UserError, match="it reads none that can be set"):
        load_prompts(data, with_template("{% for m in messages %}{{ m.content }}{% endfor %}"))
    with pytest.raises(UserError, match=f"{KEY}: the tokenizer's chat template says: Expected"):
        load_prompts(data, with_template("{% for %}"))
    many = "".join(f"{{{{ a{number} }}}}" for number in range(30))
    with pytest.raises(UserError, match=r"it reads a0, a1, a10, .* and 10 more$"):
        check_template_variables(OFF, with_template(many))


@pytest.mark.parametrize(
    ("template", "names"),
    [
        (TEMPLATE, ["enable_thinking", "note", "opens_thoughts"]),
        (THINKING, ["enable_thinking"]),
        ("{% set x = x if x is defined else 1 %}{{ x }}", ["x"]),
        ("{% if not y is defined %}{% set y = 1 %}{% endif %}{{ y }}", ["y"]),
        ("{% set d = d | default('a') %}{{ d }}", ["d"]),
        ("{% if messages %}{% set a = 1 %}{{ a }}{% elif b %}{% set a = 2 %}{{ a }}{% endif %}",
         ["b"]),
        ("{% if messages %}{% set a = 1 %}{% else %}{% set a = 2 %}{% endif %}{{ a }}", []),
        ("{% if messages %}{% set a = 1 %}{% elif b %}{% set a = 2 %}{% endif %}{{ a }}",
         ["a", "b"]),
        ("{% for a in c %}{{ a }}{{ loop.index }}{% else %}{{ e }}{% endfor %}", ["c", "e"]),
        ("{% for a in [1] %}{% set b = a %}{{ b }}{% endfor %}{{ b }}", ["b"]),
        ("{% for a in [1] if f(a) %}{% endfor %}", ["f"]),
        ("{% macro m(a, b=c) %}{{ a ~ b ~ d }}{{ kwargs }}{% endmacro %}{{ m(1) }}", ["c", "d"]),
        ("{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}{{ f }}{% endcall %}", ["f"]),
        ("{% set t %}{{ u }}{% endset %}{{ t }}{% with v = w %}{{ v }}{% endwith %}", ["u", "w"]),
        ("{% filter upper %}{{ x }}{% endfilter %}{% generation %}{{ z }}{% endgeneration %}",
         ["x", "z"]),
        ("{{ bos_token }}{{ tools }}{{ documents }}{{ add_generation_prompt }}{{ range(2) }}"
         "{{ raise_exception }}{{ strftime_now('%Y') }}{{ namespace(a=1).a }}", []),
        ({"default": "{{ one }}", "tool_use": "{{ two }}"}, ["one"]),
    ],
)  # fmt: skip
def test_which_variables_a_template_reads(template: Any, names: list[str]) -> None:
    assert template_arguments(with_template(template)) == names


def test_who_looks_for_thinking_in_the_help_finds_the_key() -> None:
    paragraphs = re.split(r"\n(?=  \S)", describe_keys(describe(FitConfig)))
    (found,) = (text for text in paragraphs if text.lstrip().startswith(f"{KEY} "))
    assert "{enable_thinking: false} turns Qwen3's thinking" in found
    about = [text.split()[0] for text in paragraphs if "thinking" in text]
    assert about == [KEY, "rewards.answer_after", "rewards.without_answer_after"]


def test_every_reader_of_the_template_has_them(tmp_path: Path) -> None:
    """This template writes nothing, and no turn marker, without its variable."""
    template = (
        "{% if kind != 'long' %}{{ raise_exception('kind') }}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{{ kind }}{% endif %}"
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=thinking_tokenizer().backend_tokenizer, eos_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    arguments = {"kind": "long"}
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert template_end(tokenizer, arguments) == end
    of_data = DataConfig(chat_template=True, chat_template_kwargs=arguments)
    assert end_tokens(tokenizer, data=of_data).imitated_id == end
    assert chat_frame(tokenizer, arguments)[1] == "<|im_end|><|im_start|>long"
    tokenizer.chat_template = template.replace("{{ m.content }}", "{{ m.content }}</think>")
    assert SpelledText(tokenizer, chat=arguments).pattern.search("</think>"), "its turn marker"
    tokenizer.chat_template = template
    config = fit_config(
        tmp_path, CHAT, f"{KEY}.kind=long", "environment.kind=function", "environment.function=a:B"
    )
    said = ObservationTokens(tokenizer, config)("hm", last_id=end)
    assert text_of(said, tokenizer) == "<|im_start|>userhm<|im_end|><|im_start|>long"
    data = both(tmp_path, ["hm"], ["z"], chat_template=True, chat_template_kwargs=arguments)
    assert (
        load_prompts(data, tokenizer).train[0].text
        == "<|im_start|>userhm<|im_end|><|im_start|>long"
    )


def test_the_critics_own_prompt_begins_with_the_policys(tmp_path: Path) -> None:
    prompt = prompt_of(tmp_path, chat_template_kwargs=OFF)
    assert render("{prompt}[{answer}]", prompt) == ASKS.format("1+1?") + NO_THOUGHTS + "[1]"
