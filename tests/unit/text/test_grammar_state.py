"""What may follow what: texts, ends, drafts, and states that are moved forth and back."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.text.grammar_compiler import GrammarCompiler
from engine.text.grammar_state import FIRST_S, TOKEN_S, GrammarState
from engine.text.structured_output import Frame, StructuredOutput
from tests.support.engines import text_tokenizer
from tests.support.examples import share_of
from tests.support.structures import SCHEMAS, allowed, compiled
from tests.support.tiny_models import BOS_ID, EOS_ID, START_ID, VOCAB_SIZE

EOS = frozenset({EOS_ID})
EVERYTHING = set(range(VOCAB_SIZE))


def encode(text: str) -> list[int]:
    return text_tokenizer().encode(text, add_special_tokens=False)


def follows(state: GrammarState, text: str) -> bool:
    """Commit a text, the masks allowing each of its tokens, or not to its end; True if nothing may follow."""
    over = False
    for token_id in encode(text):
        assert not over and token_id in allowed(state.mask(())), text
        over = state.accept(token_id)
    return over


def takes(grammar: tuple[Any, ...], text: str) -> str:
    """How a grammar takes a whole text: 'over', 'may end', 'goes on' or 'no'."""
    state = compiled(*grammar).start(EOS)
    try:
        over = follows(state, text)
    except AssertionError:
        return "no"
    if over:
        return "over"
    return "may end" if EOS_ID in allowed(state.mask(())) else "goes on"


@pytest.mark.parametrize(
    ("grammar", "text", "expected"),
    [
        (("json_object",), '{"a": [1, {"b": null}]}', "over"),
        (("json_object",), '{\n  "a": 1\n}', "over"),
        (("json_object",), "[1]", "no"),
        (("json_object",), '{"a":' + " " * 5, "no"),
        (("json_object",), '{"a":' + "\n" + " " * 32 + "1}", "over"),
        (("json_object",), '{"\\u0061": 1}', "no"),
        (("json_schema", '{"type":"integer"}'), "12", "may end"),
        (("json_schema", '{"type":"integer"}'), "12 ", "no"),
        (("json_schema", "true"), "[", "goes on"),
        (("json_schema", '{"const":"\\u0001\\"/"}'), '"\\u0001\\"/"', "over"),
        (("json_object",), '{"a": "\\"\\n"}', "over"),
        (("regex", "[0-9]{3}|x+"), "123", "over"),
        (("regex", "[0-9]{3}|x+"), "12", "goes on"),
        (("regex", "[0-9]{3}|x+"), "xxx", "may end"),
        (("regex", "a/b\n\\d"), "a/b\n7", "over"),
        (("regex", "\u00e9\U0001f642"), "\u00e9\U0001f642", "over"),
        (("choice", '["yes", "no", "yes, but"]'), "yes", "may end"),
        (("choice", '["yes", "no", "yes, but"]'), "yes, but", "over"),
        (("choice", '["yes", "no"]'), "maybe", "no"),
        (("choice", '["", "a"]'), "a", "over"),
        (("choice", json.dumps(['"\\/', "\x01\x7f", "(a|b)*"])), '"\\/', "over"),
        (("choice", json.dumps(['"\\/', "\x01\x7f", "(a|b)*"])), "\x01\x7f", "over"),
        (("choice", json.dumps(['"\\/', "\x01\x7f", "(a|b)*"])), "(a|b)*", "over"),
        (("grammar", 'start: "a" (b | "c")*\nb: /[0-9]+/'), "a12c", "may end"),
        (("grammar", 'start: value\nvalue: %json {"type": "boolean"}'), "true", "over"),
        (("grammar", 'root ::= "a" b "!"\nb ::= [0-9]+ | "x"\n'), "a12!", "over"),
        (("grammar", 'root ::= "a" b "!"\nb ::= [0-9]+ | "x"\n'), "ax12", "no"),
    ],
)
def test_what_a_grammar_takes(grammar: tuple[Any, ...], text: str, expected: str) -> None:
    assert takes(grammar, text) == expected


def test_whitespace_is_free_but_ends() -> None:
    state = compiled("json_object").start(EOS)
    assert not follows(state, "{")
    for _ in range(60):
        spaces = [i for i in allowed(state.mask(())) if not text_tokenizer().token_text(i).strip()]
        if not spaces:
            break
        assert not state.accept(spaces[0])
    else:
        pytest.fail("whitespace for ever")


def test_special_tokens_are_no_text() -> None:
    state = compiled("regex", r"[\s\S]+").start(EOS)
    first = allowed(state.mask(()))
    assert first.isdisjoint({BOS_ID, START_ID, EOS_ID})
    assert len(first) > 250
    state.accept(encode("a")[0])
    assert allowed(state.mask(())) - first == EOS


def test_frames_hold_text_special_tokens_and_repetitions() -> None:
    source = json.dumps(
        {
            "type": "object",
            "properties": {"name": {"const": "f"}},
            "required": ["name"],
            "additionalProperties": False,
        }
    )
    frame = Frame(before="<call>\n", after="\n</call>", between="\n", most=2)
    one = '<call>\n{"name": "f"}\n</call>'
    state = compiled("json_schema", source, frame=frame).start(EOS)
    assert not follows(state, one)
    assert EOS_ID in allowed(state.mask(()))
    assert follows(state, "\n" + one), "two are all"
    special = compiled("json_object", frame=Frame(before="<|im_start|>", most=1)).start(EOS)
    assert allowed(special.mask(())) == {START_ID}
    assert not special.accept(START_ID)
    assert follows(special, "{}")


def test_a_reply_ends_where_nothing_can_follow_whatever_may_end_it() -> None:
    for ends in (EOS, frozenset(), frozenset({EOS_ID, 40})):
        state = compiled("choice", '["yes"]').start(ends)
        assert follows(state, "yes")


def test_what_ends_a_reply_is_allowed_where_it_may_end_and_only_there() -> None:
    ends = frozenset({EOS_ID, START_ID})
    state = compiled("regex", "[0-9]{2}x*").start(ends)
    assert not follows(state, "1") and allowed(state.mask(())).isdisjoint(ends)
    assert not follows(state, "2") and ends < allowed(state.mask(()))
    without = compiled("regex", "[0-9]{2}x*").start(frozenset())
    assert not follows(without, "12") and allowed(without.mask(())).isdisjoint(ends)


def test_drafts_are_masked_each_after_those_before_it_and_change_nothing() -> None:
    state = compiled("regex", "ab[cd]e").start(EOS)
    a, b, c, d, e = (encode(char)[0] for char in "abcde")
    before = state.mask(()).copy()
    assert c in allowed(state.mask((a, b))) and e not in allowed(state.mask((a, b)))
    assert allowed(state.mask((a, b, c))) == {e}
    assert allowed(state.mask((a, b, d))) == {e}, "another branch"
    assert allowed(state.mask((a, b, c, e))) == EVERYTHING, "the reply has ended"
    assert allowed(state.mask((a, c))) == EVERYTHING, "not a text of this grammar"
    assert allowed(state.mask((a, EOS_ID))) == EVERYTHING, "not an end either"
    np.testing.assert_array_equal(state.mask(()), before)
    assert [state.num_valid(path) for path in ((a, b, c, e), (a, b, c, e, e), (a, e), (e,), ())] == [
        4,
        4,
        1,
        0,
        0,
    ]
    assert state.num_valid((a, b, EOS_ID)) == 2
    assert not state.accept(a)
    assert state.num_valid((b, d, e)) == 3


def test_nothing_is_said_of_what_follows_a_draft_that_ends_the_reply_by_its_id() -> None:
    a, b = encode("ab")
    state = compiled("regex", "(ab)+").start(frozenset({EOS_ID, b}))
    assert allowed(state.mask((a,))) == {b}
    assert allowed(state.mask((a, b))) == EVERYTHING
    assert state.num_valid((a, b, a)) == 1


def test_masks_of_a_padded_vocabulary_allow_no_padding() -> None:
    for vocab_size in (VOCAB_SIZE + 3, VOCAB_SIZE + 8):
        compiler = GrammarCompiler(text_tokenizer().pieces, vocab_size, EOS)
        state = compiler.compile(StructuredOutput("regex", "[ab]*")).start(EOS)
        mask = state.mask(())
        assert len(mask) == -(-vocab_size // 8)
        assert EOS_ID in allowed(mask, vocab_size) and max(allowed(mask, 8 * len(mask))) < VOCAB_SIZE


@pytest.mark.parametrize("method", ["try_consume_tokens", "compute_bitmask", "validate_tokens", "rollback"])
def test_a_matcher_that_raises_allows_nothing_any_more_and_raises_nothing(method: str) -> None:
    class Broken:
        """A matcher in which one method fails."""

        def __init__(self, matcher: Any) -> None:
            self.matcher = matcher

        def __getattr__(self, name: str) -> Any:
            return (lambda *_: 1 / 0) if name == method else getattr(self.matcher, name)

    failures: list[str] = []
    matcher = compiled("regex", "[ab]*").start(EOS)._matcher
    state = GrammarState(Broken(matcher), VOCAB_SIZE, EOS, lambda: failures.append(method))  # type: ignore[arg-type]
    a, b = encode("a")[0], encode("b")[0]
    state.mask((a, b))
    state.mask((b,))  # not behind the last drafts: back, and on
    state.num_valid([a, b])
    assert state.accept(a) is False
    assert not allowed(state.mask(()))
    assert state.num_valid([a]) == 0
    assert failures == [method], "said once"


def test_what_was_foreseen_is_what_is_found_without() -> None:
    tokens = [encode(char)[0] for char in "abce"]
    plain, foresighted = (compiled("regex", "ab[cd]e").start(EOS) for _ in range(2))
    foresighted.foresee(tokens[:3])
    for token_id in tokens[:3]:
        assert not foresighted.accept(token_id)
        assert not plain.accept(token_id)
    np.testing.assert_array_equal(foresighted.mask(()), plain.mask(()))
    foresighted.foresee(tokens[3:])
    assert foresighted.accept(tokens[3]) and plain.accept(tokens[3])


def test_what_was_foreseen_is_accepted_without_the_matcher() -> None:
    class Unasked:
        """Nobody may ask it anything."""

    state = compiled("regex", "[ab]*").start(EOS)
    a, b = encode("a")[0], encode("b")[0]
    state.foresee([a, b, a, EOS_ID, 5])
    state._matcher = Unasked()  # type: ignore[assignment]
    assert [state.accept(token_id) for token_id in (a, b, a)] == [False] * 3


def test_what_is_committed_but_was_not_foreseen_ends_the_reply() -> None:
    state = compiled("regex", "[ab]*").start(EOS)
    a, b = encode("a")[0], encode("b")[0]
    state.foresee([a])
    state.accept(b)
    assert not allowed(state.mask(()))


def test_a_reply_may_take_some_time_and_a_little_for_each_token() -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += slow
        return now

    slow = 0.0
    compiler = GrammarCompiler(text_tokenizer().pieces, VOCAB_SIZE, EOS, clock)
    grammar, (a,) = compiler.compile(StructuredOutput("regex", "[a]{300}")), encode("a")
    state = grammar.start(EOS)
    slow = TOKEN_S / 10
    for _ in range(100):
        assert allowed(state.mask(())) == {a}
        assert not state.accept(a)
    assert not state.is_dear
    slow = FIRST_S
    assert allowed(state.mask(())) == {a}
    slow = 0.0
    state.accept(a)
    assert state.is_dear
    assert allowed(state.mask(())) == {a}, "what a hundred tokens were given is used up first"
    slow = FIRST_S
    state.accept(a)
    with pytest.raises(ValueError, match="its grammar takes more than 5 ms a token"):
        state.mask(())
    other = grammar.start(EOS)
    slow = 0.0
    assert allowed(other.mask(())) == {a}, "each reply has its own"


@st.composite
def walks(draw: st.DrawFn) -> tuple[str, int, list[list[int]]]:
    """A form, a seed for the text that follows it, and lengths of drafts, right and wrong, on the way."""
    name = draw(st.sampled_from(sorted(SCHEMAS)))
    detours = draw(st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=25))
    return name, draw(st.integers(0, 2**32)), detours


@given(walks())
@settings(max_examples=share_of(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_wherever_drafts_have_led_a_state_is_what_a_fresh_one_would_be(
    walk: tuple[str, int, list[list[int]]],
) -> None:
    name, seed, detours = walk
    grammar = compiled("json_schema", json.dumps(SCHEMAS[name]))
    rng = random.Random(seed)
    state = grammar.start(EOS)
    committed: list[int] = []
    for lengths in detours:
        path: list[int] = []
        for length in lengths:  # each goes on from some part of the last one
            path = path[: rng.randrange(len(path) + 1)]
            path += _some_text(grammar, committed + path, length, rng)
            if rng.random() < 0.3:
                path.append(rng.randrange(VOCAB_SIZE))
            fresh = _fresh(grammar, committed)
            np.testing.assert_array_equal(state.mask(path), fresh.mask(path))
            assert state.num_valid(path) == fresh.num_valid(path)
        choices = sorted(allowed(_fresh(grammar, committed).mask(())))
        np.testing.assert_array_equal(state.mask(()), _fresh(grammar, committed).mask(()))
        token_id = rng.choice(choices)
        if token_id == EOS_ID:
            break
        committed.append(token_id)
        if state.accept(token_id):
            break


def _fresh(grammar: Any, committed: list[int]) -> GrammarState:
    state: GrammarState = grammar.start(EOS)
    for token_id in committed:
        state.accept(token_id)
    return state


def _some_text(grammar: Any, known: list[int], length: int, rng: random.Random) -> list[int]:
    """Tokens that may follow `known`, if that may be."""
    state, found = grammar.start(EOS), []
    if not all(token_id in allowed(state.mask(())) and not state.accept(token_id) for token_id in known):
        return []
    for _ in range(length):
        choices = sorted(allowed(state.mask(())) - EOS)
        if not choices:
            break
        found.append(rng.choice(choices))
        if state.accept(found[-1]):
            break
    return found
