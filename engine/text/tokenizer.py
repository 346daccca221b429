"""The model's tokenizer: text to token ids and back. Knows transformers; knows nothing of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from engine.errors import ContextLengthExceeded, InvalidRequest, StartRefused
from engine.plan.admission import check_token_ids
from engine.text.chat_template import ChatTemplate
from engine.text.fill_in_middle import FillInMiddle
from engine.text.reply.reply_format import ReplyFormat, Spelling
from engine.text.token_bytes import TokenBytes

_MAX_REASON_CHARS = 200


class Tokenizer:
    """Synchronous, never written after it is built: any thread may call anything at any time.

    Encoding neither truncates nor pads, whatever the model's files say. Text that spells a special token
    becomes that token (vLLM's policy, and what a completion prompt with a hand-written template needs).
    """

    def __init__(self, directory: Path, chat_template: str | None = None) -> None:
        """Reads the tokenizer.json in `directory` and no code from it.

        `chat_template` is template text that replaces the model's own. Raises StartRefused without a readable
        tokenizer.json, for a model that needs its own code, a decoder that cannot be streamed or a broken
        template.
        """
        tokenizer = load_fast_tokenizer(directory)
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._description = _describe(tokenizer)
        self.pieces = TokenBytes.of(self._backend)
        self._chat_template = ChatTemplate(tokenizer, chat_template)
        self.fill_in_middle = FillInMiddle.find(self._added())
        self._max_token_chars = max(1, self.pieces.max_chars)
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.pad_token_id: int | None = tokenizer.pad_token_id

    @property
    def vocab_size(self) -> int:
        """One more than the largest id with a token; the model's own vocabulary may be padded beyond it."""
        return len(self.pieces)

    @property
    def has_chat_template(self) -> bool:
        """False when `render_chat` can only refuse."""
        return bool(self._chat_template)

    def char_limit(self, max_model_len: int) -> int:
        """Length in characters that no text of `max_model_len` tokens exceeds.

        Longer text can be refused unread: tokenizing it would cost its length and end in the same refusal. A
        normalizer that shrinks text (runs of spaces, composed accents) is not counted in.
        """
        return self._max_token_chars * max_model_len

    def check_length(self, num_chars: int, max_model_len: int, param: str) -> None:
        """Raise ContextLengthExceeded for text that cannot fit, whatever its tokens are."""
        char_limit = self.char_limit(max_model_len)
        if num_chars > char_limit:
            fewest_tokens = -(-num_chars * max_model_len // char_limit)
            raise ContextLengthExceeded(
                limit=max_model_len, prompt_tokens=fewest_tokens, max_tokens=0, param=param
            )

    def encode(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """The token ids of `text`. Raises InvalidRequest for `param` when the text is not valid Unicode."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            reason = f"character {error.start} of the text is a lone surrogate, which is not valid Unicode"
            raise InvalidRequest(reason, param=param) from None
        # The only call of the library's that lets other threads run meanwhile: the event loop, for one.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of `token_ids` alone, no prompt before them; an id without a token adds nothing."""
        return self.pieces.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def decode_checked(
        self, token_ids: Sequence[int], vocab_size: int, param: str, *, skip_special_tokens: bool
    ) -> str:
        """The same of the request's field `param`; raises InvalidRequest for an id beyond `vocab_size`."""
        check_token_ids(param, token_ids, vocab_size)
        return self.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token as text, special tokens spelled out; an incomplete character reads as U+FFFD."""
        return (self.token_bytes(token_id) or b"").decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes | None:
        """The token's own bytes, which need not be whole characters; None for an id without a token."""
        table = self.pieces.table(skip_special_tokens=False)
        return table[token_id] or None if 0 <= token_id < len(table) else None

    def token_name(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, such as \u0120the; None for an id without a token."""
        name: str | None = self._backend.id_to_token(token_id)
        return name

    def describe(self) -> dict[str, object]:
        """Its class, special tokens (null where there is none) and the chat template in use; a copy."""
        return {**self._description, "chat_template": self._chat_template.text}

    @property
    def tool_template(self) -> str | None:
        """The chat template that shows tools to the model; None if there is none that does."""
        return self._chat_template.tool_text

    def reply_format(self, *, reasoning: str = "auto", tools: str = "auto") -> ReplyFormat:
        """How replies of this model are read, with formats of these names or as the templates show."""
        spelling = Spelling(
            table=self.pieces.table(skip_special_tokens=False),
            encode=lambda text: self.encode(text, add_special_tokens=False),
            special=self.pieces.special_tokens,
            added=self._added(),
        )
        template = self._chat_template
        return ReplyFormat.find(template.text, template.tool_text, spelling, reasoning=reasoning, tools=tools)

    def _added(self) -> dict[str, int]:
        """Every token that was added to the vocabulary, special or not."""
        return {
            token.content: token_id for token_id, token in self._backend.get_added_tokens_decoder().items()
        }

    def render_chat_text(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] = (),
        options: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text the chat template makes of `messages` and `tools`; raises InvalidRequest.

        `options` are variables of the template's own.
        """
        return self._chat_template.render(messages, tools, options or {})

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] = (),
        options: Mapping[str, object] | None = None,
        *,
        add_special_tokens: bool = False,
        max_model_len: int | None = None,
    ) -> list[int]:
        """The same as token ids. Templates write the special tokens, so none are added unless asked for.

        Raises ContextLengthExceeded for a text that is too long for `max_model_len`, None for any length.
        """
        text = self.render_chat_text(messages, tools, options)
        if max_model_len is not None:  # a template may show a text more than once
            self.check_length(len(text), max_model_len, "messages")
        return self.encode(text, add_special_tokens=add_special_tokens, param="messages")


_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


def _describe(tokenizer: Any) -> dict[str, object]:
    """What a transformers tokenizer says about itself, as its tokenizer_config.json spells it."""
    special = {name: getattr(tokenizer, name, None) for name in _SPECIAL_TOKENS}
    others = getattr(tokenizer, "extra_special_tokens", None) or ()
    return {
        "tokenizer_class": type(tokenizer).__name__,
        **{name: None if token is None else str(token) for name, token in special.items()},
        "additional_special_tokens": [str(token) for token in others],
        "vocab_size": len(tokenizer),
    }


def load_fast_tokenizer(directory: Path) -> Any:
    """The transformers tokenizer in `directory`, backed by the `tokenizers` package. Raises StartRefused."""
    # Here, because it brings torch along, which the server does without until it loads the model.
    from transformers import AutoTokenizer

    if not (directory / "tokenizer.json").is_file():
        raise StartRefused(f"{directory} has no tokenizer.json: only fast tokenizers are served")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), trust_remote_code=False, local_files_only=True
        )
    except (
        Exception
    ) as error:  # the libraries raise anything, bare Exception included, for files they cannot read
        reason = " ".join(str(error).split())[:_MAX_REASON_CHARS]
        raise StartRefused(f"the tokenizer in {directory} cannot be loaded: {reason}") from error
    if not isinstance(getattr(tokenizer, "backend_tokenizer", None), tokenizers.Tokenizer):
        raise StartRefused(
            f"the tokenizer in {directory} is a {type(tokenizer).__name__}: only fast tokenizers are served"
        )
    return tokenizer
