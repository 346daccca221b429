"""Generation: the open engine streams behind one HTTP reply, one a choice, read as one.

Everything that can refuse a request happens in `open_generation`, before the status line.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from engine import (
    CompiledGrammar,
    ContextLengthExceeded,
    Engine,
    EngineInfo,
    Finish,
    FinishReason,
    GenerationRequest,
    InvalidRequest,
    OutputDelta,
    RequestTiming,
    SamplingParams,
    SpeculationOptions,
    StructuredOutput,
    owned_salt,
)
from server.api.bad_words import read_bad_words
from server.api.live_replies import LiveReply
from server.api.openai.protocol import GenerationBody
from server.api.prompt_scores import PromptScores, ScoresOnly, scoring_request
from server.api.reply_size import ReplyPart, check_reply_size, reply_size
from server.api.sampling import (
    base_seed,
    check_limits,
    check_min_tokens,
    check_token_ids,
    choice_seed,
    priority_of,
    sampling_params,
)
from server.api.speculation import read_prediction, speculation_options
from server.api.structure import read_structure
from server.api.time_limit import allowed_s, in_time
from server.http.body_room import Lease
from server.http.context import Exchange, ServerContext, cache_owner
from server.http.errors import invalid


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model reads. `text` is what `echo` shows, None when nothing echoes it.

    `scores` is None unless log-probabilities of the prompt itself are asked for.
    """

    token_ids: Sequence[int]
    text: str | None = None
    scores: PromptScores | None = None


class DeltaStream(Protocol):
    """One choice's output: the part of the engine's RequestStream that a reply needs."""

    def __aiter__(self) -> AsyncIterator[OutputDelta]:
        """Iterate; the last delta, and no other, has `finish` set."""
        ...

    async def __anext__(self) -> OutputDelta:
        """The next delta. Cancelling the wait loses nothing."""
        ...

    def close(self) -> None:
        """Abort the request if it still runs. Idempotent."""
        ...


@dataclass(slots=True)
class Choice:
    """One choice of a reply and how far it has been read."""

    index: int
    prompt: Prompt
    stream: DeltaStream
    brings_scores: bool = False  # those of its prompt
    started: bool = False
    num_tokens: int = 0
    text_offset: int = 0
    finish: Finish | None = None

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

    def note(self, delta: OutputDelta) -> None:
        """Count a delta that was taken."""
        self.num_tokens += len(delta.token_ids)
        self.finish = delta.finish or self.finish


_Pumped: TypeAlias = tuple[Choice, OutputDelta | Exception, asyncio.Event]


class Generation:
    """All choices of one reply. Holds one delta a choice at most; the rest stays merged in its stream."""

    def __init__(self, choices: Sequence[Choice], on_close: Callable[[], None] = lambda: None) -> None:
        self.choices = choices
        self._on_close = on_close
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
        for pump in self._pumps:
            pump.cancel()
        self._on_close()
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


@dataclass(slots=True)
class EmptyStream:
    """A choice of no tokens (`max_tokens` 0): ends at once, without the engine."""

    num_prompt_tokens: int
    _done: bool = field(default=False, init=False)

    def __aiter__(self) -> EmptyStream:
        """Itself."""
        return self

    async def __anext__(self) -> OutputDelta:
        """The terminal delta, once."""
        if self._done:
            raise StopAsyncIteration
        self._done = True
        timing = RequestTiming(0.0, None, 0.0, None, 0)
        finish = Finish(FinishReason.LENGTH, None, None, self.num_prompt_tokens, 0, 0, timing)
        return OutputDelta("", (), (), finish)

    def close(self) -> None:
        """Nothing runs."""


