"""Texts as an encoder takes them: their tokens one behind the other in a single row, none of it padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.compute.embedding.records import EncodedText

# Called between pieces of work that take about ten milliseconds: it lets what is more urgent run meanwhile,
# and raises to end the pass.
GiveWay = Callable[[], None]

# Texts that attend together may differ so much in length: the longest is computed in place of each.
_MOST_PADDING = 1.15
_GROUP_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Group:
    """Texts that follow each other in the row and attend in one call: `num_texts` from token `start` on.

    `gather` [num_texts * longest] are their tokens' places in the row, padding included, and `scatter` is
    where the real ones lie in that; both are None where all are of one length.
    """

    start: int
    end: int
    num_texts: int
    longest: int
    gather: torch.Tensor | None
    scatter: torch.Tensor | None
    is_real: torch.Tensor | None  # [num_texts, longest]


@dataclass(frozen=True, slots=True)
class TextBatch:
    """The row of a pass, [num_tokens]; texts lie in it by length, and `order` says which is where."""

    token_ids: torch.Tensor
    type_ids: torch.Tensor | None
    positions: torch.Tensor
    lengths: torch.Tensor  # [num_texts]
    order: torch.Tensor  # [num_texts]: the place of each text among those given
    groups: tuple[Group, ...]
    give_way: GiveWay

    @property
    def starts(self) -> torch.Tensor:
        """Where each text begins, [num_texts]."""
        return torch.cumsum(self.lengths, 0) - self.lengths

    @classmethod
    def of(cls, texts: Sequence[EncodedText], device: torch.device, give_way: GiveWay) -> TextBatch:
        """The row of `texts`, at least one, none of them empty."""
        order = sorted(range(len(texts)), key=lambda each: len(texts[each]))
        placed = [texts[each] for each in order]
        lengths = [len(text) for text in placed]
        has_types = any(text.type_ids is not None for text in placed)
        types = [i for text in placed for i in (text.type_ids or [0] * len(text))] if has_types else None

        def tensor(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        return cls(
            token_ids=tensor([i for text in placed for i in text.token_ids]),
            type_ids=None if types is None else tensor(types),
            positions=tensor([i for length in lengths for i in range(length)]),
            lengths=tensor(lengths),
            order=tensor(order),
            groups=tuple(_groups(lengths, device)),
            give_way=give_way,
        )

    def as_given(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` [num_texts, ...] of the texts as they lie, in the order in which they were given."""
        given = torch.empty_like(rows)
        given[self.order] = rows
        return given


def _groups(lengths: Sequence[int], device: torch.device) -> list[Group]:
    """Neighbours of about one length, few enough to leave room for the scores of their attention."""
    groups, first, start = [], 0, 0
    while first < len(lengths):
        last = first + 1
        while last < len(lengths) and _fits(lengths, first, last):
            last += 1
        groups.append(_group(lengths[first:last], start, device))
        start += sum(lengths[first:last])
        first = last
    return groups


def _fits(lengths: Sequence[int], first: int, last: int) -> bool:
    longest = lengths[last]
    return longest <= lengths[first] * _MOST_PADDING and (last + 1 - first) * longest <= _GROUP_TOKENS


def _group(lengths: Sequence[int], start: int, device: torch.device) -> Group:
    longest, num_texts, end = lengths[-1], len(lengths), start + sum(lengths)
    if lengths[0] == longest:
        return Group(start, end, num_texts, longest, None, None, None)
    own = torch.tensor(lengths, device=device)
    places = torch.arange(longest, device=device)
    is_real = places[None] < own[:, None]
    begins = start + torch.cumsum(own, 0) - own
    gather = (begins[:, None] + torch.where(is_real, places[None], 0)).flatten()
    return Group(start, end, num_texts, longest, gather, is_real.flatten().nonzero().flatten(), is_real)
