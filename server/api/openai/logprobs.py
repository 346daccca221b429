"""Log-probabilities in the shapes that OpenAI and vLLM have for them."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from engine import Engine, TokenLogprobs
from server.api.long_list import LongList
from server.api.openai.protocol import GenerationBody

# JSON has no infinity; vLLM's stand-in for a token that cannot be drawn.
_LOWEST = -9999.0
_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class TokenSpelling:
    """How a reply spells single tokens: as text, or, as vLLM offers, by id."""

    text: Callable[[int], str]
    bytes: Callable[[int], bytes | None]

    @classmethod
    def of(cls, engine: Engine, body: GenerationBody) -> TokenSpelling:
        """What the request asks for."""
        by_id = bool(body.return_tokens_as_token_ids)
        # Asked for when a token is spelled: while the model loads, it is admission that refuses and counts.
        return cls(
            "token_id:{}".format if by_id else lambda token_id: engine.tokenizer.token_text(token_id),
            lambda token_id: engine.tokenizer.token_bytes(token_id),
        )


class TextPlace(NamedTuple):
    """A place between two tokens: whole characters before it, and bytes of one that is not complete yet."""

    offset: int
    rest: bytes = b""

    def behind(self, piece: bytes) -> TextPlace:
        """The place behind a token of these bytes."""
        if not self.rest and piece.isascii():
            return TextPlace(self.offset + len(piece))
        decoder = _new_utf8_decoder("replace")
        num_chars = len(decoder.decode(self.rest + piece))
        return TextPlace(self.offset + num_chars, decoder.getstate()[0])


TEXT_START = TextPlace(0)


def place_behind(token_ids: Iterable[int], spelling: TokenSpelling, place: TextPlace) -> TextPlace:
    """Where the text goes on behind these tokens."""
    for token_id in token_ids:
        place = place.behind(spelling.bytes(token_id) or b"")
    return place


def completion_logprobs(
    logprobs: Sequence[TokenLogprobs], spelling: TokenSpelling, place: TextPlace
) -> dict[str, LongList]:
    """The parallel lists of /v1/completions; `place` is where the first token's text begins in the choice.

    Of several tokens that look alike the likeliest keeps the place in `top_logprobs`.
    """
    token_text = spelling.text
    return {
        "tokens": LongList(lambda: (token_text(each.token_id) for each in logprobs)),
        "token_logprobs": LongList(lambda: (_finite(each.logprob) for each in logprobs)),
        "top_logprobs": LongList(lambda: (_top(each, token_text) for each in logprobs)),
        "text_offset": LongList(lambda: _offsets((each.token_id for each in logprobs), spelling, place)),
    }


def echoed_logprobs(
    token_ids: Sequence[int],
    records: Sequence[TokenLogprobs],
    num_top: int,
    spelling: TokenSpelling,
) -> dict[str, LongList]:
    """The same for a prompt that is echoed; its first token follows nothing and has none."""
    token_text = spelling.text
    return {
        "tokens": LongList(lambda: map(token_text, token_ids)),
        "token_logprobs": LongList(lambda: chain((None,), (_finite(each.logprob) for each in records))),
        "top_logprobs": LongList(
            lambda: chain((None,), (_top(each, token_text, num_top) for each in records))
        ),
        "text_offset": LongList(lambda: _offsets(token_ids, spelling, TEXT_START)),
    }


def joined(first: LongList, second: LongList) -> LongList:
    """The items of both."""
    return LongList(lambda: chain(first, second))


def _offsets(token_ids: Iterable[int], spelling: TokenSpelling, place: TextPlace) -> Iterator[int]:
    """Tokens that share a character have the same one."""
    for token_id in token_ids:
        yield place.offset
        place = place.behind(spelling.bytes(token_id) or b"")


def _top(
    logprobs: TokenLogprobs, token_text: Callable[[int], str], num_top: int | None = None
) -> dict[str, float]:
    top: dict[str, float] = {}
    for token_id, logprob in (*logprobs.top[:num_top], (logprobs.token_id, logprobs.logprob)):
        top.setdefault(token_text(token_id), _finite(logprob))
    return top


def chat_logprobs(logprobs: Sequence[TokenLogprobs], spelling: TokenSpelling) -> dict[str, object]:
    """The list of records of /v1/chat/completions."""
    return {"content": LongList(lambda: token_records(logprobs, spelling))}


def token_records(logprobs: Iterable[TokenLogprobs], spelling: TokenSpelling) -> Iterator[dict[str, object]]:
    """One record a token, made as it is read."""
    return (_record(each, spelling) for each in logprobs)


def _record(logprobs: TokenLogprobs, spelling: TokenSpelling) -> dict[str, object]:
    return {
        **_entry(logprobs.token_id, logprobs.logprob, spelling),
        "top_logprobs": [_entry(token_id, logprob, spelling) for token_id, logprob in logprobs.top],
    }


def _entry(token_id: int, logprob: float, spelling: TokenSpelling) -> dict[str, object]:
    """`bytes` are the token's own: those of a character that several tokens share join to the character."""
    own = spelling.bytes(token_id)
    return {
        "token": spelling.text(token_id),
        "logprob": _finite(logprob),
        "bytes": None if own is None else list(own),
    }


def prompt_logprobs(
    records: Sequence[TokenLogprobs], num_top: int, token_text: Callable[[int], str]
) -> LongList:
    """vLLM's list: null for the first token, then each token's own record and the likeliest ones', by id."""
    return LongList(lambda: chain((None,), (_by_id(each, num_top, token_text) for each in records)))


def _by_id(
    logprobs: TokenLogprobs, num_top: int, token_text: Callable[[int], str]
) -> dict[str, dict[str, object]]:
    ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(logprobs.top[:num_top], 1)]
    entries: dict[str, dict[str, object]] = {}
    for token_id, logprob, rank in ((logprobs.token_id, logprobs.logprob, logprobs.rank), *ranked):
        entries.setdefault(
            str(token_id),
            {"logprob": _finite(logprob), "rank": rank, "decoded_token": token_text(token_id)},
        )
    return entries


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
