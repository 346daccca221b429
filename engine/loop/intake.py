"""What a request becomes when it is accepted: the record that is scheduled, and what turns ids into text."""

from __future__ import annotations

from engine.loop.engine_parts import EngineParts
from engine.plan.request import GenerationRequest, Request
from engine.text.detokenizer import Detokenizer


def make_record(request: GenerationRequest, parts: EngineParts, arrival: int, now: float) -> Request:
    """The `arrival`-th request as the scheduler sees it, submitted `now`."""
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


def make_detokenizer(request: GenerationRequest, parts: EngineParts) -> Detokenizer:
    """What decodes the request's output, from its first token on."""
    sampling = request.sampling
    return parts.detokenizer(
        parts.tokenizer,
        request.prompt_token_ids,
        skip_special_tokens=sampling.skip_special_tokens,
        stop=sampling.stop,
        include_stop=sampling.include_stop_str_in_output,
        min_tokens=sampling.min_tokens,
    )
