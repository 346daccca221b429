"""Every request field of both endpoints, as data: what becomes of it, what it changes, what it may be.

A field is `honoured` (it changes the reply, or `why` says where else it shows), `refused` by name, `ignored`
as OpenAI does, or tested `elsewhere`. `good` and `bad` are its boundary: the last values that are taken and
the first that are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.support.tiny_models import EOS_ID, START_ID

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BOTH = (COMPLETIONS, CHAT)
State = Literal["honoured", "refused", "ignored", "elsewhere"]

NOT_NUMBERS: tuple[object, ...] = (True, False, "1", "", [], [1], {})
NOT_BOOLS: tuple[object, ...] = ("true", "false", 1, 0, [], {})
NOT_STRINGS: tuple[object, ...] = (1, True, [], {})
NOT_INTEGERS: tuple[object, ...] = (*NOT_NUMBERS, 1.5, 10**30, -(10**30))
MOST = 2**31 - 1


@dataclass(frozen=True)
class Said:
    """What the model says with nothing but the basics set; examples are made from it."""

    text: str
    token_ids: list[int]


Example = Callable[[Said], Mapping[str, Any]]


def _nothing(_: Said) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class RequestField:
    """One row. With `shows` added to what `beside` sets, the reply is another one, in each of `modes`."""

    name: str
    state: State = "honoured"
    paths: tuple[str, ...] = BOTH
    shows: Example | None = None
    beside: Example = _nothing
    modes: tuple[str, ...] = ("greedy", "seeded")
    why: str = ""
    good: tuple[object, ...] = ()
    bad: tuple[object, ...] = ()
    is_number: bool = False
    needs: Mapping[str, Any] = field(default_factory=dict)  # beside every value of `good` and `bad`
    is_good_anywhere: bool = True  # False: `good` fits the fake engine's own sizes


def _number(name: str, good: tuple[object, ...], bad: tuple[object, ...], **row: Any) -> RequestField:
    return RequestField(name, good=good, bad=(*bad, *NOT_NUMBERS), is_number=True, **row)


def _whole(name: str, good: tuple[object, ...], bad: tuple[object, ...], **row: Any) -> RequestField:
    return RequestField(name, good=good, bad=(*bad, *NOT_INTEGERS), is_number=True, **row)


def _switch(name: str, shows: Example | None = None, **row: Any) -> RequestField:
    return RequestField(name, shows=shows, good=(True, False), bad=NOT_BOOLS, **row)


def _ignored(name: str, *good: object) -> RequestField:
    return RequestField(name, "ignored", why="a label that OpenAI keeps", good=good)


def _refused(
    name: str, *bad: object, good: tuple[object, ...] = (), paths: tuple[str, ...] = BOTH
) -> RequestField:
    return RequestField(name, "refused", paths, bad=bad, good=good)


def _elsewhere(name: str, why: str, paths: tuple[str, ...] = BOTH) -> RequestField:
    return RequestField(name, "elsewhere", paths, why=why)


def _talk(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]


_STOPS = (*NOT_STRINGS[:2], [1], ["a", None], [""], "", ["x"] * 17, "x" * 1025, ["é" * 513], {})
_IDS_BAD: tuple[object, ...] = ([-1], [2**21], [10**30], [True], ["1"], [1.5], ["a"] * 10_000, "1", 1, {})
_FIVE = {"max_completion_tokens": 5}
_STRUCTURED = "test_structured_output"
_TOOLS = "test_tools"
_TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call")

SAMPLING = (
    _number(
        "temperature",
        (0, 1e-300, 2, 0.5),
        (-1e-9, 2.0001, 10**400),
        shows=lambda _: {"temperature": 1.6, "seed": 3},
    ),
    _number("top_p", (1e-9, 1), (0, -1, 1.0001), shows=lambda _: {"top_p": 0.01}, modes=("seeded",)),
    _whole("top_k", (-1, 0, 1, MOST), (-2, MOST + 1), shows=lambda _: {"top_k": 1}, modes=("seeded",)),
    _number("min_p", (0, 1), (-1e-9, 1.0001), shows=lambda _: {"min_p": 1}, modes=("seeded",)),
    _number("presence_penalty", (-2, 2), (-2.0001, 2.0001), shows=lambda _: {"presence_penalty": 2}),
    _number("frequency_penalty", (-2, 2), (-2.0001, 2.0001), shows=lambda _: {"frequency_penalty": 2}),
    _number(
        "repetition_penalty",
        (0.01, 100),
        (0, -1, 0.009, 100.01, 1e9),
        shows=lambda _: {"repetition_penalty": 1.9},
    ),
    _whole(
        "seed",
        (0, 2**63 - 1, -(2**63)),
        (2**63, -(2**63) - 1, 2**64),
        shows=lambda _: {"seed": 99},
        modes=("seeded",),
    ),
    RequestField(
        "logit_bias",
        shows=lambda said: {"logit_bias": {str(said.token_ids[0]): -100}},
        good=({}, {"0": -100, "1": 100}, {"1114111": 0.5}, {str(i): 0 for i in range(1024)}),
        bad=(
            {"a": 1},
            {"": 1},
            {"1": 100.1},
            {"1": -100.1},
            {"1": True},
            {"1": "1"},
            {"1": None},
            {"-1": 1},
            {"1114112": 1},
            {"1" * 11: 1},
            {"²": 1},
            {str(i): 0 for i in range(1025)},
            [],
            "x",
            1,
        ),
    ),
    RequestField(
        "allowed_token_ids",
        shows=lambda said: {"allowed_token_ids": [said.token_ids[0] ^ 1]},
        good=([0], [0, 0, 1114111]),
        bad=([], [1114112], *_IDS_BAD),
    ),
    RequestField(
        "bad_words",
        shows=lambda said: {"bad_words": [said.text[:1], said.text[1:3]]},
        good=([], ["a"], ["a b", " a"], ["é" * 512], ["a"] * 256),
        bad=("a", [""], [" "], [1], [None], ["é" * 513], ["a"] * 257, {}, 1),
    ),
    _whole("n", (1, 8), (0, -1, 9, 10**6), shows=lambda _: {"n": 2}),
)

LENGTH_AND_STOPS = (
    _whole(
        "max_tokens",
        (0, 1, 253),
        (-1, 254, MOST + 1),
        paths=(COMPLETIONS,),
        shows=lambda _: {"max_tokens": 5},
    ),
    _whole("max_tokens", (1, 200), (0, -1, MOST + 1), paths=(CHAT,), shows=lambda _: {"max_tokens": 5}),
    _whole("max_completion_tokens", (1, 200), (0, -1), paths=(CHAT,), shows=lambda _: _FIVE),
    _whole(
        "min_tokens",
        (0, 16),
        (-1, 17, MOST + 1),
        needs={"max_tokens": 16},
        beside=lambda said: {"stop_token_ids": [said.token_ids[2]]},
        shows=lambda _: {"min_tokens": 9},
    ),
    RequestField(
        "stop",
        shows=lambda said: {"stop": [said.text[4:6], "nothing"]},
        good=("a", [], ["a"], ["x"] * 16, "x" * 1024),
        bad=_STOPS,
    ),
    RequestField(
        "stop_token_ids",
        shows=lambda said: {"stop_token_ids": [said.token_ids[2]]},
        good=([], [0, 1114111]),
        bad=_IDS_BAD,
    ),
    _switch(
        "ignore_eos",
        lambda _: {"ignore_eos": True},
        beside=lambda _: {"ignore_eos": None, "logit_bias": {str(EOS_ID): 100}},
    ),
    _switch(
        "include_stop_str_in_output",
        lambda _: {"include_stop_str_in_output": True},
        beside=lambda said: {"stop": said.text[4:6]},
    ),
    _switch(
        "skip_special_tokens",
        lambda _: {"skip_special_tokens": False},
        beside=lambda _: {"logit_bias": {str(START_ID): 100}},
    ),
)

PROMPTS = (
    RequestField(
        "prompt",
        paths=(COMPLETIONS,),
        shows=lambda said: {"prompt": said.token_ids},
        good=("a", ["a", "b"], [97], [[97], [98, 99]], [1114111], "\u0000", " "),
        bad=(
            "",
            [],
            [""],
            [[]],
            ["a", [1]],
            [1, "a"],
            [True],
            [1.5],
            [-1],
            [1114112],
            [10**30],
            [[1], []],
            [[1], [True]],
            {},
            5,
            True,
            ["a"] * 33,
        ),
    ),
    RequestField(
        "messages",
        paths=(CHAT,),
        shows=lambda said: {"messages": _talk(said.text)},
        bad=(
            [],
            "hi",
            {},
            5,
            [5],
            [{}],
            [{"role": "king", "content": "a"}],
            [{"role": "user"}],
            [{"role": "user", "content": 5}],
            [{"content": "a"}],
            [{"role": "user", "content": [{"type": "image_url"}]}],
            [{"role": "user", "content": [{"type": "text", "text": 1}]}],
            [{"role": "user", "content": "a", "name": 1}],
        ),
    ),
    _switch("add_special_tokens", lambda _: {"add_special_tokens": False}, paths=(COMPLETIONS,)),
    _switch("add_special_tokens", lambda _: {"add_special_tokens": True}, paths=(CHAT,)),
    _whole(
        "truncate_prompt_tokens",
        (-1, 1, 256),  # the context of the engine that answers
        (-2, 0, 257, MOST, MOST + 1),
        shows=lambda _: {"truncate_prompt_tokens": 3},
    ),
    RequestField(
        "cache_salt",
        shows=lambda said: {"cache_salt": f"of {said.text}"},
        good=("a", "x" * 1024),
        bad=("", "x" * 1025, *NOT_STRINGS),
    ),
)

SHAPE = (
    RequestField(
        "model", shows=lambda _: {"model": "org/alias"}, good=("test-model", "org/alias"), bad=NOT_STRINGS
    ),
    _switch("echo", lambda _: {"echo": True}, paths=(COMPLETIONS,)),
    _whole(
        "logprobs",
        (0, 20),
        (-1, 21, MOST + 1),
        paths=(COMPLETIONS,),
        shows=lambda _: {"logprobs": 2, "echo": True},
    ),
    _switch("logprobs", lambda _: {"logprobs": True}, paths=(CHAT,)),
    _whole(
        "top_logprobs",
        (0, 20),
        (-1, 21, MOST + 1),
        paths=(CHAT,),
        needs={"logprobs": True},
        beside=lambda _: {"logprobs": True},
        shows=lambda _: {"top_logprobs": 3},
    ),
    _whole("prompt_logprobs", (0, 20), (-1, 21, MOST + 1), shows=lambda _: {"prompt_logprobs": 2}),
    _switch("return_token_ids", lambda _: {"return_token_ids": True}),
    _switch("return_token_origins", state="elsewhere", why="it tells drafts apart, test_token_origins.py"),
    _switch(
        "return_tokens_as_token_ids",
        lambda _: {"return_tokens_as_token_ids": True},
        beside=lambda _: {"logprobs": True},
        paths=(CHAT,),
    ),
    _switch(
        "return_tokens_as_token_ids",
        lambda _: {"return_tokens_as_token_ids": True},
        beside=lambda _: {"logprobs": 1},
        paths=(COMPLETIONS,),
    ),
    _whole("best_of", (1,), (0, 2, -1, 10**6), paths=(COMPLETIONS,), why="n only, which changes nothing"),
    _switch("stream", lambda _: {"stream": True}),
    RequestField(
        "stream_options",
        needs={"stream": True},
        beside=lambda _: {"stream": True},
        shows=lambda _: {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        good=({}, {"include_usage": True}, {"include_usage": None, "include_obfuscation": False}),
        bad=(True, [], "x", {"include_usage": "true"}, {"continuous_usage_stats": 1}),
    ),
)

SCHEDULING = (
    _whole("priority", (-1000, 0, 1000), (1001, -1001, 2**63), why="order only: test_requests"),
    RequestField(
        "service_tier",
        shows=lambda _: {"service_tier": "flex"},
        good=("auto", "default", "flex", "scale", "priority", "fast"),
        bad=("gold", "", *NOT_STRINGS),
    ),
    RequestField(
        "request_id",
        shows=lambda _: {"request_id": "mine"},
        good=("a", "x" * 128),
        bad=("", "x" * 129, "a\nb", "é", *NOT_STRINGS),
    ),
    _number("deadline_ms", (1e-9, MOST), (0, -1, MOST + 1), shows=lambda _: {"deadline_ms": 1e-6}),
    RequestField(
        "speculation",
        why="speed only: test_speculation_fields",
        good=({}, {"enabled": False}, {"num_tokens": 8}, {"method": "auto"}),
        is_good_anywhere=False,
        bad=(
            True,
            [],
            {"enabled": 1},
            {"num_tokens": 0},
            {"num_tokens": 9},
            {"num_tokens": True},
            {"num_tokens": "1"},
            {"method": "psychic"},
            {"method": ""},
        ),
    ),
    RequestField(
        "prediction",
        why="speed only: test_speculation_fields",
        good=({"type": "content", "content": "a"},),
        bad=(True, "a", {}, {"type": "content"}, {"type": "content", "content": 1}),
    ),
)

LABELS = (
    _ignored("user", "me", "é"),
    _ignored("metadata", {"a": "b"}),
    _ignored("store", True, False),
    _ignored("safety_identifier", "x"),
    _ignored("prompt_cache_key", "x"),
    _ignored("prompt_cache_options", {"mode": "explicit"}),
    _ignored("prompt_cache_retention", "24h"),
)

LATER = (
    *(_elsewhere(name, _STRUCTURED) for name in ("response_format", "structured_outputs")),
    *(_elsewhere(name, _TOOLS, (CHAT,)) for name in _TOOL_FIELDS),
    _elsewhere("suffix", "test_fill_in", (COMPLETIONS,)),
)

_REASONING = "test_reasoning"
THINKING = (
    RequestField(
        "chat_template_kwargs",
        paths=(CHAT,),
        why=_REASONING,
        good=({}, {"enable_thinking": False}, {"any": {"thing": [1]}}),
        bad=([], "x", 1, {"messages": []}, {"tools": []}, {"a b": 1}, {"add_generation_prompt": False}),
    ),
    RequestField(
        "reasoning_effort",
        paths=(CHAT,),
        why=_REASONING,
        good=("none", "minimal", "low", "medium", "high", "xhigh", "max"),
        bad=("", "huge", *NOT_STRINGS),
    ),
    RequestField(
        "verbosity",
        paths=(CHAT,),
        why=_REASONING,
        good=("low", "medium", "high"),
        bad=("", "huge", *NOT_STRINGS),
    ),
    _switch("enable_thinking", paths=(CHAT,), why=_REASONING),
    _whole("thinking_token_budget", (0, 1, MOST), (-1, MOST + 1), paths=(CHAT,), why=_REASONING),
)

REFUSED = (
    _refused("prompt_embeds", "x", ["x"]),
    _refused("use_beam_search", True, 1, good=(False,)),
    _refused("logits_processors", ["x"], good=([],)),
    _refused("logprob_token_ids", [1], good=([],)),
    _refused("repetition_detection", {}),
    _refused("thinking_token_budget", 5, paths=(COMPLETIONS,)),
    _refused("truncation_side", "right", good=("left",)),
    *(_refused(f"guided_{kind}", "x", {})
      for kind in ("json", "regex", "choice", "grammar", "decoding_backend", "whitespace_pattern")),
    _refused("add_generation_prompt", False, good=(True,), paths=(CHAT,)),
    _refused("audio", {}, paths=(CHAT,)),
    _refused("chat_template", "{{ 1 }}", paths=(CHAT,)),
    _refused("continue_final_message", True, good=(False,), paths=(CHAT,)),
    _refused("documents", [{}], good=([],), paths=(CHAT,)),
    _refused("echo", True, good=(False,), paths=(CHAT,)),
    _refused("modalities", ["audio"], ["text", "audio"], good=(["text"],), paths=(CHAT,)),
    _refused("moderation", {}, paths=(CHAT,)),
    _refused("web_search_options", {}, paths=(CHAT,)),
)  # fmt: skip

FIELDS: tuple[RequestField, ...] = (
    *SAMPLING, *LENGTH_AND_STOPS, *PROMPTS, *SHAPE, *SCHEDULING, *LABELS, *LATER, *THINKING, *REFUSED
)  # fmt: skip
