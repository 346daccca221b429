"""Rewindable: state of sequences that may, or may not, be cut back to an earlier position."""

from __future__ import annotations

from typing import Protocol


class Rewindable(Protocol):
    """What speculation needs of whoever keeps a sequence's state.

    Paged K/V is cut by forgetting slots. A recurrent state has no earlier self: it says so, and its sequences
    go on one token a step.
    """

    can_rewind: bool

    def rewind(self, request_id: str, num_tokens: int) -> None:
        """Cut a sequence to its first `num_tokens`.

        Raises RewindError: NOT_SUPPORTED unless `can_rewind`, POSITION_BEYOND_END if it holds fewer tokens.
        """
        ...
