"""StepPlanner: which tokens of which requests the next step computes, within the limits of a BatchConfig."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from engine.errors import StartRefused
from engine.plan.kv.disk_tier import disk_hold
from engine.plan.kv.paged_kv_manager import Rewindable
from engine.plan.request import Request, RequestStatus
from engine.plan.scheduling.fault_search import FaultSearch
from engine.plan.scheduling.in_flight import InFlightStep
from engine.plan.scheduling.policy import SchedulingPolicy
from engine.plan.scheduling.request_queue import RequestQueue
from engine.plan.scheduling.running_set import RunningSet
from engine.plan.scheduling.service_rates import ServiceRates
from engine.plan.scheduling.step_inputs import ScheduledItem, next_tokens, token_drawn_by
from engine.plan.speculation.length_policy import StepLoad
from engine.plan.speculation.speculative_decoder import SpeculativeDecoder
from engine.plan.step_records import ScheduledRequest

_LEAST_CHUNK = 64  # tokens; smaller ones would pay for a whole step each


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """The limits of a step and of a sequence; StartRefused where one is too small.

    Each is at least 1, but `max_preemptions` 0 and `max_logits_rows` a row for each of `max_num_seqs`.
    """

    max_num_seqs: int
    max_num_batched_tokens: int  # if fewer than `max_num_seqs`, requests take turns
    max_prefill_tokens: int
    max_decode_seqs: int
    max_model_len: int
    max_logits_rows: int  # that a step draws from: the last ones of sequences, and those of drafts
    prefix_caching: bool = False
    preemption: str = "recompute"  # see PreemptionPolicy
    max_preemptions: int = 8
    kv_block_bytes: int = 0  # what swapping a block moves
    state_bytes: int = 0  # what swapping a request moves beside its blocks
    gap_limit_s: float | None = None  # that a step should take while requests wait for their next token

    def __post_init__(self) -> None:
        others = {"max_preemptions": 0, "max_logits_rows": self.max_num_seqs}
        for limit in fields(self):
            value, least = getattr(self, limit.name), others.get(limit.name, 1)
            if limit.name.startswith("max_") and value < least:
                raise StartRefused(f"{limit.name.replace('_', '-')} is {value}: it must be at least {least}")


@dataclass(slots=True)
class TokenBudget:
    """What one step may compute, in all, of prompts and of rows of logits, and what has been taken so far."""

    max_tokens: int
    max_prefill: int
    max_rows: int
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    num_sampling_chunks: int = 0  # of prefill, that reach their request's last token and draw the next one
    num_draft_tokens: int = 0

    @property
    def left(self) -> int:
        """Tokens not taken yet."""
        return self.max_tokens - self.num_decode_tokens - self.num_prefill_tokens - self.num_draft_tokens

    @property
    def prefill_left(self) -> int:
        """Tokens that prefill chunks may still take."""
        return min(self.max_prefill - self.num_prefill_tokens, self.left)

    @property
    def drafts_left(self) -> int:
        """Drafts that may still be verified: each takes a token and a row, as what is drawn anyway does."""
        num_rows = self.num_decode_tokens + self.num_sampling_chunks + self.num_draft_tokens
        return min(self.left, self.max_rows - num_rows)

    def limit_others(self, num_tokens: int) -> None:
        """Let prefill and drafts take at most that many together, beside the decodes taken before."""
        self.max_tokens = min(self.max_tokens, self.num_decode_tokens + num_tokens)

    def take_chunk(self, wanted: int) -> int:
        """Take up to `wanted` tokens for one prefill chunk; how many it got."""
        granted = min(wanted, self.prefill_left)
        self.num_prefill_tokens += granted
        return granted


class StepPlan(NamedTuple):
    """Plain decodes, then chunks of prompts, then decodes with drafts; the tokens of each kind."""

    items: list[ScheduledItem]
    budget: TokenBudget
    preempted: list[tuple[str, bool]]  # since the last plan, True if their KV went to the host


@dataclass(slots=True, eq=False)
class StepPlanner:
    """Spends a step's budget: a token for each request that lacks only its newest, then chunks, then drafts.

    Admits requests from the queue, and preempts where blocks are short.
    """

    _config: BatchConfig
    _queue: RequestQueue
    _running: RunningSet
    _policy: SchedulingPolicy
    _rates: ServiceRates
    _decoder: SpeculativeDecoder
    search: FaultSearch = field(init=False, default_factory=FaultSearch)
    _token_limit: int = field(init=False)  # lower for a while after a step ran out of memory
    _preempted: list[tuple[str, bool]] = field(init=False, default_factory=list)  # since the last plan

    def __post_init__(self) -> None:
        self._token_limit = self._config.max_num_batched_tokens

    def allow_less(self, num_tokens: int) -> None:
        """Plan no more than so many tokens, or one, in the next step."""
        self._token_limit = max(1, num_tokens)

    def allow_more(self) -> None:
        """A step went well: allow one token more, up to the configured limit."""
        self._token_limit = min(self._token_limit + 1, self._config.max_num_batched_tokens)

    def requeue(self, preempted: Sequence[Request]) -> None:
        """Let requests wait again that were just preempted, and drop their drafts."""
        for request in preempted:
            self._decoder.pause(request.request_id)
            self._queue.add(request)  # the disk is asked when there is room for it again
            self._queue.unhold(request.request_id)
            self._preempted.append((request.request_id, request.status is RequestStatus.SWAPPED))

    def plan(self, turn: int) -> StepPlan:
        """Plan the next step; `turn` counts steps. Blocks for all of it are there on return."""
        while (group := self.search.group()) is not None:
            plan = self._plan(turn, group)
            if plan.items:
                return plan
            self._preempted = plan.preempted
            self.search.skip()  # it got no blocks
        return self._plan(turn, self._running)

    def _plan(self, turn: int, candidates: Iterable[Request]) -> StepPlan:
        self._running.lookup.begin_step()
        if (victim := self._to_yield()) is not None:
            self._running.preempt(victim)
            self.requeue([victim])
        config = self._config
        budget = TokenBudget(self._token_limit, config.max_prefill_tokens, config.max_logits_rows)
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in candidates:
            only_newest = len(request.token_ids) - request.num_computed_tokens == 1
            (decodes if only_newest else prefills).append(request)
        limit = min(config.max_decode_seqs, self._token_limit - self._reserve(prefills, turn))
        decodes = self._choose_decodes(decodes, limit)
        prefills = _still_running(prefills)
        budget.num_decode_tokens = len(decodes)
        if decodes:
            self._keep_gap_short(budget)
        chunks = self._take_chunks(prefills, budget)
        budget.num_sampling_chunks = sum(item.scheduled.samples for item in chunks)
        verified = self._take_drafts(decodes, budget)
        drafted = {item.scheduled.request_id for item in verified}
        plain = [next_tokens(request) for request in decodes if request.request_id not in drafted]
        preempted, self._preempted = self._preempted, []
        return StepPlan([*plain, *chunks, *verified], budget, preempted)

    def plan_ahead(self, step: InFlightStep) -> list[ScheduledItem] | None:
        """The next token of each running request, by the row of `step` that draws the one before it.

        None if the next step has to wait for the result: a fault is searched for, a request waits that could
        be admitted or that another gives way to, `step` has drafts or does not draw for all that run, drafts
        are at hand or waited for, or blocks are short. Requests whose last token `step` draws are left out.
        For one that a stop token or string ends, a token is drawn in vain, and the commit drops it. Where a
        request draws by its history, the pass needs no more than that row, but the draw is later: see
        StepInputs. As async scheduling in vLLM and SGLang, but nothing is written into a request before its
        token is read.
        """
        if self.search.is_active or self.next_in_queue() is not None or step.decision.num_draft_tokens:
            return None
        if self._to_yield() is not None:
            return None
        pairs = zip(step.items, step.rows, strict=True)
        rows = {item.scheduled.request_id: own.start for item, own in pairs if own}
        if any(request.request_id not in rows for request in self._running):
            return None
        going_on = [r for r in self._running if len(r.token_ids) + 1 < r.max_num_tokens]
        limit = min(self._config.max_decode_seqs, self._token_limit)
        if not 0 < len(going_on) <= limit:
            return None
        if self._decoder.expects_drafts(going_on) or not self._running.make_room_ahead(going_on):
            return None
        self._decoder.choose(going_on, StepLoad(len(going_on), len(going_on), 0, max_draft_tokens=0))
        return [token_drawn_by(request, rows[request.request_id]) for request in going_on]

    def next_in_queue(self) -> Request | None:
        """The first in the queue if it can be admitted now; if it cannot, no other request overtakes it.

        None is admitted while a fault is searched for. Requests that had better wait for another's KV are
        held on the way.
        """
        if self.search.is_active:
            return None
        running = self._running
        while (request := self._queue.peek()) is not None:
            if not (running.lookup.may_look_up(request) and running.can_admit(request)):
                return None
            leader = self._leader(request)
            if leader is None:
                return request
            self._queue.hold(request.request_id, leader)
        return None

    def _to_yield(self) -> Request | None:
        """The running request that gives way to the first in the queue, if that cannot be admitted."""
        if self.search.is_active or self.next_in_queue() is not None:
            return None
        first = self._queue.peek()
        return None if first is None else self._running.to_yield(first)

    def _leader(self, request: Request) -> str | None:
        """What to hold a waiting request for, so as not to compute what is being computed or is on disk."""
        can_fork = self._running.kv.rewindable is not Rewindable.NEVER
        parent = self._queue.get(request.fork_of or "") if can_fork else None
        if parent is not None and parent.status is request.status is RequestStatus.WAITING:
            return request.fork_of
        leader = self._running.lookup.leader(request)
        if leader is None and self._running.lookup.ask_disk(request):
            return disk_hold(request.request_id)
        return leader

    def _choose_decodes(self, decodes: list[Request], limit: int) -> list[Request]:
        """The `limit` of `decodes` whose turn it is, with a slot for each one's newest token.

        Any running request may be preempted for blocks. One that gets no slot all the same misses the step,
        and another takes its turn, which must get a slot too.
        """
        while True:
            chosen = self._running.take_turns(decodes, limit)
            preempted, stalled = self._running.make_room(chosen)
            self.requeue(preempted)
            if not stalled:
                return _still_running(chosen) if preempted else chosen
            decodes = [request for request in _still_running(decodes) if request not in stalled]

    def _keep_gap_short(self, budget: TokenBudget) -> None:
        """Leave prefill and drafts what the step has time for by measured rates, but always some.

        Every stream waits while a prompt is computed beside it: a fixed budget makes those gaps as long as
        the machine is slow (chunked prefill as in Sarathi-Serve, Agrawal et al. 2024, sized by measurement).
        While nothing is measured, chunks are the least.
        """
        if self._config.gap_limit_s is None:
            return
        if not self._rates.is_known:
            budget.limit_others(_LEAST_CHUNK)
            return
        fitting = self._rates.prefill_tokens_within(self._config.gap_limit_s, budget.num_decode_tokens)
        if fitting is not None:
            budget.limit_others(max(fitting, _LEAST_CHUNK))

    def _reserve(self, prefills: list[Request], turn: int) -> int:
        """Tokens that decodes must leave so that prefill advances too: a block's worth, at most half a step.

        A budget of one token alternates between decodes and prefill. 0 under a policy without turns.
        """
        if not self._policy.takes_turns or not (prefills or self.next_in_queue() is not None):
            return 0
        half = (self._token_limit + turn % 2) // 2
        return min(half, self._running.kv.block_size, self._config.max_prefill_tokens)

    def _take_chunks(self, prefills: list[Request], budget: TokenBudget) -> list[ScheduledItem]:
        """Spend what is left of the budget on prompts: running and waiting requests, merged by policy.

        While anyone waits for a reply, a background prompt gets one token a step, as if it were decoded: its
        seat was granted because a step with one token more takes no longer.
        """
        key = self._policy.key
        is_felt = any(not request.is_background for request in self._running)
        running = sorted(prefills, key=key, reverse=True)  # the best is last
        chunks: list[ScheduledItem] = []
        while budget.prefill_left > 0:
            waiting = self.next_in_queue()
            if waiting is not None and not (running and key(running[-1]) < key(waiting)):
                request = self._queue.pop()
                self._running.admit(request)
                self._decoder.open(request)
                if (behind := self._queue.peek()) is not None:
                    self._running.lookup.part(request, behind)
            elif running:
                request = running.pop()
            else:
                break
            is_felt = is_felt or not request.is_background
            wanted = self._running.lookup.stops.next_stop(request) - request.num_computed_tokens
            count = budget.take_chunk(1 if is_felt and request.is_background else wanted)
            self._policy.charge(request, count, 0)
            chunks.append(self._hold_back(next_tokens(request, count)))
        chunks.sort(key=lambda item: item.scheduled.num_tokens > 1)  # sequences of one token come first
        return chunks

    def _hold_back(self, item: ScheduledItem) -> ScheduledItem:
        """The chunk, its state held before its last token if that is a prompt's whose forks wait.

        They compute that token themselves, for its logits, and a state cannot let go of what it took in.
        """
        scheduled, request, *_ = item
        ends_prompt = scheduled.samples and len(request.token_ids) == request.num_prompt_tokens
        is_held_back = (
            self._running.kv.rewindable is Rewindable.DRAFTS
            and ends_prompt
            and scheduled.num_tokens > 1  # a state takes in one token at once, or none
            and self._queue.has_forks_of(request.request_id)
        )
        return item._replace(is_held_back=is_held_back)

    def _take_drafts(self, decodes: Sequence[Request], budget: TokenBudget) -> list[ScheduledItem]:
        """Spend what decodes and prefill leave of the budget on drafts, in blocks that are free anyway."""
        if not decodes:
            return []
        load = StepLoad(
            num_seqs=len(decodes),
            num_tokens=budget.num_decode_tokens + budget.num_prefill_tokens,
            num_prefill_tokens=budget.num_prefill_tokens,
            max_draft_tokens=budget.drafts_left,
            draft_s=self._decoder.gain.waited_s,
        )
        verified: list[ScheduledItem] = []
        for request, drafted in self._decoder.choose(decodes, load):
            count = self._running.make_room_for_drafts(request, len(drafted))
            if count:
                budget.num_draft_tokens += count
                first = request.num_computed_tokens
                scheduled = ScheduledRequest(request.request_id, first, 1 + count, True, count)
                verified.append(ScheduledItem(scheduled, request, drafted[:count]))
        return verified


def _still_running(requests: list[Request]) -> list[Request]:
    return [request for request in requests if request.status is RequestStatus.RUNNING]
