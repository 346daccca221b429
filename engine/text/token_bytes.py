"""What each token adds to the text, as bytes: the table behind decoding whole and decoding token by token.

Text is not a function of one token (a character may be split over several) but its UTF-8 bytes are. With the
bytes of each token known, joining them and decoding once, or decoding them as they come, give the same text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from engine.errors import StartRefused


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level BPE vocabularies (GPT-2, Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {chr(byte): byte for byte in printable}
    stand_ins.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return stand_ins


_BYTE_OF = _byte_alphabet()
_HEX_BYTE = {f"<0x{byte:02{case}}>": byte for byte in range(256) for case in "xX"}


@dataclass(frozen=True, slots=True)
class DecoderRules:
    """How a tokenizer's decoder turns one token into bytes, read from its own description.

    `replacements` are of single characters, so that they never reach over a token's end. `separator` goes
    before each token. `strips_one_space` removes a space at the start of a text, `strips_first_token` every
    space of its first token (Metaspace).
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    separator: str = ""
    strips_one_space: bool = False
    strips_first_token: bool = False

    @classmethod
    def read(cls, description: dict[str, Any] | None) -> DecoderRules:
        """Rules equal to the described decoder; StartRefused for one whose output is not a join of tokens."""
        if description is None:
            return cls(separator=" ", strips_one_space=True)
        rules: dict[str, Any] = {"replacements": ()}
        steps = _flat(description)
        for before, step in zip([None, *steps], steps, strict=False):
            _add_step(rules, step, follows_fuse=before == {"type": "Fuse"})
        return cls(**rules)

    def bytes_of(self, token: str) -> bytes:
        """The bytes of one token that does not open the text."""
        if self.byte_level:
            try:
                return bytes([_BYTE_OF[character] for character in token])
            except KeyError:  # an added token: plain text, not the byte alphabet
                return token.encode()
        if self.byte_fallback and token in _HEX_BYTE:
            return bytes([_HEX_BYTE[token]])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return (self.separator + token).encode()


def _flat(description: dict[str, Any]) -> list[dict[str, Any]]:
    if description["type"] == "Sequence":
        return [step for inner in description["decoders"] for step in _flat(inner)]
    return [description]


def _add_step(rules: dict[str, Any], step: dict[str, Any], follows_fuse: bool) -> None:
    match step:
        case {"type": "ByteLevel"}:
            rules["byte_level"] = True
        case {"type": "ByteFallback"}:
            rules["byte_fallback"] = True
        case {"type": "Fuse"}:
            pass
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if len(old) == 1:
            rules["replacements"] += ((old, new),)
        case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if follows_fuse:
            rules["strips_one_space"] = True
        case {"type": "Metaspace", "replacement": str(old), "prepend_scheme": str(scheme)}:
            rules["replacements"] += ((old, " "),)
            rules["strips_first_token"] = scheme != "never"
        case _:
            raise StartRefused(
                f"the tokenizer's {step['type']} decoder cannot be streamed exactly; a byte-level or "
                "SentencePiece-style tokenizer.json is needed"
            )


class TokenBytes:
    """The bytes of every token, in two tables: special tokens as their text, and special tokens as nothing.

    Built once a model and only read afterwards, so that any thread and any number of requests may share it.
    """

    def __init__(self, rules: DecoderRules, tokens: dict[int, str], special_ids: frozenset[int]) -> None:
        self._rules = rules
        self._all = [b""] * (max(tokens, default=-1) + 1)
        for token_id, token in tokens.items():
            self._all[token_id] = rules.bytes_of(token)
        self._visible = self._all.copy()
        for token_id in special_ids:
            self._visible[token_id] = b""
        self._showing: dict[frozenset[int], list[bytes]] = {}  # one a set of marks; a model has a few

    @classmethod
    def of(cls, backend: Any) -> TokenBytes:
        """The table of a `tokenizers.Tokenizer`; StartRefused when its decoder cannot be streamed exactly."""
        description = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        tokens = {token_id: token for token, token_id in backend.get_vocab(with_added_tokens=True).items()}
        added = backend.get_added_tokens_decoder()
        tokens.update({token_id: token.content for token_id, token in added.items()})
        special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        return cls(DecoderRules.read(description), tokens, special_ids)

    def __len__(self) -> int:
        """One more than the largest token id."""
        return len(self._all)

    def table(self, skip_special_tokens: bool) -> Sequence[bytes]:
        """Bytes by token id; b"" for an id without a token, and for special tokens when they are skipped."""
        return self._visible if skip_special_tokens else self._all

    def table_showing(self, special_ids: frozenset[int] | None) -> Sequence[bytes]:
        """Bytes by token id; of special tokens only these have any, None: all of them."""
        if not special_ids:
            return self.table(special_ids is not None)
        table = self._showing.get(special_ids)
        if table is None:
            table = self._visible.copy()
            for token_id in special_ids:
                table[token_id] = self._all[token_id]
            self._showing[special_ids] = table
        return table

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of special tokens by the text that spells them."""
        hidden = [index for index, piece in enumerate(self._all) if piece and not self._visible[index]]
        return {self._all[index].decode("utf-8", "replace"): index for index in hidden}

    def opening(self, piece: bytes) -> bytes:
        """The first non-empty `piece` of a text without the space that SentencePiece put before it."""
        if self._rules.strips_first_token:
            return piece.replace(b" ", b"")
        return piece.removeprefix(b" ") if self._rules.strips_one_space else piece

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of all of `token_ids`; each maximal ill-formed part of its UTF-8 reads as one U+FFFD."""
        table = self.table(skip_special_tokens)
        pieces = [table[token_id] for token_id in token_ids if token_id < len(table)]
        first = next((index for index, piece in enumerate(pieces) if piece), None)
        if first is not None:
            pieces[first] = self.opening(pieces[first])
        return b"".join(pieces).decode("utf-8", "replace")

    @property
    def max_chars(self) -> int:
        """Characters of the longest token; a character split over tokens counts in each of them."""
        return max((len(piece.decode("utf-8", "replace")) for piece in self._all), default=0)
