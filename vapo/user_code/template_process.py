"""The process that renders a model's chat template. `chat_templates` starts it.

A template is a program that comes with a model. Here it has little memory and little time, and if
it takes too long only this process is lost. Its jinja environment is that of Transformers'
`apply_chat_template`, so that the text is the same. Torch and Transformers are not loaded for it.

Frames of JSON come through stdin: `{"template": TEXT}`, which is not answered, and then
`{"variables": {...}}`, or `{}`, which asks for the names of the variables that the template reads.
Each of these is answered by one frame on stdout. It has the `text` (for `{}` the names, with spaces
between them), the `refusal` (what the template raised) or the `excess` (of memory or text).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vapo.user_code.process_protocol import limit_memory
from vapo.user_code.template_frames import (
    MEMORY_BYTES,
    SECONDS,
    max_chars,
    read_frame,
    write_frame,
)

_SECONDS_EARNED = 0.02
"""How much time each conversation adds to what the earlier ones have left, up to `SECONDS`. If each
had the whole time, many could take hours. An ordinary template takes a thousandth of this."""
_OF_MACROS = ("caller", "varargs", "kwargs")


class _Generation(Extension):
    """A jinja extension that accepts `{% generation %}`, which adds nothing to the text."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own way)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Macro) -> str:
        return caller()


def template_environment() -> Environment:
    """Make the jinja environment in which Transformers compiles chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    return environment


def variable_names(template: str) -> list[str]:
    """Return the variables that a template reads from outside, in alphabetical order.

    Raises: TemplateError: the text is not a template.
    """
    return sorted(names_from_outside(template_environment().parse(template)))


def names_from_outside(template: nodes.Template) -> set[str]:
    """Return the names that a template reads in places where it may not have set them.

    jinja's own function knows the scopes. But it also returns names that are set and read inside
    one branch of an `if`, as `reasoning` in `{% if a %}{% set reasoning = a %}{{ reasoning }}`. So
    a name is returned only if one of the places that read it comes before it is set.
    """
    reads: set[str] = set()
    _read_all(template.body, set(), reads)
    return reads & meta.find_undeclared_variables(template)


def _read_all(all_nodes: Iterable[nodes.Node], defined: set[str], reads: set[str]) -> None:
    for node in all_nodes:
        _read(node, defined, reads)


def _read(node: nodes.Node, defined: set[str], reads: set[str]) -> None:
    """Update `reads` and `defined` for a template's node.

    Names that it reads while not in `defined` are added to `reads`. Names that it sets in any case
    are added to `defined`.
    """
    if isinstance(node, nodes.Name):
        if node.ctx == "load" and node.name not in defined:
            reads.add(node.name)
        elif node.ctx != "load":
            defined.add(node.name)
    elif isinstance(node, nodes.Assign):
        _read_all((node.node, node.target), defined, reads)  # the value first
    elif isinstance(node, nodes.If):
        _read(node.test, defined, reads)
        branches = [
            node.body,
            *([elif_node.test, *elif_node.body] for elif_node in node.elif_),
            node.else_,
        ]
        names_after_branches = []
        for branch in branches:  # without an else there is an empty one
            names_after_branches.append(set(defined))
            _read_all(branch, names_after_branches[-1], reads)
        defined |= set.intersection(*names_after_branches)
    elif isinstance(node, nodes.For):
        _read(node.iter, defined, reads)
        inside = {*defined, "loop"}
        _read_all((node.target, *filter(None, [node.test]), *node.body), inside, reads)
        _read_all(node.else_, set(defined), reads)
    elif isinstance(node, (nodes.Macro, nodes.CallBlock)):
        if isinstance(node, nodes.CallBlock):
            _read(node.call, defined, reads)
        else:
            defined.add(node.name)
        _read_all(node.defaults, defined, reads)
        _read_all((*node.args, *node.body), {*defined, *_OF_MACROS}, reads)
    elif isinstance(node, nodes.With):
        _read_all(node.values, defined, reads)
        _read_all((*node.targets, *node.body), set(defined), reads)
    elif isinstance(node, nodes.AssignBlock):
        _read_all((*filter(None, [node.filter]), *node.body), set(defined), reads)
        _read(node.target, defined, reads)
    elif isinstance(node, (nodes.FilterBlock, nodes.Block, nodes.Scope)):
        _read_all(node.iter_child_nodes(), set(defined), reads)
    else:
        _read_all(node.iter_child_nodes(), defined, reads)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON, without the escapes for HTML that jinja's own filter adds."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


class Renderer:
    """Renders a chat template for requests, each of which is a frame of JSON.

    The signal SIGPROF kills the process if a request takes too much processor time.
    """

    def __init__(self) -> None:
        self._source = ""
        self._template: Template | None = None
        self._seconds = SECONDS

    def answer(self, frame: bytes) -> dict[str, str] | None:
        try:
            request = json.loads(frame)
            if "template" in request:
                self._source, self._template = request["template"], None
                return None
            text = self._answer_text(request.get("variables"))
        except MemoryError:
            return {"excess": f"{MEMORY_BYTES >> 20} MiB of memory"}
        except Exception as error:  # templates raise what their authors chose
            return {"refusal": str(error)[:2000] or type(error).__name__}
        if len(text) > (max_length := max_chars(frame)):
            return {"excess": f"{max_length} characters of text"}
        return {"text": text}

    def _answer_text(self, variables: dict[str, Any] | None) -> str:
        signal.setitimer(signal.ITIMER_PROF, self._seconds)
        try:
            if variables is None:
                return " ".join(variable_names(self._source))
            if self._template is None:
                self._template = template_environment().from_string(self._source)
            return self._template.render(variables)  # as one argument: a name may be `self`
        finally:
            remaining_s, _ = signal.setitimer(signal.ITIMER_PROF, 0)
            self._seconds = min(SECONDS, remaining_s + _SECONDS_EARNED)


def answer_frames() -> None:
    """Read requests from stdin, and write an answer to stdout for each, until stdin ends.

    The memory of this process is limited first. A request that only brings a template gets no
    answer.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    limit_memory(MEMORY_BYTES)
    renderer = Renderer()
    incoming, outgoing = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    while (frame := read_frame(incoming)) is not None:
        answer = renderer.answer(frame)
        if answer is not None:
            write_frame(outgoing, json.dumps(answer).encode())
