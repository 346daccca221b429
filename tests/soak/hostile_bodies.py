"""Request bodies made to cost as much as they may: every field of every endpoint, filled in many ways.

Then whole requests whose reply, or whose preparation, multiplies fields with each other.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from pydantic import BaseModel

from server.api.anthropic.protocol import CountTokensRequest, MessagesRequest
from server.api.batches.protocol import BatchRequest
from server.api.embeddings.protocol import EmbeddingsRequest, RerankRequest, ScoreRequest
from server.api.llama_cpp.protocol import InfillRequest
from server.api.openai.protocol import ChatCompletionRequest, CompletionRequest, RequestPatch
from server.api.openai.protocol_tokens import DetokenizeRequest, TokenizeRequest
from server.api.responses.protocol import ResponsesRequest
from server.api.server_changes import ServerPatch
from server.http.json_body import MAX_PARTS, MAX_VALUES
from server.http.json_parts import MAX_DEPTH, count_marks

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
INFILL = "/infill"
LARGEST = 8 * 2**20
SIZES = (2**16, 2**20, LARGEST)
NUM_MIXED = 60
CONTEXT = 8192

_HOLE = "\0"  # where a field's JSON goes
_HELLO = {"role": "user", "content": "hi"}


@dataclass(frozen=True, slots=True)
class HostileBody:
    """A request: where to, what it is made of in words, and its bytes when they are wanted."""

    method: str
    path: str
    name: str
    make: Callable[[], bytes]


def _filled(before: str, piece: str, after: str) -> Callable[[int], bytes]:
    """Pieces in a row, until the size is reached."""

    def make(size: int) -> bytes:
        encoded = piece.encode()
        count = max(1, (size - len(before) - len(after)) // len(encoded))
        return before.encode() + (encoded * count).rstrip(b",") + after.encode()

    return make


def _keys(size: int) -> bytes:
    return b"{" + b",".join(b'"k%d":1' % i for i in range(size // 12)) + b"}"


def _nested(before: bytes, after: bytes, num_levels: int) -> Callable[[int], bytes]:
    """A long text within as many of these as the parser's depth allows, each of so many levels."""
    count = (MAX_DEPTH - 20) // num_levels

    def make(size: int) -> bytes:
        text = b"a" * max(1, size - count * (len(before) + len(after)) - 2)
        return before * count + b'"' + text + b'"' + after * count

    return make


