"""A command's name, options and help. Light to import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vapo.commands.command_line import Parser

Option = tuple[list[str], dict[str, Any]]


def option(text: str, help: str, **kwargs: Any) -> Option:
    """Arguments of argparse's `add_argument`, from `--flag METAVAR`.

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
    """A command; `vapo.commands.MODULE.run` gets its options by name.

    Args:
        doc: one line for the overview.
        schema: in `vapo.config`, of the config that the command reads; None: it reads none.
        needs: flags that have to be given, each with an example. They name files.
        one_of: options of which exactly one has to be given.
        more: the rest of the help's first part.
        loads: the libraries that take seconds, in the order in which they are imported.
        composes_rows: it gets the config files and overrides themselves, for a grid of configs.
        trains_networks: it trains the actor or the critic that its config names.
    """

    module: str
    doc: str
    options: tuple[Option, ...] = ()
    one_of: tuple[Option, ...] = ()
    schema: str | None = None
    needs: tuple[tuple[str, str], ...] = ()
    more: str = ""
    epilog: str | None = None
    composes_rows: bool = False
    trains_networks: bool = False
    loads: tuple[str, ...] = ()

    def make_parser(self, name: str) -> Parser:
        needed = " ".join(f"--{flag} FILE" for flag, _ in self.needs)
        parser = Parser(
            prog=f"vapo {name}",
            usage=f"vapo {name} {needed} [KEY=VALUE ...] [options]" if self.schema else None,
            description=f"{self.doc[0].upper()}{self.doc[1:]}.{self.more}",
            epilog=self.epilog,
        )
        chosen = parser.add_mutually_exclusive_group(required=True) if self.one_of else parser
        for names, kwargs in self.one_of:
            chosen.add_argument(*names, **kwargs)
        for names, kwargs in self.options:
            parser.add_argument(*names, **kwargs)
        return parser
