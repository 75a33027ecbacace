"""Renders a model's chat template in a process of its own, with bounds on memory and time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vapo.errors import UserError
from vapo.user_code.credentials import variables_without_credentials
from vapo.user_code.python_child import python_program
from vapo.user_code.template_frames import LENGTH, SECONDS, max_chars, read_frame, write_frame

if TYPE_CHECKING:  # importing it takes seconds, which commands without a model need not spend
    from transformers import PreTrainedTokenizerBase


_ROOT = str(Path(__file__).parents[2])
_PROGRAM = """\
import sys
sys.path.append(sys.argv[1])  # last: nothing beside the package stands in for a library
from vapo.user_code.template_process import answer_frames
answer_frames()
"""
_WITHOUT_A_VALUE = ("tools", "documents")  # Transformers gives a template None for these
_BYTES_A_CHARACTER = 12  # of JSON, for one that is written as two surrogates


class TemplateRefusal(Exception):
    """Raised if a conversation cannot be rendered, or the tokenizer has no chat template."""


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    /,
    *,
    add_generation_prompt: bool = False,
    **arguments: Any,
) -> str:
    """Return the text of `tokenizer.apply_chat_template(messages, tokenize=False, ...)`.

    Args:
        arguments: further variables of the template (`data.chat_template_kwargs`).

    Raises:
        TemplateRefusal: the tokenizer has no template, the template raises an error, or the
            conversation is empty or cannot be written as JSON.
        UserError: the template takes more time or memory than any template needs.
    """
    if not messages:
        raise TemplateRefusal("a conversation without messages")
    variables = {
        **tokenizer.special_tokens_map,
        **dict.fromkeys(_WITHOUT_A_VALUE),
        **arguments,
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        request = json.dumps({"variables": variables}, default=str).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TemplateRefusal(f"the conversation cannot be written as JSON: {error}") from None
    return _answer(tokenizer, request)


def template_arguments(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the names of the variables that the chat template reads and that a user may set.

    Variables that `render_chat` sets, such as the conversation and the special tokens, are left
    out.

    Raises:
        TemplateRefusal: the tokenizer has no template, or the template is malformed.
        UserError: the template takes more time or memory than any template needs.
    """
    set_here = {"messages", "add_generation_prompt", *_WITHOUT_A_VALUE}
    set_here.update(tokenizer.SPECIAL_TOKENS_ATTRIBUTES, tokenizer.special_tokens_map)
    return [name for name in _answer(tokenizer, b"{}").split() if name not in set_here]


def _answer(tokenizer: PreTrainedTokenizerBase, frame: bytes) -> str:
    """Send a request for the tokenizer's template to the template process; return its text.

    Raises:
        TemplateRefusal: the tokenizer has no template, or the template raises an error.
        UserError: the template takes more time or memory than any template needs.
    """
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:
        raise TemplateRefusal(str(error)) from None
    answer = _process().answer(template, frame)
    if "refusal" in answer:
        raise TemplateRefusal(answer["refusal"])
    if "excess" in answer:
        raise UserError(
            f"{_template_file(tokenizer)}: the chat template takes more than {answer['excess']} "
            "for one conversation: it is damaged or hostile; take the file from where the model "
            "comes from, or set data.chat_template=false"
        )
    return answer["text"]


def _template_file(tokenizer: PreTrainedTokenizerBase) -> str:
    folder = Path(os.path.expanduser(tokenizer.name_or_path))
    names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    files = [str(folder / name) for name in names if (folder / name).is_file()]
    return files[0] if files else tokenizer.name_or_path or "the tokenizer"


class TemplateProcess:
    """The process that renders chat templates. It is started for the first request.

    If it was killed, the next request starts another one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._template: str | None = None  # the one that was sent to the process
        self._process: subprocess.Popen[bytes] | None = None

    def answer(self, template: str, request: bytes) -> dict[str, str]:
        """Send a template, unless it was the last one sent, and a request; return the answer.

        The answer has one key: `text`, `refusal` (the template raised an error) or `excess` (of
        time, memory or text).
        """
        with self._lock:
            process = self._process or self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                if template != self._template:
                    write_frame(process.stdin, json.dumps({"template": template}).encode())
                    self._template = template
                write_frame(process.stdin, request)
                max_bytes = _BYTES_A_CHARACTER * max_chars(request) + LENGTH.size
                frame = read_frame(process.stdout, max_bytes)
            except OSError:  # it has ended while it was sent something
                frame = None
            except BaseException:
                self._stop()
                raise
            if frame is None:
                ended_by = self._stop()
                is_slow = ended_by == -signal.SIGPROF
                time = f"{SECONDS:.0f} s of processor time"
                return {"excess": time if is_slow else f"a process can give (it ends: {ended_by})"}
            answer: dict[str, str] = json.loads(frame)
            return answer

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            python_program(_PROGRAM, _ROOT),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=variables_without_credentials(),
            start_new_session=True,
        )
        self._process, self._template = process, None
        self._finalizer = weakref.finalize(self, _end, process, os.getpid())
        return process

    def _stop(self) -> int | None:
        """Kill the process, if there is one; return its exit status, or None without a process."""
        process, self._process = self._process, None
        self._finalizer()
        return None if process is None else process.returncode


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:  # a process that was forked from it ends
        return
    process.kill()
    for pipe in filter(None, (process.stdin, process.stdout)):
        with suppress(OSError):  # what is left in its buffer has no reader
            pipe.close()
    process.wait()


_processes: dict[int, TemplateProcess] = {}


def _process() -> TemplateProcess:
    """Return the child process that renders chat templates for this process.

    A forked process starts a child of its own, so that it does not use its parent's pipes.
    """
    return _processes.setdefault(os.getpid(), TemplateProcess())
