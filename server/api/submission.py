"""Submission: from a checked request body to the open engine streams of its reply.

Everything that can refuse a request happens in `open_generation`, before the status line.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from engine import (
    MAX_PRIORITY,
    CompiledGrammar,
    Engine,
    EngineInfo,
    GenerationRequest,
    InvalidRequest,
    SamplingParams,
    SpeculationOptions,
    StructuredOutput,
    owned_salt,
)
from server.api.bad_words import read_bad_words
from server.api.generation import Accepted, Choice, Generation, Prompt
from server.api.live_replies import LiveReply
from server.api.off_loop import off_loop
from server.api.openai.protocol import GenerationBody
from server.api.prompt_scores import PromptScores
from server.api.reply_rules import ReplyRules
from server.api.reply_size import ReplyPart, check_reply_size, reply_size
from server.api.sampling import (
    base_seed,
    check_limits,
    check_min_tokens,
    check_truncation,
    choice_seed,
    priority_of,
    sampling_params,
)
from server.api.speculation import read_prediction, speculation_options
from server.api.structure import read_structure
from server.api.time_limit import allowed_s, prepared_by
from server.http.body_room import Lease
from server.http.context import Exchange, ServerContext, cache_owner
from server.http.errors import invalid


@dataclass(frozen=True, slots=True)
class Submission:
    """What to generate for one reply. `prepare` reads the prompts, after queue places are taken for them.

    `reply_id` is fresh; the engine's request ids are derived from it. `endpoint` is the path. `exchange`
    holds the tenant and the time of arrival. `rules` are a chat's, None where the reply is just text. `lease`
    counts the memory of the request; `held_bytes` of it stay in use after the prompts have been read.
    """

    reply_id: str
    endpoint: str
    body: GenerationBody
    num_prompts: int
    prepare: Callable[[Engine], Awaitable[list[Prompt]]]
    exchange: Exchange
    lease: Lease
    rules: ReplyRules | None = None
    held_bytes: int = 0

    @property
    def priority(self) -> int:
        """Its class; that of background work is the last."""
        return MAX_PRIORITY if self.exchange.is_background else priority_of(self.body)

    @property
    def tenant(self) -> str | None:
        """Whose turns and places it takes: its user's where one key serves many, else the key's holder's."""
        name, label = self.body.safety_identifier or self.body.user, self.exchange.tenant_of_user
        return label(name) if label is not None and isinstance(name, str) and name else self.exchange.tenant


@dataclass(frozen=True, slots=True)
class PreparedInputs:
    """What another thread made of the body's text. `grammar` is None where the output may be anything."""

    prompts: Sequence[Prompt]
    speculation: SpeculationOptions
    bad_words: tuple[tuple[int, ...], ...]
    grammar: CompiledGrammar | None


async def open_generation(context: ServerContext, submission: Submission) -> Generation:
    """Take queue places, read the prompts, submit. Raises ApiError or an EngineError; then nothing runs.

    On return the body holds nothing large any more.
    """
    body, engine, lease = submission.body, context.engine, submission.lease
    exchange, grammar = submission.exchange, None
    tenant = submission.tenant
    deadline = _deadline(submission, context.settings.server.request_timeout)
    check_limits(body, context.settings.server)
    structure = await off_loop(context, lease.num_bytes, lambda: _structure(submission, engine))
    has_form = structure is not None and structure.calls is None
    rules = None if submission.rules is None else replace(submission.rules, has_form=has_form)
    num_requests = submission.num_prompts * body.num_choices
    _check_queueable(submission, num_requests, context.settings.server.max_queued_requests)
    with engine.admit(num_requests, tenant, submission.priority):
        try:
            speculation = speculation_options(body, engine.info)
            check_truncation(body, engine.info)
            async with prepared_by(engine, deadline, exchange.arrival_time):
                prompts = await submission.prepare(engine)
                speculation = replace(speculation, prediction=await read_prediction(body, engine, tenant))
                bad_words = await read_bad_words(body.bad_words or (), engine, tenant)
                if structure is not None:
                    grammar = await engine.text.compile_grammar(structure, tenant=tenant)
            inputs = PreparedInputs(prompts, speculation, bad_words, grammar)
            requests = _make_requests(submission, inputs, context)
            size = reply_size(body, _reply_parts(requests, body.num_choices, engine.info.max_model_len))
            check_reply_size(size)
            lease.hold(lease.num_bytes + size.held_bytes)
            readers = [
                None if rules is None else rules.reader(engine, prompt.token_ids) for prompt, _ in requests
            ]
            streams = engine.submit_all([request for _, request in requests])
        except InvalidRequest as error:
            error.param = body.prompt_param if error.param == "prompt" else error.param
            raise
    body.forget_input()
    lease.hold(submission.held_bytes + size.held_bytes)
    request_ids = [request.request_id for _, request in requests]
    reply = LiveReply(
        *(submission.reply_id, exchange.caller_id, exchange.tenant, request_ids),
        arrival_time=exchange.arrival_time,
        is_background=exchange.is_background,
    )
    context.live.open(reply)

    def on_close() -> None:
        context.live.close(reply)
        if exchange.peer.stalled:  # closing the streams would count it as a client that left
            for request_id in request_ids:
                engine.cancel(request_id, abort="timeout")

    choices = [
        Choice(index, prompt, stream, request.sampling.prompt_logprobs is not None, reader)
        for index, ((prompt, request), stream, reader) in enumerate(
            zip(requests, streams, readers, strict=True)
        )
    ]
    generation = Generation(choices, on_close)
    exchange.accepted = Accepted(submission.reply_id, body, generation, exchange.age_s)
    return generation


