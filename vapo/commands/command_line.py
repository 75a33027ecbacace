"""Each command's name, options and help, and a parser for its flags and the config's overrides.

This module is light to import."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from vapo.errors import UserError
from vapo.errors.suggestions import did_you_mean

if TYPE_CHECKING:
    from vapo.config.options import Entry


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are `UserError`s, and which takes no abbreviated flags."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`")

    def read(
        self, argv: Sequence[str], entries: Mapping[str, Entry] | None = None
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the options by name, and the config's overrides as a list of `KEY=VALUE`.

        Args:
            entries: the config's keys. If None, the command has no config and takes no overrides.

        Raises: UserError: an argument is neither an option nor a config key, or has no value.
            The message names the nearest that exists.
        """
        options, unknown_arguments = self.parse_known_args(argv)
        overrides: list[str] = []
        place = 0  # in argv, after the last of `unknown_arguments` that was read
        flags = [flag for action in self._actions for flag in action.option_strings]
        while unknown_arguments:
            token = unknown_arguments.pop(0)
            place = argv.index(token, place) + 1
            flag, equals, _ = token.partition("=")
            if entries is None:
                self.error(f"unexpected argument '{token}'{did_you_mean(token, flags)}")
            if token.startswith("--"):
                from vapo.config.foreign_names import FOREIGN_NAMES, meant_key
                from vapo.config.options import is_key

                if not is_key(flag[2:], entries):
                    is_foreign = flag[2:] in FOREIGN_NAMES
                    hint = "" if is_foreign else did_you_mean(flag, flags)
                    if not hint and (nearest := meant_key(flag[2:], entries)):
                        hint = f"; did you mean '--{nearest}'?"
                    raise UserError(
                        f"command line: unknown option '{flag}'{hint or '; see --help'}"
                    )
                follows = argv[place] if place < len(argv) else "--"
                if not equals and (follows.startswith("--") or follows != unknown_arguments[0]):
                    raise UserError(f"{flag} needs a value, as {flag}=VALUE")
                overrides.append(token[2:] if equals else f"{flag[2:]}={unknown_arguments.pop(0)}")
            elif equals and not token.startswith("-"):
                overrides.append(token)
            else:
                hint = did_you_mean(token, flags) if token.startswith("-") else ""
                if token.endswith((".yaml", ".yml")) and "--config" in flags:
                    hint = f"; a config file is given as --config {token}"
                raise UserError(
                    f"unexpected argument '{token}'{hint or '; an override is written KEY=VALUE'}"
                )
        return vars(options), overrides


CommandOption = tuple[list[str], dict[str, Any]]


def option(text: str, help: str, **kwargs: Any) -> CommandOption:
    """Return the names and keyword arguments for argparse's `add_argument`, from `--flag METAVAR`.

    A flag may also be written with dashes. A default is added to the help.
    """
    name, _, metavar = text.partition(" ")
    names = dict.fromkeys([name, name.replace("_", "-") if name.startswith("--") else name])
    if metavar:
        kwargs["metavar"] = metavar
    if isinstance(kwargs.get("default"), (str, int, Path)):
        help = f"{help}; default: %(default)s".removeprefix("; ")
    return list(names), {"help": help, **kwargs}


@dataclass(frozen=True)
class Command:
    """A subcommand of `vapo`: its options, its help, and the module whose `run` it calls.

    `vapo.commands.MODULE.run` gets the options by name.

    Args:
        doc: one line for the overview.
        schema: the class in `vapo.config` of the config that the command reads. If None, it reads
            no config.
        needs: flags that have to be given, each with an example. They name files.
        one_of: options of which exactly one has to be given.
        more: the rest of the help's first part.
        loads: the libraries that take seconds, in the order in which they are imported.
        composes_rows: the command gets the config files and overrides as they are, because it
            composes a config for each row of a grid.
        model_is_enough: the command takes `--model` without `--data` and `--reward`, and reads only
            the model's config.json.
    """

    module: str
    doc: str
    options: tuple[CommandOption, ...] = ()
    one_of: tuple[CommandOption, ...] = ()
    schema: str | None = None
    needs: tuple[tuple[str, str], ...] = ()
    more: str = ""
    epilog: str | None = None
    composes_rows: bool = False
    model_is_enough: bool = False
    loads: tuple[str, ...] = ()

    def make_parser(self, name: str) -> Parser:
        required_files = " ".join(f"--{flag} FILE" for flag, _ in self.needs)
        parser = Parser(
            prog=f"vapo {name}",
            usage=f"vapo {name} {required_files} [KEY=VALUE ...] [options]"
            if self.schema
            else None,
            description=f"{self.doc[0].upper()}{self.doc[1:]}.{self.more}",
            epilog=self.epilog,
        )
        group = parser.add_mutually_exclusive_group(required=True) if self.one_of else parser
        for names, kwargs in self.one_of:
            group.add_argument(*names, **kwargs)
        for names, kwargs in self.options:
            parser.add_argument(*names, **kwargs)
        return parser


FILES: dict[str, Any] = {"action": "append", "type": Path}
SWITCH: dict[str, Any] = {"action": "store_true"}


def configured(
    module: str,
    doc: str,
    *options: CommandOption,
    schema: str = "FitConfig",
    example: str = "conf/vapo.yaml",
    **more: Any,
) -> Command:
    """Return a command that reads one config, composed of files and overrides.

    `example` is the config file that its help names.
    """
    common_options = (
        option("--config FILE", f"YAML file, as {example}; may be repeated", **FILES),
        option("--print_config", "print the merged config as YAML and stop", **SWITCH),
    )
    return Command(
        module, doc, (*common_options, *options), schema=schema, needs=(("config", example),),
        more="\n\nConfig files are merged in order, then the overrides; the last wins. An override "
        "is\nwritten KEY=VALUE, --KEY=VALUE or --KEY VALUE, with a dotted KEY of the list below.",
        **more,
    )  # fmt: skip


def folder_name(text: str) -> Path:
    """Return a folder's path, as an argparse type.

    An empty text, as from a variable that is not set, is refused.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError("the folder has no name; the current folder is .")
    return Path(text)


def positive(text: str) -> int:
    """Return a whole number from 1 up, as an argparse type; other texts are refused."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def seeds(text: str) -> list[int]:
    """Return different whole numbers from 0 up, as an argparse type; other texts are refused.

    >>> seeds("0, 2")
    [0, 2]
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(
            f"give different whole numbers, as --seeds 0,1,2; got {text}"
        )
    return numbers


def key_and_value(text: str) -> tuple[str, str]:
    """Return the key and the value of `KEY=VALUE`, as an argparse type; other texts are refused."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"give KEY=VALUE, got {text}")
    return key, value