# JSON values of any size.
SHAPES: dict[str, Callable[[int], bytes]] = {
    "text": _filled('"', "a", '"'),
    "words": _filled('"', "the quick, brown fox: ", '"'),
    "wide text": _filled('"', "\U0001f642", '"'),
    "escapes": _filled('"', "\\u00e9", '"'),
    "quotes": _filled('"', '\\"', '"'),
    "brackets in text": _filled('"', '\\"[{:,', '"'),
    "spaces": _filled('"', " ", '"'),
    "json in text": _filled('"{\\"a\\":[', "1,", '1]}"'),
    "ones": _filled("[", "1,", "]"),
    "ids": _filled("[", "451,", "]"),
    "floats": _filled("[", "1.25,", "]"),
    "strings": _filled("[", '"ab",', "]"),
    "long strings": _filled("[", '"' + "a" * 1000 + '",', "]"),
    "lists": _filled("[", "[],", "]"),
    "lists of ids": _filled("[", "[" + "7," * 999 + "7],", "]"),
    "objects": _filled("[", '{"role":"user","content":"a"},', "]"),
    "parts": _filled("[", '{"type":"text","text":"a"},', "]"),
    "tools": _filled("[", '{"type":"function","function":{"name":"f"}},', "]"),
    "files": _filled("[", '{"filename":"a","text":"' + "a, b " * 1700 + '"},', "]"),
    "keys": _keys,
    "deep": lambda size: b"[" * (size // 2) + b"]" * (size // 2),
    "deep objects": lambda size: b'{"a":' * (size // 6) + b"1" + b"}" * (size // 6),
    "digits": lambda size: b"9" * size,
    "nested documents": _nested(b'[{"type":"document","source":{"type":"content","content":', b"}}]", 3),
    "nested results": _nested(b'[{"type":"search_result","title":"a","content":', b"}]", 2),
}


@cache
def _largest_read(shape: str) -> int:
    """Bytes of the largest value of a shape whose parts and values are not too many to be read."""
    sample = SHAPES[shape](SIZES[0])
    counts = list(count_marks(sample))
    num_parts, num_values = (
        max(1, sum(parts for parts, _ in counts)),
        max(1, sum(values for _, values in counts)),
    )
    return min(LARGEST, int(0.95 * len(sample) * min(MAX_PARTS / num_parts, MAX_VALUES / num_values)))


_BATCH = {"input_file_id": "none", "endpoint": COMPLETIONS, "completion_window": "24h"}
_KINDS: tuple[tuple[str, str, type[BaseModel], dict[str, Any]], ...] = (
    ("POST", COMPLETIONS, CompletionRequest, {"prompt": "hi", "max_tokens": 2}),
    ("POST", CHAT, ChatCompletionRequest, {"messages": [_HELLO], "max_tokens": 2}),
    ("POST", TOKENIZE, TokenizeRequest, {"prompt": "hi"}),
    ("POST", DETOKENIZE, DetokenizeRequest, {"tokens": [5]}),
    ("POST", RESPONSES, ResponsesRequest, {"input": "hi", "max_output_tokens": 2}),
    ("POST", MESSAGES, MessagesRequest, {"messages": [_HELLO], "max_tokens": 2}),
    ("POST", f"{MESSAGES}/count_tokens", CountTokensRequest, {"messages": [_HELLO]}),
    ("POST", INFILL, InfillRequest, {"input_prefix": "a", "input_suffix": "b", "n_predict": 2}),
    ("POST", "/v1/embeddings", EmbeddingsRequest, {"input": "hi"}),
    ("POST", "/v1/rerank", RerankRequest, {"query": "hi", "documents": ["a"]}),
    ("POST", "/v1/score", ScoreRequest, {"text_1": "a", "text_2": "b"}),
    ("POST", "/v1/batches", BatchRequest, _BATCH),
    ("PATCH", "/v1/requests/none", RequestPatch, {}),
    ("PATCH", "/server_info", ServerPatch, {}),
)
BODY_KINDS = {kind: path for _, path, kind, _ in _KINDS}
_FUNCTION = {"name": "f", "parameters": {"type": "object"}}


def _said(**message: Any) -> tuple[str, dict[str, Any]]:
    """A chat with an earlier message of the model."""
    return CHAT, {"messages": [_HELLO, {"role": "assistant", **message}, _HELLO], "max_tokens": 2}


def _item(**item: Any) -> tuple[str, dict[str, Any]]:
    """A response to an item."""
    return RESPONSES, {"input": [item], "max_output_tokens": 2}


def _block(role: str = "user", **block: Any) -> tuple[str, dict[str, Any]]:
    """A message of one block."""
    return MESSAGES, {"messages": [{"role": role, "content": [block]}], "max_tokens": 2}


def _asking(path: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    """An ordinary conversation with these fields beside it."""
    return path, {"input" if path == RESPONSES else "messages": [_HELLO], **_BASES[path], **fields}


_BASES: dict[str, dict[str, Any]] = {CHAT: {}, RESPONSES: {}, MESSAGES: {"max_tokens": 2}}
# Places within fields, as a body around them.
_INNER: dict[str, tuple[str, dict[str, Any]]] = {
    "content of a message": (CHAT, {"messages": [{"role": "user", "content": _HOLE}]}),
    "content to be tokenized": (TOKENIZE, {"messages": [{"role": "user", "content": _HOLE}]}),
    "arguments of a call": (
        CHAT,
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": _HOLE}}],
                }
            ]
        },
    ),
    "a name": (CHAT, {"messages": [_HELLO | {"name": _HOLE}]}),
    "parameters": (
        CHAT,
        {
            "messages": [_HELLO],
            "tools": [{"type": "function", "function": _FUNCTION | {"parameters": _HOLE}}],
        },
    ),
    "description": (
        CHAT,
        {
            "messages": [_HELLO],
            "tools": [{"type": "function", "function": _FUNCTION | {"description": _HOLE}}],
        },
    ),
    **{
        f"structured {kind}": (COMPLETIONS, {"prompt": "hi", "structured_outputs": {kind: _HOLE}})
        for kind in ("json", "regex", "choice", "grammar")
    },
    "schema": (
        CHAT,
        {
            "messages": [_HELLO],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _HOLE}},
        },
    ),
    "an item": _item(role="user", content=_HOLE),
    "output of a call": _item(type="function_call_output", call_id="a", output=_HOLE),
    "a block": (MESSAGES, {"messages": [{"role": "user", "content": _HOLE}], "max_tokens": 2}),
    "input of a tool": _block("assistant", type="tool_use", id="a", name="f", input=_HOLE),
    "prediction": (COMPLETIONS, {"prompt": "hi", "prediction": {"type": "content", "content": _HOLE}}),
}
# Places that are read as others are, or not at all: each is filled in a few ways.
_INNER_SELDOM: dict[str, tuple[str, dict[str, Any]]] = {
    "reasoning of a message": _said(content="a", reasoning_content=_HOLE),
    "refusal of a message": _said(content=None, refusal=_HOLE),
    "input of a custom call": _said(
        tool_calls=[{"id": "a", "type": "custom", "custom": {"name": "f", "input": _HOLE}}]
    ),
    "template options": _asking(CHAT, chat_template_kwargs={"a": _HOLE}),
    "grammar of a custom tool": _asking(
        CHAT,
        tools=[
            {
                "type": "custom",
                "custom": {
                    "name": "f",
                    "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": _HOLE}},
                },
            }
        ],
        tool_choice="required",
    ),
    "allowed tools": _asking(
        CHAT,
        tools=[{"type": "function", "function": _FUNCTION}],
        tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": _HOLE}},
    ),
    "arguments of an item": _item(type="function_call", call_id="a", name="f", arguments=_HOLE),
    "input of an item": _item(type="custom_tool_call", call_id="a", name="f", input=_HOLE),
    "thoughts of an item": _item(type="reasoning", content=_HOLE),
    "summary of an item": _item(type="reasoning", summary=_HOLE),
    "encrypted thoughts": _item(type="reasoning", encrypted_content=_HOLE),
    "an unknown item": _item(type="unheard_of", data=_HOLE),
    "schema of a text": _asking(RESPONSES, text={"format": {"type": "json_schema", "schema": _HOLE}}),
    "effort of a response": _asking(RESPONSES, reasoning={"effort": _HOLE}),
    "parameters in a namespace": _asking(
        RESPONSES,
        tools=[
            {
                "type": "namespace",
                "name": "n",
                "tools": [{"type": "function", "name": "f", "parameters": _HOLE}],
            }
        ],
    ),
    "definition of a custom tool": _asking(
        RESPONSES,
        tools=[
            {
                "type": "custom",
                "name": "f",
                "format": {"type": "grammar", "syntax": "regex", "definition": _HOLE},
            }
        ],
        tool_choice={"type": "custom", "name": "f"},
    ),
    "a thinking block": _block("assistant", type="thinking", thinking=_HOLE, signature="a"),
    "result of a tool": _block(type="tool_result", tool_use_id="a", content=_HOLE),
    "a document": _block(type="document", source={"type": "text", "data": _HOLE}),
    "content of a document": _block(type="document", source={"type": "content", "content": _HOLE}),
    "title of a document": _block(type="document", title=_HOLE, source={"type": "text", "data": "a"}),
    "a search result": _block(type="search_result", title="a", source="b", content=_HOLE),
    "an unknown block": _block("assistant", type="unheard_of", data=_HOLE),
    "a system block": _asking(MESSAGES, system=[{"type": "text", "text": _HOLE}]),
    "schema of a tool's input": _asking(MESSAGES, tools=[{"name": "f", "input_schema": _HOLE}]),
    "schema of a message": _asking(
        MESSAGES, output_config={"format": {"type": "json_schema", "schema": _HOLE}}
    ),
    "another file": (
        INFILL,
        {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"filename": "c", "text": _HOLE}]},
    ),
    "thinking of a message": _asking(MESSAGES, thinking={"type": "enabled", "budget_tokens": _HOLE}),
}
NUM_SELDOM = 5  # ways
_OFTEN = frozenset(
    (
        "prompt",
        "messages",
        "input",
        "input_prefix",
        "input_extra",
        "system",
        "tokens",
        "tools",
        "allowed_token_ids",
        "stop_token_ids",
        "logit_bias",
        "unknown",
    )
)  # filled in every way, the others in a few


