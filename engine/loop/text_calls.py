"""TextCalls: a request's text read, rendered and written, and its grammar compiled, off the event loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from engine.loop.engine_parts import EngineParts
from engine.loop.text_thread import TextThread
from engine.plan.grammar import CompiledGrammar
from engine.text.grammar_compiler import GrammarCompiler
from engine.text.structured_output import StructuredOutput
from engine.text.text_size import count_chars


class TextCalls:
    """What callers have done to text before a request; each call waits for its `tenant`'s turn.

    `loaded` gives the engine's parts. All raise its Overloaded while there are none, and InvalidRequest for
    what cannot be worked on. Loop thread only.
    """

    def __init__(self, thread: TextThread, loaded: Callable[[], EngineParts]) -> None:
        self._thread = thread
        self._loaded = loaded
        self._grammars: GrammarCompiler | None = None

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, tenant: str | None = None
    ) -> list[int]:
        """Tokenize. Text too long for any prompt is refused unread."""
        parts = self._loaded()
        parts.tokenizer.check_length(len(text), parts.info.max_model_len, "prompt")
        call = partial(parts.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await self._thread.run(call, "tokenizer", tenant)

    async def render_chat(
        self,
        messages: list[dict[str, object]],
        tools: Sequence[dict[str, object]] = (),
        *,
        options: Mapping[str, object] | None = None,
        add_special_tokens: bool = False,
        tenant: str | None = None,
    ) -> list[int]:
        """Apply the chat template and tokenize.

        All text that the template is given counts for the length that is refused before it costs anything.
        `options` are variables of the template's own.
        """
        parts = self._loaded()
        tokenizer, limit = parts.tokenizer, parts.info.max_model_len
        num_chars = count_chars([messages, list(tools), options], tokenizer.char_limit(limit))
        tokenizer.check_length(num_chars, limit, "messages")
        render = partial(tokenizer.render_chat, add_special_tokens=add_special_tokens, max_model_len=limit)
        return await self._thread.run(partial(render, messages, tools, options), "tokenizer", tenant)

    async def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        param: str = "prompt",
        tenant: str | None = None,
    ) -> str:
        """Text of a whole token list, the request's field `param`, whose ids must be in the vocabulary."""
        parts = self._loaded()
        decode = partial(parts.tokenizer.decode_checked, token_ids, parts.info.vocab_size, param)
        call = partial(decode, skip_special_tokens=skip_special_tokens)
        return await self._thread.run(call, "detokenizer", tenant)

    async def compile_grammar(
        self, structure: StructuredOutput, *, tenant: str | None = None
    ) -> CompiledGrammar:
        """What a reply must be, made ready for `GenerationRequest.grammar`; cached, and so are refusals."""
        parts = self._loaded()
        if self._grammars is None:
            pieces = parts.tokenizer.pieces
            self._grammars = GrammarCompiler(pieces, parts.info.vocab_size, parts.eos_token_ids)
        return await self._thread.run(partial(self._grammars.compile, structure), "grammar", tenant)
