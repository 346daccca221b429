"""RequestStream: the one-slot mailbox between the step loop and the reader of a request's output.

What the reader has not taken yet is merged, so a slow one never blocks the loop. Text is decoded when it is
taken, while the device runs the next step, unless stop strings make the loop need it at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from engine.errors import EngineError, RequestFailed
from engine.plan.request import FinishReason
from engine.plan.speculation.spec_stats import SpecStats
from engine.plan.step_records import TokenLogprobs
from engine.text.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Seconds spent in each part of one request's life; None where that part never came."""

    queue_s: float  # from its arrival to its first step
    time_to_first_token_s: float | None  # from its arrival
    generation_s: float
    mean_itl_s: float | None
    preemptions: tuple[tuple[float, str], ...] = ()  # (seconds since the arrival, "recompute" or "swap")


@dataclass(frozen=True, slots=True)
class Finish:
    """The one terminal event of a request."""

    reason: FinishReason
    stop_reason: str | int | None  # the stop string or token id that matched; None for EOS and other reasons
    error: EngineError | None  # set when it did not end by its own terms; the reader reports it
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    timing: RequestTiming
    speculation: SpecStats | None = None  # None when nothing was ever drafted


class OutputDelta(NamedTuple):
    """What came since the last one."""

    text: str  # may be empty while part of a character or of a stop string is held back
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]  # one for each of `token_ids`, if asked for
    finish: Finish | None  # set on the last and only there
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of all but its first; with the first token or the end
    are_drafts: tuple[bool, ...] = ()  # for each of `token_ids`: an accepted draft, not drawn by the target


def _wake_at_once(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


@dataclass(slots=True, eq=False)
class RequestStream:
    """An async iterator of `OutputDelta` with exactly one terminal delta, for one reader.

    `on_abandon(request_id, error)` is called when the reader closes early (error None) or when decoding its
    text fails; the engine then ends the request within a step. Of a text that fails nothing more is given but
    the end, which is an error even if the request had ended well by then.

    With `scores_only` the one token that is put is the last of the prompt, see `Request`: only its
    log-probability is given. `wake` ends the reader's wait for a token, at once or in its turn; the end is
    told at once.
    """

    request_id: str
    _detokenizer: Detokenizer
    _on_abandon: Callable[[str, RequestFailed | None], None]
    checks_stops: bool = field(kw_only=True)
    scores_only: bool = field(kw_only=True, default=False)
    wake: Callable[[asyncio.Future[None]], None] = field(kw_only=True, default=_wake_at_once)
    first_token_time: float | None = field(init=False, default=None)
    last_token_time: float = field(init=False, default=-1.0)  # before any
    _token_ids: list[int] = field(init=False, default_factory=list)
    _logprobs: list[TokenLogprobs] = field(init=False, default_factory=list)
    _are_drafts: list[bool] = field(init=False, default_factory=list)
    _num_drafts: int = field(init=False, default=0)  # of all that were put
    _prompt_logprobs: list[TokenLogprobs] = field(init=False, default_factory=list)  # until the first token
    _text: str = field(init=False, default="")
    _failure: RequestFailed | None = field(init=False, default=None)  # of decoding: only the end is shown
    _finish: Finish | None = field(init=False, default=None)
    _hides_last: bool = field(init=False, default=False)  # the newest token's text is not part of the output
    _stopped: bool = field(init=False, default=False)  # a stop string matched: no text follows
    _taken: bool = field(init=False, default=False)  # the terminal delta was handed out
    _waiter: asyncio.Future[None] | None = field(init=False, default=None)  # the last, which may be over
    _is_called: bool = field(init=False, default=False)  # for `_waiter`, which has its turn or waits for it

    @property
    def is_finished(self) -> bool:
        """True once the terminal event is set, read or not."""
        return self._finish is not None

    # The loop's side.

    def put(
        self, token_id: int, logprobs: TokenLogprobs | None, *, shown: bool, num_accepted: int = 0
    ) -> str | None:
        """Add a committed token; the stop string it completes, if any. `shown` False keeps its text out.

        `num_accepted` drafts have been accepted up to the end of its step, where they come first.
        """
        if self.scores_only:
            assert logprobs is not None, "the score of the prompt's last token is asked for"
            self._prompt_logprobs.append(logprobs)
            return None
        self._token_ids.append(token_id)
        self._are_drafts.append(self._num_drafts < num_accepted)
        self._num_drafts += self._are_drafts[-1]
        if logprobs is not None:
            self._logprobs.append(logprobs)
        stop = None
        if not shown:
            self._hides_last = True
        elif self.checks_stops:
            delta = self._detokenizer.push((token_id,))
            self._text += delta.text
            stop = delta.stop
            self._stopped = stop is not None
        if self._waiter is not None and not self._is_called:
            self._is_called = True
            self.wake(self._waiter)
        return stop

    def put_prompt_logprobs(self, first: int, records: Sequence[TokenLogprobs]) -> None:
        """Set the log-probabilities of the prompt's tokens from position `first` + 1 on.

        Those of the positions before must be set already. A prompt that is computed again sets them again.
        """
        self._prompt_logprobs[first:] = records

    def finish(self, finish: Finish) -> None:
        """Set the terminal event; only the first one counts."""
        if self._finish is None:
            self._finish = finish
            if self._waiter is not None:
                _wake_at_once(self._waiter)

    # The reader's side.

    def close(self) -> None:
        """Stop reading: the request is aborted if it still runs. Safe to call twice."""
        if self._finish is None:
            self._on_abandon(self.request_id, None)

    def __aiter__(self) -> RequestStream:
        """Iterate over what comes from here on."""
        return self

    async def __anext__(self) -> OutputDelta:
        """Wait for output; ends after the terminal delta. Cancelling the wait loses nothing."""
        if self._taken:
            raise StopAsyncIteration
        while True:
            while (self._failure is not None or not self._token_ids) and self._finish is None:
                self._waiter, self._is_called = asyncio.get_running_loop().create_future(), False
                await self._waiter
            try:
                return self._take()
            except Exception as error:  # one request's text must not cost another request anything
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        """The text could not be decoded: the end, which may have come already, is an error."""
        self._failure = RequestFailed(
            f"the output could not be decoded ({type(error).__name__})", "detokenizer"
        )
        self._failure.__cause__ = error
        self._on_abandon(self.request_id, self._failure)

    def _take(self) -> OutputDelta:
        """All there is, in one delta. Raises what decoding does."""
        token_ids, logprobs = tuple(self._token_ids), tuple(self._logprobs)
        are_drafts = tuple(self._are_drafts)
        text = ""
        if self._failure is None:
            text = self._take_text(token_ids)
        elif self._finish is not None and self._finish.error is None:
            self._finish = replace(self._finish, reason=FinishReason.ERROR, error=self._failure)
        self._token_ids.clear()
        self._logprobs.clear()
        self._are_drafts.clear()
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if token_ids or self.scores_only:
            prompt_logprobs = tuple(self._prompt_logprobs)
            self._prompt_logprobs.clear()
        self._taken = self._finish is not None
        return OutputDelta(text, token_ids, logprobs, self._finish, prompt_logprobs, are_drafts)

    def _take_text(self, token_ids: tuple[int, ...]) -> str:
        if self.checks_stops:
            text, self._text = self._text, ""
        else:
            text = self._detokenizer.decode(token_ids[:-1] if self._hides_last else token_ids)
        if self._finish is not None and not self._stopped:
            text += self._detokenizer.flush().text
        return text
