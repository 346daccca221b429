"""NextTurns: what the next prompts of chats begin with, to be computed while there is nothing else to do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.plan.kv.paged_kv_manager import PagedKvManager
from engine.plan.kv.prefix_cache import extend_block_hashes
from engine.plan.request import MAX_PRIORITY, Request, SamplingParams, SpeculationOptions
from engine.plan.scheduling.service_rates import ServiceRates

_MAX_CHATS = 64  # the oldest is given up
_SLICE_S = 0.02  # a step of it: as long whoever comes meanwhile may have to wait
_LEAST_SLICE = 64  # tokens
_ID_PREFIX = "next-turn-"
_LATEST = 1 << 62  # arrival: all others came before


def is_read_ahead(request_id: str) -> bool:
    """True for a request of `next_slice`: nobody has asked for it, and nobody gets its token."""
    return request_id.startswith(_ID_PREFIX)


@dataclass(frozen=True, slots=True)
class _Beginning:
    """A prompt's first blocks."""

    token_ids: Sequence[int]
    hashes: list[bytes]
    salt: str | None
    num_tried: int = -1  # blocks that were there when the last slice was cut: each must bring some


class NextTurns:
    """Cuts prompts that are yet to come into requests of one short step, whose blocks the prefix cache keeps.

    `next_slice` is for when nothing else is to be computed, so that what has been asked for never waits for
    more than one such step. `num_used` and `num_unused` count the tokens of blocks that a prompt has begun
    with since, and of those that left the cache before.
    """

    def __init__(self, kv: PagedKvManager, rates: ServiceRates) -> None:
        self._kv = kv
        self._rates = rates
        self._beginnings: OrderedDict[bytes, _Beginning] = OrderedDict()  # by the last hash, oldest first
        self._ahead: set[bytes] = set()  # blocks computed here and in no other prompt yet
        self._num_slices = 0
        self.num_used = 0
        self.num_unused = 0

    def expect(self, token_ids: Sequence[int], salt: str | None) -> None:
        """A prompt will begin with these tokens; only whole blocks of them are of use."""
        block_size = self._kv.block_size
        num_blocks = min(len(token_ids) // block_size, self._kv.max_blocks_per_seq - 1)
        hashes: list[bytes] = []
        extend_block_hashes(hashes, token_ids, block_size, num_blocks, salt)
        if hashes:
            self._beginnings[hashes[-1]] = _Beginning(token_ids, hashes, salt)
        while len(self._beginnings) > _MAX_CHATS:
            self._beginnings.popitem(last=False)

    def next_slice(self, arrival_time: float) -> Request | None:
        """The next request to compute, of the chat that was expected last; None when nothing is left."""
        self._forget_lost()
        find, block_size = self._kv.prefixes.find, self._kv.block_size
        while self._beginnings:
            last, beginning = self._beginnings.popitem()
            hashes = beginning.hashes
            num_found = len(find(hashes, len(hashes)))
            if num_found in (len(hashes), beginning.num_tried) or len(hashes) > self._kv.pool.num_free:
                continue
            num_blocks = min(len(hashes), num_found + self._blocks_a_slice())
            if num_blocks < len(hashes):
                self._beginnings[last] = replace(beginning, num_tried=num_found)
            self._ahead.update(hashes[num_found:num_blocks])
            return self._request(beginning.token_ids[: num_blocks * block_size], beginning.salt, arrival_time)
        return None

    def _blocks_a_slice(self) -> int:
        num_tokens = self._rates.prefill_tokens_within(_SLICE_S, 0) or 0
        return max(1, max(_LEAST_SLICE, num_tokens) // self._kv.block_size)

    def _request(self, token_ids: Sequence[int], salt: str | None, arrival_time: float) -> Request:
        self._num_slices += 1
        return Request(
            request_id=f"{_ID_PREFIX}{self._num_slices}",
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            stop_token_ids=frozenset(),
            arrival=_LATEST + self._num_slices,
            arrival_time=arrival_time,
            priority=MAX_PRIORITY - 1,  # behind all but the background, whose prompts are computed slowly
            cache_salt=salt,
            speculation=SpeculationOptions(enabled=False),
        )

    def note_found(self, request_id: str, hashes: Sequence[bytes]) -> None:
        """A request begins on the blocks of these hashes."""
        if self._ahead and not is_read_ahead(request_id):
            used = self._ahead.intersection(hashes)
            self._ahead -= used
            self.num_used += len(used) * self._kv.block_size

    def _forget_lost(self) -> None:
        lost = {block_hash for block_hash in self._ahead if not self._kv.prefixes.find((block_hash,), 1)}
        self._ahead -= lost
        self.num_unused += len(lost) * self._kv.block_size
