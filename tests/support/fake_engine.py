"""An engine for tests of the server: no model, no threads, every answer known in advance.

A token is a character (its code point), and the reply to a prompt is the prompt again: output token i is
prompt token (i + seed) % len(prompt), seed counted as 0 when greedy. Token i comes after `await gate(i)`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

from engine import (
    BatchMetrics,
    CompiledGrammar,
    ContextLengthExceeded,
    DrafterState,
    DraftingRules,
    DraftingState,
    EngineDead,
    EngineError,
    EngineGauges,
    EngineInfo,
    EngineState,
    FillInMiddle,
    Finish,
    FinishReason,
    FormulaTerms,
    GenerationRequest,
    InvalidRequest,
    OutputDelta,
    Overloaded,
    RequestDrafting,
    RequestExplanation,
    RequestTiming,
    SpecStats,
    StructuredOutput,
    TokenLogprobs,
    check_token_ids,
)
from engine.loop.open_requests import RequestCounts
from engine.plan.admission import check_prompt
from engine.plan.grammar import Grammar
from engine.plan.speculation.recent_gain import NO_DRAFTS
from engine.text.reply.reply_format import ReplyFormat, Spelling

VOCAB_SIZE = 0x110000
TIMING = RequestTiming(queue_s=0.001, time_to_first_token_s=0.01, generation_s=0.1, mean_itl_s=0.005)


class Characters(Sequence[bytes]):
    """The bytes of each token, which is a character."""

    def __len__(self) -> int:
        return VOCAB_SIZE

    def __getitem__(self, token_id: Any) -> Any:
        return chr(token_id).encode("utf-8", "replace")


@dataclass(frozen=True)
class FakeTokenizer:
    """A token is a character."""

    fill_in_middle: FillInMiddle | None = None
    most_chars: int = 1 << 20

    def char_limit(self, max_model_len: int) -> int:
        return self.most_chars

    def check_length(self, num_chars: int, max_model_len: int, param: str) -> None:
        if num_chars > self.most_chars:
            raise ContextLengthExceeded(
                limit=max_model_len, prompt_tokens=num_chars, max_tokens=0, param=param
            )

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def token_bytes(self, token_id: int) -> bytes | None:
        return chr(token_id).encode("utf-8", "replace")

    def token_name(self, token_id: int) -> str | None:
        return f"<{chr(token_id)}>"

    def describe(self) -> dict[str, object]:
        return {"tokenizer_class": "Fake", "eos_token": "$", "bos_token": None, "chat_template": "{{ 1 }}"}


@dataclass(frozen=True)
class FakeGrammar:
    """What a request was given to follow; nobody does."""

    structure: StructuredOutput

    def start(self, end_token_ids: frozenset[int]) -> Grammar:
        raise NotImplementedError


async def open_gate(_: int) -> None:
    """Let every token through, but let others run in between, as a real engine does."""
    await asyncio.sleep(0)


@dataclass
class FakeEngine:
    """The engine's public face. Tests set the fields and look at `streams`.

    `fail_at` ends every stream with `failure` instead of that token; `merge` tokens make one delta. Text of
    more than `char_limit` characters is too long to be encoded; `adds_bos` puts a special ^ before it. Every
    stream ends with `speculation`, whose accepted drafts are the first tokens but for each delta's last. With
    a `reply` every stream says that, and stops, whatever its prompt.
    """

    max_model_len: int = 256
    state: EngineState = EngineState.READY
    fault: EngineDead | None = None
    gate: Callable[[int], Awaitable[None]] = open_gate
    failure: EngineError | None = None
    fail_at: int = 0
    refusal: Exception | None = None
    merge: int = 1
    start_error: Exception | None = None
    char_limit: int = 1 << 20
    adds_bos: bool = False
    draft_methods: tuple[str, ...] = ("ngram", "suffix", "prediction")
    max_draft_tokens: int = 8
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    speculation: SpecStats | None = None
    no_drafts_because: str | None = None
    draft_gauges: tuple[float, float, float] = (0.0, 0.0, 1.0)
    formula: FormulaTerms = NO_DRAFTS
    requests: list[GenerationRequest] = field(default_factory=list)
    streams: list[FakeStream] = field(default_factory=list)
    num_encoded: int = 0
    tenants: list[str | None] = field(default_factory=list)  # for whom text was worked on, call by call
    messages: list[dict[str, object]] = field(default_factory=list)
    tools: Sequence[dict[str, object]] = ()
    tool_template: str | None = None
    reasoning: str = "none"
    options: Mapping[str, object] = field(default_factory=dict)  # of the template
    reply: str | None = None
    fill_in_middle: FillInMiddle | None = None
    metrics: BatchMetrics = field(default_factory=BatchMetrics)
    cancelled: list[tuple[str, str]] = field(default_factory=list)
    died: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: bool = False
    companion: None = None
    generates: bool = True

    @property
    def info(self) -> EngineInfo:
        if self.state is EngineState.LOADING:
            raise Overloaded("The model is still loading.", code="loading")
        return EngineInfo(
            max_model_len=self.max_model_len,
            vocab_size=VOCAB_SIZE,
            dtype="float32",
            device="cpu",
            num_kv_blocks=64,
            kv_block_size=16,
            kv_bytes=1 << 20,
            has_chat_template=True,
            draft_methods=self.draft_methods,
            max_draft_tokens=self.max_draft_tokens,
            default_sampling=self.default_sampling,
            kv_dtype="float32",
            weight_bytes={"Q4_K": 3 << 20, "F32": 1 << 20},
            max_num_seqs=64,
            max_num_batched_tokens=2048,
        )

    @property
    def num_open(self) -> int:
        return sum(not stream.over.is_set() for stream in self.streams)

    def now(self) -> float:
        return time.monotonic()

    def miss_deadline(self) -> None:
        RequestCounts(self.metrics).miss_deadline()

    def gauges(self) -> EngineGauges:
        return EngineGauges(
            self.num_open, 0, 0, self.num_open, 0, 64 - self.num_open, 0.0, *self.draft_gauges, self.formula
        )

    def drafting(self) -> DraftingState | None:
        if self.state is EngineState.LOADING:
            return None
        drafters = tuple(
            DrafterState(method, self.max_draft_tokens, "inline", self.no_drafts_because)
            for method in self.draft_methods
        )
        rules = DraftingRules(self.max_draft_tokens, "goodput")
        return DraftingState(rules, "auto", drafters, self.no_drafts_because)

    is_idle = False  # nothing is read ahead

    def next_turn_tokens(self) -> dict[str, int]:
        return {"used": 0, "unused": 0}

    def decode_steps_s(self, most: int) -> Sequence[float] | None:
        return [0.01] * most

    def admit(
        self, num_requests: int, tenant: str | None = None, priority: int = 0
    ) -> AbstractContextManager[object]:
        if self.refusal is not None:
            raise self.refusal
        if self.fault is not None:
            raise self.fault
        if self.state is not EngineState.READY:
            raise Overloaded("Not now.", code=self.state.value, retry_after_s=3)
        return nullcontext()

    def admit_text(self, tenant: str | None = None) -> AbstractContextManager[object]:
        return self.admit(1)

    @property
    def text(self) -> Self:
        return self

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, tenant: str | None = None
    ) -> list[int]:
        self.tenants.append(tenant)
        self.num_encoded += 1
        if len(text) > self.char_limit:
            raise ContextLengthExceeded(
                limit=self.max_model_len, prompt_tokens=len(text), max_tokens=0, param="prompt"
            )
        await asyncio.sleep(0)
        return [ord("^")] * self.adds_bos * add_special_tokens + [ord(char) for char in text]

    async def render_chat(
        self,
        messages: list[dict[str, object]],
        tools: Sequence[dict[str, object]] = (),
        *,
        options: Mapping[str, object] | None = None,
        add_special_tokens: bool = False,
        tenant: str | None = None,
    ) -> list[int]:
        self.messages, self.tools, self.options = messages, tools, options or {}
        if any(message["content"] == "refuse me" for message in messages):
            raise InvalidRequest("the chat template refused these messages: no", param="messages")
        text = "".join(f"<{each['role']}>{each['content']}" for each in messages)
        return await self.encode(text, add_special_tokens=add_special_tokens, tenant=tenant)

    @property
    def reply_format(self) -> ReplyFormat:
        if self.state is EngineState.LOADING:
            raise Overloaded("The model is still loading.", code="loading")
        spelling = Spelling(Characters(), lambda text: [ord(char) for char in text], {}, {})
        return ReplyFormat.find(None, self.tool_template, spelling, reasoning=self.reasoning)

    async def compile_grammar(
        self, structure: StructuredOutput, *, tenant: str | None = None
    ) -> CompiledGrammar:
        self.tenants.append(tenant)
        if "refuse me" in structure.source:
            raise InvalidRequest(f"'{structure.param}' cannot be used: no.", structure.param)
        return FakeGrammar(structure)

    async def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        param: str = "prompt",
        tenant: str | None = None,
    ) -> str:
        self.tenants.append(tenant)
        check_token_ids(param, token_ids, VOCAB_SIZE)
        return "".join(map(chr, token_ids))

    @property
    def tokenizer(self) -> FakeTokenizer:
        return FakeTokenizer(self.fill_in_middle, self.char_limit)

    def submit(self, request: GenerationRequest) -> FakeStream:
        self.requests.append(request)
        stream = FakeStream(self, request)
        self.streams.append(stream)
        return stream

    def submit_all(self, requests: Sequence[GenerationRequest]) -> list[FakeStream]:
        for request in requests:
            check_prompt(request, self.max_model_len, VOCAB_SIZE)
        return [self.submit(request) for request in requests]

    def cancel(self, request_id: str, abort: str = "cancel") -> bool:
        self.cancelled.append((request_id, abort))
        return True

    @property
    def controls(self) -> FakeEngine:
        """What the engine's have is here beside the rest."""
        return self

    def explain(self, request_id: str) -> RequestExplanation | None:
        open_streams = (each for each in self.streams if not each.over.is_set())
        return next((each.explain() for each in open_streams if each.request_id == request_id), None)

    def tenant_shares(self) -> dict[str, float]:
        return {"tenant-a": 0.75, "other": 0.25}

    async def start(self) -> None:
        if self.start_error is not None:
            raise self.start_error
        self.state = EngineState.READY

    async def drain(self, timeout_s: float) -> None:
        self.state = EngineState.DRAINING

    async def stop(self) -> None:
        self.stopped = True

    async def wait_dead(self) -> None:
        await self.died.wait()


