"""Mix: draws the requests of a soak, and what the client that sends one does with it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON_TYPE = "application/json"

LEAVE, BAD, SLOW, MEDDLE = 0.2, 0.05, 0.05, 0.05  # shares of all errands
READ_GAP_S = 0.03  # of a slow reader, from event to event
MAX_TOKENS = 80

_PREFIXES = (
    "A server answers many requests at once; each of them is independent of its neighbours. ",
    "Once upon a time there was a little girl who lived in a village near the forest. ",
    "The capital of France is Paris, and the capital of Germany is Berlin. ",
    "",
)
_PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
_AGE = {"type": "object", "properties": {"age": _PERSON["properties"]["age"]}, "required": ["age"]}
_TOOL = {"type": "function", "function": {"name": "look_up", "parameters": _AGE}}
_STRUCTURES: tuple[dict[str, Any], ...] = (
    {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}},
    {"structured_outputs": {"regex": "[A-Z]{2}-[0-9]{1,3}"}},
    {"structured_outputs": {"json": _PERSON}},
    {"structured_outputs": {"grammar": 'start: "a" | "b" start'}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": _PERSON}}},
    {"response_format": {"type": "json_object"}},
)
_TALK = [{"role": "user", "content": "hi"}]
_REFUSED: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    (COMPLETIONS, "hi", {"max_tokens": 10**9}),
    (COMPLETIONS, "hi", {"n": 10**6}),
    (COMPLETIONS, "word " * 20_000, {}),
    (COMPLETIONS, [10**9], {}),
    (COMPLETIONS, "hi", {"logit_bias": {"99999999": 1}}),
    (COMPLETIONS, "hi", {"structured_outputs": {"regex": "("}}),
    (COMPLETIONS, "hi", {"model": "no-such-model"}),
    (CHAT, _TALK, {"max_tokens": "many"}),
    (CHAT, [{"role": "nobody", "content": "hi"}], {}),
    (CHAT, _TALK, {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
    (CHAT, [], {}),
)
_BAD: tuple[tuple[str, bytes, str], ...] = (
    (COMPLETIONS, b'{"prompt": "hi", ', JSON_TYPE),
    (COMPLETIONS, b"", JSON_TYPE),
    (COMPLETIONS, b'{"prompt": "hi"}', "text/plain"),
    (COMPLETIONS, b'{"prompt": "hi", "temperature": NaN}', JSON_TYPE),
    (COMPLETIONS, b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", JSON_TYPE),
    (COMPLETIONS, b'{"prompt": "\\ud800"}', JSON_TYPE),
    *(
        (
            path,
            json.dumps({"prompt" if path is COMPLETIONS else "messages": text, **extra}).encode(),
            JSON_TYPE,
        )
        for path, text, extra in _REFUSED
    ),
)


@dataclass(frozen=True, slots=True)
class Errand:
    """One request as bytes, and how its client goes about it.

    After `leave_s` the client closes the connection, after `cancel_s` it asks for the request's end; None is
    never. `read_gap_s` lies between two events that it reads. One that `meddles` looks the request up and
    changes its priority. `may_be_late`: it has a deadline that may pass. `is_bad`: to be refused.
    """

    path: str
    body: bytes
    content_type: str = JSON_TYPE
    is_stream: bool = False
    is_bad: bool = False
    may_be_late: bool = False
    leave_s: float | None = None
    cancel_s: float | None = None
    read_gap_s: float = 0.0
    meddles: bool = False


class Mix:
    """Errands without end; equal seeds draw the same ones."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def errand(self) -> Errand:
        """The next one."""
        draw = self._draw
        if draw.random() < BAD:
            return Errand(*draw.choice(_BAD), is_bad=True)
        path = draw.choice((COMPLETIONS, CHAT))
        body = self._body(path)
        leaves = draw.random() < LEAVE
        by_closing = leaves and draw.random() < 0.7
        after_s = draw.choice((0.0, draw.uniform(0, 0.05), draw.expovariate(2.0)))
        return Errand(
            path,
            json.dumps(body).encode(),
            is_stream=bool(body.get("stream")),
            may_be_late="deadline_ms" in body,
            leave_s=after_s if by_closing else None,
            cancel_s=after_s if leaves and not by_closing else None,
            read_gap_s=READ_GAP_S if not leaves and draw.random() < SLOW / (1 - LEAVE) else 0.0,
            meddles=draw.random() < MEDDLE,
        )

    def _body(self, path: str) -> dict[str, Any]:
        draw = self._draw
        text = draw.choice(_PREFIXES) + " ".join(
            str(draw.randrange(1000)) for _ in range(draw.randrange(1, 15))
        )
        body: dict[str, Any] = {"max_tokens": draw.randrange(1, MAX_TOKENS), "seed": draw.randrange(1 << 30)}
        if path is COMPLETIONS:
            body["prompt"] = text
        else:
            body["messages"] = [{"role": "user", "content": text}]
        for chance, wish in self._wishes(path, text):
            if draw.random() < chance:
                body |= wish()
        return body

    def _wishes(self, path: str, text: str) -> list[tuple[float, Callable[[], dict[str, Any]]]]:
        """What a body may have beside its prompt: with what chance, and the fields."""
        draw = self._draw
        is_chat = path is CHAT
        wishes: list[tuple[float, Callable[[], dict[str, Any]]]] = [
            (0.6, lambda: {"stream": True, "stream_options": {"include_usage": draw.random() < 0.5}}),
            (0.5, lambda: {"temperature": 0}),
            (0.3, lambda: {"ignore_eos": True}),
            (0.1, lambda: {"n": draw.randint(2, 3)}),
            (0.1, lambda: {"logprobs": True, "top_logprobs": 3} if is_chat else {"logprobs": 3}),
            (0.1, lambda: {"top_k": 20, "top_p": 0.9, "min_p": 0.02}),
            (0.1, lambda: {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3}),
            (0.2, lambda: {"priority": draw.randint(-10, 10)}),
            (0.1, lambda: {"deadline_ms": draw.choice((20, 200, 60_000))}),
            (0.1, lambda: {"stop": ["$", "the end", "0 1"]}),
            (0.1, lambda: {"cache_salt": f"salt {draw.randrange(3)}"}),
            (0.05, lambda: {"prediction": {"type": "content", "content": text}}),
            (0.05, lambda: {"speculation": {"enabled": False}}),
            (0.05, lambda: {"unheard_of": 1}),
            (0.02, lambda: {"prompt_logprobs": 2}),
            (0.08, lambda: draw.choice(_STRUCTURES)),
        ]
        if is_chat:
            choices = ("auto", "required", {"type": "function", "function": {"name": "look_up"}})
            # Last, and without a structure of its own: the two would contradict each other.
            tools = {"tools": [_TOOL], "structured_outputs": None, "response_format": None}
            wishes.append((0.1, lambda: {**tools, "tool_choice": draw.choice(choices)}))
        else:
            wishes.append((0.03, lambda: {"echo": True}))
        return wishes
