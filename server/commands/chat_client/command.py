"""The command `slipstream chat`."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from server.commands.chat_client.conversation import Conversation, Sampling
from server.commands.chat_client.line_editor import LineEditor
from server.commands.chat_client.reply import Reply, describe
from server.commands.chat_client.slash_commands import Session, obey
from server.commands.chat_client.terminal import Terminal
from server.commands.command_line import CommandParser, number, wants_help, whole
from server.commands.remote.address import Address, add_address_flags, read_address
from server.commands.remote.failures import Refused, RemoteError, Unreachable
from server.commands.remote.http_client import HttpClient
from server.commands.remote.models import first_model

OK, FAULT, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130

_DESCRIPTION: Final = """\
Talks with a model: answers stream in, the conversation goes on, /help shows what else can be said.
With MESSAGE, or with a question in a pipe, it prints the one answer and ends."""
_EXAMPLES: Final = """\
  slipstream chat                                          the server on this machine
  slipstream chat --url https://host/v1 --api-key-file key.txt --model org/name
  slipstream chat --temperature 0 "Why is the sky blue?"
  cat report.txt | slipstream chat --system "Summarise in three sentences." > summary.txt

exit code: 0 ended, 1 the answer failed (MESSAGE or pipe), 2 wrong usage, 130 interrupted"""


def chat_parser() -> CommandParser:
    """The parser; its help text is the command's."""
    parser = CommandParser(
        "chat", usage="[MESSAGE] [--url URL] [options]", description=_DESCRIPTION, examples=_EXAMPLES
    )
    parser.add_argument("message", nargs="?", metavar="MESSAGE", help="ask this, print the answer, end")
    add_address_flags(parser)
    add_conversation_flags(parser)
    return parser


def add_conversation_flags(parser: CommandParser) -> None:
    """--system, --temperature, --max-tokens and --seed."""
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("--temperature", type=number(0, 100), metavar="X", help="0 is greedy")
    parser.add_argument("--max-tokens", type=whole(1, 10**9), metavar="N", help="longest answer")
    parser.add_argument(
        "--seed", type=whole(-(2**63), 2**63 - 1), metavar="N", help="equal seeds give equal answers"
    )


def run(argv: Sequence[str]) -> int:
    """Talk as `argv` says; the exit code. Raises SettingsError before anything is sent."""
    if wants_help(argv):
        print(chat_parser().format_help(), end="")
        return OK
    values = chat_parser().read(argv)
    address = read_address(values["url"], values["api_key"], values["api_key_file"])
    asked = read_question(values["message"], "chat")
    return WRONG_USAGE if asked is None else talk(address, values, asked)


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be asked; `question` None is a conversation. `place` says whom one talks with."""

    question: str | None
    terminal: Terminal
    place: str | None = None


def read_question(message: str | None, command: str) -> Asked | None:
    """What `message` or the pipe asks, else a conversation; None, with a complaint, for an empty question."""
    talks = message is None and sys.stdin.isatty() and sys.stdout.isatty()
    is_plain = not sys.stdout.isatty() or (message is None and not talks)
    terminal = Terminal(is_plain=is_plain, command=command)
    if message is None and not talks:
        message = sys.stdin.buffer.read().decode("utf-8", "replace").strip()
    if message is not None and not message.strip():
        terminal.complain("nothing was asked")
        return None
    return Asked(message, terminal)


def talk(address: Address, values: dict[str, Any], asked: Asked) -> int:
    """Ask the server at `address`, with the parameters in `values`; the exit code."""
    terminal = asked.terminal
    try:
        with asyncio.Runner() as runner, contextlib.closing(_Talk(runner, address, terminal)) as conversation:
            session = Session(conversation.begin(values), terminal)
            if asked.question is None:
                return conversation.converse(session, asked.place)
            return OK if conversation.ask(session, asked.question) else FAULT
    except RemoteError as error:
        terminal.complain(explain(error, address))
        return FAULT


def explain(error: RemoteError, address: Address) -> str:
    """What went wrong, and what of it can be mended here."""
    if isinstance(error, Unreachable) and error.kind.startswith("connect") and address.is_local:
        return f"{error}; start a server with 'slipstream serve', or use 'slipstream run', which needs none"
    if isinstance(error, Refused) and error.status == 401:
        return f"{error} Give the key with --api-key-file FILE, or --api-key KEY"
    return str(error)


class _Talk:
    """One server to talk to, from the main thread; the loop only runs while an answer comes."""

    def __init__(self, runner: asyncio.Runner, address: Address, terminal: Terminal) -> None:
        self._runner = runner
        self._address = address
        self._terminal = terminal
        self._client = HttpClient(address)

    def close(self) -> None:
        """Hang up."""
        self._client.close()

    def begin(self, values: dict[str, Any]) -> Conversation:
        """An empty conversation; asks the server for its model if none is named. Raises RemoteError."""
        model = values["model"] or self._runner.run(first_model(self._client, self._address))
        sampling = Sampling(values["temperature"], values["max_tokens"], values["seed"])
        return Conversation(model, sampling, values["system"])

    def converse(self, session: Session, place: str | None = None) -> int:
        """Questions and answers until the user ends it; `place` is where the model is, None its URL."""
        editor = LineEditor()
        place = place or f"{session.conversation.model} at {self._address.url}"
        self._terminal.note(f"{place}. /help shows the commands, Ctrl-D ends.")
        while not session.is_over:
            line = self._read_line(editor)
            if line is None:
                self._terminal.write("\n")
                break
            is_one_line = "\n" not in line
            if is_one_line and line.startswith("/") and not line.startswith("//"):
                obey(session, line)
            elif line:
                # The user decides what to do about a failure.
                with contextlib.suppress(KeyboardInterrupt):
                    self.ask(session, line.removeprefix("/") if is_one_line else line)
        return OK

    def ask(self, session: Session, question: str) -> bool:
        """Show the answer to `question`; False when it failed, which was said then.

        Raises KeyboardInterrupt when the user stopped it. What had come of it stays said.
        """
        conversation, terminal = session.conversation, self._terminal
        reply = Reply(terminal.write, terminal.write_aside)
        path = f"{self._address.base}/chat/completions"
        failure, ending = None, "stopped"
        try:
            self._runner.run(reply.ask(self._client, path, conversation.body(question)))
            ending = ""
        except RemoteError as error:
            failure, ending = error, "broken off"
        finally:
            if reply.text:
                conversation.add(question, reply.text)
            if reply.stats.num_tokens:
                session.replies.append(reply.stats)
                terminal.end_answer()
                terminal.note(f"[{', '.join(filter(None, [describe(reply.stats), ending]))}]")
        if failure is not None:
            terminal.complain(explain(failure, self._address))
        return failure is None

    def _read_line(self, editor: LineEditor) -> str | None:
        """What the user says next, without spaces around it; None at the end. A stopped line is empty."""
        try:
            return editor.read()
        except EOFError:
            return None
        except KeyboardInterrupt:
            self._terminal.write("\n")
        except UnicodeDecodeError:
            self._terminal.complain("that was not valid text in this terminal's encoding")
        return ""
