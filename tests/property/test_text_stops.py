"""Stop strings found in a stream are the ones a search of the whole text finds, wherever it was cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.detokenizer import Detokenizer
from tests.support.examples import share_of
from tests.unit.text.builders import load

FEW_CHARACTERS = st.text("ab é🦀", max_size=25)
quick = settings(max_examples=share_of(300), deadline=None)


@st.composite
def stops_for(draw: st.DrawFn, text: str) -> list[str]:
    """Stop strings that often occur in `text`, nearly occur, overlap or contain one another."""
    alphabet = st.text("ab é🦀", min_size=1, max_size=4)
    if not text:
        return draw(st.lists(alphabet, min_size=1, max_size=4))
    start = draw(st.integers(0, len(text) - 1))
    piece = text[start : start + draw(st.integers(1, 6))]
    near = st.sampled_from([piece, piece + "b", piece[1:] or "a", piece[:-1] or "b", piece[-1] + piece])
    return draw(st.lists(st.one_of(alphabet, near), min_size=1, max_size=4))


def tokens_of(data: st.DataObject, kind: str, text: str) -> list[int]:
    """`text` as tokens, cut at random places so that they are not always the longest."""
    tokenizer, points = load(kind), sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *points], [*points, len(text)], strict=True)]
    return [i for piece in pieces for i in tokenizer.encode(piece, add_special_tokens=False)]


def first_stop(
    kind: str, prompt: Sequence[int], tokens: Sequence[int], stops: Sequence[str], min_tokens: int
) -> tuple[int, str, int] | None:
    """By brute force: how many tokens it takes, the stop string, and where in the text it ends."""
    plain = Detokenizer(load(kind), prompt)
    text = ""
    for count, token_id in enumerate(tokens, start=1):
        start = len(text)
        text += plain.push([token_id]).text
        if count <= min_tokens:
            continue
        for end in range(start + 1, len(text) + 1):
            ending = [stop for stop in stops if text[:end].endswith(stop)]
            if ending:
                return count, max(ending, key=len), end
    return None


@pytest.mark.parametrize("kind", ["byte_level", "gemma"])
@quick
@given(data=st.data())
def test_the_stream_stops_where_a_search_of_the_text_says(kind: str, data: st.DataObject) -> None:
    tokens = tokens_of(data, kind, data.draw(FEW_CHARACTERS))
    prompt = load(kind).encode("ab", add_special_tokens=False)
    whole = load(kind).decode(tokens, skip_special_tokens=True)
    stops, min_tokens = data.draw(stops_for(whole)), data.draw(st.sampled_from([0, 0, 1, 3, 8]))
    include = data.draw(st.booleans())
    detokenizer = Detokenizer(load(kind), prompt, stop=stops, include_stop=include, min_tokens=min_tokens)
    expected = first_stop(kind, prompt, tokens, stops, min_tokens)
    if min_tokens == 0:
        assert (expected is not None) == any(whole.find(stop) >= 0 for stop in stops)

    shown, consumed, found = "", 0, None
    step = data.draw(st.integers(1, 4))
    for start in range(0, len(tokens), step):
        delta = detokenizer.push(tokens[start : start + step])
        shown += delta.text
        consumed += delta.num_tokens
        if delta.stop is not None:
            found = delta.stop
            break
        assert whole.startswith(shown)
        if min_tokens == 0:
            assert not any(stop in shown for stop in stops)
    if expected is None:
        assert found is None
        assert shown + detokenizer.flush().text == whole
    else:
        count, stop, end = expected
        assert (found, consumed) == (stop, count)
        assert shown == whole[: end if include else end - len(stop)]


@quick
@given(text=FEW_CHARACTERS, data=st.data())
def test_no_more_is_held_back_than_could_still_become_a_stop(text: str, data: st.DataObject) -> None:
    tokens = tokens_of(data, "byte_level", text)
    stops = data.draw(stops_for(text))
    detokenizer = Detokenizer(load("byte_level"), [], stop=stops)
    plain = Detokenizer(load("byte_level"), [])
    shown = so_far = ""
    for token_id in tokens:
        delta = detokenizer.push([token_id])
        if delta.stop is not None:
            return
        shown += delta.text
        so_far += plain.push([token_id]).text
        prefixes = {stop[:length] for stop in stops for length in range(1, len(stop))}
        could_grow = max((len(prefix) for prefix in prefixes if so_far.endswith(prefix)), default=0)
        assert len(so_far) - len(shown) == could_grow
