"""Forms that are more than one value: an answer or a call, calls amid free text, a header before either."""

from __future__ import annotations

import json
from types import MappingProxyType

import pytest

from engine.errors import InvalidRequest
from engine.text.grammar_compiler import GrammarCompiler
from engine.text.structured_output import Frame, StructuredOutput
from engine.text.tools.json_formats import HERMES, MISTRAL
from engine.text.tools.tool_format import ToolFormat
from engine.text.tools.tool_spec import ToolRules, ToolSpec
from tests.unit.text.builders import ByteTokens, byte_compiler

COUNT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
RULES = ToolRules([ToolSpec("count", parameters=COUNT, is_strict=True)])
ANSWER = StructuredOutput("choice", '["yes", "no"]')
CALL = '<tool_call>\n{"name": "count", "arguments": {"n": 1}}\n</tool_call>'


def follows(form: StructuredOutput, text: str) -> int:
    """How many bytes of the text the form takes."""
    return byte_compiler().compile(form).start(frozenset()).num_valid(list(text.encode()))


def calls(form: ToolFormat, **further: object) -> StructuredOutput:
    assert form.forced is not None
    found = form.forced(RULES)
    return StructuredOutput(found.kind, found.source, found.frame, **further)  # type: ignore[arg-type]


def takes(form: StructuredOutput, text: str) -> bool:
    return follows(form, text) == len(text.encode())


def test_a_reply_is_of_one_form_or_of_the_other() -> None:
    for other in (
        ANSWER,
        StructuredOutput("regex", "yes|no"),
        StructuredOutput("json_schema", json.dumps({"enum": ["yes", "no"]})),
    ):
        form = calls(HERMES, otherwise=other)
        answer = '"yes"' if other.kind == "json_schema" else "yes"
        assert takes(form, CALL) and takes(form, answer) and takes(form, f"{CALL}\n{CALL}")
        assert follows(form, "maybe") == 0
        assert not takes(form, CALL.replace("1", '"x"'))
        assert not takes(form, f"{answer} {CALL}")


def test_a_header_comes_before_either() -> None:
    form = calls(HERMES, otherwise=ANSWER, lead="A: ")
    assert takes(form, f"A: {CALL}") and takes(form, "A: no") and follows(form, CALL) == 0
    assert takes(StructuredOutput("regex", "a+", lead="A: "), "A: aaa")


@pytest.mark.parametrize("others", [{"lead": "A"}, {"otherwise": ANSWER}])
def test_a_grammar_stands_alone(others: dict[str, object]) -> None:
    grammar = StructuredOutput("grammar", 'start: "a"')
    with pytest.raises(InvalidRequest, match="stands alone"):
        follows(StructuredOutput("grammar", 'start: "a"', **others), "a")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="stands alone"):
        follows(calls(HERMES, otherwise=grammar), "a")


def test_text_is_free_and_calls_in_it_are_not() -> None:
    form = calls(HERMES, amid_text=True)
    for text in ("", "Hello, <b>\n\nKöln 🦀", "<tool_<tool call>", f"Hm.\n{CALL} and {CALL}\nok"):
        assert takes(form, text)
    assert takes(form, "<tool_call>" + CALL.partition(">")[2].replace("\n", ""))
    wrong = CALL.replace('"n": 1', '"n": 1, "m": 2')
    assert follows(form, f"Hm. {wrong}") == len("Hm. ") + wrong.index(', "m"')
    assert follows(form, "Hm. <tool_call>x") == len("Hm. <tool_call>")
    assert follows(form, "Hm. <tool_<tool_call>x") == len("Hm. <tool_<tool_call>")


def test_lists_of_calls_are_kept_amid_text_as_well() -> None:
    form = calls(MISTRAL, amid_text=True)
    call = '{"name": "count", "arguments": {"n": 1}}'
    assert takes(form, f"Hm. [TOOL_CALLS][{call}, {call}] ok")
    assert follows(form, "Hm. [TOOL_CALLS][{}]") == len("Hm. [TOOL_CALLS][{")


def test_a_frame_around_nothing_is_no_frame() -> None:
    assert takes(StructuredOutput("json_object", frame=Frame()), '{"a": 1}')


@pytest.mark.parametrize("upper", ["maximum", "exclusiveMaximum"])
@pytest.mark.parametrize("least", [0, 1, 10.0])
def test_a_whole_number_that_is_excluded_is_not_taken_where_only_fractions_follow(
    least: float, upper: str
) -> None:
    bounds = {"type": "number", "exclusiveMinimum": least, upper: least + 0.5}
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": bounds}}
    form = StructuredOutput("json_schema", json.dumps(schema))
    whole = int(least)
    for number in (f"{whole}", f"{whole}.0", f"{whole}.6", f"{whole + 1}"):
        assert not takes(form, f'{{"x": {number}}}')
    for number in (f"{whole}.25", f"{whole}.001", f"{whole}.499"):
        assert takes(form, f'{{"x": {number}}}')


class MarkTokens(ByteTokens):
    """The 256 bytes and a special token that begins calls."""

    special_tokens = MappingProxyType({"[TOOL_CALLS]": 256})

    def table(self, skip_special_tokens: bool) -> list[bytes]:
        return [*super().table(skip_special_tokens), b"[TOOL_CALLS]"]


def test_a_mark_that_is_a_special_token_begins_a_call_as_that_token_only() -> None:
    compiler = GrammarCompiler(MarkTokens(), 257, frozenset())  # type: ignore[arg-type]
    state = compiler.compile(calls(MISTRAL, amid_text=True)).start(frozenset())
    call = b'[{"name": "count", "arguments": {"n": 1}}]'
    taken = [*b"Hm. ", 256, *call, *b" ok ", 256, *call]
    assert state.num_valid(taken) == len(taken)
    assert state.num_valid([*b"Hm.", 256, *b"[{}]"]) == len("Hm.") + 1 + len("[{")
    spelled = [*b"Hm. [TOOL_CALLS] is a mark"]
    assert state.num_valid(spelled) == len(spelled)
