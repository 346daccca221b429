"""From a request's fields to SamplingParams: the defaults, the limits of this server and of this model."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from hashlib import blake2b

from config import ServerSettings
from engine import EngineInfo, Priority, SamplingParams, check_token_ids
from server.api.openai.protocol import CompletionRequest, GenerationBody
from server.http.errors import invalid

# Below this a temperature is greedy: logits divided by it would overflow float32.
GREEDY_TEMPERATURE = 1e-5

# The API's own values where neither a request nor the model's makers say anything.
_DEFAULTS: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
_TIERS: Mapping[str, int] = {"priority": Priority.HIGH, "fast": Priority.HIGH, "flex": Priority.FLEX}


def check_limits(body: GenerationBody, settings: ServerSettings) -> None:
    """Raise ApiError for what this server does not allow, whatever model it serves."""
    if body.num_choices > settings.max_n:
        raise invalid(f"'n' is {body.num_choices}; the limit is {settings.max_n}.", "n")
    if (body.num_logprobs or 0) > settings.max_logprobs:
        raise invalid(
            f"'{body.logprobs_param}' is {body.num_logprobs}; the limit is {settings.max_logprobs}.",
            body.logprobs_param,
        )
    if (body.prompt_logprobs or 0) > settings.max_logprobs:
        raise invalid(
            f"'prompt_logprobs' is {body.prompt_logprobs}; the limit is {settings.max_logprobs}.",
            "prompt_logprobs",
        )
    if body.truncate_prompt_tokens == 0:
        raise invalid("'truncate_prompt_tokens' is 0: keep at least one token, or -1 for all that fit.",
                      "truncate_prompt_tokens")  # fmt: skip
    if isinstance(body, CompletionRequest):
        _check_completion(body)


def check_truncation(body: GenerationBody, info: EngineInfo) -> None:
    """Raise ApiError where more of a prompt is to be kept than the model could read."""
    keep = body.truncate_prompt_tokens
    if keep is not None and keep > info.max_model_len:
        raise invalid(
            f"'truncate_prompt_tokens' is {keep}; this model's maximum context length is "
            f"{info.max_model_len} tokens.",
            "truncate_prompt_tokens",
        )


def _check_completion(body: CompletionRequest) -> None:
    if body.best_of is not None and body.best_of != body.num_choices:
        raise invalid(f"'best_of' is {body.best_of}: it is supported only when equal to 'n'.", "best_of")


def priority_of(body: GenerationBody) -> int:
    """The scheduling priority; an explicit one wins over the service tier's."""
    if body.priority is not None:
        return body.priority
    return _TIERS.get(body.service_tier or "default", Priority.DEFAULT)


def check_min_tokens(body: GenerationBody, max_tokens: int) -> None:
    """Raise ApiError when more tokens are asked for than there may be."""
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid(f"'min_tokens' is {min_tokens}, more than the {max_tokens} to generate.", "min_tokens")


def sampling_params(body: GenerationBody, info: EngineInfo, max_tokens: int) -> SamplingParams:
    """What the engine needs, but for the seed. Raises ApiError for values this model does not allow."""
    check_min_tokens(body, max_tokens)
    stop_ids, allowed = body.stop_token_ids or (), body.allowed_token_ids
    bias = body.logit_bias or ()
    check_token_ids("stop_token_ids", stop_ids, info.vocab_size)
    check_token_ids("logit_bias", [token_id for token_id, _ in bias], info.vocab_size)
    if allowed is not None:
        check_token_ids("allowed_token_ids", allowed, info.vocab_size)
        if not allowed:
            raise invalid("'allowed_token_ids' is empty: nothing could be generated.", "allowed_token_ids")
    held = {name: effective(name, getattr(body, name), info.default_sampling) for name in _DEFAULTS}
    temperature = held["temperature"]
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        temperature=0.0 if temperature < GREEDY_TEMPERATURE else temperature,
        top_k=min(max(0, int(held["top_k"])), info.vocab_size),
        top_p=held["top_p"],
        min_p=held["min_p"],
        repetition_penalty=held["repetition_penalty"],
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=bias,
        allowed_token_ids=None if allowed is None else tuple(allowed),
        stop=body.stop or (),
        stop_token_ids=frozenset(stop_ids),
        ignore_eos=bool(body.ignore_eos),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        logprobs=body.num_logprobs,
        prompt_logprobs=body.num_prompt_logprobs,
    )


def effective(name: str, asked: float | None, advised: Mapping[str, float]) -> float:
    """What holds for a field: as asked for, else as the model's makers advise, else its default."""
    return advised.get(name, _DEFAULTS[name]) if asked is None else asked


def base_seed(body: GenerationBody) -> int:
    """The caller's seed, or a fresh one that cannot be guessed: -1 asks for none by vLLM and llama.cpp."""
    return secrets.randbits(63) if body.seed is None or body.seed == -1 else body.seed


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice j: a hash of (seed, j), so that choices differ and repeat; choice 0 keeps it."""
    if choice == 0:
        return seed
    digest = blake2b(seed.to_bytes(8, "little", signed=True) + choice.to_bytes(8, "little"), digest_size=8)
    return int.from_bytes(digest.digest(), "little", signed=True)
