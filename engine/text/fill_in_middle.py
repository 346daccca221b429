"""FillInMiddle: the tokens by which a model is asked for what stands between two texts.

Found by their names in the vocabulary: models of code have them, and none of their files says what they do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Before the text that leads in, before the text that follows, before what is written. With None nothing says
# where writing begins: the text that follows comes first then.
_MARKS: Sequence[tuple[str, str, str | None]] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # qwen coder, codegemma, granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # starcoder, granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # santacoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # deepseek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # glm 4
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # code llama
    ("[PREFIX]", "[SUFFIX]", None),  # codestral
)
# What models write behind the middle, which many of them do not name as an end of text.
_ENDS = (
    *("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "▁<EOT>"),
    *("<|endoftext|>", "<|file_separator|>", "<|file_sep|>", "<file_sep>", "<|repo_name|>"),
)
_REPOSITORY = ("<|repo_name|>", "<repo_name>", "<reponame>")
_FILE = ("<|file_sep|>", "<|file_separator|>", "<file_sep>")


@dataclass(frozen=True, slots=True)
class FillInMiddle:
    """Token ids. `middle` None: the suffix comes first, and writing begins where the prefix ends.

    `ends` end what is written. `repository` comes before a repository's name and `file` before a file's, for
    models that are shown other files; None where there is no such token.
    """

    prefix: int
    suffix: int
    middle: int | None
    ends: frozenset[int]
    repository: int | None = None
    file: int | None = None

    @classmethod
    def find(cls, special: Mapping[str, int]) -> FillInMiddle | None:
        """The tokens of a vocabulary with these `special` ones; None if it has none for this."""
        for prefix, suffix, middle in _MARKS:
            if prefix in special and suffix in special and (middle is None or middle in special):
                return cls(
                    special[prefix],
                    special[suffix],
                    None if middle is None else special[middle],
                    frozenset(special[name] for name in _ENDS if name in special),
                    next((special[name] for name in _REPOSITORY if name in special), None),
                    next((special[name] for name in _FILE if name in special), None),
                )
        return None

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """What asks for the text between these two."""
        if self.middle is None:
            return [self.suffix, *after, self.prefix, *before]
        return [self.prefix, *before, self.suffix, *after, self.middle]
