"""What a request becomes when it is accepted: the record that is scheduled, and what turns ids into text."""

from __future__ import annotations

from dataclasses import replace

from engine.loop.engine_parts import EngineParts
from engine.plan.request import GenerationRequest, Request, SamplingParams, SpeculationOptions
from engine.text.detokenizer import Detokenizer


def computes_nothing(request: GenerationRequest) -> bool:
    """True for no output and nothing to say of the prompt; its first token has no log-probability."""
    sampling = request.sampling
    return sampling.max_tokens == 0 and (
        sampling.prompt_logprobs is None or len(request.prompt_token_ids) == 1
    )


def scores_only(request: GenerationRequest) -> bool:
    """True for no output but the prompt's log-probabilities."""
    return request.sampling.max_tokens == 0 and not computes_nothing(request)


def make_record(request: GenerationRequest, parts: EngineParts, arrival: int, now: float) -> Request:
    """The `arrival`-th request as the scheduler sees it, submitted `now`."""
    if scores_only(request):
        record = make_record(_scoring(request), parts, arrival, now)
        return replace(record, stop_token_ids=frozenset(), scores_only=True)
    sampling = request.sampling
    eos = frozenset() if sampling.ignore_eos else parts.eos_token_ids
    stop_token_ids = sampling.stop_token_ids | eos
    return Request(
        request_id=request.request_id,
        token_ids=list(request.prompt_token_ids),
        num_prompt_tokens=len(request.prompt_token_ids),
        sampling=sampling,
        stop_token_ids=stop_token_ids,
        arrival=arrival,
        arrival_time=now if request.arrival_time is None else request.arrival_time,
        priority=request.priority,
        tenant=request.tenant,
        deadline=request.deadline,
        cache_salt=request.cache_salt,
        fork_of=request.fork_of,
        speculation=request.speculation,
        grammar=None if request.grammar is None else request.grammar.start(stop_token_ids),
    )


def _scoring(request: GenerationRequest) -> GenerationRequest:
    """The request as it is computed: its last token is drawn, with no other allowed; see `Request`."""
    *prompt, last = request.prompt_token_ids
    number = request.sampling.prompt_logprobs
    return replace(
        request,
        prompt_token_ids=prompt,
        sampling=SamplingParams(
            max_tokens=1,
            temperature=0.0,
            allowed_token_ids=(last,),
            logprobs=number,
            prompt_logprobs=number,
        ),
        speculation=SpeculationOptions(enabled=False),
        grammar=None,
    )


def make_detokenizer(request: GenerationRequest, parts: EngineParts) -> Detokenizer:
    """What decodes the request's output, from its first token on."""
    sampling = request.sampling
    return parts.detokenizer(
        parts.tokenizer,
        request.prompt_token_ids,
        shown_special_ids=sampling.shown_special_ids if sampling.skip_special_tokens else None,
        stop=sampling.stop,
        include_stop=sampling.include_stop_str_in_output,
        min_tokens=sampling.min_tokens,
    )
