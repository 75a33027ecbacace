"""Annotated types and tensor shapes of `vapo` are checked while tests run.

A check costs more than most of the functions that it checks, so a test pays for the first calls of
each function, not for the ten thousandth token of a decoding loop.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep3119Exception

CALLS_CHECKED = 4  # of each function, in each test
# PEP 484: an int is good where a float is asked for.
TYPES = BeartypeConf(is_pep484_tower=True)
CHECK_ALL = jaxtyping.jaxtyped

_test = 0  # which one runs, counted
_nested: dict[CodeType, int] = {}  # in which test a nested function was checked last


def next_test() -> None:
    """Every function is checked again."""
    global _test
    _test += 1


def install(modules: list[str]) -> None:
    """Check the modules, which must not have been imported yet."""
    vars(jaxtyping)["jaxtyped"] = checked_at_first  # what the hook's decorators look up
    jaxtyping.install_import_hook(modules, f"{__name__}.checked")


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its annotations enforced."""
    try:
        return beartype(conf=TYPES)(function)
    except BeartypeDecorHintPep3119Exception:
        return function  # asks for a Protocol that isinstance() cannot check


def checked_at_first(decorated: Any = None, *, typechecker: Any) -> Any:
    """What the import hook puts on all functions and classes: `jaxtyping.jaxtyped`, with an end."""
    if decorated is None:
        return functools.partial(checked_at_first, typechecker=typechecker)
    if isinstance(decorated, classmethod | staticmethod):
        inner = checked_at_first(decorated.__func__, typechecker=typechecker)
        return type(decorated)(inner)
    if inspect.isclass(decorated):
        plain = decorated.__init__
        if dataclasses.is_dataclass(decorated) and plain.__globals__ is not globals():
            made = functools.partial(CHECK_ALL, plain, typechecker=typechecker)
            type.__setattr__(decorated, "__init__", _ending(plain, made))
        return decorated
    if not inspect.isfunction(decorated):
        return CHECK_ALL(decorated, typechecker=typechecker)
    if "<locals>" in decorated.__qualname__:  # made anew by each call of the function around it
        if _nested.get(decorated.__code__) == _test:
            return decorated
        _nested[decorated.__code__] = _test
    if decorated.__module__.startswith("vapo.config."):  # no tensors: no names of sizes to note
        return _ending(decorated, lambda: checked(decorated), has_shapes=False)
    return _ending(decorated, lambda: CHECK_ALL(decorated, typechecker=typechecker))


def _ending(
    plain: Callable[..., Any], made: Callable[[], Callable[..., Any]], *, has_shapes: bool = True
) -> Callable[..., Any]:
    """The checking function for the first calls of each test, `plain` for the others.

    It is `made` at the first call that it checks: that takes milliseconds, and most functions are
    never called, or only where jaxtyping's checks of shapes are switched off.
    """
    checking: Callable[..., Any] | None = None
    test, calls = -1, 0

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal checking, test, calls
        __tracebackhide__ = True
        if has_shapes and jaxtyping.config.jaxtyping_disable:
            return plain(*args, **kwargs)
        if test != _test:
            test, calls = _test, 0
        if calls == CALLS_CHECKED:
            return plain(*args, **kwargs)
        calls += 1
        if checking is None:
            checking = made()
        return checking(*args, **kwargs)

    return call
