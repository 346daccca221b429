"""Arguments between tags: a text is told as it comes, and is the same however it is split."""

from __future__ import annotations

import json
import random

import pytest

from engine.text.reply.pieces import CallArguments, CallEnd, CallStart, CollectedReply, Piece
from engine.text.reply.text_feed import Stage
from engine.text.tools.call_teller import CallTeller
from engine.text.tools.tagged_calls import argument_of
from engine.text.tools.tagged_formats import GLM45, MINIMAX, QWEN3_CODER
from engine.text.tools.tool_format import ToolFormat
from engine.text.tools.tool_spec import ToolRules, ToolSpec
from tests.support.examples import share_of

PROPERTIES = {"path": {"type": "string"}, "text": {"type": "string"}, "mode": {"type": "integer"}}
RULES = ToolRules([ToolSpec("write", parameters={"type": "object", "properties": PROPERTIES})])
# What stands before and behind the value of `text`.
AROUND = {
    "qwen3-coder": (
        QWEN3_CODER,
        "<tool_call>\n<function=write>\n<parameter=text>",
        "</parameter>\n<parameter=mode>\n5\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm45": (
        GLM45,
        "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>",
        "</arg_value>\n<arg_key>mode</arg_key>\n<arg_value>5</arg_value>\n</tool_call>",
    ),
    "minimax-m2": (
        MINIMAX,
        '<minimax:tool_call>\n<invoke name="write">\n<parameter name="text">',
        '</parameter>\n<parameter name="mode">5</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
}


def stage_of(form: ToolFormat) -> Stage:
    return Stage(lambda feed, tell: form.read(feed, CallTeller(RULES, tell)))


def told(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, CallArguments))


def test_a_text_is_told_as_it_comes_up_to_what_may_be_its_tag() -> None:
    form, before, _ = AROUND["qwen3-coder"]
    stage = stage_of(form)
    start, head = stage.feed(f"{before}\n")
    assert isinstance(start, CallStart) and head == CallArguments(0, '{"text": "')
    assert told(stage.feed('print("hello")\n')) == r"print(\"hello\")"
    assert told(stage.feed("\n")) == r"\n"
    assert told(stage.feed("</para")) == ""
    assert told(stage.feed("graph>é\n</parameter")) == r"\n</paragraph>é"
    assert told(stage.feed(">\n<parameter=mode>\n")) == '"'
    assert told(stage.feed("5")) == ""
    *_, end = stage.feed("\n</parameter>\n</function>")
    assert end == CallEnd(0)


@pytest.mark.parametrize("name", AROUND)
def test_a_text_is_the_same_however_it_is_split(name: str) -> None:
    form, before, after = AROUND[name]
    rng = random.Random(5)
    closing = after.partition("\n")[0]
    alphabet = [
        "\n",
        "\n",
        closing[:4],
        closing[4:],
        closing[:-1],
        '"',
        "\\",
        "\\n",
        "é",
        "🦀",
        "<",
        " ",
        "x",
    ]
    for _ in range(share_of(400)):
        value = "".join(rng.choices(alphabet, k=rng.randrange(8)))
        while closing in value:
            value = value.replace(closing, "")
        expected = {"text": json.loads(argument_of(value, PROPERTIES["text"])), "mode": 5}
        text = before + value + after
        at = sorted(rng.sample(range(len(text)), 3))
        several = [text[first:stop] for first, stop in zip([0, *at], [*at, len(text)], strict=True)]
        for parts in ([text], list(text), several):
            stage = stage_of(form)
            pieces = [piece for part in parts for piece in stage.feed(part)] + stage.finish(cut=False)
            (call,) = CollectedReply.of(pieces).calls
            assert call.is_whole and json.loads(call.arguments) == expected, value


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("name", AROUND)
def test_a_text_that_a_reply_ends_in_is_told_so_far(name: str, cut: bool) -> None:
    form, before, after = AROUND[name]
    stage = stage_of(form)
    pieces = stage.feed(f"{before}\na line\n{after[:4]}") + stage.finish(cut=cut)
    (call,) = CollectedReply.of(pieces).calls
    assert (call.arguments, call.is_whole) == ('{"text": "a line', False)
