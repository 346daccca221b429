"""The workloads: same lengths every time, same words for a seed, exact token counts."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from tests.bench.workloads import (
    Words,
    Workload,
    eight_streams,
    mixed_lengths,
    one_stream,
    prompts_of,
    repeated_passage,
    shared_prefix,
)

MAKERS: list[Callable[[Words, int], Workload]] = [
    one_stream,
    eight_streams,
    mixed_lengths,
    lambda words, seed: shared_prefix(words, seed, warm=False),
    lambda words, seed: shared_prefix(words, seed, warm=True),
]


def byte_level(words: list[str]) -> tokenizers.Tokenizer:
    """A byte-level BPE that knows exactly `words`, each with its space, beside single letters."""
    vocabulary = {chr(letter): number for number, letter in enumerate(range(ord("a"), ord("z") + 1))}
    vocabulary["Ġ"] = len(vocabulary)
    merges: list[tuple[str, str]] = []
    for word in words:
        left = "Ġ"
        for letter in word:
            if left + letter not in vocabulary:
                vocabulary[left + letter] = len(vocabulary)
                merges.append((left, letter))
            left += letter
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    rng = random.Random(1)
    return byte_level(["".join(rng.choices("abcdefgh", k=5)) for _ in range(150)])


@pytest.fixture(scope="module")
def words(tokenizer: tokenizers.Tokenizer) -> Words:
    return Words(tokenizer)


@pytest.mark.parametrize("make", MAKERS)
def test_text_and_token_ids_are_the_same_prompt(
    make: Callable[[Words, int], Workload], words: Words, tokenizer: tokenizers.Tokenizer
) -> None:
    for prompt in make(words, 3).prompts:
        assert tuple(tokenizer.encode(prompt.text).ids) == prompt.token_ids


@pytest.mark.parametrize("make", MAKERS)
def test_a_seed_gives_the_same_words_and_another_seed_other_words_of_the_same_lengths(
    make: Callable[[Words, int], Workload], words: Words
) -> None:
    first, again, other = make(words, 0), make(words, 0), make(words, 1)
    assert first == again
    assert [len(p.token_ids) for p in first.prompts] == [len(p.token_ids) for p in other.prompts]
    assert not {p.text for p in first.prompts} & {p.text for p in other.prompts}


def test_the_shapes_are_those_the_titles_name(words: Words) -> None:
    shapes = {}
    for make in MAKERS:
        workload = make(words, 0)
        lengths = sorted(len(prompt.token_ids) for prompt in workload.prompts)
        shapes[workload.name] = (len(lengths), lengths[0], lengths[-1], workload.max_tokens)
    assert shapes == {
        "W1": (1, 128, 128, 128),
        "W2": (8, 128, 128, 128),
        "W3": (32, 32, 512, 64),
        "W4 cold": (16, 529, 529, 32),
        "W4 warm": (16, 529, 529, 32),
    }


def test_the_mixed_lengths_are_spread_evenly_and_not_sorted(words: Words) -> None:
    lengths = [len(prompt.token_ids) for prompt in mixed_lengths(words, 0).prompts]
    assert lengths != sorted(lengths)
    steps = {later - earlier for earlier, later in zip(sorted(lengths), sorted(lengths)[1:], strict=False)}
    assert steps <= {15, 16}


def test_a_warm_prefix_is_the_cold_one_and_the_ends_are_new(words: Words) -> None:
    cold, warm = shared_prefix(words, 5, warm=False), shared_prefix(words, 5, warm=True)
    prefixes = {prompt.token_ids[:512] for prompt in cold.prompts + warm.prompts}
    ends = {prompt.token_ids[512:] for prompt in cold.prompts + warm.prompts}
    assert (len(prefixes), len(ends)) == (1, 32)


def test_a_passage_is_to_be_repeated_and_no_two_runs_begin_alike(words: Words) -> None:
    texts = [repeated_passage(words, seed).prompts[0].text for seed in range(6)]
    for seed, text in enumerate(texts):
        start, _, rest = text.partition("\n\nHere is the same passage again:\n\n")
        assert start.startswith(f"{seed}. ")
        assert start.startswith(rest)
        assert len(start) > 650  # more characters than 128 tokens cover
    assert len({text[:2] for text in texts}) == 6


def test_totals(words: Words) -> None:
    workload = eight_streams(words, 0)
    assert (workload.num_prompt_tokens, workload.num_output_tokens) == (1024, 1024)


def test_plain_prompts_differ_from_each_other(words: Words) -> None:
    prompts = prompts_of(words, 4, 10, seed=0)
    assert len({prompt.text for prompt in prompts}) == 4


def test_a_tokenizer_without_enough_words_is_refused() -> None:
    with pytest.raises(ValueError, match="only 2 one-token words"):
        Words(byte_level(["ab", "zz"]))