@dataclass
class FakeStream:
    """One request's output; `over` is set at its end, `closed` too when its reader gave up early."""

    engine: FakeEngine
    request: GenerationRequest
    num_sent: int = 0
    num_drafts: int = 0  # of those sent
    over: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> OutputDelta:
        if self.over.is_set():
            raise StopAsyncIteration
        await self.engine.gate(self.num_sent)
        if self.engine.failure is not None and self.num_sent >= self.engine.fail_at:
            return self._end(OutputDelta("", (), (), None), FinishReason.ERROR, error=self.engine.failure)
        return self._take()

    def _take(self) -> OutputDelta:
        sampling, sent = self.request.sampling, self.num_sent
        self.num_sent = min(sent + self.engine.merge, sampling.max_tokens)
        if self.engine.reply is not None:
            self.num_sent = min(self.num_sent, len(self.engine.reply))
        tokens = tuple(self._token(i) for i in range(sent, self.num_sent))
        text = "".join(map(chr, tokens))
        logprobs: tuple[TokenLogprobs, ...] = ()
        if sampling.logprobs is not None:
            logprobs = tuple(self._logprobs(token, sampling.logprobs) for token in tokens)
        scores = self._prompt_logprobs() if sent == 0 else ()
        are_drafts = self._are_drafts(len(tokens))
        delta = OutputDelta(text, tokens, logprobs, None, scores, are_drafts)
        stop = next((each for each in sampling.stop if each == text), None)
        if stop is not None:
            return self._end(
                OutputDelta("", tokens, logprobs, None, scores, are_drafts),
                FinishReason.STOP,
                stop_reason=stop,
            )
        if self.engine.reply is not None and self.num_sent == len(self.engine.reply):
            return self._end(delta, FinishReason.STOP)
        if self.num_sent == sampling.max_tokens:
            return self._end(delta, FinishReason.LENGTH)
        return delta

    def _token(self, i: int) -> int:
        prompt, sampling = self.request.prompt_token_ids, self.request.sampling
        if self.engine.reply is not None:
            return ord(self.engine.reply[i])
        seed = 0 if sampling.temperature == 0 else sampling.seed
        return prompt[(i + seed) % len(prompt)]

    def _are_drafts(self, num_tokens: int) -> tuple[bool, ...]:
        stats = self.engine.speculation
        left = 0 if stats is None else stats.num_accepted - self.num_drafts
        num_drafts = max(0, min(left, num_tokens - 1))
        self.num_drafts += num_drafts
        return (True,) * num_drafts + (False,) * (num_tokens - num_drafts)

    def _logprobs(self, token: int, num_top: int) -> TokenLogprobs:
        top = tuple((token + i, -0.5 - i) for i in range(num_top))
        return TokenLogprobs(token, -0.5, 1, top)

    def _prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """The token at place i has -i / 4."""
        number = self.request.sampling.prompt_logprobs
        if number is None:
            return ()
        prompt = self.request.prompt_token_ids
        return tuple(
            TokenLogprobs(token, -i / 4, 2, tuple((ord("A") + k, -0.125 * k) for k in range(number)))
            for i, token in enumerate(prompt[1:], 1)
        )

    def _end(
        self,
        delta: OutputDelta,
        reason: FinishReason,
        *,
        stop_reason: str | None = None,
        error: EngineError | None = None,
    ) -> OutputDelta:
        self.over.set()
        num_prompt = len(self.request.prompt_token_ids)
        finish = Finish(
            reason, stop_reason, error, num_prompt, self.num_sent, 2, TIMING, self.engine.speculation
        )
        return delta._replace(finish=finish)

    def explain(self) -> RequestExplanation:
        """It runs; of its drafts those that were sent are accepted."""
        num_prompt, sent = len(self.request.prompt_token_ids), self.num_sent
        return RequestExplanation(
            request_id=self.request_id,
            status="running",
            waits_because=None,
            position=None,
            priority=self.request.priority,
            deadline_s=None,
            preemptions=(),
            num_known_tokens=num_prompt + sent,
            num_output_tokens=sent,
            num_computed_tokens=num_prompt + sent,
            num_cached_tokens=0,
            num_draft_tokens=2 * self.num_drafts,
            num_accepted_tokens=self.num_drafts,
            num_blocks=1,
            drafting=self._drafting(),
        )

    def _drafting(self) -> RequestDrafting:
        drafter, options = "ngram" if self.num_drafts else None, self.request.speculation
        most = options.num_tokens or self.engine.max_draft_tokens
        policy = options.length_policy or "goodput"
        return RequestDrafting(("ngram",), drafter, most, most, policy, None, "inline")

    def close(self) -> None:
        if not self.over.is_set():
            self.over.set()
            self.closed.set()
