"""Turns the tokens of one request into text as they come, up to the first stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from engine.text.stop_strings import StopMatch, StopMatcher
from engine.text.tokenizer import Tokenizer

_MAX_SPLIT_BYTES = 3  # the longest incomplete UTF-8 sequence
_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class TextDelta(NamedTuple):
    """Text that may be shown now, and the stop string that ended it (None: it goes on).

    `num_tokens` counts the given tokens up to and including the one that completed the stop string, all of
    them when there was none: those after it are not part of the reply.
    """

    text: str
    stop: str | None
    num_tokens: int


class Detokenizer:
    """The text of one reply, token by token; cheap to make, for one thread at a time.

    Pushed and flushed text joined together is what decoding all tokens at once gives, wherever the pushes
    were cut, with the prompt before it: a SentencePiece reply keeps its leading space, and a character that
    the prompt leaves incomplete comes whole with the reply. Characters are shown once complete. Bytes that
    cannot become a character read as U+FFFD, one for each maximal ill-formed part; so do those of `<0xNN>`
    tokens, where the `tokenizers` package would take back characters already shown.

    With stop strings, the text held back is the longest end of it that could still become one. A stop string
    is cut from the text, or kept with `include_stop`; what follows it is dropped either way. The one that is
    completed first wins, of several completed by the same character the longest. One completed by any of the
    first `min_tokens` tokens does not count, as in vLLM. The token that ends a reply by its id is not pushed.

    Special tokens have no text, but for those in `shown_special_ids`; None: all have theirs.
    """

    __slots__ = (
        "_at_start",
        "_held",
        "_include_stop",
        "_min_tokens",
        "_num_tokens",
        "_pieces",
        "_stops",
        "_table",
        "_utf8",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        shown_special_ids: frozenset[int] | None = frozenset(),
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._pieces = tokenizer.pieces
        self._table = tokenizer.pieces.table_showing(shown_special_ids)
        self._stops = StopMatcher(stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""
        self._utf8 = _new_utf8_decoder("replace")
        tail = self._tail(prompt_token_ids)
        self._at_start = not tail
        self._utf8.decode(tail)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` make showable when there are no stop strings to look for."""
        assert self._stops is None, "stop strings would be missed"
        return self._utf8.decode(self._bytes_of(token_ids))

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """The text that `token_ids` make showable. Not to be called again after it reported a stop."""
        if self._stops is None:
            return TextDelta(self.decode(token_ids), None, len(token_ids))
        shown = ""
        for count, token_id in enumerate(token_ids, start=1):
            self._num_tokens += 1
            text, stop = self._until_stop(self._stops, self._utf8.decode(self._bytes_of((token_id,))))
            shown += text
            if stop is not None:
                return TextDelta(shown, stop, count)
        return TextDelta(shown, None, len(token_ids))

    def flush(self) -> TextDelta:
        """All that was held back, once the reply has ended by an id, by length or from outside.

        Not for a reply that a stop string has ended. `stop` is set only when a final U+FFFD completes one.
        """
        text = self._utf8.decode(b"", final=True)
        if self._stops is None:
            return TextDelta(text, None, 0)
        shown, stop = self._until_stop(self._stops, text)
        rest, self._held = self._held, ""
        return TextDelta(shown + rest, stop, 0)

    def _until_stop(self, stops: StopMatcher, text: str) -> tuple[str, str | None]:
        """Add `text` to what is held back; the part that may be shown, and the stop string it ends at."""
        num_held = len(self._held)
        match = stops.feed(text, ignore=self._num_tokens <= self._min_tokens)
        self._held += text
        cut = self._cut(match, num_held) if match else len(self._held) - stops.num_held
        shown = self._held[:cut]
        self._held = "" if match else self._held[cut:]
        return shown, match.stop if match else None

    def _cut(self, match: StopMatch, num_held: int) -> int:
        end = num_held + match.end
        return end if self._include_stop else end - len(match.stop)

    def _bytes_of(self, token_ids: Sequence[int]) -> bytes:
        if self._at_start:
            return self._opening_bytes(token_ids)
        table = self._table
        if len(token_ids) == 1 and token_ids[0] < len(table):
            return table[token_ids[0]]
        # A model's vocabulary may be padded beyond the tokenizer's: such an id has no text.
        return b"".join([table[token_id] for token_id in token_ids if token_id < len(table)])

    def _opening_bytes(self, token_ids: Sequence[int]) -> bytes:
        """The same while nothing but empty tokens came before, so that the first space may not count."""
        for index, token_id in enumerate(token_ids):
            if token_id < len(self._table) and self._table[token_id]:
                self._at_start = False
                return self._pieces.opening(self._table[token_id]) + self._bytes_of(token_ids[index + 1 :])
        return b""

    def _tail(self, prompt_token_ids: Sequence[int]) -> bytes:
        """The prompt's last bytes, as many as an incomplete character can have; b"" when it has no text."""
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if token_id < len(self._table):
                tail = self._table[token_id] + tail
            if len(tail) >= _MAX_SPLIT_BYTES:
                break
        return tail