@dataclass(frozen=True, slots=True)
class Order:
    """What to generate for one reply: `prepare` reads the prompts once queue places are taken for them.

    `reply_id` is fresh; the engine's request ids are derived from it. `exchange` says who asked, and when.
    `structure` is the form that every choice must have; None for what the body asks for. `lease` counts the
    memory of the request; `held_bytes` of it stay in use after the prompts have been read.
    """

    reply_id: str
    body: GenerationBody
    num_prompts: int
    prepare: Callable[[Engine], Awaitable[list[Prompt]]]
    exchange: Exchange
    lease: Lease
    structure: StructuredOutput | None = None
    held_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request that passed every check, and what answers it. Queued `prepared_s` after its arrival."""

    reply_id: str
    body: GenerationBody
    generation: Generation
    prepared_s: float


@dataclass(frozen=True, slots=True)
class Wanted:
    """What of a request had to be read off the loop."""

    prompts: Sequence[Prompt]
    speculation: SpeculationOptions
    bad_words: tuple[tuple[int, ...], ...]
    grammar: CompiledGrammar | None


async def open_generation(context: ServerContext, order: Order) -> Generation:
    """Take queue places, read the prompts, submit. Raises ApiError or an EngineError; then nothing runs.

    On return the order's body has forgotten all that may be large.
    """
    body, engine, lease = order.body, context.engine, order.lease
    tenant, grammar = order.exchange.tenant, None
    check_limits(body, context.settings.server)
    structure = order.structure or read_structure(body)
    num_requests = order.num_prompts * body.num_choices
    _check_queueable(order, num_requests, context.settings.server.max_queued_requests)
    with engine.admit(num_requests):
        try:
            speculation = speculation_options(body, engine.info)
            limit_s = allowed_s(body.deadline_ms, context.settings.server.request_timeout)
            async with in_time(limit_s, order.exchange.age_s, engine.metrics):
                prompts = await order.prepare(engine)
                speculation = replace(speculation, prediction=await read_prediction(body, engine, tenant))
                bad_words = await read_bad_words(body.bad_words or (), engine, tenant)
                if structure is not None:
                    grammar = await engine.compile_grammar(structure, tenant=tenant)
            wanted = Wanted(prompts, speculation, bad_words, grammar)
            requests = _make_requests(order, wanted, context)
            size = reply_size(body, _reply_parts(wanted.prompts, requests, body.num_choices))
            check_reply_size(size)
            lease.hold(lease.num_bytes + size.held_bytes)
            choices = _submit(engine, requests)
        except InvalidRequest as error:
            error.param = body.prompt_param if error.param == "prompt" else error.param
            raise
    body.forget_input()
    lease.hold(order.held_bytes + size.held_bytes)
    request_ids = [request.request_id for _, request in requests]
    exchange = order.exchange
    reply = LiveReply(order.reply_id, exchange.caller_id, exchange.tenant, request_ids, exchange.age_s)
    context.live.open(reply)

    def on_close() -> None:
        context.live.close(reply)
        if exchange.peer.stalled:  # closing the streams would count it as a client that left
            for request_id in request_ids:
                engine.cancel(request_id, abort="timeout")

    generation = Generation(choices, on_close)
    exchange.accepted = Accepted(order.reply_id, body, generation, reply.prepared_s)
    return generation


def _check_queueable(order: Order, num_requests: int, limit: int) -> None:
    """Refuse for good what no empty queue could hold."""
    if num_requests > limit:
        name = "n" if order.num_prompts == 1 else order.body.prompt_param
        raise invalid(
            f"The request asks for {num_requests} generations at once; the queue holds {limit}.", name
        )


def truncated(body: GenerationBody, token_ids: Sequence[int], info: EngineInfo) -> Sequence[int]:
    """The last tokens of a prompt when the request asks for that, else all; -1 keeps what fits."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return token_ids
    if keep < 0:
        keep = max(1, info.max_model_len - (1 if body.tokens_asked is None else body.tokens_asked))
    return token_ids[-keep:]


