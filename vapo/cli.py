"""The `vapo` command. Light to import: commands load torch only once the config is valid."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from vapo import __version__
from vapo.errors import UserError

if TYPE_CHECKING:
    from vapo.config.options import Entry


@dataclass(frozen=True)
class Command:
    """A command with a config: its module in `vapo.commands`, and its schema in `vapo.config`."""

    module: str
    schema: str
    example: str
    doc: str
    resumes: bool = False


CONFIGURED = {
    "fit": Command("fit", "FitConfig", "conf/vapo.yaml", "train a policy", resumes=True),
    "validate": Command(
        "validate", "FitConfig", "conf/vapo.yaml", "score a policy on held-out prompts", True
    ),
    "sft": Command("sft", "SftConfig", "conf/sft_state_tracking.yaml", "train on demonstrations"),
    "reward-model": Command(
        "reward_model",
        "RewardModelConfig",
        "conf/reward_model_state_tracking.yaml",
        "train a reward model, the critic's start",
    ),
}
PLAIN = {
    "export": "write the actor or critic of a checkpoint as a Hugging Face folder",
    "ui": "open the MLflow UI on recorded runs",
}


class Parser(argparse.ArgumentParser):
    """argparse whose errors are `UserError`s, and that takes no abbreviated flags."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. Only errors that are not the user's have tracebacks."""
    try:
        _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except UserError as error:
        print(f"vapo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("vapo: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `vapo fit --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def _dispatch(argv: list[str]) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return
    name, rest = argv[0], argv[1:]
    if name == "--version":
        print(f"vapo {__version__}")
    elif name in CONFIGURED:
        _configured(name, rest)
    elif name == "export":
        _export(rest)
    elif name == "ui":
        _ui(rest)
    else:
        hint = _did_you_mean(name, [*CONFIGURED, *PLAIN, "--help", "--version"])
        raise UserError(f"unknown command '{name}'{hint or '; see `vapo --help`'}")


def _overview() -> str:
    docs = {**{name: command.doc for name, command in CONFIGURED.items()}, **PLAIN}
    width = max(map(len, docs))
    return "\n".join(
        [
            "usage: vapo COMMAND ...",
            "",
            "VAPO (arXiv 2504.05118): value-based reinforcement learning for reasoning models.",
            "",
            "commands:",
            *(f"  {name:<{width}}  {doc}" for name, doc in docs.items()),
            "",
            "`vapo COMMAND --help` lists a command's options; `vapo fit --help` every config key.",
            "Start with: vapo fit --config conf/vapo.yaml",
        ]
    )


def _configured(name: str, argv: list[str]) -> None:
    """fit, validate, sft, reward-model: config files and dotted overrides."""
    import vapo.config
    from vapo.config.loading import compose, to_yaml
    from vapo.config.options import describe

    command = CONFIGURED[name]
    schema = getattr(vapo.config, command.schema)
    entries = describe(schema)
    parser = _make_parser(name, command)
    if "-h" in argv or "--help" in argv:
        from vapo.config.help import describe_keys

        print(f"{parser.format_help()}\n{describe_keys(entries)}")
        return
    flags = [flag for action in parser._actions for flag in action.option_strings]
    arguments, overrides = split_overrides(argv, flags, entries)
    options = parser.parse_args(arguments)
    if not options.config:
        raise UserError(f"vapo {name} needs --config FILE, for example --config {command.example}")
    composed = compose(schema, [Path(file) for file in options.config], overrides)
    if options.print_config:
        print(to_yaml(composed.tree), end="")
        return
    run = _load_command(command.module)
    if command.resumes:
        run(composed.config, ckpt_path=options.ckpt_path)
    else:
        run(composed.config)


def _make_parser(name: str, command: Command) -> Parser:
    parser = Parser(
        prog=f"vapo {name}",
        usage=f"vapo {name} --config FILE [--config FILE ...] [KEY=VALUE ...] [options]",
        description=f"{command.doc[0].upper()}{command.doc[1:]}.\n\n"
        "Config files are merged in order, then the overrides; the last wins. An override is\n"
        "written KEY=VALUE, --KEY=VALUE or --KEY VALUE, with a dotted KEY of the list below.",
    )
    parser.add_argument(
        "--config", action="append", metavar="FILE", help=f"YAML file, as {command.example}"
    )
    parser.add_argument(
        "--print_config",
        "--print-config",
        action="store_true",
        help="print the merged config as YAML, interpolations kept, and stop",
    )
    if command.resumes:
        does = "resume from" if name == "fit" else "score the actor of"
        parser.add_argument(
            "--ckpt_path",
            "--ckpt-path",
            metavar="last|best|PATH",
            help=f"{does} a checkpoint; last and best: of the newest run in output_dir",
        )
    return parser


def split_overrides(
    argv: Sequence[str], flags: Sequence[str], entries: dict[str, Entry]
) -> tuple[list[str], list[str]]:
    """Part the command's own flags from the overrides, given in any of their three forms.

    Raises: UserError: a flag that is neither ours nor a config key, or one without a value.
    """
    arguments: list[str] = []
    overrides: list[str] = []
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        flag, equals, _ = token.partition("=")
        if flag in flags:
            arguments.append(token)
            takes_value = flag.replace("-", "_") != "__print_config"
            if takes_value and not equals and tokens:
                arguments.append(tokens.pop(0))
        elif token.startswith("--"):
            _check_flag(flag, flags, entries)
            if not equals and (not tokens or tokens[0].startswith("--")):
                raise UserError(f"{flag} needs a value, as {flag}=VALUE")
            overrides.append(token[2:] if equals else f"{flag[2:]}={tokens.pop(0)}")
        elif equals and not token.startswith("-"):
            overrides.append(token)
        else:
            hint = _did_you_mean(token, flags) if token.startswith("-") else ""
            raise UserError(
                f"unexpected argument '{token}'{hint or '; an override is written KEY=VALUE'}"
            )
    return arguments, overrides


def _check_flag(flag: str, flags: Sequence[str], entries: dict[str, Entry]) -> None:
    from vapo.config.options import is_key, nearest_key

    if is_key(flag[2:], entries):
        return
    hint = _did_you_mean(flag, flags)
    if not hint and (nearest := nearest_key(flag[2:], entries)):
        hint = f"; did you mean '--{nearest}'?"
    raise UserError(f"command line: unknown option '{flag}'{hint or '; see --help'}")


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def _export(argv: list[str]) -> None:
    parser = Parser(prog="vapo export", description=PLAIN["export"].capitalize() + ".")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="a .ckpt file")
    parser.add_argument("output_dir", metavar="OUTPUT_DIR", type=Path, help="folder to write")
    parser.add_argument(
        "--network", choices=["actor", "critic"], default="actor", help="default: actor"
    )
    options = _parse_plain(parser, argv)
    if options is not None:
        _load_command("export")(options.checkpoint, options.output_dir, options.network)


def _ui(argv: list[str]) -> None:
    parser = Parser(prog="vapo ui", description=PLAIN["ui"] + ".")
    parser.add_argument("--tracking_uri", "--tracking-uri", default="mlruns", metavar="URI")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=5000)
    options = _parse_plain(parser, argv)
    if options is not None:
        _load_command("ui")(options.tracking_uri, options.host, options.port)


def _parse_plain(parser: Parser, argv: list[str]) -> argparse.Namespace | None:
    if "-h" in argv or "--help" in argv:
        print(parser.format_help(), end="")
        return None
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        parser.error(f"unexpected argument '{unknown[0]}'{_did_you_mean(unknown[0], flags)}")
    return options


def _load_command(module: str) -> Callable[..., object]:
    run: Callable[..., object] = importlib.import_module(f"vapo.commands.{module}").run
    return run
