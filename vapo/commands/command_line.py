"""Reading a command's arguments: its own flags, and the config's overrides among them."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from vapo.errors import UserError

if TYPE_CHECKING:
    from vapo.config.options import Entry


class Parser(argparse.ArgumentParser):
    """argparse whose errors are `UserError`s, and that takes no abbreviated flags."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`")


def split_overrides(
    argv: Sequence[str], parser: Parser, entries: dict[str, Entry]
) -> tuple[list[str], list[str]]:
    """Part the command's own flags from the overrides, given in any of their three forms.

    Raises: UserError: a flag that is neither ours nor a config key, or one without a value.
    """
    flags = {
        flag: action.nargs != 0 for action in parser._actions for flag in action.option_strings
    }
    arguments: list[str] = []
    overrides: list[str] = []
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        flag, equals, _ = token.partition("=")
        if flag in flags:
            arguments.append(token)
            if flags[flag] and not equals and tokens:
                arguments.append(tokens.pop(0))
        elif token.startswith("--"):
            _check_flag(flag, list(flags), entries)
            if not equals and (not tokens or tokens[0].startswith("--")):
                raise UserError(f"{flag} needs a value, as {flag}=VALUE")
            overrides.append(token[2:] if equals else f"{flag[2:]}={tokens.pop(0)}")
        elif equals and not token.startswith("-"):
            overrides.append(token)
        else:
            hint = did_you_mean(token, list(flags)) if token.startswith("-") else ""
            raise UserError(
                f"unexpected argument '{token}'{hint or '; an override is written KEY=VALUE'}"
            )
    return arguments, overrides


def _check_flag(flag: str, flags: Sequence[str], entries: dict[str, Entry]) -> None:
    from vapo.config.options import is_key, nearest_key

    if is_key(flag[2:], entries):
        return
    hint = did_you_mean(flag, flags)
    if not hint and (nearest := nearest_key(flag[2:], entries)):
        hint = f"; did you mean '--{nearest}'?"
    raise UserError(f"command line: unknown option '{flag}'{hint or '; see --help'}")


def did_you_mean(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def parse_plain(parser: Parser, argv: list[str]) -> argparse.Namespace | None:
    """The options; None once `--help` has been printed."""
    if "-h" in argv or "--help" in argv:
        print(parser.format_help(), end="")
        return None
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        parser.error(f"unexpected argument '{unknown[0]}'{did_you_mean(unknown[0], flags)}")
    return options


def positive(text: str) -> int:
    """An argparse type."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def parse_seeds(text: str) -> list[int]:
    """`0,1,2`: whole numbers from 0 up, each once.

    >>> parse_seeds("0, 2")
    [0, 2]
    """
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds {text}: give different whole numbers, as --seeds 0,1,2")
    return seeds


def parse_pairs(flag: str, texts: Sequence[str]) -> dict[str, str]:
    """`KEY=VALUE` texts as a mapping."""
    pairs = dict(text.partition("=")[::2] for text in texts)
    if any("=" not in text or text.startswith("=") for text in texts):
        raise UserError(f"{flag}: give KEY=VALUE, got {' '.join(texts)}")
    return pairs
