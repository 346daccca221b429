"""However a reply is split into tokens, its events follow the grammar, and come to the same reply."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from engine import Finish, FinishReason, OutputDelta, RequestStream, ToolRules, ToolSpec
from server.api.anthropic.message import MessageShape
from server.api.blocks import BlockWriter
from server.api.generation import Choice, Prompt
from server.api.ollama.reply import OllamaShape
from server.api.responses.events import ResponsesShape
from server.api.responses.output import Envelope, ItemSpelling, ServedBy
from server.api.responses.protocol import ResponsesRequest
from server.api.responses.tools import read_tool_set
from server.api.turn_reply import TurnShape
from server.http.json_reply import encode_json
from tests.support import tool_templates
from tests.support.examples import share_of
from tests.support.fake_engine import TIMING, FakeEngine
from tests.support.messages_grammar import check_message, check_messages_stream
from tests.support.named_events import NamedEvent
from tests.support.ollama_grammar import check_lines, check_reply
from tests.support.responses_grammar import check_response, check_responses_stream

Part = tuple[str, str]
quick = settings(max_examples=share_of(60), deadline=None)

# What looks like the beginning of a mark, and what JSON has to escape, beside letters.
TEXT = st.text('ab <>/_"\\{}é🦀\n', min_size=1, max_size=12).filter(lambda text: bool(text.strip()))
ARGUMENTS = st.dictionaries(
    st.sampled_from(["city", "input", "x"]), st.text('ab"\\é🦀', max_size=8), max_size=3
)
CALLS = st.tuples(st.sampled_from(["weather", "grep", "ns__find"]), ARGUMENTS)
BODY = {
    "input": "hi",
    "include": ["reasoning.encrypted_content"],
    "tools": [
        {"type": "function", "name": "weather"},
        {"type": "custom", "name": "grep"},
        {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "find"}]},
    ],
}


STATUSES = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.ABORT: "cancelled",
}
RULES = ToolRules([ToolSpec(name) for name in ("weather", "grep", "ns__find")])
FORMAT = FakeEngine(tool_template=tool_templates.ALL["hermes"], reasoning="qwen3").reply_format


@st.composite
def replies(draw: st.DrawFn) -> tuple[str, list[Part]]:
    """What a model writes, and the parts that it comes to: thoughts, text, calls with their arguments."""
    thought = draw(st.text("ab <>/é🦀\n", max_size=10)).strip()
    written, parts = ["<think>", thought, "</think>"], [("reasoning", thought)] if thought else []
    for is_call in draw(st.lists(st.booleans(), max_size=5)):
        if is_call:
            name, arguments = draw(CALLS)
            told = json.dumps(arguments, ensure_ascii=draw(st.booleans()))
            written.append(f'<tool_call>\n{{"name": "{name}", "arguments": {told}}}\n</tool_call>')
            parts.append((name, told))
        elif parts and parts[-1][0] == "text":
            continue
        else:
            text = f"{draw(TEXT).strip()}."  # a part of a mark at the end of a cut reply is left out
            written.append(text)
            parts.append(("text", text))
    return "".join(written), parts


def split(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=len(text))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


splits = st.composite(lambda draw, text: split(draw, text))


def run(shape: TurnShape, pieces: Sequence[str], reason: FinishReason) -> list[NamedEvent]:
    """The events of a reply that comes in these pieces of text."""
    reader = FORMAT.reader([1, 2, 3], RULES)
    choice = Choice(0, Prompt([1, 2, 3]), cast(RequestStream, None), reader=reader)
    writer = BlockWriter()
    sent = []
    for i, text in enumerate(pieces):
        is_last = i == len(pieces) - 1
        finish = Finish(reason, None, None, 3, len(pieces), 2, TIMING, None) if is_last else None
        delta = OutputDelta(text, (1,), (), finish)
        choice.note(delta)
        events = list(shape.events(choice, delta, writer.write(choice, delta)))
        # What is told is not told otherwise later.
        sent += [NamedEvent(each.name, json.loads(encode_json(each.payload))) for each in events]
    return sent


def responses_shape() -> ResponsesShape:
    body = ResponsesRequest.model_validate(BODY)
    tools = read_tool_set(body.tools or ())
    envelope = Envelope.of(body, tools, "resp_0", ServedBy("m", {}, tells_metrics=True))
    items = ItemSpelling("resp_0", tools, encodes_thoughts=True)
    return ResponsesShape(envelope, items, lambda response, output, num_scores: None)


def message_shape(*, hides_thoughts: bool = False) -> MessageShape:
    return MessageShape("msg_0", "m", 3, 1000, True, "req", hides_thoughts)


def is_call(name: str) -> bool:
    return name not in ("text", "reasoning")


def parts_of_response(response: dict[str, Any]) -> list[Part]:
    found = []
    for item in response["output"]:
        match item["type"]:
            case "message":
                found.append(("text", item["content"][0]["text"]))
            case "reasoning":
                found.append(("reasoning", item["content"][0]["text"]))
            case "function_call":
                name = f"ns__{item['name']}" if item.get("namespace") else item["name"]
                found.append((name, item["arguments"]))
            case "custom_tool_call":
                found.append((item["name"], item["input"]))
    return found


def parts_of_message(message: dict[str, Any]) -> list[Part]:
    found = []
    for block in message["content"]:
        match block["type"]:
            case "text":
                found.append(("text", block["text"]))
            case "thinking":
                found.append(("reasoning", block["thinking"]))
            case "tool_use":
                found.append((block["name"], json.dumps(block["input"])))
    return found


@quick
@given(st.data(), replies(), st.sampled_from(list(STATUSES)))
def test_a_response_is_the_same_however_its_tokens_are_split(
    data: st.DataObject, reply: tuple[str, list[Part]], reason: FinishReason
) -> None:
    text, parts = reply
    shape = responses_shape()
    response = check_responses_stream(run(shape, data.draw(splits(text)), reason))
    whole = check_response(json.loads(encode_json(shape.whole())))
    assert whole == response
    expected = [(name, json.loads(told).get("input", "") if name == "grep" else told) for name, told in parts]
    assert parts_of_response(response) == (expected or [("text", "")])
    assert response["status"] == STATUSES[reason]


@quick
@given(st.data(), replies(), st.sampled_from(list(STATUSES)))
def test_a_message_is_the_same_however_its_tokens_are_split(
    data: st.DataObject, reply: tuple[str, list[Part]], reason: FinishReason
) -> None:
    text, parts = reply
    shape = message_shape()
    message = check_messages_stream(run(shape, data.draw(splits(text)), reason))
    whole = check_message(json.loads(json.dumps(shape.whole())))
    assert {name: whole[name] for name in message} == message
    told = [(name, json.dumps(json.loads(each)) if is_call(name) else each) for name, each in parts]
    assert parts_of_message(message) == told
    has_calls = any(is_call(name) for name, _ in parts)
    assert (
        message["stop_reason"]
        == {
            FinishReason.STOP: "tool_use" if has_calls else "end_turn",
            FinishReason.LENGTH: "model_context_window_exceeded",
            FinishReason.ABORT: None,
        }[reason]
    )


@quick
@given(st.data(), replies(), st.sampled_from(list(STATUSES)))
def test_lines_are_the_same_however_their_tokens_are_split(
    data: st.DataObject, reply: tuple[str, list[Part]], reason: FinishReason
) -> None:
    text, parts = reply
    shape = OllamaShape("m", is_chat=True, tells_metrics=True)
    said = check_lines([each.payload for each in run(shape, data.draw(splits(text)), reason)])
    assert check_reply(json.loads(json.dumps(shape.whole()))) == said
    assert said["content"] == "".join(told for name, told in parts if name == "text")
    assert said["thinking"] == "".join(told for name, told in parts if name == "reasoning")
    called = [(each["function"]["name"], each["function"]["arguments"]) for each in said["tool_calls"]]
    assert called == [(name, json.loads(told)) for name, told in parts if is_call(name)]


@quick
@given(st.data(), replies())
def test_thoughts_can_be_left_out_of_a_message(data: st.DataObject, reply: tuple[str, list[Part]]) -> None:
    text, parts = reply
    sent = run(message_shape(hides_thoughts=True), data.draw(splits(text)), FinishReason.STOP)
    message = check_messages_stream(sent)
    assert parts_of_message(message) == [
        (name, json.dumps(json.loads(told)) if is_call(name) else told if name == "text" else "")
        for name, told in parts
    ]


@quick
@given(st.data(), replies(), st.integers(0, 200))
def test_a_reply_that_is_cut_anywhere_leaks_no_mark_and_ends_well(
    data: st.DataObject, reply: tuple[str, list[Part]], size: int
) -> None:
    text = reply[0][:size]
    pieces = data.draw(splits(text))
    response = check_responses_stream(run(responses_shape(), pieces, FinishReason.LENGTH))
    message = check_messages_stream(run(message_shape(), pieces, FinishReason.LENGTH))
    assert [name for name, _ in parts_of_response(response)] in (
        [name for name, _ in parts_of_message(message)],
        ["text"],
    )
    lines = run(OllamaShape("m", is_chat=True, tells_metrics=True), pieces, FinishReason.LENGTH)
    assert "</tool_call>" not in check_lines([each.payload for each in lines])["content"]
    for told in (parts_of_response(response), parts_of_message(message)):
        assert all("</tool_call>" not in each for name, each in told if name == "text")
