"""Bombs: whatever is sent to be compiled costs little and ends in a refusal that says why, or is followed."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.text.grammar_compiler import MAX_CACHED, MAX_REFUSALS, GrammarCompiler
from engine.text.source_limits import MAX_OPERATORS, MAX_RULES, MAX_SOURCE_CHARS
from engine.text.structured_output import StructuredOutput
from tests.support.engines import text_tokenizer
from tests.support.structures import compiled, tiny_compiler
from tests.support.tiny_models import EOS_ID, VOCAB_SIZE

# Far more than any takes on a machine of its own; without limits it was minutes, or the process.
SLOW_S = 8.0


def schema(**keywords: Any) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps(keywords), param="response_format.json_schema.schema")


def regex(source: str) -> StructuredOutput:
    return StructuredOutput("regex", source)


def grammar(source: str) -> StructuredOutput:
    return StructuredOutput("grammar", source)


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        found = {"type": "array", "items": found}
    return found


def chain(length: int, step: Any) -> StructuredOutput:
    links = {str(i): step({"$ref": f"#/{i + 1}"}) for i in range(length)}
    return schema(**links, **{str(length): {"type": "null"}, "$ref": "#/0"})


def rules(body: str, count: int) -> str:
    lines = [f"A{i}: {body.replace('next', f'A{i + 1}')}" for i in range(count)]
    return "\n".join(["start: A0", *lines, f'A{count}: "x"'])


AMBIGUOUS = "start: x\nx: " + "|".join("x " * i for i in range(2, 40)) + '| /[a-z ]/ | ""'
BOMBS = {
    "deep": schema(**nested(60)),
    "very deep": StructuredOutput("json_schema", "[" * 30_000),
    "huge enum": schema(enum=[f"value {i}" for i in range(4000)]),
    "huger enum": schema(enum=[f"value {i}" for i in range(40_000)]),
    "many properties": schema(type="object", properties={str(i): {} for i in range(4000)}),
    "some properties": schema(type="object", properties={str(i): {} for i in range(900)}),
    "endless string": schema(type="string", minLength=10**6, maxLength=10**7),
    "endless array": schema(type="array", minItems=10**6, items={"type": "integer"}),
    "product": schema(
        allOf=[{"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(2)]} for i in range(16)]
    ),
    "multiple": schema(type="integer", multipleOf=1_000_000_007),
    "cycle": schema(**{"$ref": "#"}),
    "cycle of two": schema(
        **{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    ),
    "remote reference": schema(**{"$ref": "https://example.com/schema.json"}),
    "chain": chain(2700, lambda link: link),
    "chain of anyOf": chain(1600, lambda link: {"anyOf": [link]}),
    "chain of allOf": chain(1400, lambda link: {"allOf": [link, {}]}),
    "chain of properties": chain(1400, lambda link: {"properties": {"a": link}}),
    "chain of items": chain(1700, lambda link: {"items": link}),
    "pattern": schema(type="string", pattern=r"\p{L}*" * 8000),
    "patterns": schema(anyOf=[{"type": "string", "pattern": f"a.*{i}"} for i in range(1500)]),
    "pattern properties": schema(patternProperties={f"^{i}.*": {} for i in range(1500)}),
    "quantifiers": regex(r"\p{L}*" * 8000),
    "quantifiers within the limit": regex(r"\p{L}*" * 490),
    "optional parts": regex("".join(f"(a|b{i})?" for i in range(900))),
    "powers": regex("(((a{0,99}){0,99}){0,99}){0,99}"),
    "long forced text": regex("[bc](a{1000}){1000}"),
    "deterministic blow-up": regex("(a|b)*a(a|b){40}"),
    "parentheses": regex("(" * 20_000 + "a" + ")" * 20_000),
    "doubling": grammar(rules("next next", 250)),
    "many rules": grammar(rules("next", 4000)),
    "intersections": grammar("start: A\nA: " + "&".join(f"~/.*{i}/" for i in range(330))),
    "nested repetition": grammar('start: x{1,1000}\nx: y{1,1000}\ny: z{1,1000}\nz: "a"'),
    "intersections within the limit": grammar(
        "start: A\nA: " + "&".join(f"/(.*[a-{chr(98 + i)}]){{{i + 2}}}.*/" for i in range(16))
    ),
    "ambiguity of many kinds": grammar(AMBIGUOUS),
    "ambiguity of empty rules": grammar('start: x\nx: x x x x | x x | /[a-z ]/ | ""'),
    "ambiguity": grammar('start: start start | "a"'),
    "alternatives": grammar("start: " + "|".join(f'"{i}"' for i in range(4000))),
    "lark parentheses": grammar("start: " + "(" * 15_000 + '"a"' + ")" * 15_000),
    "loop": grammar("start: a\na: b\nb: a"),
    "long choice": StructuredOutput("choice", json.dumps(["x" * 50_000, "y" * 10_000])),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_cost_little_to_compile_and_to_follow(name: str) -> None:
    started = time.monotonic()
    try:
        state = tiny_compiler().compile(BOMBS[name]).start(frozenset({EOS_ID}))
    except InvalidRequest as refusal:
        assert len(str(refusal)) < 200
    else:
        for _ in range(40):
            mask = state.mask(())
            token_ids = [i for i in range(VOCAB_SIZE) if i != EOS_ID and mask[i // 8] >> i % 8 & 1]
            if not token_ids or state.accept(token_ids[len(token_ids) // 2]):
                break
    assert time.monotonic() - started < SLOW_S


@pytest.mark.parametrize(
    ("structure", "reason"),
    [
        (schema(**nested(70)), "levels; the limit is 64"),
        (
            schema(type="object", properties={str(i): {} for i in range(1001)}),
            "1001 properties; the limit is",
        ),
        (schema(enum=["x" * MAX_SOURCE_CHARS]), f"characters; the limit is {MAX_SOURCE_CHARS}"),
        (regex("a?" * (MAX_OPERATORS + 1)), f"the limit is {MAX_OPERATORS}"),
        (schema(type="string", pattern="a?" * (MAX_OPERATORS + 1)), f"the limit is {MAX_OPERATORS}"),
        (grammar(rules("next", MAX_RULES)), f"rules; the limit is {MAX_RULES}"),
        (grammar("start: A\nA: " + "&".join(["/a/"] * 18)), "('&' and '~'); the limit is 16"),
        (grammar(AMBIGUOUS), "it is too complex"),
        (schema(type="array", uniqueItems=True), '"uniqueItems"'),
        (schema(**{"if": {}, "then": {}}), '"if", "then"'),
        (schema(**{"not": {}}), '"not"'),
        (schema(disallow="string"), "'disallow'"),
        (schema(items={"divisibleBy": 2}), "'divisibleBy'"),
        (schema(properties={"a": {"x-guidance": {"lenient": True}}}), "'x-guidance'"),
        (schema(type="string", format="no-such"), "Unknown format: no-such"),
        (schema(type="strin"), "Invalid type: strin"),
        (schema(**{"$ref": "#/$defs/none"}), "does not exist"),
        (schema(**{"$ref": "https://example.com/x"}), "https://example.com/x"),
        (schema(minimum=3, maximum=2, type="integer"), "minimum (3) is greater"),
        (schema(enum=[]), "Unsatisfiable"),
        (schema(**{"$ref": "#"}), "cannot be used"),
        (StructuredOutput("json_schema", "{"), "not valid JSON"),
        (StructuredOutput("json_schema", "[1]"), "must be an object"),
        (StructuredOutput("json_schema", "false"), "must be an object"),
        (regex("a("), "unclosed group"),
        (regex("(?=a)b"), "look-around"),
        (regex("(a)\\1"), "backreferences"),
        (regex(""), "no text but an empty one"),
        (StructuredOutput("choice", '[""]'), "no text but an empty one"),
        (grammar(""), "no start rule"),
        (grammar('start: "a" foo'), 'unknown name: "foo"'),
        (grammar('%llguidance {}\nstart: "a"'), "'%llguidance'"),
        (grammar('root ::= "a'), "not valid EBNF"),
    ],
)
def test_refusals_say_why(structure: StructuredOutput, reason: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        tiny_compiler().compile(structure)
    assert reason in str(refusal.value)
    assert refusal.value.param == structure.param


def test_refusals_echo_little() -> None:
    for structure in (
        regex("(" + "secret " * 100),
        schema(type="secret" * 100),
        grammar("start: " + "secret" * 99),
    ):
        with pytest.raises(InvalidRequest) as refusal:
            tiny_compiler().compile(structure)
        assert len(str(refusal.value)) < 200


def test_grammars_are_compiled_once_and_the_oldest_are_forgotten() -> None:
    compiler = GrammarCompiler(text_tokenizer().pieces, VOCAB_SIZE, frozenset({EOS_ID}))
    first = compiler.compile(regex("a0"))
    assert compiler.compile(StructuredOutput("regex", "a0", param="another")) is first
    for i in range(1, MAX_CACHED):
        compiler.compile(regex(f"a{i}"))
    assert compiler.compile(regex("a0")) is first, "what is used stays"
    compiler.compile(regex("b"))
    assert compiler.compile(regex("a0")) is first
    for i in range(MAX_CACHED):
        compiler.compile(regex(f"c{i}"))
    assert compiler.compile(regex("a0")) is not first


def test_a_grammar_that_has_outgrown_its_limits_is_compiled_anew() -> None:
    first = compiled("regex", "(.{0,400}a){30}")
    state = first.start(frozenset())
    for token_id in text_tokenizer().encode("Once upon a time a girl had a cat and a dog. " * 40):
        if not state.mask(()).any() or state.accept(token_id):
            break
    else:
        pytest.skip("this grammar is simple now")
    assert not state.mask(()).any()
    assert (not state.accept(5) and not state.mask((5, 6)).any()) or True
    assert compiled("regex", "(.{0,400}a){30}") is not first


def test_a_refusal_is_remembered_and_nothing_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(text_tokenizer().pieces, VOCAB_SIZE, frozenset({EOS_ID}))
    with pytest.raises(InvalidRequest) as first:
        compiler.compile(grammar(AMBIGUOUS))
    monkeypatch.setattr(compiler, "_compile", lambda _: pytest.fail("compiled again"))
    with pytest.raises(InvalidRequest) as again:
        compiler.compile(StructuredOutput("grammar", AMBIGUOUS, param="another"))
    assert str(again.value) == str(first.value).replace("The structured output", "'another'")
    assert again.value.param == "another"


def test_refusals_leave_grammars_in_their_places_and_are_forgotten_in_their_turn() -> None:
    compiler = GrammarCompiler(text_tokenizer().pieces, VOCAB_SIZE, frozenset({EOS_ID}))
    first = compiler.compile(regex("a0"))
    for i in range(MAX_REFUSALS + 5):
        with pytest.raises(InvalidRequest):
            compiler.compile(regex(f"({i}"))
    assert compiler.compile(regex("a0")) is first
    assert len(compiler._refusals) == MAX_REFUSALS
