"""The contract's request fields are all known: honoured, ignored as OpenAI does, or refused by name."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from pydantic import ValidationError

from server.api.anthropic.protocol import MessagesRequest
from server.api.field_words import close_name, describe
from server.api.ollama.protocol import OllamaChatRequest
from server.api.openai.protocol import ChatCompletionRequest, CompletionRequest, GenerationBody
from server.api.openai.protocol_refusals import ON_CHAT, ON_COMPLETIONS, check_refusals
from server.api.openai.protocol_structure import StructuredOutputs
from server.api.openai.protocol_values import BodyPart
from server.api.responses.protocol import ResponsesRequest
from server.http.errors import ApiError

EXTRAS = [
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "bad_words"),
    *("include_stop_str_in_output", "skip_special_tokens", "truncate_prompt_tokens", "add_special_tokens"),
    *("allowed_token_ids", "prompt_logprobs", "return_token_ids", "cache_salt", "priority", "request_id"),
    *("deadline_ms", "speculation", "prediction", "structured_outputs", "service_tier", "prompt_embeds"),
    *("use_beam_search", "guided_json", "return_token_origins"),
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


PARSERS_WORDS = re.compile(
    r"[Ii]nput|valid|instance|dictionary|Field|Extra|item|should|pattern|None|\b(int|str|float|bool|dict)\b"
)


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
def test_what_is_wrong_is_said_in_plain_words(kind: type[GenerationBody]) -> None:
    basics = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    for name, value in itertools.product({*COMPLETIONS, *CHAT}, [*ODD_VALUES, [{"type": "x"}], {"type": 5}]):
        try:
            kind.model_validate({**basics, name: value})
        except ValidationError as error:
            reply = describe(error).reply
            assert reply.message.startswith(f"'{name}"), reply
            assert "not allowed here" not in reply.message, error  # the last resort: a kind without words
            assert not PARSERS_WORDS.search(reply.message.replace(name, "")), reply.message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 3}, "'temperature' must be at most 2, not 3."),
        ({"temperature": "hot"}, "'temperature' must be a number, not a string."),
        ({"n": 1.5}, "'n' must be a whole number, not 1.5."),
        ({"n": 0}, "'n' must be at least 1, not 0."),
        ({"n": -(10**400)}, "'n' must be at least 1, not a number far beyond it."),
        ({"deadline_ms": 0.0}, "'deadline_ms' must be above 0, not 0."),
        ({"stream": "true"}, "'stream' must be true or false, not a string."),
        ({"messages": []}, "'messages' must not be empty."),
        ({"messages": None}, "'messages' must be a list, not null."),
        ({"messages": ["hi"]}, "'messages[0]' must be an object, not a string."),
        ({"messages": [{"content": "hi"}]}, "'messages[0].role' is missing."),
        (
            {"messages": [{"role": "king"}]},
            "'messages[0].role' must be 'system', 'developer', 'user', 'assistant', 'tool' or 'function'.",
        ),
        ({"request_id": "a\nb"}, "'request_id' must have printable ASCII characters only."),
        ({"request_id": "x" * 129}, "'request_id' must have at most 128 characters."),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "'tools[0].function.name' must have 1 to 64 letters, digits, '_', '-' and '.' only.",
        ),
        (
            {"top_p": 0, "n": True},
            "'top_p' must be above 0, not 0; 'n' must be a whole number, not a boolean.",
        ),
    ],
)
def test_what_is_wrong_names_the_limit_and_the_value(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **fields})
    assert describe(refused.value).reply.message == message


LONG_NAME = "'tools[0].name' must have 1 to 128 letters, digits, '_', '-' and '.' only."


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (OllamaChatRequest, {"think": "max"}, "'think' must be 'low', 'medium' or 'high'."),
        (OllamaChatRequest, {"think": 1}, "'think' must be true or false, not 1."),
        (OllamaChatRequest, {"format": "xml"}, "'format' must be '' or 'json'."),
        (OllamaChatRequest, {"format": []}, "'format' must be an object, not a list."),
        (StructuredOutputs, {"json": []}, "'json' must be an object, not a list."),
        (ResponsesRequest, {"tools": [{"type": "function", "name": "a b"}]}, LONG_NAME),
        (MessagesRequest, {"tools": [{"name": "a" * 129, "input_schema": {}}]}, LONG_NAME),
    ],
)
def test_what_is_wrong_is_said_without_the_parsers_names(
    kind: type[BodyPart], fields: dict[str, Any], message: str
) -> None:
    basics = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    with pytest.raises(ValidationError) as refused:
        kind.model_validate({**basics, **fields})
    assert describe(refused.value).reply.message == message


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("maxTokens", "max_tokens"),
        ("message", "messages"),
        ("colour", None),
        ("top_a", None),
        ("x" * 10_000, None),
    ],
)
def test_a_close_name_is_found_and_no_far_one(name: str, meant: str | None) -> None:
    assert close_name(name, ChatCompletionRequest.model_fields) == meant


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
