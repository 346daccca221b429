"""NextTurns: tells the engine what a chat's next prompt will begin with, once its reply has been given."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

from engine import Engine, EngineError
from server.api.generation import Choice, Generation
from server.api.openai.chat_input import ChatInput
from server.api.reply_rules import ReplyRules

log = logging.getLogger("slipstream.http")

_MAX_BYTES = 1 << 18  # of a request's body, which is kept until the reply has ended
_NEXT_MESSAGES = "Why?", "2"  # as different from each other as what a user may say


@dataclass(frozen=True, slots=True)
class Chat:
    """What its next prompt is made of, beside the reply. `cache_salt` says who finds it."""

    shown: ChatInput
    rules: ReplyRules
    add_special_tokens: bool
    tenant: str | None
    cache_salt: str | None


class NextTurns:
    """Renders a chat with its reply and some next message: what is there whatever is said next is sure.

    So thinking that the template leaves out of later prompts is left out, and a text that the model spelled
    with other tokens is spelled as the tokenizer does. Nothing is done unless the engine is idle. Replies
    with calls are not followed: what comes next is not the user's. Loop thread only.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tasks: set[asyncio.Task[None]] = set()

    def keeps(self, num_bytes: int, num_choices: int, *, is_background: bool) -> bool:
        """True for a request of so many bytes that `follow` is to be called for."""
        return num_choices == 1 and num_bytes <= _MAX_BYTES and not is_background

    def follow(self, generation: Generation, chat: Chat) -> None:
        """Have the engine expect the chat's next prompt when its reply has come to its end."""
        choice = generation.choices[0]
        choice.said = []
        generation.on_ended = partial(self._begin, choice, chat)

    def _begin(self, choice: Choice, chat: Chat) -> None:
        if self._engine.is_idle:
            task = asyncio.get_running_loop().create_task(
                self._expect(choice, chat), name="slipstream-next-turn"
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _expect(self, choice: Choice, chat: Chat) -> None:
        reader = chat.rules.reader(self._engine, choice.prompt.token_ids)
        reply = reader.whole("".join(choice.said or ()), cut=choice.is_cut)
        if reply.calls:
            return
        answer: dict[str, object] = {"role": "assistant", "content": reply.content}
        try:
            one, other = [await self._render(chat, answer, text) for text in _NEXT_MESSAGES]
            same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
            self._engine.expect_prompt(one[: sum(1 for _ in same)], chat.cache_salt)
        except EngineError as error:  # too long by now, refused by the template, or the end of the server
            log.debug("a chat's next prompt is not read ahead: %s", error)

    async def _render(self, chat: Chat, answer: dict[str, object], text: str) -> list[int]:
        messages: list[dict[str, object]] = [*chat.shown.messages, answer, {"role": "user", "content": text}]
        return await replace(chat.shown, messages=messages).render(
            self._engine, add_special_tokens=chat.add_special_tokens, tenant=chat.tenant
        )
