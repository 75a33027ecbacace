"""`vapo completion`: commands, options, config keys and their values, for the shell's Tab key.

The shell's script asks `vapo completion words` at every Tab, which takes a third of a second: so
it knows the keys of the version that is installed, and only the script's few lines are the shell's
own. No library is asked: `shtab` writes static scripts from argparse alone, without config keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from vapo.commands.command_line import Command
from vapo.config.options import NAME, Entry, Option, describe
from vapo.system.shown_text import say

SCRIPTS = {
    "bash": """\
# in ~/.bashrc: eval "$(vapo completion bash)"
_vapo() {
    local line="${COMP_LINE:0:COMP_POINT}"
    mapfile -t COMPREPLY < <(vapo completion words --line="${line#* }" 2> /dev/null)
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace
    # bash replaces only what follows the last '='
    [[ ${line##* } == *=* ]] && COMPREPLY=("${COMPREPLY[@]#*=}")
}
complete -o default -F _vapo vapo
""",
    "zsh": """\
# in ~/.zshrc, after compinit: eval "$(vapo completion zsh)"
_vapo() {
    local -a found
    found=(${(f)"$(vapo completion words --line="${(j: :)words[2,CURRENT]}" 2> /dev/null)"})
    if (( ! $#found )); then
        _files
        return
    fi
    compadd -S '' -- ${(M)found:#*[=.]}
    compadd -- ${found:#*[=.]}
}
compdef _vapo vapo
""",
    "fish": """\
# in ~/.config/fish/config.fish: vapo completion fish | source
function __vapo
    set -l line (string join " " -- (commandline -opc)[2..] (commandline -ct))
    vapo completion words --line="$line" 2> /dev/null
end
complete -c vapo -a '(__vapo)'
""",
}


def run(shell: str, line: str) -> None:
    """Print a shell's script, or for `words` what the last word of the line may become."""
    typed = line.split() + [""] * (not line or line[-1].isspace())
    text = "".join(f"{word}\n" for word in candidates(typed))
    say(text if shell == "words" else SCRIPTS[shell], end="")


def candidates(typed: Sequence[str]) -> list[str]:
    """What the last word may become, a word each; empty where the shell's file names serve.

    Keys come level by level: `algorithm.` first, then what is in it.
    """
    from vapo.commands.command_table import COMMANDS

    *before, last = typed
    if not before:
        return _beginning_with(last, [*COMMANDS, "--help", "--version"])
    command = COMMANDS.get(before[0])
    if command is None:
        return []
    every = command.make_parser("").actions()
    actions = {flag: action for action in every for flag in action.option_strings}
    asked = actions.get(before[-1])
    if asked is not None and asked.nargs != 0:
        return _beginning_with(last, map(str, asked.choices or ()))
    keys = _keys(command)
    if last.startswith("-"):
        return _beginning_with(last, actions) or [f"--{word}" for word in _of_keys(last[2:], keys)]
    positional = [choice for a in every if not a.option_strings for choice in a.choices or ()]
    return [*_beginning_with(last, map(str, positional)), *_of_keys(last, keys)]


def _keys(command: Command) -> Mapping[str, Entry]:
    import vapo.config

    return describe(getattr(vapo.config, command.schema)) if command.schema else {}


def _of_keys(last: str, keys: Mapping[str, Entry]) -> list[str]:
    """Keys up to their next dot, or to `=`; after it the values, where they are known."""
    key, equals, value = last.partition("=")
    if equals:
        entry = keys.get(key)
        values = _values(entry) if isinstance(entry, Option) else ()
        return [f"{key}={each}" for each in _beginning_with(value, values)]
    found = dict[str, None]()
    for name, entry in keys.items():
        if name.startswith(last) and isinstance(entry, Option) and f".{NAME}." not in name:
            level, dot, _ = name[len(last) :].partition(".")
            found[f"{last}{level}{dot or '='}"] = None
    return list(found)


def _values(option: Option) -> Iterator[str]:
    if get_origin(option.type) is Literal:
        yield from map(str, get_args(option.type))
    elif option.type is bool:
        yield from ("true", "false")
    if option.nullable:
        yield "null"


def _beginning_with(start: str, words: Any) -> list[str]:
    return [word for word in words if word.startswith(start)]
