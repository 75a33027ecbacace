"""The `vapo` command. It is light to import: torch is loaded only once the config is valid."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

from vapo.commands.command_line import Command
from vapo.commands.command_table import COMMANDS, OTHER_NAMES
from vapo.errors import InterruptedRunError, StoppedRun, StopRequested, UserError, check_utf8
from vapo.errors.redactor import hide_environment, redacted
from vapo.errors.shown_text import say
from vapo.errors.suggestions import did_you_mean
from vapo.files.whole_files import why_disk_is_full
from vapo.system.installation import __version__
from vapo.system.process import (
    ending_signals,
    is_main_process,
    stop_in_good_order,
    stop_with_starter,
)
from vapo.user_code.process_memory import overwrite_secrets
from vapo.user_code.python_child import safe_path_in_children


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code. Only errors that are not the user's have tracebacks."""
    hide_environment()
    overwrite_secrets()
    if argv is None:  # this process is the command's own
        sys.excepthook = _show_traceback
    try:
        with ending_signals(stop_in_good_order), safe_path_in_children():
            stop_with_starter()
            _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except UserError as error:
        if str(error):
            say(f"vapo: {redacted(str(error))}", file=sys.stderr)
        return error.exit_code
    except StopRequested as signalled:
        if is_main_process():
            how = f"; {signalled.how_to_resume}" if signalled.how_to_resume else ""
            say(f"vapo: stopped by {signalled}{how}", file=sys.stderr)
        return signalled.exit_code
    except StoppedRun as stop:
        if is_main_process():
            say(f"vapo: the run stopped: {redacted(str(stop))}", file=sys.stderr)
        return stop.exit_code
    except KeyboardInterrupt:
        say("vapo: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `vapo fit --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:  # libraries have classes of their own for a full disk
        if (reason := why_disk_is_full(error)) is None:
            raise
        cure = "make room, or choose a folder on another disk"
        say(f"vapo: {redacted(reason)}; {cure}", file=sys.stderr)
        return InterruptedRunError.exit_code
    return 0


def _show_traceback(
    kind: type[BaseException], error: BaseException, at: TracebackType | None
) -> None:
    """Print a traceback without secrets: a library's error may quote the request that failed."""
    sys.stderr.write(redacted("".join(traceback.format_exception(kind, error, at))))


def _dispatch(argv: list[str]) -> None:
    for number, argument in enumerate(argv, start=1):
        key, equals, _ = argument.partition("=")
        check_utf8(argument, f"command line: argument {number}{f', {key!a},' * bool(equals)}")
    name, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if name in ("-h", "--help"):
        say(_overview())
    elif name == "--version":
        say(f"vapo {__version__}")
    elif name not in COMMANDS:
        hint = (
            f"; did you mean '{OTHER_NAMES[name.lower()]}'?"
            if name.lower() in OTHER_NAMES
            else did_you_mean(name, [*COMMANDS, "--help", "--version"]) or "; see `vapo --help`"
        )
        raise UserError(f"unknown command '{name}'{hint}")
    else:
        _run(name, COMMANDS[name], rest)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: vapo COMMAND ...",
            "",
            "VAPO (arXiv 2504.05118): value-based reinforcement learning for reasoning models.",
            "",
            "commands:",
            *(f"  {name:<{width}}  {command.doc}" for name, command in COMMANDS.items()),
            "",
            "`vapo COMMAND --help` lists a command's options; `vapo fit --help` every config key.",
            "Start with: vapo fit --config conf/vapo.yaml",
        ]
    )


def _run(name: str, command: Command, argv: list[str]) -> None:
    parser = command.make_parser(name)
    asks_for_help = "-h" in argv or "--help" in argv
    if command.schema is None:
        if asks_for_help:
            say(parser.format_help(), end="")
        else:
            options, _ = parser.read(argv)
            _load_command(name, command)(**options)
        return
    import vapo.config
    from vapo.config.options import describe, describe_keys

    schema = getattr(vapo.config, command.schema)
    entries = describe(schema)
    if asks_for_help:
        say(f"{parser.format_help()}\n{describe_keys(entries)}")
        return
    options, overrides = parser.read(argv, entries)
    has_own_model = "model" in options
    if has_own_model:
        overrides = _with_own_model(name, command, options, overrides)
    for flag, example in command.needs:
        if not options[flag]:
            alternative = ""
            if has_own_model:
                other_flags = "" if command.model_is_enough else ", --data and --reward"
                alternative = f", or --model{other_flags} in its place"
            raise UserError(
                f"vapo {name} needs --{flag} FILE, for example --{flag} {example}{alternative}"
            )
    _run_configured(name, command, schema, options, overrides)


