"""KvMarks: whose KV may hold non-finite values, and which blocks to zero because of that."""

from __future__ import annotations

from collections.abc import Iterable

from engine.plan.kv.paged_kv_manager import PagedKvManager


class KvMarks:
    """A sequence's KV is suspect until a finite row of logits was drawn from all of it.

    Blocks that a suspect sequence leaves are zeroed before the next pass, since a NaN spoils a weighted sum
    even at weight zero. Only good blocks are published, and published blocks are not written again, so they
    are never zeroed; those of a bad sequence are withdrawn, whichever request computed them.
    """

    def __init__(self, kv: PagedKvManager) -> None:
        self._kv = kv
        self._suspect: set[str] = set()
        self._scrub_blocks: list[int] = []

    def is_suspect(self, request_id: str) -> bool:
        """True while no finite row was drawn from all the KV of this request."""
        return request_id in self._suspect

    def mark_kv_good(self, request_id: str) -> bool:
        """A finite row was drawn from all the KV of this request; True if it was suspect until now."""
        was_suspect = request_id in self._suspect
        self._suspect.discard(request_id)
        return was_suspect

    def mark_kv_suspect(self, request_id: str) -> None:
        """The KV that this request has been computing may be non-finite."""
        self._suspect.add(request_id)

    def mark_kv_bad(self, request_id: str) -> None:
        """All the KV that this request holds may be non-finite, even what was found or is published."""
        self._suspect.add(request_id)
        self._kv.unpublish(request_id)

    def release(self, request_id: str) -> None:
        """Free the row and the blocks of a request that does not run any more."""
        left_over = self._kv.free(request_id)
        if request_id in self._suspect:
            self._suspect.remove(request_id)
            self.scrub(left_over)

    def scrub(self, block_ids: Iterable[int]) -> None:
        """Have these blocks zeroed before the next pass."""
        self._scrub_blocks += block_ids

    def take_scrub_blocks(self) -> tuple[int, ...]:
        """The blocks to zero before the next pass; each is handed out once."""
        blocks = tuple(self._scrub_blocks)
        self._scrub_blocks.clear()
        return blocks
