"""PrefixLookup: the KV that a waiting request can share with others instead of computing it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from engine.plan.kv.disk_tier import DiskTier
from engine.plan.kv.paged_kv_manager import PagedKvManager, Rewindable
from engine.plan.kv.prefix_cache import extend_block_hashes
from engine.plan.request import Request, RequestStatus
from engine.plan.scheduling.next_turns import NextTurns
from engine.plan.scheduling.policy import PolicyKey
from engine.plan.scheduling.state_stops import StateStops

_FIRST_HASHES = 4  # blocks to hash before the first look-up; then twice as many as were found


@dataclass(slots=True, eq=False)
class PrefixLookup:
    """Finds published prefixes, parents to fork from, and the running requests worth waiting for.

    A request whose prefix is published begins on those blocks; one that forks begins on the blocks of its
    parent's prompt. Both still compute their last prompt token, whose logits they need. `caching` False
    publishes and finds nothing; forks need only a model whose KV can be rewound. Where a model keeps state
    beside the KV, a prefix is found as far as there is a snapshot of that, which is taken at `stops`, and a
    parent is forked in the step after its prompt's, which holds its state before the last token.

    A prefix is hashed no further than it is found, and hashing for waiting requests is bounded in each step
    (`may_look_up`), so that many of them do not hold up the event loop.
    """

    HASHES_A_STEP: ClassVar = 4096  # blocks, a few milliseconds; what is beyond waits for the next step

    _kv: PagedKvManager
    _running: Mapping[str, Request]
    _key: Callable[[Request], PolicyKey]
    _caching: bool
    _num_hashed: int = 0  # blocks, in this step
    disk: DiskTier | None = None  # behind the prefix cache
    next_turns: NextTurns | None = None  # told of what is found
    stops: StateStops = field(init=False)

    def __post_init__(self) -> None:
        self.stops = StateStops(self._kv)

    def begin_step(self) -> None:
        """A step is to be planned: HASHES_A_STEP blocks may be hashed again."""
        self._num_hashed = 0

    def may_look_up(self, request: Request) -> bool:
        """False if looking this waiting request up may have to wait for the next step."""
        if self._num_hashed < self.HASHES_A_STEP:
            return True
        return not self._caching or len(request.block_hashes) >= self._num_findable(request)

    def find(self, request: Request) -> list[int]:
        """The published blocks that this waiting request can begin on."""
        found = self._find_published(request)
        if self._kv.keeps_state and not self._kv.host.has_copied(request.request_id):
            del found[self._kv.snapshots.longest(request.block_hashes[: len(found)]) :]
        return found

    def _find_published(self, request: Request) -> list[int]:
        if not self._caching:
            return []
        limit, hashes = self._num_findable(request), request.block_hashes
        while True:
            found = self._kv.prefixes.find(hashes, min(limit, len(hashes)))
            if len(found) < len(hashes) or len(hashes) >= limit:
                return found
            self._hashes(request, min(limit, max(_FIRST_HASHES, 2 * len(hashes))))

    def ask_disk(self, request: Request) -> bool:
        """Have what a waiting request begins with looked for on disk; True if it is to be held for that."""
        if self.disk is None or self._may_fork(request) or request.request_id in self._kv.host:
            return False
        return self.disk.ask(request, len(self.find(request)), self._num_findable(request))

    def ready_parent(self, request: Request) -> Request | None:
        """The request to fork this waiting one from now: it runs, and its prompt's KV is good."""
        if request.scores_prompt or not self._may_fork(request):
            return None
        parent = self._running.get(request.fork_of or "")
        if parent is None or self._kv.is_suspect(parent.request_id) or not self._holds_state(parent):
            return None
        return parent

    def leader(self, request: Request) -> str | None:
        """The running request to hold this waiting one for; None if there is none.

        It is the parent that it forks from, or the one that computes the next block of its prefix and ranks
        before it: no request is put off by a less urgent one.
        """
        parent_id = request.fork_of or ""
        parent = self._running.get(parent_id) if self._may_fork(request) else None
        if parent is not None and (self._kv.is_suspect(parent_id) or self._holds_state(parent)):
            return parent_id if self._kv.is_suspect(parent_id) else None
        if not self._caching or request.request_id in self._kv.host:
            return None
        num_found = len(self.find(request))
        if num_found == self._num_findable(request):
            return None
        claimant = self._running.get(self._kv.prefixes.claimant(request.block_hashes[num_found]) or "")
        if claimant is None or self._key(claimant) > self._key(request):
            return None
        if claimant.is_background and not request.is_background:
            return None  # its prompt is computed slowly
        if self._kv.keeps_state and not self.stops.gain(
            claimant, self._num_shared(claimant, request), num_found * self._kv.block_size
        ):
            return None
        return claimant.request_id

    def part(self, request: Request, other: Request) -> None:
        """Have what a running request shares with a waiting one be found by that one, if it is much."""
        if self._caching and self._kv.keeps_state and self.may_look_up(other):
            self.stops.ask(request.request_id, self._num_shared(request, other))

    def _num_shared(self, running: Request, waiting: Request) -> int:
        """Tokens of the full blocks that both prompts begin with."""
        limit = min(self._num_findable(waiting), len(running.block_hashes))
        while True:
            hashes = waiting.block_hashes[:limit]
            pairs = enumerate(zip(running.block_hashes, hashes, strict=False))
            shared = next((index for index, (one, other) in pairs if one != other), len(hashes))
            if shared < len(hashes) or len(hashes) >= limit:
                return shared * self._kv.block_size
            self._hashes(waiting, min(limit, max(_FIRST_HASHES, 2 * len(hashes))))

    def num_to_compute(self, request: Request) -> int:
        """Known tokens of a waiting request that no request has computed or is computing; at least one."""
        if self.leader(request) is not None or self.ready_parent(request) is not None:
            return 1
        return len(request.token_ids) - len(self.find(request)) * self._kv.block_size

    def claim(self, request: Request, num_found: int) -> None:
        """Note that the request computes its known full blocks behind the `num_found` first."""
        if self._caching:
            if self._kv.keeps_state:
                block_size, num_known = self._kv.block_size, len(self._find_published(request))
                self.stops.begin(request.request_id, num_found * block_size, num_known * block_size)
            if self.next_turns is not None:
                self.next_turns.note_found(request.request_id, request.block_hashes[:num_found])
            hashes = self._hashes(request, len(request.token_ids) // self._kv.block_size)
            self._kv.prefixes.claim(request.request_id, hashes[num_found:])

    def publish(self, request: Request) -> None:
        """Let the blocks be found that the request has filled; a finite row was drawn from all its KV."""
        num_blocks = request.num_computed_tokens // self._kv.block_size
        num_before = self._kv.num_published(request.request_id)
        if not self._caching or num_blocks <= num_before:
            return
        hashes = self._hashes(request, num_blocks)
        self._kv.publish(request.request_id, hashes, num_blocks)
        self._kv.snapshots.publish(
            request.request_id,
            hashes[:num_blocks],
            request.num_prompt_tokens // self._kv.block_size,
            self._kv.prefixes.has,
        )
        if self.disk is not None:
            is_first = num_before * self._kv.block_size == request.num_cached_tokens
            self.disk.note_published(hashes[num_before:num_blocks], hashes[:num_before] if is_first else ())

    def _may_fork(self, request: Request) -> bool:
        is_new = request.status is RequestStatus.WAITING
        return is_new and request.fork_of is not None and self._kv.rewindable is not Rewindable.NEVER

    def _holds_state(self, parent: Request) -> bool:
        """True if a fork can begin before the last token of this running request's prompt."""
        if not self._kv.keeps_state:
            return True
        is_newest = parent.num_computed_tokens == parent.num_prompt_tokens
        return is_newest and self._kv.state_at(parent.request_id) == parent.num_prompt_tokens - 1

    def _num_findable(self, request: Request) -> int:
        """Full blocks that the request need not compute; it computes at least one token."""
        if request.scores_prompt:
            return 0  # the logits of every prompt token are wanted, and no logits are kept
        saved = request.request_id in self._kv.host
        num_tokens = request.num_computed_tokens if saved else len(request.token_ids) - 1
        return num_tokens // self._kv.block_size

    def _hashes(self, request: Request, num_blocks: int) -> Sequence[bytes]:
        """The request's block hashes, at least `num_blocks`; each is computed once in its life."""
        if len(request.block_hashes) < num_blocks:
            self._num_hashed += num_blocks - len(request.block_hashes)
            token_ids, block_size, salt = request.token_ids, self._kv.block_size, request.cache_salt
            extend_block_hashes(request.block_hashes, token_ids, block_size, num_blocks, salt)
        return request.block_hashes