def hostile_bodies(seed: int) -> Iterator[HostileBody]:
    """Every field in some way, those that are read at length in every way, and mixed requests; by `seed`."""
    draw = random.Random(seed)
    for method, path, kind, basis in _KINDS:
        names = [field.alias or name for name, field in kind.model_fields.items()]
        for name in (*names, "unknown"):
            around = json.dumps({**basis, name: _HOLE})
            for shape in SHAPES if name in _OFTEN else draw.sample(list(SHAPES), 2):
                sizes = _sizes(shape) if name in _OFTEN else {draw.choice((*SIZES, _largest_read(shape)))}
                for size in sorted(sizes):
                    yield _body(method, path, f"{name} of {shape}", around, (shape, size))
    for name, (path, inner) in (_INNER | _INNER_SELDOM).items():
        for shape in SHAPES if name in _INNER else draw.sample(list(SHAPES), NUM_SELDOM):
            for size in sorted(_sizes(shape)):
                yield _body("POST", path, f"{name} of {shape}", json.dumps(inner), (shape, size))
    for number in range(NUM_MIXED):
        path, fields = _mixed(draw)
        yield HostileBody("POST", path, f"mixed {number}: {_told(fields)}", partial(_encoded, fields))


def _sizes(shape: str) -> set[int]:
    return {LARGEST, _largest_read(shape)}