def _with_own_model(
    name: str, command: Command, options: dict[str, Any], overrides: list[str]
) -> list[str]:
    """Replace the options `--model`, `--data` and `--reward` by the config that they stand for.

    The config's files become the option `config`. Without any of the three nothing changes.

    Returns: all overrides.

    Raises: UserError: one of the three is missing, or --config or --model_config is given as well.
    """
    values = {flag: options.pop(flag) for flag in ("model", "data", "reward")}
    set_flags = [flag for flag, value in values.items() if value is not None]
    if not set_flags:
        return overrides
    if options["config"]:
        raise UserError(f"--{set_flags[0]} stands in place of --config: leave one of them out")
    if options.get("model_config") is not None:  # of `vapo estimate`
        raise UserError(
            "--model_config names a second model beside --model: leave it out. --model is enough, "
            "and takes a folder that has only a config.json"
        )
    required_flags = ["model"] if command.model_is_enough else list(values)
    if missing := [flag for flag in required_flags if flag not in set_flags]:
        raise UserError(
            f"--{set_flags[0]} needs --{missing[0]} beside it; see `vapo {name} --help`"
        )
    from vapo.commands.own_model import own_model

    tell = partial(_tell, name, quiet=options.get("quiet", False))
    gpu_gib = options.get("gpu_memory_gib")  # of `vapo estimate`
    composed = own_model(
        *values.values(),
        overrides=overrides,
        gpu_gib=gpu_gib,
        config_is_enough=command.model_is_enough,
        tell=tell,
    )
    tell(composed.line)
    options["config"] = composed.files
    return composed.overrides


def _run_configured(
    name: str, command: Command, schema: Any, options: dict[str, Any], overrides: list[str]
) -> None:
    """Compose a command's config, check what the command will read and write, then run it.

    With `--print_config` the config is printed instead. The checks come before torch is loaded. A
    command for a grid of configs gets the files and overrides instead of a config.
    """
    from vapo.commands.early_checks import check_early, checked_command
    from vapo.config.chosen_systems import check_one_system
    from vapo.config.loading import compose
    from vapo.config.written import to_yaml
    from vapo.runs.resuming import meant_by

    if command.composes_rows:
        options["overrides"] = overrides
        check_early(name, None, options)
        about = ", ".join(map(str, [*options["config"], options["grid"]]))
        _load_command(name, command, about)(**options)
        return
    if options.pop("profile", False):
        overrides.append("trainer.profile=true")
    files = options.pop("config")
    if options.get("ckpt_path") is not None:
        options["ckpt_path"] = meant_by(options["ckpt_path"], files)
    composed = compose(schema, files, overrides)
    if options.pop("print_config"):
        check_one_system(composed.config.sources)
        sys.stdout.write(to_yaml(composed.tree))  # YAML has its own escapes, and is read again
        return
    about = f"{', '.join(map(str, files))}, seed {composed.config.seed}"
    if options.pop("smoke", False):
        del options["smoke_until"]
        command = replace(command, module="smoke", loads=())  # its processes load the libraries
    with checked_command(name, composed.config, options):
        run = _load_command(name, command, about, quiet=options.get("quiet", False))
        run(composed.config, **options)


def _load_command(
    name: str, command: Command, about: str = "", *, quiet: bool = False
) -> Callable[..., object]:
    """Import a command's module and return its `run`.

    Libraries that take seconds are announced on stderr.

    Args:
        about: what the command is about to do, for the first line.
    """
    module, start_time, introduction = f"vapo.commands.{command.module}", time.monotonic(), about
    if module not in sys.modules:
        was_enabled = gc.isenabled()
        # A fifth faster than with the collector, which would find nothing in a million new
        # objects. They stay, so that it never looks through them later, either.
        gc.disable()
        try:
            for library in command.loads:
                if library not in sys.modules:
                    text = f"{introduction}{'; ' if introduction else ''}loading {library} ..."
                    _tell(name, text, quiet=quiet)
                    introduction = ""
                    importlib.import_module(library)
            importlib.import_module(module)
        finally:
            gc.freeze()
            if was_enabled:
                gc.enable()
        if command.loads:
            _tell(name, f"loaded in {time.monotonic() - start_time:.1f} s", quiet=quiet)
    run: Callable[..., object] = sys.modules[module].run
    return run


def _tell(name: str, text: str, *, quiet: bool = False) -> None:
    if is_main_process() and not quiet:
        say(f"vapo {name}: {text}", file=sys.stderr)
