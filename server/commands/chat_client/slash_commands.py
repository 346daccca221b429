"""The lines that begin with a slash: said to the program, not to the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from config.errors import closest, did_you_mean, shown
from server.commands.chat_client.conversation import Conversation, Sampling
from server.commands.chat_client.reply import ReplyStats, describe
from server.commands.chat_client.terminal import Terminal
from server.commands.remote.chunks import Drafts
from server.plain_words import counted


@dataclass(slots=True)
class Session:
    """What slash commands work on. `replies` are the answers so far; `is_over` ends the program."""

    conversation: Conversation
    terminal: Terminal
    replies: list[ReplyStats] = field(default_factory=list)
    is_over: bool = False


class _Command(NamedTuple):
    argument: str
    text: str
    run: Callable[[Session, str], None]


def obey(session: Session, line: str) -> None:
    """Do what `line`, which begins with a slash, says; a mistake is one line."""
    word, _, argument = line.partition(" ")
    command = COMMANDS.get(word)
    if command is None:
        near = did_you_mean(closest(word, COMMANDS))
        session.terminal.complain(f"unknown command {shown(word)[1:-1]}{near} (see /help)")
        return
    command.run(session, argument.strip())


def _help(session: Session, _argument: str) -> None:
    for word, command in COMMANDS.items():
        session.terminal.note(f"  {f'{word} {command.argument}':<26}{command.text}", style="none")
    session.terminal.note(
        "Ctrl-C stops an answer, Ctrl-D ends. Lines that are pasted together are one question; a line that "
        "ends in \\ goes on in the next one; // begins a question that begins with a slash."
    )


def _clear(session: Session, _argument: str) -> None:
    session.conversation.clear()
    session.terminal.note("The conversation begins anew.")


def _system(session: Session, argument: str) -> None:
    conversation = session.conversation
    if argument:
        conversation.system = None if argument == "none" else argument
        session.terminal.note("Set, from the next question on.")
    else:
        session.terminal.note(conversation.system or "No system prompt.")


def _save(session: Session, argument: str) -> None:
    if not argument:
        session.terminal.complain("/save needs the name of a file: .json, or anything else for text")
        return
    try:
        session.conversation.save(Path(argument))
    except FileExistsError:
        session.terminal.complain(f"{argument} is there already; choose another name")
    except (OSError, RuntimeError, ValueError) as error:
        session.terminal.complain(
            f"{argument} cannot be written: {getattr(error, 'strerror', None) or error}"
        )
    else:
        session.terminal.note(f"Saved {counted(len(session.conversation.messages), 'message')}.")


def _stats(session: Session, _argument: str) -> None:
    replies = session.replies
    if not replies:
        session.terminal.note("No answer yet.")
        return
    last = replies[-1]
    session.terminal.note(f"last answer: {describe(last)}")
    if last.num_prompt_tokens is not None:
        cached = f", {last.num_cached_tokens} of them cached" if last.num_cached_tokens else ""
        session.terminal.note(f"its prompt: {counted(last.num_prompt_tokens, 'token')}{cached}")
    drafts = sum((each.drafts for each in replies if each.drafts is not None), Drafts())
    accepted = f", {drafts.acceptance_rate:.0%} of drafts accepted" if drafts.num_proposed else ""
    num_tokens = sum(each.num_tokens for each in replies)
    session.terminal.note(f"all {len(replies)}: {counted(num_tokens, 'token')}{accepted}")


def _params(session: Session, argument: str) -> None:
    sampling = session.conversation.sampling
    if argument:
        name, _, text = argument.replace("=", " ").partition(" ")
        problem = set_parameter(sampling, name.replace("-", "_"), text.strip())
        if problem is not None:
            session.terminal.complain(problem)
            return
    for name in Sampling.__slots__:
        value = getattr(sampling, name)
        session.terminal.note(f"  {name:<12} {'the server decides' if value is None else value}")


def set_parameter(sampling: Sampling, name: str, text: str) -> str | None:
    """Set one parameter from text, "none" to leave it to the server; what is wrong, None when it is set."""
    if name not in Sampling.__slots__:
        near = did_you_mean(closest(name, Sampling.__slots__))
        return f"unknown parameter {shown(name)}{near}; there are {', '.join(Sampling.__slots__)}"
    if text == "none":
        setattr(sampling, name, None)
        return None
    try:
        value = float(text) if name == "temperature" else int(text)
    except ValueError:
        return f"{name} = {shown(text)} is not allowed; expected a number or none"
    low, high = {"temperature": (0, 100), "max_tokens": (1, 10**9), "seed": (-(2**63), 2**63 - 1)}[name]
    if not low <= value <= high:
        return f"{name} = {shown(text)} is not allowed; expected {low} to {high}"
    setattr(sampling, name, value)
    return None


def _quit(session: Session, _argument: str) -> None:
    session.is_over = True


COMMANDS: Final[Mapping[str, _Command]] = {
    "/help": _Command("", "show this", _help),
    "/clear": _Command("", "forget what was said", _clear),
    "/system": _Command("[TEXT|none]", "show or set the system prompt", _system),
    "/params": _Command("[NAME VALUE|none]", "show or set temperature, max_tokens, seed", _params),
    "/stats": _Command("", "how fast the answers came", _stats),
    "/save": _Command("FILE", "write the conversation: .json, else text", _save),
    "/quit": _Command("", "end", _quit),
}
