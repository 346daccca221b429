"""Which tokens ask for the middle, by vocabulary, and in which order."""

from __future__ import annotations

import pytest

from engine.text.fill_in_middle import FillInMiddle

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")


def vocabulary(*names: str) -> dict[str, int]:
    return {name: 100 + i for i, name in enumerate(names)}


@pytest.mark.parametrize(
    "names",
    [
        QWEN[:3],
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
        ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ],
)
def test_the_middle_is_asked_for_behind_both_texts(names: tuple[str, ...]) -> None:
    found = FillInMiddle.find(vocabulary(*names))
    assert found is not None and (found.ends, found.repository, found.file) == (frozenset(), None, None)
    assert found.prompt([1, 2], [3]) == [100, 1, 2, 101, 3, 102]


def test_without_a_mark_for_it_the_middle_follows_what_leads_in() -> None:
    found = FillInMiddle.find(vocabulary("[PREFIX]", "[SUFFIX]"))
    assert found is not None and found.prompt([1, 2], [3]) == [101, 3, 100, 1, 2]


def test_what_ends_the_middle_and_what_shows_files_is_found_too() -> None:
    found = FillInMiddle.find(vocabulary(*QWEN))
    assert found == FillInMiddle(100, 101, 102, frozenset({103, 104, 105}), 104, 105)


@pytest.mark.parametrize("names", [(), QWEN[:2], ("[PREFIX]",), ("<|im_start|>",)])
def test_a_vocabulary_with_no_such_tokens_has_none(names: tuple[str, ...]) -> None:
    assert FillInMiddle.find(vocabulary(*names)) is None
