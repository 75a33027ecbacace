"""Rows of generator functions: a user's own, and those of the shipped tasks in `vapo.tasks`.

A generator is a function `(num_examples, *, seed, **options)` which returns rows with the columns
of a line of a JSONL file. What else its module may have is said in docs/extending.md.
"""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from vapo.config.data import FunctionSource, ProceduralSource, source_name, sources_of
from vapo.config.schema import DataConfig
from vapo.errors import UserError
from vapo.errors.suggestions import suggest_known
from vapo.user_code.user_functions import check_arguments, import_function, raised_in

_TASKS_FOLDER = Path(__file__).parents[1] / "tasks"


def generator_of(source: FunctionSource | ProceduralSource, key: str) -> Callable[..., Any]:
    """Import the generator of a source.

    Raises: UserError: there is no such function, or no shipped task of this name.
    """
    key = f"{key}.{source.generator_key}"
    if isinstance(source, FunctionSource):
        folder = source.generator_function_folder
        return import_function(source.generator_function, key=key, folder=folder)
    tasks = [module.name for module in pkgutil.iter_modules([str(_TASKS_FOLDER)])]
    if source.task not in tasks:
        fix = suggest_known(str(source.task), tasks)
        raise UserError(f"{key} is {source.task!r}: {fix}")
    return import_function(f"vapo.tasks.{source.task}:{source.task}", key=key)


def generated_records(source: FunctionSource | ProceduralSource, key: str) -> list[tuple[str, Any]]:
    """Return the rows of a source's generator, each with its place, which names it in errors.

    Raises: UserError: the generator is not there, does not take an option, or raises.
    """
    function, name = generator_of(source, key), source.generator
    label = f"{key}.{source.generator_key} {name}"
    try:
        options = _checked_options(function, source.options, name)
        check_arguments(function, label, "num_examples", seed=source.seed, **options)
        generated = function(source.num_examples, seed=source.seed, **options)
        rows = list(islice(generated, source.num_examples))
    except UserError as error:
        is_of_options = str(error).startswith("options.")
        raise UserError(f"{key}.{error}" if is_of_options else str(error)) from None
    except Exception as error:  # a user's function may raise anything
        raise UserError(f"{label} {raised_in(function, error)}") from error
    if len(rows) < source.num_examples:
        raise UserError(
            f"{label} returned {len(rows)} rows, fewer than {key}.num_examples, "
            f"{source.num_examples}: lower that, or return more rows"
        )
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping) or not {"prompt", "answer"} <= row.keys():
            raise UserError(
                f"{label}: row {number} is {row!r:.80}: each row must be a dict with `prompt` and "
                "`answer`"
            )
    return [(f"{name}[seed {source.seed}]: row {n}", row) for n, row in enumerate(rows, start=1)]


def _checked_options(
    function: Callable[..., Any], options: Mapping[str, Any], name: str
) -> dict[str, Any]:
    """Check that a generator has these options. Numbers become those of its defaults' types."""
    _, *parameters = inspect.signature(function).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    defaults = {p.name: p.default for p in parameters if p.name != "seed"}
    checked = {}
    for option, value in options.items():
        if option not in defaults and not takes_any:
            fix = suggest_known(str(option), list(defaults))
            raise UserError(f"options.{option}: the task {name} has no such option; {fix}")
        checked[option] = _as_type_of(defaults.get(option), option, value)
    return checked


def _as_type_of(default: Any, name: str, value: Any) -> Any:
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise UserError(f"options.{name} is {value!r}: give true or false")
    elif isinstance(default, (int, float)) and default is not inspect.Parameter.empty:
        is_whole = isinstance(default, int)
        if isinstance(value, bool) or not isinstance(value, int if is_whole else (int, float)):
            expected = "a whole number" if is_whole else "a number"
            raise UserError(f"options.{name} is {value!r}: give {expected}")
        return value if is_whole else float(value)
    return value


def functions_beside_generators(data: DataConfig, name: str) -> dict[str, Callable[..., Any]]:
    """Return the functions called `name` in the modules of the training sources' generators.

    The keys are the sources' names in their mixture; the only source has an empty name. Sources
    without a generator function, or without such a function beside it, are left out.
    """
    functions = {}
    for key, source in sources_of(data, "train").items():
        if isinstance(source, (FunctionSource, ProceduralSource)):
            module = sys.modules.get(generator_of(source, key).__module__)
            if callable(function := getattr(module, name, None)):
                functions[source_name(key)] = function
    return functions


def call_beside_generator(function: Callable[..., Any], *args: str) -> Any:
    """Call a function that stands beside a generator.

    Raises: UserError: it raises.
    """
    try:
        return function(*args)
    except Exception as error:  # a user's function may raise anything
        raise UserError(f"{name_of(function)} {raised_in(function, error)}") from error


def name_of(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__qualname__}"
