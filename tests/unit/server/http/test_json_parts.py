"""Reading in parts gives what the parser gives of the whole, refuses what it refuses, in short runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from server.http import json_parts as module
from server.http.json_parts import WINDOW, count_marks, read_in_parts

TEXTS = st.text(st.sampled_from('ab"\\[]{},: \u00e9\U0001f642\n'), max_size=30)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(-(10**9), 10**9) | TEXTS,
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=30,
)


def parsed(text: bytes) -> Any:
    """What the parser makes of the whole, or that it refuses it."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        return ValueError


def read(text: bytes) -> Any:
    try:
        return read_in_parts(text)
    except ValueError:
        return ValueError


@pytest.fixture(params=[16, 100])
def window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small enough for short texts to be read in many parts."""
    monkeypatch.setattr(module, "WINDOW", request.param)


@pytest.mark.usefixtures("window")
@settings(max_examples=60, deadline=None)
@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_any_value(value: Any, is_ascii: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent).encode()
    assert read(text) == parsed(text) == value


@pytest.mark.usefixtures("window")
@settings(max_examples=100, deadline=None)
@given(VALUES, st.data())
def test_any_mistake(value: Any, data: st.DataObject) -> None:
    """A byte too many, too few or changed: refused or not as in the whole."""
    text = bytearray(json.dumps(value).encode())
    place = data.draw(st.integers(0, len(text) - 1))
    kind = data.draw(st.sampled_from(["cut", "insert", "change", "end"]))
    byte = data.draw(st.sampled_from(b'"\\[]{},: 1aud8'))
    if kind == "cut":
        del text[place]
    elif kind == "insert":
        text.insert(place, byte)
    elif kind == "change":
        text[place] = byte
    else:
        del text[place:]
    assert read(bytes(text)) == parsed(bytes(text))


@pytest.mark.usefixtures("window")
@pytest.mark.parametrize(
    "text",
    [
        *(b"", b" ", b"1", b"1,", b",1", b"[1,,2]", b"[,1]", b"[1,]", b"[1 2]", b'{"a":1,}'),
        *(b'{"a":1,,"b":2}', b"[1]]", b"[[1]", b"[1}", b'{"a":1]', b"[]x", b"[] []", b'["a" "b"]'),
        *(b'{"a" 1}', b"{1:2}", b'{"a"}', b"NaN", b'"\xff"', b'"\\x"', b'"\\u12"', b'"\\ud83d"'),
        *(b'"\\ud83d\\ude42"', b'"\\ude42"', b'"\\\\ud83d"', b'"\\\\\\ud83d\\ude42"'),
        *(b'"' + b"\\\\" * 50 + b'"', b'"' + b"\\ud83d\\ude42" * 50 + b'"'),
        *(b'"' + b"\\\\ud83d" * 50 + b'"', ('"' + "é\U0001f642€" * 60 + '"').encode()),
        *(b'["' + b"a" * 500 + b'" "b"]', b'[1 "' + b"a" * 500 + b'"]', b'{"' + b"a" * 500 + b'"}'),
        *(b'{"' + b"a" * 500 + b'":1}', b'{"' + b"a" * 500 + b'" : [' + b"1," * 99 + b"2]}", b"9" * 5000),
        *(b'{"k":"' + b"a" * 500 + b'","k":2}', b'{ "k" : [' + b"1," * 300 + b'1] , "l" : 2 }'),
        *(b"[" * 300, b"[" * 300 + b"]" * 300, b"[" * 150 + b"]" * 150),
        *(b"[" + b"[1,2]," * 99 + b"[]]", b"[" + b" " * 999 + b"]", b"[1," + b" " * 999 + b"]"),
        *(b'{"a":' + b" " * 999 + b"1}", b'[{"a":"' + b"b" * 999 + b'"},' + b"1," * 99 + b"]"),
    ],
)
def test_edges(text: bytes) -> None:
    assert read(text) == parsed(text)


LARGE = {
    "ids": b'{"p":[' + b",".join([b"45678"] * 100_000) + b"]}",
    "lists": b'{"p":[' + b",".join([b"[]"] * 20_000) + b"]}",
    "keys": b"{" + b",".join(b'"k%d":1' % i for i in range(20_000)) + b"}",
    "messages": b"[" + b",".join([b'{"role":"user","content":["hi",{"a":"b"}]}'] * 8_000) + b"]",
    "one text": b'{"p":"' + b"a" * 1_000_000 + b'"}',
    "text that looks like json": b'{"p":"' + b'\\"[,{' * 100_000 + b'"}',
    "escapes": b'{"p":"' + b"\\u00e9\\ud83d\\ude42" * 100_000 + b'"}',
    "characters": b'{"p":"' + "\U0001f642".encode() * 100_000 + b'"}',
    "texts": b'{"p":[' + b",".join([b'"ab"'] * 100_000) + b"]}",
}


@pytest.mark.parametrize("name", LARGE)
def test_no_run_of_the_parser_is_long(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the interpreter meanwhile."""
    runs: list[int] = []

    def parse(text: bytes, **options: Any) -> Any:
        runs.append(len(text))
        return from_json(text, **options)

    def rest() -> None:
        runs_at_rest.append(len(runs))

    runs_at_rest: list[int] = []
    monkeypatch.setattr(module, "from_json", parse)
    assert read_in_parts(LARGE[name], rest) == from_json(LARGE[name])
    assert max(runs) <= 2 * WINDOW + 10
    assert runs_at_rest == list(range(len(runs))), "between any two it gives way"


def test_marks_within_text_do_not_count() -> None:
    marks = [sum(each) for each in zip(*count_marks(LARGE["text that looks like json"]), strict=True)]
    assert marks == [2, 0]
    marks = [sum(each) for each in zip(*count_marks(LARGE["keys"]), strict=True)]
    assert marks == [20_001, 19_999]


def repeated_possessively(tree: Any) -> Iterator[Any]:
    """The parts of a pattern that are repeated so and may be more than one character."""
    for operation, argument in tree:
        if str(operation) == "POSSESSIVE_REPEAT":
            _, _, body = argument
            if [str(each) for each, _ in body] not in (["NOT_LITERAL"], ["IN"], ["ANY"], ["LITERAL"]):
                yield body
        stack = [argument]
        while stack:
            each = stack.pop()
            if isinstance(each, (list, tuple)):
                stack.extend(each)
            elif hasattr(each, "getwidth"):
                yield from repeated_possessively(each)


@pytest.mark.parametrize(
    "pattern", [module._RUN, module._WHOLE_STRING, module._ANYTHING, module._STRING_PART], ids="RSAP"
)
def test_a_pattern_matches_in_python_3_11_2_too(pattern: re.Pattern[bytes]) -> None:
    """What that one repeats possessively has to be an atomic group, or matches are missed."""
    bodies = list(repeated_possessively(re._parser.parse(pattern.pattern)))
    assert bodies
    for body in bodies:
        assert [str(operation) for operation, _ in body] == ["ATOMIC_GROUP"]