def _body(method: str, path: str, name: str, around: str, filling: tuple[str, int]) -> HostileBody:
    shape, size = filling
    before, _, after = around.partition(json.dumps(_HOLE))

    def make() -> bytes:
        left = size - len(before) - len(after) - 16
        return before.encode() + SHAPES[shape](left) + after.encode()

    return HostileBody(method, path, f"{name}, {size} bytes", make)


def _encoded(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()


def _told(fields: dict[str, Any]) -> str:
    told = {
        name: f"<{len(value)}>" if isinstance(value, (list, dict)) else value
        for name, value in fields.items()
    }
    return " ".join(f"{name}={value}" for name, value in told.items())


_MANY = ([5] * 10**6, list(range(3, 500)) * 2000, [450] * 10**6)  # ids


def _mixed(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """Extremes of what multiplies: prompts, choices, positions, alternatives, and long lists beside them."""
    num_ids = draw.choice((1, 500, CONTEXT - 300))
    fields: dict[str, Any] = {
        "n": draw.choice((1, 2, 8, 128)),
        "max_tokens": draw.choice((1, 2, 8)),
        "stream": draw.random() < 0.5,
        "ignore_eos": True,
    }
    for name, values in (
        ("prompt_logprobs", (0, 1, 20)),
        ("return_token_ids", (True,)),
        ("return_token_origins", (True,)),
        ("allowed_token_ids", (list(range(3, 400)), *_MANY[:2])),
        ("stop_token_ids", _MANY[2:]),
        ("bad_words", (["word" * 200] * 256,)),
        ("logit_bias", ({str(i): -1 for i in range(500)},)),
        ("repetition_penalty", (1.1,)),
        ("stop", (["no such text"] * 16,)),
        ("priority", (5,)),
        ("min_tokens", (1,)),
    ):
        if draw.random() < 0.35:
            fields[name] = draw.choice(values)
    if draw.random() < 0.5:
        prompts = draw.choice((1, 2, 64, 256))
        fields["prompt"] = (
            [[7 + i % 400 for i in range(num_ids)]] * prompts if prompts * num_ids < 10**5 else "a"
        )
        fields["n"] = max(1, min(fields["n"], 256 // prompts))
        if draw.random() < 0.5:
            fields |= {"logprobs": draw.choice((0, 5, 20)), "echo": draw.random() < 0.7}
        return COMPLETIONS, fields
    fields["messages"] = [{"role": "user", "content": "ab " * (num_ids // 3)}] * draw.choice((1, 1, 2))
    if draw.random() < 0.5:
        fields |= {"logprobs": True, "top_logprobs": draw.choice((0, 5, 20))}
    return CHAT, fields
