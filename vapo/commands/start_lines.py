"""What a command says until its libraries are loaded, which takes seconds. On stderr, in lines."""

from __future__ import annotations

import gc
import importlib
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from vapo.system.process import is_main_process
from vapo.system.shown_text import say


def load_command(name: str, module: str, libraries: Sequence[str], about: str = "") -> None:
    """Import a command's module; before each library that takes seconds, say so.

    Args:
        name: the command's, which begins each line.
        libraries: in the order in which they are imported.
        about: what the command is about to do, for the first line.
    """
    if module in sys.modules:
        return
    started, said = time.monotonic(), about
    with _without_collector():
        for library in libraries:
            if library not in sys.modules:
                _say(name, f"{said}{'; ' if said else ''}loading {library} ...")
                said = ""
                importlib.import_module(library)
        importlib.import_module(module)
    if libraries:
        _say(name, f"loaded in {time.monotonic() - started:.1f} s")


def _say(name: str, text: str) -> None:
    if is_main_process():
        say(f"vapo {name}: {text}", file=sys.stderr)


@contextmanager
def _without_collector() -> Iterator[None]:
    """A fifth faster than with the collector, which would find nothing in a million new objects.

    They stay, so that it never looks through them later, either.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
