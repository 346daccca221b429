"""Reasoning in replies: read from any split of tokens, nothing of a mark leaks and nothing else is lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.reply.pieces import CollectedReply, Piece
from engine.text.reply.reasoning_format import REASONING_FORMATS, ReasoningFormat
from engine.text.reply.reasoning_place import Phase
from engine.text.reply.reply_format import ReplyFormat, Spelling
from engine.text.reply.reply_reader import ReplyReader
from engine.text.tools.json_formats import HERMES
from tests.support.examples import share_of

quick = settings(max_examples=share_of(60), deadline=None)
FORMS = {name: form for name, form in REASONING_FORMATS.items() if not form.has_channels}
PLAIN = st.text(st.sampled_from("ab <>/|thinkTHINK[]\n{é🦀"), max_size=12)


def format_of(form: ReasoningFormat) -> ReplyFormat:
    """Over a vocabulary of characters: every mark is split over many tokens."""
    table = [chr(token_id).encode() for token_id in range(0x2600)]
    spelling = Spelling(table, lambda text: [ord(char) for char in text], {}, {})
    return ReplyFormat(form, HERMES, spelling)


def pieces_of(reader: ReplyReader, parts: Sequence[str], *, cut: bool) -> list[Piece]:
    pieces = [piece for part in parts for piece in reader.read(part)]
    return pieces + reader.read("", ended=True, cut=cut)


def has_no_mark(form: ReasoningFormat, text: str) -> bool:
    return not any(mark and mark in text for mark in form.marks)


@pytest.mark.parametrize("name", FORMS)
@quick
@given(data=st.data())
def test_reasoning_and_content_come_apart_at_any_split(name: str, data: st.DataObject) -> None:
    form = FORMS[name]
    thought = data.draw(PLAIN.filter(lambda text: has_no_mark(form, text)))
    content = data.draw(PLAIN.filter(lambda text: has_no_mark(form, text) and text == text.lstrip()))
    opened = data.draw(st.booleans())
    reply = (
        f"{thought}\n{form.end}\n\n{content}" if opened else f"\n{form.begin}\n{thought}{form.end}{content}"
    )
    if reply.count(form.end) != 1 or reply.count(form.begin) != (not opened):
        return  # a mark came about where the parts meet
    cuts = sorted(data.draw(st.lists(st.integers(0, len(reply)), max_size=8)))
    parts = [reply[a:b] for a, b in zip([0, *cuts], [*cuts, len(reply)], strict=True)]
    prompt = [ord(char) for char in f"user: hi\n{form.begin}\n"] if opened else [ord("x")]
    found = CollectedReply.of(pieces_of(format_of(form).reader(prompt), parts, cut=False))
    assert (found.reasoning, found.content) == (thought.strip(), content)


@pytest.mark.parametrize("name", FORMS)
@quick
@given(data=st.data())
def test_a_cut_reply_tells_a_beginning_and_nothing_of_a_mark(name: str, data: st.DataObject) -> None:
    form = FORMS[name]
    reply = f"{form.begin}\nI see.\n{form.end}\n\nYes."
    size = data.draw(st.integers(0, len(reply)))
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=8)))
    parts = [reply[a:b] for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
    found = CollectedReply.of(pieces_of(format_of(form).reader([1]), parts, cut=True))
    assert "I see.".startswith(found.reasoning.strip())
    assert "Yes.".startswith(found.content)


@quick
@given(st.text(st.sampled_from("ab</think>\n"), max_size=30), st.booleans())
def test_tokens_and_text_agree_on_where_the_reasoning_ends(text: str, opened: bool) -> None:
    form = format_of(REASONING_FORMATS["qwen3"])
    prompt = [ord(char) for char in "<think>"] if opened else [1]
    place = form.begin(prompt)
    assert place is not None and place.phase is (Phase.THINKING if opened else Phase.BEFORE)
    reader = form.reader(prompt)
    reader.count([ord(char) for char in text])
    found = CollectedReply.of(reader.read(text, ended=True))
    assert (reader.num_reasoning_tokens > 0) >= bool(found.reasoning)


def test_a_prompt_that_closes_the_reasoning_leaves_none() -> None:
    form = format_of(REASONING_FORMATS["qwen3"])
    prompt = [ord(char) for char in "<think>\n\n</think>\n\n"]
    found = CollectedReply.of(form.reader(prompt).read("<think>a</think>", ended=True))
    assert (found.reasoning, found.content) == ("", "<think>a</think>")


def test_tokens_of_the_reasoning_are_counted_without_marks_that_are_tokens() -> None:
    table = [b"<think>", b"</think>", b"a", b"\n", b"</", b"think>"]
    form = ReplyFormat(
        REASONING_FORMATS["qwen3"], HERMES, Spelling(table, lambda text: [], {}, {"<think>": 0})
    )
    counts = []
    for tokens in ([0, 3, 2, 2, 1, 2], [2, 2], [0, 1, 2], [0, 2, 4, 5, 2]):
        reader = form.reader([2])
        reader.count(tokens)
        counts.append(reader.num_reasoning_tokens)
    assert counts == [3, 0, 0, 2]