def _make_requests(
    order: Order, wanted: Wanted, context: ServerContext
) -> list[tuple[Prompt, GenerationRequest]]:
    """One engine request a choice, in the order of the choices. Raises ApiError or ContextLengthExceeded."""
    body, info = order.body, context.engine.info
    limit_s = allowed_s(body.deadline_ms, context.settings.server.request_timeout)
    requests: list[tuple[Prompt, GenerationRequest]] = []
    shared: SamplingParams | None = None  # by all prompts: lists of token ids are long
    for prompt in wanted.prompts:
        if not prompt.token_ids:
            raise invalid("The prompt is empty: at least one token is needed.", body.prompt_param)
        max_tokens = _tokens_to_generate(body, len(prompt.token_ids), info.max_model_len)
        check_min_tokens(body, max_tokens)
        if shared is None:
            shared = replace(sampling_params(body, info, max_tokens), bad_words=wanted.bad_words)
        sampling = replace(shared, max_tokens=max_tokens)
        if sampling.prompt_logprobs is not None:
            prompt = replace(prompt, scores=PromptScores())
        first_id = f"{order.reply_id}-{len(requests)}"
        seed = base_seed(body)  # without one in the body each prompt has its own, equal prompts too
        for j in range(body.num_choices):
            request = GenerationRequest(
                request_id=f"{order.reply_id}-{len(requests)}",
                prompt_token_ids=prompt.token_ids,
                sampling=replace(
                    sampling,
                    seed=choice_seed(seed, j),
                    prompt_logprobs=None if j else sampling.prompt_logprobs,
                ),
                priority=priority_of(body),
                group=order.reply_id,
                tenant=order.exchange.tenant,
                deadline_s=None if limit_s is None else limit_s - order.exchange.age_s,
                cache_salt=owned_salt(cache_owner(context, order.exchange), body.cache_salt),
                fork_of=first_id if j else None,
                speculation=wanted.speculation,
                grammar=wanted.grammar,
            )
            requests.append((prompt, request))
    return requests


def _reply_parts(
    prompts: Sequence[Prompt], requests: Sequence[tuple[Prompt, GenerationRequest]], num_choices: int
) -> list[ReplyPart]:
    """One a prompt; the choices of one are requests that follow each other."""
    firsts = [request for _, request in requests[::num_choices]]
    return [
        ReplyPart(len(prompt.token_ids), prompt.text, num_choices, first.sampling.max_tokens)
        for prompt, first in zip(prompts, firsts, strict=True)
    ]


def _tokens_to_generate(body: GenerationBody, num_prompt_tokens: int, limit: int) -> int:
    """The tokens asked for, or all that the context leaves. Raises ContextLengthExceeded."""
    asked = body.tokens_asked
    num_tokens = max(1, limit - num_prompt_tokens) if asked is None else asked
    if num_prompt_tokens + num_tokens > limit:
        too_long = num_prompt_tokens >= limit or asked is None
        raise ContextLengthExceeded(
            limit=limit,
            prompt_tokens=num_prompt_tokens,
            max_tokens=num_tokens,
            param=body.prompt_param if too_long else "max_tokens",
        )
    return num_tokens


def _submit(engine: Engine, requests: Sequence[tuple[Prompt, GenerationRequest]]) -> list[Choice]:
    """Queue all of them or none."""
    choices: list[Choice] = []
    try:
        for prompt, request in requests:
            brings_scores = request.sampling.prompt_logprobs is not None
            stream = _open_stream(engine, request)
            choices.append(Choice(len(choices), prompt, stream, brings_scores))
    except Exception:
        for choice in choices:
            choice.stream.close()
        raise
    return choices


def _open_stream(engine: Engine, request: GenerationRequest) -> DeltaStream:
    """The engine's own stream, if there is anything to compute."""
    if request.sampling.max_tokens > 0:
        return engine.submit(request)
    num_prompt_tokens = len(request.prompt_token_ids)
    if request.sampling.prompt_logprobs is None or num_prompt_tokens == 1:
        return EmptyStream(num_prompt_tokens)
    check_token_ids("prompt", request.prompt_token_ids, engine.info.vocab_size)
    return ScoresOnly(engine.submit(scoring_request(request)), num_prompt_tokens)
