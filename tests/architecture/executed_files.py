"""A program: `vapo fit` with its arguments, then the package's files that an iteration executed.

A file counts where a function of it was called, in whichever thread of the process, by the stages
of the last iteration, by its training steps or by the sync after them: what a reader of one
iteration has to read. They are printed as a list of JSON, in the order of their first calls.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import vapo
from vapo import cli
from vapo.training.datamodule import WeightSync
from vapo.training.iteration import IterationRunner
from vapo.training.module import VapoModule

PACKAGE = str(Path(vapo.__file__).parent) + "/"
seen: dict[CodeType, None] = {}
num_open = 0


def trace(frame: FrameType, event: str, arg: Any) -> None:
    if num_open and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # no body of a module or class
        seen[frame.f_code] = None


def traced(owner: type, name: str, *, begins: bool = False) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        global num_open
        if begins:
            seen.clear()
        num_open += 1
        sys.settrace(trace)
        try:
            return function(*args, **options)
        finally:
            sys.settrace(None)
            num_open -= 1

    setattr(owner, name, call)


def executed(arguments: list[str]) -> int:
    """In a process of its own, whose functions stay traced."""
    threading.settrace(trace)
    traced(IterationRunner, "run", begins=True)
    traced(VapoModule, "training_step")
    traced(WeightSync, "on_train_epoch_end")
    code = cli.main(arguments)
    names = (code.co_filename for code in seen)
    files = dict.fromkeys(n.removeprefix(PACKAGE) for n in names if n.startswith(PACKAGE))
    print(json.dumps(list(files)))
    return code


if __name__ == "__main__":
    sys.exit(executed(sys.argv[1:]))
