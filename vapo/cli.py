"""The `vapo` command. Light to import: commands load torch only once the config is valid."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from vapo.commands.command_line import Command, command_hint, split_overrides
from vapo.commands.command_table import COMMANDS
from vapo.errors import StoppedRun, StopRequested, UserError
from vapo.system.main_process import is_main_process
from vapo.system.shown_text import say
from vapo.system.signals import ending_signals, stop_in_good_order
from vapo.system.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. Only errors that are not the user's have tracebacks."""
    try:
        with ending_signals(stop_in_good_order):
            _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except UserError as error:
        if str(error):
            say(f"vapo: {error}", file=sys.stderr)
        return error.exit_code
    except StopRequested as signalled:
        if is_main_process():
            how = f"; {signalled.how_to_resume}" if signalled.how_to_resume else ""
            say(f"vapo: stopped by {signalled}{how}", file=sys.stderr)
        return signalled.exit_code
    except StoppedRun as stop:
        if is_main_process():
            say(f"vapo: the run stopped: {stop}", file=sys.stderr)
        return stop.exit_code
    except KeyboardInterrupt:
        say("vapo: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `vapo fit --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def _dispatch(argv: list[str]) -> None:
    name, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if name in ("-h", "--help"):
        say(_overview())
    elif name == "--version":
        say(f"vapo {__version__}")
    elif name not in COMMANDS:
        raise UserError(f"unknown command '{name}'{command_hint(name, COMMANDS)}")
    elif COMMANDS[name].schema is None:
        _run_plain(name, COMMANDS[name], rest)
    else:
        _run_configured(name, COMMANDS[name], rest)


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


def _run_plain(name: str, command: Command, argv: list[str]) -> None:
    parser = command.make_parser(name)
    if "-h" in argv or "--help" in argv:
        say(parser.format_help(), end="")
    else:
        options = parser.read(argv)
        _load_command(name, command)(**options)


def _run_configured(name: str, command: Command, argv: list[str]) -> None:
    """A command with config files and overrides among its arguments."""
    import vapo.config
    from vapo.config.options import describe, describe_keys

    schema = getattr(vapo.config, str(command.schema))
    entries = describe(schema)
    parser = command.make_parser(name)
    if "-h" in argv or "--help" in argv:
        say(f"{parser.format_help()}\n{describe_keys(entries)}")
        return
    from vapo.commands.checked import checked
    from vapo.commands.early_checks import check_early
    from vapo.config.loading import compose
    from vapo.config.written import to_yaml

    arguments, overrides = split_overrides(argv, parser, entries)
    options = parser.read(arguments)
    for flag, example in command.needs:
        if not options[flag]:
            raise UserError(f"vapo {name} needs --{flag} FILE, for example --{flag} {example}")
    if command.composes_rows:
        options["overrides"] = overrides
        check_early(name, None, options)
        about = ", ".join(map(str, [*options["config"], options["grid"]]))
        _load_command(name, command, about)(**options)
        return
    if options.pop("profile", False):
        overrides.append("trainer.profile=true")
    files = options.pop("config")
    composed = compose(schema, files, overrides)
    if options.pop("print_config"):
        sys.stdout.write(to_yaml(composed.tree))  # YAML has its own escapes, and is read again
        return
    about = f"{', '.join(map(str, files))}, seed {composed.config.seed}"
    with checked(name, composed.config, options):
        _load_command(name, command, about)(composed.config, **options)


def _load_command(name: str, command: Command, about: str = "") -> Callable[..., object]:
    from vapo.commands.start_lines import load_command

    module = f"vapo.commands.{command.module}"
    load_command(name, module, command.loads, about)
    run: Callable[..., object] = sys.modules[module].run
    return run