def _structure(submission: Submission, engine: Engine) -> StructuredOutput | None:
    """The form that every choice must have, for its calls or its content; None if there is none."""
    form = read_structure(submission.body)
    return form if submission.rules is None else submission.rules.structure(engine, form)


def _check_queueable(submission: Submission, num_requests: int, limit: int) -> None:
    """Refuse for good what no empty queue could hold."""
    if num_requests > limit:
        name = "n" if submission.num_prompts == 1 else submission.body.prompt_param
        raise invalid(
            f"The request asks for {num_requests} generations at once; the queue holds {limit}.", name
        )


def _deadline(submission: Submission, request_timeout_s: float) -> float | None:
    """When the reply must be complete, in seconds of the engine's clock; None for no limit."""
    limit_s = allowed_s(submission.body.deadline_ms, request_timeout_s)
    return None if limit_s is None else submission.exchange.arrival_time + limit_s


def truncated(body: GenerationBody, token_ids: Sequence[int], info: EngineInfo) -> Sequence[int]:
    """The last tokens of a prompt when the request asks for that, else all; -1 keeps what fits."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return token_ids
    if keep < 0:
        keep = max(1, info.max_model_len - (1 if body.tokens_asked is None else body.tokens_asked))
    return token_ids[-keep:]


def _make_requests(
    submission: Submission, inputs: PreparedInputs, context: ServerContext
) -> list[tuple[Prompt, GenerationRequest]]:
    """One engine request a choice, in the order of the choices. Raises ApiError or InvalidRequest."""
    body, info, rules = submission.body, context.engine.info, submission.rules
    deadline = _deadline(submission, context.settings.server.request_timeout)
    requests: list[tuple[Prompt, GenerationRequest]] = []
    shared: SamplingParams | None = None  # by all prompts: lists of token ids are long
    for prompt in inputs.prompts:
        max_tokens = _most_tokens(body, max(1, info.max_model_len - len(prompt.token_ids)))
        check_min_tokens(body, max_tokens)
        if shared is None:
            shown = frozenset() if rules is None else rules.shown_special_ids(context.engine)
            shared = replace(
                sampling_params(body, info, max_tokens),
                bad_words=inputs.bad_words,
                shown_special_ids=shown,
            )
        sampling = replace(shared, max_tokens=max_tokens)
        if sampling.prompt_logprobs is not None:
            prompt = replace(prompt, scores=PromptScores())
        grammar = inputs.grammar
        if rules is not None:
            grammar = rules.gate(context.engine, prompt.token_ids, grammar)
        first_id = f"{submission.reply_id}-{len(requests)}"
        seed = base_seed(body)  # without one in the body each prompt has its own, equal prompts too
        for j in range(body.num_choices):
            request = GenerationRequest(
                request_id=f"{submission.reply_id}-{len(requests)}",
                prompt_token_ids=prompt.token_ids,
                sampling=replace(
                    sampling,
                    seed=choice_seed(seed, j),
                    prompt_logprobs=None if j else sampling.prompt_logprobs,
                ),
                priority=submission.priority,
                group=submission.reply_id,
                tenant=submission.tenant,
                endpoint=submission.endpoint,
                arrival_time=submission.exchange.arrival_time,
                deadline=deadline,
                cache_salt=owned_salt(cache_owner(context, submission.exchange), body.cache_salt),
                fork_of=first_id if j else None,
                speculation=inputs.speculation,
                grammar=grammar,
            )
            requests.append((prompt, request))
    return requests


def _most_tokens(body: GenerationBody, num_left: int) -> int:
    """Tokens to generate where the context leaves so many; the engine refuses what is too long."""
    if body.tokens_asked is None:
        return num_left
    return min(body.tokens_asked, num_left) if body.ends_with_context else body.tokens_asked


def _reply_parts(
    requests: Sequence[tuple[Prompt, GenerationRequest]], num_choices: int, max_model_len: int
) -> list[ReplyPart]:
    """One a prompt; the choices of one are requests that follow each other.

    What does not fit the context counts as if cut to it, since the engine refuses it by that name.
    """
    parts = []
    for prompt, first in requests[::num_choices]:
        num_prompt_tokens = min(len(prompt.token_ids), max_model_len)
        num_left = max_model_len - num_prompt_tokens
        max_tokens = min(first.sampling.max_tokens, num_left)
        parts.append(ReplyPart(num_prompt_tokens, prompt.text, num_choices, max_tokens))
    return parts
