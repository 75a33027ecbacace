"""A model's chat template gives the text that Transformers gives, in bounded time and memory."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import PreTrainedTokenizerBase

from tests.tiny_model import save_tiny_folder, tiny_tokenizer
from vapo.errors import UserError
from vapo.networks.loading import load_tokenizer
from vapo.user_code import chat_templates
from vapo.user_code.chat_templates import TemplateRefusal, render_chat, template_arguments
from vapo.user_code.template_process import Renderer

CHATML = """{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
THINKING = """{%- if messages[0].role == 'system' %}
    {{- messages[0].content + '\\n\\n' }}
{%- endif %}
{%- set ns = namespace(last=true, index=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.last and message.role == "user" and message.content is string and not(
           message.content.startswith('<tool>') and message.content.endswith('</tool>')) %}
        {%- set ns.last = false %}
        {%- set ns.index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if loop.index0 > ns.index and '</think>' in message.content %}
        {%- set reasoning = message.content.split('</think>')[0].rstrip('\\n') %}
        {{- reasoning ~ '|' ~ loop.last }}
    {%- else %}
        {{- '%s: %s' % (message.role, message.content) }}
    {%- endif %}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}<none>{% endif %}"""
GENERATION = """{{ bos_token }}{% for m in messages %}
    {% if m.role == 'assistant' %}
    {% generation %}{% set x = 1 %}{{ m.content }}{{ eos_token }}{{ loop.index }}{% endgeneration %}
    {% else %}
    {{ m | tojson }}{{ m.content | tojson(indent=2) }} {{ x is defined }}
    {% endif %}
{% endfor %}"""
LOOPS = """{% macro told(m) %}{{ m.role | upper }}{% endmacro %}
{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}
{% if not m.content %}{% continue %}{% endif %}
{% for part in m.content if part != 'x' %}{{ part }}{% endfor %}{{ told(m) }}
{% endfor %}{{ tools is none }} {{ documents is none }} {{ nothing }} {{ pad_token }}
{{ messages | map(attribute='role') | join(', ') | safe }}{{ range(3) | list }}{{ {'é': [1.5]} }}
{{- strftime_now('%Y') }}"""
SPACES = "  \n{# c #}\n  {% if 1 %}\n a\n{% endif %}\n"
TEMPLATES = [
    CHATML,
    THINKING,
    GENERATION,
    LOOPS,
    "",
    "  \n{# c #}\n  {% if 1 %}\n a\n{% endif %}\n",
]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": " two  spaces,\ttab\n\n<b>&amp;'\" é 👩‍🔬 \x00 "}],
    [{"role": "system", "content": ""}, {"role": "user", "content": "{{ 7 * 7 }} {% raw %}"}],
    [
        {"role": "system", "content": "Think."},
        {"role": "user", "content": "3 + 4?", "n": [1, 2.5, None, True, {"a": "b"}]},
        {"role": "assistant", "content": "<think>7\n</think>7", "big": 2**70},
        {"role": "user", "content": "lone \ud800 surrogate"},
        {"role": "assistant", "content": "a</think>b"},
    ],
]


def with_template(template: Any) -> PreTrainedTokenizerBase:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_text_is_that_of_transformers(template: str) -> None:
    tokenizer = with_template(template)
    for messages in CONVERSATIONS:
        settings: list[dict[str, Any]] = [{}, {"add_generation_prompt": True}]
        for options in (*settings, {"enable_thinking": False}):
            expected = tokenizer.apply_chat_template(messages, tokenize=False, **options)
            assert render_chat(tokenizer, messages, **options) == expected


def test_a_template_of_several_names(tmp_path: Path) -> None:
    both = with_template({"default": "a{{ messages[0].content }}", "tool_use": "b"})
    assert render_chat(both, [{"content": "x"}]) == "ax"
    with pytest.raises(TemplateRefusal, match="no default specified"):
        render_chat(with_template({"one": "a"}), [{"content": "x"}])
    with pytest.raises(TemplateRefusal, match="without messages"):
        render_chat(both, [])
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(
        TemplateRefusal, match="the conversation cannot be written as JSON: maximum recursion"
    ):
        render_chat(both, [{"content": nested}])
    with pytest.raises(TemplateRefusal, match=r"tokenizer\.chat_template is not set"):
        render_chat(tiny_tokenizer(), [{"content": "x"}])


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "^roles must alternate$"),
        ("{{ messages[9].content.x }}", "has no element 9"),
        ("{% for %}", "Expected|expected"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe|callable"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
        ("{{ 'x' * (10 ** 30) }}", "cannot fit 'int'"),
        ("{{ messages | nothing }}", "No filter named 'nothing'"),
    ],
)
def test_what_a_template_raises_is_said(template: str, said: str) -> None:
    with pytest.raises(TemplateRefusal, match=said):
        render_chat(with_template(template), CONVERSATIONS[0])
    assert render_chat(with_template("fine"), CONVERSATIONS[0]) == "fine"


