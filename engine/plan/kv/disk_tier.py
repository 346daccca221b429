"""DiskTier: which blocks of the prefix cache go to disk, and for which requests some are read from there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from engine.plan.kv.paged_kv_manager import PagedKvManager
from engine.plan.request import Request
from engine.plan.scheduling.service_rates import ServiceRates

_LEAST_SAVING_S = 0.005  # of computing: for less it is not worth while to look
_KEEP = 0.9  # of what was measured of reads, at each further one
_BELIEF = 0.97  # of their time is left at each that is not made: a stall once is not avoided for ever


def disk_hold(request_id: str) -> str:
    """What a request is held for in the queue while the disk is asked for what it begins with."""
    return f"{request_id} on disk"


class DiskLookUp(NamedTuple):
    """The full blocks of a prompt to look for on disk, those behind the `num_found` first."""

    request_id: str  # of the request that is held until it is known
    token_ids: Sequence[int]
    salt: str | None
    num_found: int  # in memory
    num_blocks: int
    limit_s: float | None  # what computing them takes: so long is worth waiting; None while unknown


class BlockBatch(NamedTuple):
    """Blocks in memory and the names of their contents, by position."""

    block_ids: Sequence[int]
    names: Sequence[bytes]


class DiskTier:
    """Accounts for the blocks between the prefix cache and a store on disk. Loop thread only.

    Whoever moves the bytes is told of work by `on_look_up` and `on_unwritten`. Blocks to be written are
    neither held nor copied: `is_unchanged`, which any thread may call, says afterwards whether what was read
    from a block is what it was published with. Blocks to be read into are taken, and zeroed if nothing good
    has come.
    """

    def __init__(self, kv: PagedKvManager, rates: ServiceRates) -> None:
        self._kv = kv
        self._rates = rates
        self._unwritten: OrderedDict[bytes, None] = OrderedDict()
        self._touched: OrderedDict[bytes, None] = OrderedDict()
        self._being_written: set[int] = set()
        self._asking: set[str] = set()
        self._asked_at: dict[str, int] = {}  # its preemptions then, of each request that has not ended
        self._seconds = self._num_read = 0.0
        self.on_look_up: Callable[[DiskLookUp], None] = lambda look_up: None
        self.on_unwritten: Callable[[], None] = lambda: None
        kv.pool.on_dropped = self._being_written.discard

    @property
    def is_asked(self) -> bool:
        """True while a request is held for what may be on disk, or blocks are being read."""
        return bool(self._asking) or self._kv.num_reserved > 0

    def ask(self, request: Request, num_found: int, num_blocks: int) -> bool:
        """Have the blocks behind the `num_found` first looked for; True if the request is to be held for it.

        Once while it waits, and once more if there was no room for what was found.
        """
        request_id, block_size = request.request_id, self._kv.block_size
        compute_s = self._rates.prefill_s((num_blocks - num_found) * block_size)
        if num_blocks <= num_found or (compute_s is not None and compute_s < _LEAST_SAVING_S):
            return False
        if self._asked_at.get(request_id) == request.num_preemptions:
            return False
        self._asked_at[request_id] = request.num_preemptions
        self._asking.add(request_id)
        tokens = tuple(request.token_ids[: num_blocks * block_size])
        self.on_look_up(DiskLookUp(request_id, tokens, request.cache_salt, num_found, num_blocks, compute_s))
        return True

    def end_asking(self, request_id: str) -> None:
        """Nobody is held for this request's look-up any more."""
        self._asking.discard(request_id)

    def forget(self, request_id: str) -> None:
        """This request has ended."""
        self._asked_at.pop(request_id, None)

    def begin_read(self, request_id: str, names: Sequence[bytes]) -> BlockBatch | None:
        """Take free blocks for the contents that are on disk and not in memory; None if computing is better.

        `names` are those of the request's first blocks, all of them in memory or on disk.
        """
        num_found = len(self._kv.prefixes.find(names, len(names)))
        missing = names[num_found:]
        compute_s = self._rates.prefill_s(len(missing) * self._kv.block_size)
        read_s = self._seconds / self._num_read * len(missing) if self._num_read else None
        if not missing:
            return None
        if compute_s is not None and read_s is not None and read_s >= compute_s:
            self._seconds *= _BELIEF
            return None
        block_ids = self._kv.reserve(len(missing))
        if block_ids is None:
            self._asked_at.pop(request_id, None)
            return None
        return BlockBatch(block_ids, missing)

    def end_read(self, read: BlockBatch, num_good: int, seconds: float) -> None:
        """The first `num_good` blocks have their contents and can be found from now on."""
        for block_id, name in list(zip(*read, strict=True))[:num_good]:
            self._kv.prefixes.publish(block_id, name)
        self._kv.unreserve(read.block_ids)
        self._seconds = _KEEP * self._seconds + seconds
        self._num_read = _KEEP * self._num_read + num_good

    def note_published(self, published: Sequence[bytes], ancestors: Iterable[bytes]) -> None:
        """These can be found from now on, and continue those `ancestors`, which are of use again."""
        self._unwritten.update(dict.fromkeys(published))
        self._touched.update(dict.fromkeys(ancestors))
        for waiting in (self._unwritten, self._touched):
            while len(waiting) > self._kv.num_blocks:
                waiting.popitem(last=False)
        self.on_unwritten()

    @property
    def has_unwritten(self) -> bool:
        """True while there may be blocks to write."""
        return bool(self._unwritten)

    def begin_write(self, limit: int) -> BlockBatch:
        """The next blocks to write, at most `limit` and perhaps none; `end_write` must follow."""
        block_ids: list[int] = []
        names: list[bytes] = []
        while self._unwritten and len(names) < limit:
            name, _ = self._unwritten.popitem(last=False)
            block_ids += (found := self._kv.prefixes.find((name,), 1))
            names += [name] * len(found)
        self._being_written.update(block_ids)
        return BlockBatch(block_ids, names)

    def take_touched(self) -> Sequence[bytes]:
        """Names of contents that are of use and were not before; each is handed out once."""
        touched, self._touched = tuple(self._touched), OrderedDict()
        return touched

    def is_unchanged(self, block_id: int) -> bool:
        """True if a block has had the same contents ever since `begin_write`."""
        return block_id in self._being_written

    def end_write(self) -> None:
        """What `begin_write` gave is written, or given up."""
        self._being_written.clear()
