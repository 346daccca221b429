"""GrammarCompiler: grammars ready to be followed, each compiled once, whatever is sent to be compiled."""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, TypeVar

from engine.errors import InvalidRequest
from engine.text.grammar_state import GrammarState
from engine.text.grammar_text import grammar_text
from engine.text.structured_output import StructuredOutput
from engine.text.token_bytes import TokenBytes

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

K = TypeVar("K")
V = TypeVar("V")

MAX_CACHED = 32
MAX_REFUSALS = 256  # remembered by a digest, so that sources too dear to follow are not worked on again
# Items of the parser that one mask may take. A rule of a grammar may be ambiguous, and then an item costs a
# hundred times what it does of JSON; programming languages take a tenth of these.
_GRAMMAR_ITEMS = 2000
_JSON_ITEMS = 20_000
# Deep sources are compiled by recursion: a long chain of references needs far more than a usual stack, and
# there is no error for its end. Only what is used becomes memory.
_STACK_BYTES = 256 << 20
_MAX_REASON_CHARS = 100
_PLACE = re.compile(r"^(at )?\d+\(\d+\): |^failed to compile JSON schema: ")
_END_TOKEN = b"<|end|>"  # a name for messages: no text spells a special token

_stack_size_lock = threading.Lock()


class FollowableGrammar:
    """A compiled grammar; see CompiledGrammar. Loop thread only."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, clock: Callable[[], float]) -> None:
        self.is_worn = False  # its automaton, which all replies share, has outgrown its limits
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._clock = clock

    def start(self, end_token_ids: frozenset[int]) -> GrammarState:
        """See CompiledGrammar; O(1)."""
        matcher = self._matcher.deep_copy()
        return GrammarState(matcher, self._vocab_size, end_token_ids, self._wear_out, self._clock)

    def _wear_out(self) -> None:
        self.is_worn = True


class GrammarCompiler:
    """Compiles for one model's tokens; any thread may do so at any time.

    Remembers the last `MAX_CACHED` grammars, and why the last `MAX_REFUSALS` were refused. They are over the
    very bytes that replies are decoded from. `eos_token_ids` are no text. `clock` is the GrammarStates'.
    """

    def __init__(
        self,
        pieces: TokenBytes,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._pieces = pieces
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._lock = threading.Lock()  # never held while anything is compiled
        self._cache: OrderedDict[StructuredOutput, FollowableGrammar] = OrderedDict()
        self._refusals: OrderedDict[bytes, str] = OrderedDict()
        self._tokenizer_lock = threading.Lock()

    def compile(self, structure: StructuredOutput) -> FollowableGrammar:
        """Ready to be followed. Raises InvalidRequest for what is not valid, not supported or too large."""
        key = _digest(structure)
        with self._lock:
            found, refusal = self._cache.get(structure), self._refusals.get(key)
        if refusal is None and (found is None or found.is_worn):
            try:
                found = FollowableGrammar(self._compile(structure), self._vocab_size, self._clock)
            except ValueError as error:
                refusal = _shown(str(error))
        with self._lock:
            if refusal is not None:
                _remember(self._refusals, key, refusal, MAX_REFUSALS)
            elif found is not None:
                _remember(self._cache, structure, found, MAX_CACHED)
        if found is None or refusal is not None:
            name = f"'{structure.param}'" if structure.param else "The structured output"
            raise InvalidRequest(f"{name} cannot be used: {refusal}.", structure.param)
        return found

    def _compile(self, structure: StructuredOutput) -> LLMatcher:
        from llguidance import LLMatcher

        with self._tokenizer_lock:
            tokenizer, special_tokens = self._tokenizer, self._pieces.special_tokens
        text = grammar_text(structure, special_tokens)
        limits = _limits(_GRAMMAR_ITEMS if "%lark" in text or structure.kind == "grammar" else _JSON_ITEMS)
        matcher = _on_deep_stack(lambda: LLMatcher(tokenizer, text, log_level=0, limits=limits))
        if matcher.is_error():
            raise ValueError(_reason(matcher.get_error()))
        # The first mask is the dearest, and shows what cannot be followed at all.
        first = matcher.deep_copy()
        mask = GrammarState(first, self._vocab_size, frozenset()).mask(())
        if not mask.any():
            if first.is_error() and not first.stop_reason().startswith("NoExtension"):
                raise ValueError("it is too complex")
            raise ValueError("no text but an empty one satisfies it")
        return matcher

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """The tokens as bytes, and one of its own that ends a reply. Takes a moment to build."""
        from llguidance import LLTokenizer, TokenizerWrapper

        special = self._eos_token_ids.union(self._pieces.special_tokens.values())
        return LLTokenizer(TokenizerWrapper(_Vocabulary(self._pieces, self._vocab_size, special)))


class _Vocabulary:
    """A model's tokens as llguidance asks for them: special ones apart, and the end token behind the last."""

    bos_token_id = None

    def __init__(self, pieces: TokenBytes, vocab_size: int, special_token_ids: frozenset[int]) -> None:
        spelled = pieces.table(False)[:vocab_size]
        padding = [b""] * (vocab_size - len(spelled))
        self.tokens = [*spelled, *padding, _END_TOKEN]
        self.special_token_ids = sorted(token_id for token_id in special_token_ids if token_id < vocab_size)
        self.special_token_ids.append(vocab_size)
        self.eos_token_id = vocab_size

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text that a grammar forces: never needed, for ours force nothing."""
        return []


def _digest(structure: StructuredOutput) -> bytes:
    """Of what a refusal depends on."""
    described = repr(_without_param(structure))
    return sha256(described.encode("utf-8", "surrogatepass")).digest()


def _without_param(structure: StructuredOutput) -> StructuredOutput:
    other = structure.otherwise
    return replace(structure, param=None, otherwise=None if other is None else _without_param(other))


def _remember(cache: OrderedDict[K, V], key: K, value: V, size: int) -> None:
    """As the newest of `size` entries at most."""
    cache[key] = value
    cache.move_to_end(key)
    if len(cache) > size:
        cache.popitem(last=False)


def _limits(num_items: int) -> LLParserLimits:
    from llguidance import LLParserLimits

    # A state takes one or two kilobytes. Messages are to hold nothing of the grammar.
    return LLParserLimits(max_lexer_states=25_000, step_max_items=num_items, verbose_errors=False)


def _on_deep_stack(call: Callable[[], LLMatcher]) -> LLMatcher:
    """The result of `call`, made in a thread of its own that has a large stack."""
    results: list[LLMatcher] = []
    thread = threading.Thread(target=lambda: results.append(call()), name="grammar", daemon=True)
    with _stack_size_lock:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    if not results:
        raise ValueError("the compiler has failed on it")
    return results[0]


def _reason(error: str) -> str:
    """The part of the compiler's message that says what is wrong."""
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["the compiler does not say why"]
    reason = next((line for line in lines if line.startswith("error: ")), lines[0]).removeprefix("error: ")
    while (shorter := _PLACE.sub("", reason)) != reason:
        reason = shorter
    return reason


def _shown(reason: str) -> str:
    """Short enough to be sent back, whatever of the source it holds."""
    reason = reason.rstrip(".")
    return reason if len(reason) <= _MAX_REASON_CHARS else reason[: _MAX_REASON_CHARS - 1] + "…"
