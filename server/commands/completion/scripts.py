"""The scripts, one for each shell. They hold the flags; nothing of ours runs when a key is pressed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from server.commands.completion.flag_table import Command, Flag

_BASH: Final = """\
_slipstream() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}}
  local words= paths=
  if [ "$cur" = = ]; then cur=; elif [ "$prev" = = ]; then prev=${{COMP_WORDS[COMP_CWORD-2]}}; fi
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W '{names} --help --version' -- "$cur")); return
  fi
  case "$command $prev" in
{values}  esac
  case "$command" in
{flags}  esac
  [ -n "$paths" ] && [[ $cur != -* ]] && compopt -o filenames && COMPREPLY=($(compgen -f -- "$cur"))
  COMPREPLY+=($(compgen -W "$words" -- "$cur"))
}}
complete -F _slipstream slipstream
"""


def bash_script(table: Sequence[Command]) -> str:
    """For bash: `eval "$(slipstream completion bash)"`, or a file that bash-completion finds."""
    values, flags = "", ""
    for command in table:
        for flag in command.flags:
            if flag.takes_value:
                values += f"    '{command.name} {flag.word}') {_bash_value(flag)}return;;\n"
        words = " ".join([*command.words, *(flag.word for flag in command.flags)])
        flags += f"    {command.name}) words='{words}' paths={'1' if command.takes_path else ''};;\n"
    return _BASH.format(names=" ".join(command.name for command in table), values=values, flags=flags)


def _bash_value(flag: Flag) -> str:
    if flag.choices:
        return f"COMPREPLY=($(compgen -W '{' '.join(flag.choices)}' -- \"$cur\")); "
    return 'compopt -o filenames; COMPREPLY=($(compgen -f -- "$cur")); ' if flag.is_path else ""


def zsh_script(table: Sequence[Command]) -> str:
    """For zsh: a file `_slipstream` in a folder of $fpath, or evaluated behind compinit."""
    names = " ".join(_quoted(f"{command.name}:{command.help}") for command in table)
    cases = "".join(
        f"    {command.name}) _arguments {' '.join(_zsh_words(command))};;\n" for command in table
    )
    return (
        "#compdef slipstream\n_slipstream() {\n"
        f"  if (( CURRENT == 2 )); then local -a names=({names}); _describe command names; return; fi\n"
        "  local name=$words[2]; shift words; (( CURRENT-- ))\n"
        f"  case $name in\n{cases}  esac\n}}\n"
        'if [[ $funcstack[1] = _slipstream ]]; then _slipstream "$@"\n'
        "else compdef _slipstream slipstream; fi\n"
    )


def _zsh_words(command: Command) -> Iterator[str]:
    for flag in command.flags:
        text = flag.help
        for special in "\\[]:":
            text = text.replace(special, f"\\{special}")
        value = f"({' '.join(flag.choices)})" if flag.choices else "_files" if flag.is_path else " "
        equals, tail = ("=", f":value:{value}") if flag.takes_value else ("", "")
        yield _quoted(f"*{flag.word}{equals}[{text}]{tail}")
    if command.words:
        yield _quoted(f"1:word:({' '.join(command.words)})")
    if command.takes_path:
        yield _quoted("*:path:_files")


def fish_script(table: Sequence[Command]) -> str:
    """For fish: a file in ~/.config/fish/completions."""
    lines = ["complete -c slipstream -f"]
    for command in table:
        start = f"complete -c slipstream -n __fish_use_subcommand -a {command.name}"
        lines.append(f"{start} -d {_quoted(command.help)}")
        here = f"complete -c slipstream -n '__fish_seen_subcommand_from {command.name}'"
        lines += [f"{here} -a {word}" for word in command.words]
        lines += [f"{here} -F"] if command.takes_path else []
        for flag in command.flags:
            value = " -x" if flag.takes_value else ""
            if flag.choices:
                value = f" -x -a {_quoted(' '.join(flag.choices))}"
            elif flag.is_path:
                value = " -r -F"
            lines.append(f"{here} -l {flag.word.removeprefix('--')}{value} -d {_quoted(flag.help)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A word in single quotes, for any of the shells."""
    return "'" + text.replace("'", "’") + "'"


SCRIPTS: Final[Mapping[str, Callable[[Sequence[Command]], str]]] = MappingProxyType(
    {"bash": bash_script, "fish": fish_script, "zsh": zsh_script}
)
