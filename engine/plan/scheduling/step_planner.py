"""StepPlanner: who computes how many known tokens in the next step, and who is seated for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from engine.plan.request import Request, RequestStatus
from engine.plan.scheduling.batch_config import BatchConfig
from engine.plan.scheduling.cost_model import CostModel
from engine.plan.scheduling.policy import SchedulingPolicy
from engine.plan.scheduling.request_queue import RequestQueue
from engine.plan.scheduling.running_set import RunningSet
from engine.plan.scheduling.token_budget import TokenBudget

_LEAST_CHUNK = 64  # tokens; smaller ones would pay for a whole step each
Chunk = tuple[Request, int]  # with the tokens that the step computes


class StepPlan(NamedTuple):
    """Those who compute their newest token, chunks of prompts, newcomers, and what is left for drafts."""

    decodes: list[Request]
    chunks: list[Chunk]
    newcomers: list[Request]
    budget: TokenBudget


class StepPlanner:
    """Spends a step's budget: one token for each request that lacks only its newest, then chunks of prompts.

    Seats whom it finds in the queue, and preempts where blocks are short; `requeue` takes those back. Plan
    tier; loop thread only.
    """

    def __init__(
        self,
        config: BatchConfig,
        queue: RequestQueue,
        running: RunningSet,
        policy: SchedulingPolicy,
        costs: CostModel,
        requeue: Callable[[list[Request]], None],
    ) -> None:
        self._config = config
        self._queue = queue
        self._running = running
        self._policy = policy
        self._costs = costs
        self._requeue = requeue
        self._token_limit = config.max_num_batched_tokens  # lower for a while after a step ran out of memory

    @property
    def max_decodes(self) -> int:
        """How many may decode in a step of nothing else."""
        return min(self._config.max_decode_seqs, self._token_limit)

    def allow_less(self, num_tokens: int) -> None:
        """Plan no more than so many tokens, or one, in the next step."""
        self._token_limit = max(1, num_tokens)

    def allow_more(self) -> None:
        """A step went well: allow one token more, up to the configured limit."""
        self._token_limit = min(self._token_limit + 1, self._config.max_num_batched_tokens)

    def plan(self, turn: int) -> StepPlan:
        """Plan the next step; `turn` counts steps. Blocks for all of it are there on return."""
        config = self._config
        budget = TokenBudget(self._token_limit, config.max_prefill_tokens, config.max_decode_seqs)
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self._running:
            only_newest = len(request.token_ids) - request.num_computed_tokens == 1
            (decodes if only_newest else prefills).append(request)
        limit = budget.decode_limit(self._reserve(prefills, turn))
        decodes = self._choose_decodes(decodes, limit)
        prefills = _running(prefills)
        budget.take_decodes(len(decodes))
        if decodes:
            self._keep_gap_short(budget)
        chunks, newcomers = self._chunk(prefills, budget)
        return StepPlan(decodes, chunks, newcomers, budget)

    def _choose_decodes(self, decodes: list[Request], limit: int) -> list[Request]:
        """The `limit` of `decodes` whose turn it is, with a slot for each one's newest token.

        Blocks for it may be taken from anybody who runs. Who gets no slot all the same misses the step, and
        somebody else has the turn, who must get a slot too.
        """
        while True:
            chosen = self._running.take_turns(decodes, limit)
            preempted, stalled = self._running.make_room(chosen)
            self._requeue(preempted)
            if not stalled:
                return _running(chosen) if preempted else chosen
            decodes = [request for request in _running(decodes) if request not in stalled]

    def _keep_gap_short(self, budget: TokenBudget) -> None:
        """Leave prefill and drafts what the step has time for by what steps cost, but always some.

        Every stream waits while a prompt is computed beside it: a fixed budget makes those gaps as long as
        the machine is slow (chunked prefill as in Sarathi-Serve, Agrawal et al. 2024, sized by measurement).
        """
        if self._config.gap_limit_s is not None:
            fitting = self._costs.prefill_tokens_within(self._config.gap_limit_s, budget.num_decode_tokens)
            if fitting is not None:
                budget.limit_others(max(fitting, _LEAST_CHUNK))

    def _reserve(self, prefills: list[Request], turn: int) -> int:
        """Tokens that decodes must leave so that prefill advances too: a block's worth, at most half a step.

        A budget of one token goes to decodes and prefill by turns. Nothing, where nobody takes turns.
        """
        if not self._policy.takes_turns:
            return 0
        if not prefills and self.next_in_queue() is None:
            return 0
        half = (self._token_limit + turn % 2) // 2
        return min(half, self._running.kv.block_size, self._config.max_prefill_tokens)

    def next_in_queue(self) -> Request | None:
        """The first in the queue if it can be seated now; nobody overtakes it if it cannot.

        Those that could, but had better not, are held on the way.
        """
        while (request := self._queue.peek()) is not None and self._running.can_admit(request):
            leader = self._leader(request)
            if leader is None:
                return request
            self._queue.hold(request.request_id, leader)
        return None

    def _leader(self, request: Request) -> str | None:
        """Whom a waiting request should be held for, not to compute what that one will."""
        parent = self._queue.get(request.fork_of or "") if self._running.kv.can_rewind else None
        if parent is not None and parent.status is request.status is RequestStatus.WAITING:
            return request.fork_of
        return self._running.lookup.leader(request)

    def _chunk(self, prefills: list[Request], budget: TokenBudget) -> tuple[list[Chunk], list[Request]]:
        """Spend what is left of the budget on prefill: seated and waiting requests, merged by policy.

        With those newly seated.
        """
        key = self._policy.key
        seated = sorted(prefills, key=key, reverse=True)  # the best is last
        chunks: list[Chunk] = []
        newcomers: list[Request] = []
        while budget.prefill_left > 0:
            waiting = self.next_in_queue()
            if waiting is not None and not (seated and key(seated[-1]) < key(waiting)):
                request = self._queue.pop()
                self._running.admit(request)
                newcomers.append(request)
            elif seated:
                request = seated.pop()
            else:
                break
            missing = len(request.token_ids) - request.num_computed_tokens
            chunks.append((request, budget.take_chunk(missing)))
            self._policy.charge(request, chunks[-1][1], 0)
        chunks.sort(key=lambda chunk: chunk[1] > 1)  # sequences of one token come first
        return chunks, newcomers


def _running(requests: list[Request]) -> list[Request]:
    return [request for request in requests if request.status is RequestStatus.RUNNING]
