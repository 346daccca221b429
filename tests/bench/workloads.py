"""The served workloads W1 to W4: the same lengths every time, other words every run; and REP, for drafts.

Prompts are made of words that are one token each, so that their length is exact whether they travel as text
or as token ids, and every peer gets the same tokens. REP's are passages of plain English.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from tests.bench.draft_texts import HARBOUR, LIGHTHOUSE, REPORT

WORD = re.compile(r"Ġ[a-z]{2,}")  # a space and a lower-case word, as byte-level tokenizers write it
PREFIX_TOKENS = 512
OWN_TOKENS = 17
PASSAGES = HARBOUR, REPORT, LIGHTHOUSE.partition("\n\n")[2]  # 160 to 200 tokens each
OPENING_WORDS = 8  # from which on a passage is repeated


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, as text and as the token ids that the text encodes to."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are sent at once, each to generate exactly `max_tokens`, EOS ignored, greedy.

    With another `cache_salt` the same prompts are computed again.
    """

    name: str
    title: str
    prompts: tuple[Prompt, ...]
    max_tokens: int
    cache_salt: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Over all prompts."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def num_output_tokens(self) -> int:
        """Over all prompts."""
        return len(self.prompts) * self.max_tokens


class Words:
    """A model's vocabulary of one-token words."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Raises ValueError when there are fewer than 100 such words: prompts would hardly differ."""
        self._tokenizer = tokenizer
        tokens = sorted(token for token in tokenizer.get_vocab() if WORD.fullmatch(token))
        texts = [" " + token[1:] for token in tokens]
        encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
        self._words = [(text, e.ids[0]) for text, e in zip(texts, encoded, strict=True) if len(e.ids) == 1]
        if len(self._words) < 100:
            raise ValueError(f"the tokenizer has only {len(self._words)} one-token words")

    @classmethod
    def of(cls, directory: Path) -> Words:
        """The words of the model in `directory`."""
        return cls(tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")))

    @property
    def token_ids(self) -> list[int]:
        """The id of every word."""
        return [token_id for _, token_id in self._words]

    def encode(self, text: str) -> Prompt:
        """Any text."""
        return Prompt(text, tuple(self._tokenizer.encode(text, add_special_tokens=False).ids))

    def prompt(self, rng: random.Random, num_tokens: int, prefix: Prompt | None = None) -> Prompt:
        """Random words after `prefix`; `num_tokens` counts the new ones.

        Raises ValueError when the text does not encode to just these tokens.
        """
        chosen = rng.choices(self._words, k=num_tokens)
        text = "".join(word for word, _ in chosen)
        token_ids = tuple(token_id for _, token_id in chosen)
        if prefix is not None:
            text, token_ids = prefix.text + text, prefix.token_ids + token_ids
        prompt = self.encode(text)
        if prompt.token_ids != token_ids:
            raise ValueError("words that are one token each do not stay so side by side")
        return prompt


def one_stream(words: Words, seed: int) -> Workload:
    """W1: 128 tokens in, 128 out."""
    return Workload("W1", "1 stream, 128 in / 128 out", _equal(words, f"W1/{seed}", 1), 128)


def eight_streams(words: Words, seed: int) -> Workload:
    """W2: eight times W1."""
    return Workload("W2", "8 at once, 128 in / 128 out", _equal(words, f"W2/{seed}", 8), 128)


def mixed_lengths(words: Words, seed: int) -> Workload:
    """W3: 32 prompts whose lengths are spread evenly over 32 to 512, in an order that is always the same."""
    lengths = [32 + round(480 * place / 31) for place in range(32)]
    random.Random("W3 order").shuffle(lengths)
    rng = random.Random(f"W3/{seed}")
    prompts = tuple(words.prompt(rng, length) for length in lengths)
    return Workload("W3", "32 at once, 32-512 in / 64 out", prompts, 64)


def shared_prefix(words: Words, seed: int, *, warm: bool) -> Workload:
    """W4: 16 prompts of one prefix and an end of their own; warm: the cold prefix again, with other ends."""
    rng = random.Random(f"W4/{seed}")
    prefix = words.prompt(rng, PREFIX_TOKENS)
    ends = random.Random(f"W4/{seed}/{'warm' if warm else 'cold'}")
    prompts = tuple(words.prompt(ends, OWN_TOKENS, prefix) for _ in range(16))
    state = "warm" if warm else "cold"
    return Workload(
        f"W4 {state}", f"16 at once, {PREFIX_TOKENS} shared + {OWN_TOKENS} in / 32 out", prompts, 32
    )


def repeated_passage(words: Words, seed: int) -> Workload:
    """REP: a text and the beginning of the same text again; its number keeps one run's K/V from the next."""
    passage = PASSAGES[seed % len(PASSAGES)].split()
    opening = " ".join(passage[:OPENING_WORDS])
    text = f"{seed}. {' '.join(passage)}\n\nHere is the same passage again:\n\n{seed}. {opening}"
    return Workload("REP", "1 stream, a passage to be repeated / 128 out", (words.encode(text),), 128)


def _equal(words: Words, seed: str, num_prompts: int) -> tuple[Prompt, ...]:
    rng = random.Random(seed)
    return tuple(words.prompt(rng, 128) for _ in range(num_prompts))


def prompts_of(words: Words, num_prompts: int, num_tokens: int, seed: int) -> Sequence[Prompt]:
    """Plain prompts of one length, for the benchmarks that need no workload."""
    rng = random.Random(f"plain/{seed}")
    return [words.prompt(rng, num_tokens) for _ in range(num_prompts)]
