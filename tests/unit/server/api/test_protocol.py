"""The contract's request fields are all known: honoured, ignored as OpenAI does, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from server.api.openai.protocol import ChatCompletionRequest, CompletionRequest, GenerationBody
from server.api.openai.protocol_refusals import ON_CHAT, ON_COMPLETIONS, check_refusals
from server.http.errors import ApiError

EXTRAS = [
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "bad_words"),
    *("include_stop_str_in_output", "skip_special_tokens", "truncate_prompt_tokens", "add_special_tokens"),
    *("allowed_token_ids", "prompt_logprobs", "return_token_ids", "cache_salt", "priority", "request_id"),
    *("deadline_ms", "speculation", "prediction", "structured_outputs", "service_tier", "prompt_embeds"),
    *("use_beam_search", "guided_json"),
]
OPENAI = [
    *("model", "temperature", "top_p", "n", "stop", "stream", "stream_options", "seed", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "logprobs", "max_tokens", "user"),
]
COMPLETIONS = [*OPENAI, *EXTRAS, "prompt", "best_of", "echo", "suffix"]
CHAT = [
    *(*OPENAI, *EXTRAS, "messages", "top_logprobs", "max_completion_tokens", "response_format", "tools"),
    *("tool_choice", "parallel_tool_calls", "modalities", "audio", "metadata", "store", "safety_identifier"),
    *("chat_template",),
]


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completions_know_the_field(name: str) -> None:
    assert name in CompletionRequest.model_fields or name in ON_COMPLETIONS


@pytest.mark.parametrize("name", CHAT)
def test_chat_knows_the_field(name: str) -> None:
    assert name in ChatCompletionRequest.model_fields or name in ON_CHAT


def test_every_harmless_value_passes_and_null_is_one() -> None:
    for refusals in (ON_CHAT, ON_COMPLETIONS):
        for name, refusal in refusals.items():
            for value in (None, *refusal.harmless):
                check_refusals({name: value}, refusals)
            with pytest.raises(ApiError) as refused:
                check_refusals({name: "certainly not"}, refusals)
            assert refused.value.reply.param == name


ODD_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, float("inf")),
    *(float("nan"), "", "a", "1", "\x00", "\U0001f980" * 600, [], [[]], [None], ["a"], ["a", 1], [1, 2.0]),
    *([True], [[1], "a"], [1] * 20, ["a"] * 20, {}, {"": 1}, {"1": 1}, {"1": None}, {"a": {"b": []}}),
    *([{}], [{"role": "user", "content": "a"}], [{"role": "user", "content": [{}]}], [{"role": []}]),
]


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
@pytest.mark.parametrize("value", ODD_VALUES, ids=range(len(ODD_VALUES)))
def test_any_value_in_any_field_is_taken_or_refused(kind: type[GenerationBody], value: object) -> None:
    for name in {*COMPLETIONS, *CHAT}:
        try:
            kind.model_validate({"prompt": "a", "messages": [{"role": "user", "content": "a"}], name: value})
        except ValidationError as error:
            assert error.error_count() < 50
            assert {each["loc"][0] for each in error.errors()} == {name}


def test_long_lists_of_wrong_things_are_refused_at_the_first() -> None:
    for fields in ({"stop_token_ids": ["a"] * 10_000}, {"allowed_token_ids": [None] * 10_000}):
        with pytest.raises(ValidationError) as refused:
            CompletionRequest.model_validate({"prompt": "a", **fields})
        assert refused.value.error_count() == 1
    with pytest.raises(ValidationError) as refused:
        ChatCompletionRequest.model_validate({"messages": [5] * 10_000})
    assert refused.value.error_count() == 1


def test_what_a_reply_does_not_need_is_forgotten() -> None:
    large = "a" * 1000
    body = CompletionRequest.model_validate(
        {
            "prompt": [large],
            "user": large,
            "metadata": {"a": large},
            "stop": large[:9],
            "allowed_token_ids": [1, 2],
            "unknown": large,
            "structured_outputs": {"choice": [large]},
            "model": "m",
            "n": 2,
            "logprobs": 1,
            "echo": True,
            "temperature": 0.5,
        }
    )
    body.forget_input()
    kept = {name: value for name, value in body if value is not None}
    assert kept == {"model": "m", "n": 2, "logprobs": 1, "echo": True, "temperature": 0.5}
    assert not body.model_extra