def test_the_time_of_many_conversations_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets what those before have left; an ordinary one earns more than it takes."""
    given: list[float] = []

    def settimer(which: int, seconds: float) -> tuple[float, float]:
        given.append(seconds)
        return (given[-2] - 0.5 if seconds == 0 else 0.0), 0.0  # each takes half a second

    monkeypatch.setattr("vapo.user_code.template_process.signal.setitimer", settimer)
    renderer = Renderer()
    assert renderer.answer(b'{"template": "a{{ n }}"}') is None
    for _ in range(3):
        assert renderer.answer(b'{"variables": {"n": 1}}') == {"text": "a1"}
    assert given[::2] == pytest.approx([2.0, 1.52, 1.04])


def test_a_text_that_nobody_could_read(tmp_path: Path) -> None:
    """Megabytes for each of many prompts would fill the memory of the command."""
    folder = save_tiny_folder(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ 'x' * 1000000 }}")
    place = rf"^{folder}/chat_template\.jinja: the chat template takes more than \d+ characters"
    with pytest.raises(UserError, match=place):
        render_chat(load_tokenizer(str(folder)), CONVERSATIONS[0])
    long = [{"role": "user", "content": "x" * 1_000_000}]
    assert render_chat(with_template(CHATML), long).count("x") == 1_000_000


def test_a_forked_process_has_its_own_renderer() -> None:
    """Two that read one pipe would get each other's texts."""
    tokenizer = with_template(CHATML)
    render_chat(tokenizer, CONVERSATIONS[0])
    (number,) = chat_templates._processes.keys() & {os.getpid()}
    ours = chat_templates._processes[number]
    child = os.fork()
    if child == 0:
        os._exit(int(chat_templates._process() is ours))
    assert os.waitpid(child, 0)[1] == 0


def test_the_process_ends_with_its_owner() -> None:
    process = chat_templates.TemplateProcess()
    assert process.answer("a", b'{"variables": {}}') == {"text": "a"}
    assert process._process is not None
    renderer = psutil.Process(process._process.pid)
    assert psutil.Process().pid == renderer.ppid()
    process._process.stdin.close()  # type: ignore[union-attr]  # as the system does for the killed
    assert renderer.wait(timeout=5) == 0
    process._process = None


@pytest.mark.attacks
@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3, "2 s of processor time"),
        ("{{ 'x' * 9999999999 }}", "1024 MiB of memory"),
        ("{{ [0] * 9999999999 }}", "1024 MiB of memory"),
        ("{{ '%9999999999d' % 1 }}", "1024 MiB of memory"),
        ("{{ '{:9999999999}'.format(1) }}", "1024 MiB of memory"),
        ("{{ 'x'.ljust(9999999999) }}", "1024 MiB of memory"),
        ("{{ 'x' | center(9999999999) }}", "1024 MiB of memory"),
        ("{{ 'x\\n' | indent(9999999999) }}", "1024 MiB of memory"),
        ("{{ lipsum(n=99999999) }}", "2 s of processor time"),
        ("{{ 9 ** (9 ** 9) }}", "2 s of processor time"),
        (
            "{% set n = namespace(t='x') %}{% for a in range(99) %}{% set n.t = n.t + n.t %}"
            "{% endfor %}",
            "1024 MiB of memory",
        ),
        (
            "{% set n = namespace(t=[1]) %}{% for a in range(99) %}{% set n.t = n.t + n.t %}"
            "{% endfor %}{{ n.t }}",
            "1024 MiB of memory",
        ),
        (
            "{% for c in messages[0].content %}{% for d in messages[0].content %}"
            "{% for e in messages[0].content %}{% endfor %}{% endfor %}{% endfor %}",
            "2 s of processor time",
        ),
        ("{% for a in range(9999) %}{{ 'x' * 99999 }}{% endfor %}", "characters of text"),
        ("{{ 'x' * 99999999 }}", "characters of text"),
    ],
)
def test_work_without_a_bound_is_one_error(tmp_path: Path, template: str, what: str) -> None:
    folder = save_tiny_folder(tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(str(folder))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    place = rf"^{folder}/chat_template\.jinja: the chat template takes more than "
    with pytest.raises(UserError, match=rf"{place}\d* ?{what} for one conversation"):
        render_chat(tokenizer, [{"role": "user", "content": "x" * 5000}])
    assert time.monotonic() - started < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "KiB"
    assert render_chat(with_template("fine"), CONVERSATIONS[0]) == "fine"


@pytest.mark.attacks
@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("".join(f"{{{{ a{n} }}}}" for n in range(200_000)), "2 s of processor time"),
        (f"{{{{ {'a' * 300_000} }}}}", "characters of text"),
        ("{% if a %}" * 50_000 + "{% endif %}" * 50_000, "recursion"),
        ("{{ " + "-" * 100_000 + "1 }}", "recursion"),
    ],
)
def test_the_names_of_a_template_without_a_bound_are_one_error(template: str, what: str) -> None:
    started = time.monotonic()
    with pytest.raises((UserError, TemplateRefusal), match=what):
        template_arguments(with_template(template))
    assert time.monotonic() - started < 60
    assert template_arguments(with_template("{{ a }}")) == ["a"]
