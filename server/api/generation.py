"""Generation: the open engine streams behind one HTTP reply, one a choice, read as one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from engine import Finish, FinishReason, OutputDelta, ReplyReader, RequestStream
from server.api.openai.logprobs import TEXT_START, TextPlace
from server.api.openai.protocol import GenerationBody
from server.api.prompt_scores import PromptScores


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model reads. `text` is what `echo` shows, None when nothing echoes it.

    `scores` is None unless log-probabilities of the prompt itself are asked for.
    """

    token_ids: Sequence[int]
    text: str | None = None
    scores: PromptScores | None = None


@dataclass(slots=True)
class Choice:
    """One choice of a reply and how far it has been read. `reader` finds the parts of a chat's reply."""

    index: int
    prompt: Prompt
    stream: RequestStream
    brings_scores: bool = False  # those of its prompt
    reader: ReplyReader | None = None
    started: bool = False
    num_tokens: int = 0
    text_place: TextPlace = TEXT_START
    finish: Finish | None = None
    said: list[str] | None = None  # its text so far; None where nobody wants all of it

    async def read(self) -> OutputDelta:
        """The next delta; the prompt's scores are known with the first one of any choice.

        Cancelling the wait loses nothing.
        """
        scores = self.prompt.scores
        if scores is not None and not self.brings_scores:
            await scores.known.wait()
        delta = await anext(self.stream)
        if scores is not None and self.brings_scores:
            scores.note(delta)
        return delta

    @property
    def is_cut(self) -> bool:
        """True once it has ended and it was not the model, or a stop string, that ended it."""
        return self.finish is not None and self.finish.reason is not FinishReason.STOP

    def note(self, delta: OutputDelta) -> None:
        """Count a delta that was taken."""
        self.num_tokens += len(delta.token_ids)
        if self.said is not None:
            self.said.append(delta.text)
        if self.reader is not None:
            self.reader.count(delta.token_ids)
        self.finish = delta.finish or self.finish


_Pumped: TypeAlias = tuple[Choice, OutputDelta | Exception, asyncio.Event]


class Generation:
    """All choices of one reply. Holds one delta a choice at most; the rest stays merged in its stream."""

    def __init__(self, choices: Sequence[Choice], on_close: Callable[[], None] = lambda: None) -> None:
        self.choices = choices
        self._on_close = on_close
        self.on_ended: Callable[[], None] = lambda: None  # once, at the close, if it came to its end
        self._num_open = len(choices)
        # The common single choice is read directly; several are pumped in here as they come, in turn.
        self._ready: asyncio.Queue[_Pumped] = asyncio.Queue()
        self._pumps = (
            [asyncio.create_task(self._pump(choice)) for choice in choices] if len(choices) > 1 else []
        )

    @property
    def is_open(self) -> bool:
        """False once every choice has ended."""
        return self._num_open > 0

    async def next(self) -> tuple[Choice, OutputDelta]:
        """What any choice gives next; call while open. Raises the error a choice ended with.

        Cancelling the wait loses nothing.
        """
        if self._pumps:
            choice, delta = await self._next_pumped()
        else:
            choice = self.choices[0]
            delta = await choice.read()
        choice.note(delta)
        if delta.finish is not None:
            if delta.finish.error is not None:
                raise delta.finish.error
            self._num_open -= 1
        return choice, delta

    async def _next_pumped(self) -> tuple[Choice, OutputDelta]:
        choice, delta, taken = await self._ready.get()
        taken.set()
        if isinstance(delta, Exception):
            raise delta
        return choice, delta

    async def _pump(self, choice: Choice) -> None:
        """Offer the choice's deltas one by one: the next is read only when the last was taken."""
        taken = asyncio.Event()
        try:
            while True:
                delta = await choice.read()
                self._ready.put_nowait((choice, delta, taken))
                if delta.finish is not None:
                    return
                await taken.wait()
                taken.clear()
        except Exception as error:
            self._ready.put_nowait((choice, error, taken))

    def close(self) -> None:
        """Abort whatever still runs, after `on_close`. Idempotent; must be called however the reply ends."""
        pumps, self._pumps = self._pumps, []  # an ended task's exception holds its frame, and that holds this
        for pump in pumps:
            pump.cancel()
        self._on_close()
        if not self.is_open:
            on_ended, self.on_ended = self.on_ended, lambda: None
            on_ended()
        for choice in self.choices:
            choice.stream.close()

    @property
    def has_ended(self) -> bool:
        """True once it is known of every choice how it ended."""
        return all(choice.finish is not None for choice in self.choices)

    async def see_out(self) -> None:
        """After `close`: read the rest, for what each choice came to. A stream without an end has none."""
        while not self._ready.empty():
            choice, delta, _ = self._ready.get_nowait()
            if not isinstance(delta, Exception):
                choice.note(delta)
        for choice in self.choices:
            async for delta in choice.stream:
                choice.note(delta)


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request that passed every check, and what answers it. Queued `prepared_s` after its arrival."""

    reply_id: str
    body: GenerationBody
    generation: Generation
    prepared_s: float
