"""ReasoningGate: which tokens may end a reasoning that a form follows, and from where on the form holds."""

from __future__ import annotations

import json

from engine.plan.grammar import Grammar
from engine.text.grammar_compiler import GrammarCompiler
from engine.text.reply.reasoning_format import THINK
from engine.text.reply.reply_format import ReplyFormat, Spelling
from engine.text.structured_output import StructuredOutput
from engine.text.tools.json_formats import HERMES
from tests.unit.text.builders import ByteTokens

WORDS = [b"<think>", b"</think>", b"</th", b"ink>", b"ink>no", b"</think>no", b"ink>\n", b"</think>\n\n"]
BEGIN, END, HALF, REST, REST_NO, END_NO, REST_SPACE, END_SPACE = range(256, 256 + len(WORDS))
EOS = 256 + len(WORDS)
VOCAB_SIZE = EOS + 1


class WordTokens(ByteTokens):
    """The 256 bytes, words that hold the mark or a part of it, and the token that ends a reply."""

    def table(self, skip_special_tokens: bool) -> list[bytes]:
        return [*super().table(skip_special_tokens), *WORDS, b""]


def started(budget: int | None = None) -> Grammar:
    """A reply that begins within its reasoning and then is "yes" or "no"."""
    table = WordTokens().table(False)
    spelling = Spelling(table, lambda text: list(text.encode()), {}, {"<think>": BEGIN, "</think>": END})
    form = ReplyFormat(THINK, HERMES, spelling)
    compiler = GrammarCompiler(WordTokens(), VOCAB_SIZE, frozenset({EOS}))  # type: ignore[arg-type]
    grammar = compiler.compile(StructuredOutput("choice", json.dumps(["yes", "no"])))
    gate = form.gate([BEGIN], VOCAB_SIZE, grammar, budget)
    assert gate is not None
    return gate.start(frozenset({EOS}))


def allowed(state: Grammar, *path: int) -> set[int]:
    mask = state.mask(path)
    return {token_id for token_id in range(VOCAB_SIZE) if mask[token_id >> 3] >> (token_id & 7) & 1}


def test_no_token_ends_the_reply_or_goes_on_behind_the_mark_within_the_reasoning() -> None:
    state = started()
    everything = set(range(VOCAB_SIZE))
    assert allowed(state) == everything - {EOS, END_NO}
    # Only behind the mark's beginning would its rest complete it, wherever that beginning was drawn.
    assert allowed(state, HALF) == everything - {EOS, END_NO, REST_NO}
    assert allowed(state, *b"</th") == everything - {EOS, END_NO, REST_NO}
    assert allowed(state, HALF, ord("x")) == everything - {EOS, END_NO}
    state.accept(HALF)
    assert allowed(state) == everything - {EOS, END_NO, REST_NO}


def test_the_form_holds_from_the_token_behind_the_mark() -> None:
    starts = {ord("y"), ord("n")}
    for end in ((END,), (END_SPACE,), (HALF, REST), (HALF, REST_SPACE), tuple(b"</think>")):
        assert allowed(started(), *end) == starts
        assert allowed(started(), *end, ord("n")) == {ord("o")}
        assert started().num_valid((ord("x"), *end, *b"nx")) == len(end) + 2
        state = started()
        for token_id in end:
            assert not state.accept(token_id)
        assert allowed(state) == starts


def test_a_budget_leaves_only_the_mark() -> None:
    state = started(budget=2)
    assert END in allowed(state, 65) and 66 in allowed(state, 65)
    assert allowed(state, 65, 66) == {END}
    assert allowed(state, 65, 66, END) == {ord("y"), ord("n")}
