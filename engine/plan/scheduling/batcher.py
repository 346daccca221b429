"""ContinuousBatcher: decides each step's work and commits its result.

Owns every request from `add` to its end, and the KV accounting. Loop thread only.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import chain

from engine.plan.kv.disk_tier import disk_hold
from engine.plan.kv.paged_kv_manager import PagedKvManager
from engine.plan.request import FinishReason, Request, RequestStatus
from engine.plan.scheduling.explanation import RequestExplanation, explain
from engine.plan.scheduling.in_flight import CommittedToken, InFlightStep, append_rows
from engine.plan.scheduling.next_turns import NextTurns, is_read_ahead
from engine.plan.scheduling.policy import SchedulingPolicy
from engine.plan.scheduling.preemption import PreemptionPolicy
from engine.plan.scheduling.reply_steps import ReplySteps
from engine.plan.scheduling.request_queue import RequestQueue
from engine.plan.scheduling.running_set import RunningSet
from engine.plan.scheduling.service_rates import ReplyWork, ServiceRates
from engine.plan.scheduling.step_inputs import (
    ScheduledItem,
    build_step_inputs,
    sampling_now,
)
from engine.plan.scheduling.step_planner import BatchConfig, StepPlanner, TokenBudget
from engine.plan.speculation.speculation_config import DraftingChange
from engine.plan.speculation.speculative_decoder import SpeculativeDecoder
from engine.plan.step_records import NO_MOVES, BatchDecision, BlockMoves, SampledRows, SamplingInputs

_JUDGED_EVERY = 16  # steps, while it runs


@dataclass(frozen=True, slots=True)
class _Guess:
    """A reply is taken to be as short as `share` of what was served, or of its own tenant's alone."""

    share: float
    only_own: bool = False


_HALF = _Guess(0.5)
_LIKELY = _Guess(0.9)  # what misses its deadline with all but so few is late
_SURE = _Guess(0.05, only_own=True)  # what misses it even so ends: nobody does for others' replies


class ContinuousBatcher:
    """Iteration-level batching: each step advances every running request by what it has not computed yet.

    One budget goes to one token for each request that lacks only its newest, then to chunks of the others in
    policy order, admitting waiting requests on the way. A preempted request is computed again, or brought
    back from the host, before any that has not run yet. What two requests have in common is computed once: a
    waiting one is held while a running one computes its next block, or the prompt that it forks from.

    `running` holds the requests that take part in steps, `queue` those that wait, preempted ones included.

    Protocol: `step`; if its decision is not empty, exactly one of `commit`, `abandon`, `isolate` and
    `preempt_for_memory` completes it before the next `step`. `step_ahead` may decide a second step meanwhile;
    it completes after the first, in the same ways, and is dropped with the first if that fails. Between the
    two, `sampling_ahead` says how the second is drawn, if that was to be later. `add` and `finish` may come
    at any time.

    Progress: while there is work, of two successive steps at least one schedules something, because every
    request fits at least alone, and the oldest running request is never preempted.
    """

    def __init__(
        self,
        config: BatchConfig,
        kv: PagedKvManager,
        policy: SchedulingPolicy,
        clock: Callable[[], float] = time.monotonic,
        decoder: SpeculativeDecoder | None = None,
    ) -> None:
        self.config = config
        self.kv = kv
        self.decoder = decoder or SpeculativeDecoder.without_drafters()
        self.rates = ServiceRates()  # the engine loop tells it what steps took
        self.replies = ReplySteps()
        self._policy = policy
        self._clock = clock
        self.queue = RequestQueue(policy)
        preemption = PreemptionPolicy(
            config.preemption, config.max_preemptions, self.rates, config.kv_block_bytes, config.state_bytes
        )
        self.running = RunningSet(config.max_num_seqs, kv, policy, clock, preemption, config.prefix_caching)
        self.next_turns = self.running.lookup.next_turns = NextTurns(kv, self.rates)
        self._planner = StepPlanner(config, self.queue, self.running, policy, self.rates, self.decoder)
        self._in_flight: deque[InFlightStep] = deque()  # oldest first
        self._ended: list[str] = []  # while a step computed for them, in this order: they keep their blocks
        self._step_id = 0

    @property
    def is_isolating(self) -> bool:
        """True while the next steps are to find out which request made a pass raise."""
        return self._planner.search.is_active

    @property
    def has_work(self) -> bool:
        """True while any request has not ended."""
        return len(self.running) > 0 or len(self.queue) > 0

    def add(self, request: Request) -> None:
        """Queue a new request; AssertionError if it could not fit even alone, which admission checks."""
        limit = min(self.config.max_model_len, self.kv.max_tokens_per_seq)
        assert request.max_num_tokens <= limit, f"{request.request_id} may need more than {limit} tokens"
        assert self.running.get(request.request_id) is None, f"{request.request_id} runs already"
        self.queue.add(request)
        if self.running.lookup.ask_disk(request):  # at once: the answer may be there before the next step
            self.queue.hold(request.request_id, disk_hold(request.request_id))

    def read_ahead(self) -> bool:
        """Queue a piece of what a chat will ask next; False if there is none. For when there is no work."""
        request = self.next_turns.next_slice(self._clock())
        if request is not None:
            self.add(request)
        return request is not None

    @property
    def waits_for_disk(self) -> bool:
        """True while there may be nothing to do until `resume` because of what may be on disk."""
        disk = self.running.lookup.disk
        return disk is not None and disk.is_asked

    def resume(self, request_id: str) -> None:
        """What this request was held for has been read from disk, or will not be."""
        self.queue.unhold(disk_hold(request_id))

    def finish(self, request_id: str, reason: FinishReason) -> Request | None:
        """End a request; None if it has ended before. Its blocks are free once no step in flight has it."""
        request = self.queue.remove(request_id)
        if request is not None:
            request.finish(reason)
            self._forget(request_id)
            return request
        request = self.running.get(request_id)
        if request is not None:
            self._end(request, reason)
        return request

    def reprioritize(
        self, request_id: str, *, priority: int | None = None, deadline: float | None = None
    ) -> bool:
        """Give a request another priority or deadline, None for the old one; False if it has ended."""
        request = self._find(request_id)
        if request is None:
            return False
        request.reprioritize(priority, deadline)
        self.queue.unhold(request_id)  # nobody waits for who is less urgent: see PrefixLookup.leader
        if request_id in self.queue:
            if self.queue.held_for(request_id) != disk_hold(request_id):
                self.queue.release(request_id)
            self.queue.reprioritize(request_id)
        return True

    def retune(self, request_id: str, change: DraftingChange) -> bool:
        """Draft for a request in another way, from the next step on; False if it has ended."""
        request = self._find(request_id)
        if request is None:
            return False
        request.retune(change)
        self.decoder.retune(request)
        return True

    def can_meet(self, request: Request, before: Sequence[Request] = ()) -> bool:
        """False when a request not added yet will miss its deadline, by 19 in 20 of what was served.

        Those `before` it are to be added, too. True while `rates` are unknown. O(waiting), with a deadline.
        """
        if request.deadline is None:
            return True
        return not self._will_miss(request, _SURE, self._before(request, before))

    def completion_s(self, request: Request, before: Sequence[Request] = ()) -> float | None:
        """In how many seconds a request not added yet will have ended; None while unknown.

        It and those before it are taken to be as long as half of what was served.
        """
        return self._finish_s(request, _HALF, self._before(request, before))

    def _before(self, request: Request, others: Sequence[Request]) -> Sequence[Request]:
        """What runs before a request not added yet, `others` added before it."""
        ahead = [*self.queue.ahead_of(request), *others] if self._policy.ranks_newcomers else []
        return (*self.running, *ahead)

    def hopeless(self) -> Request | None:
        """A request that will miss its deadline, by 19 in 20 of what was served: it is to end before a step.

        The first in the queue if it can have a seat; else one whose seat is wanted, each judged every few
        steps. Under a policy that ranks deadlines, those of the queue found on the way that will probably
        miss theirs are put behind the others, and run where there is room for them all the same.
        """
        while (request := self.queue.peek()) is not None:
            if len(self.running) >= self.config.max_num_seqs:
                judged = (each for each in self.running if self._is_judged_now(each))
                return next((each for each in judged if self._will_miss(each, _SURE)), None)
            if request.deadline is None or request.status is not RequestStatus.WAITING:
                return None
            if self._will_miss(request, _SURE):
                return request
            is_in_place = request.is_late or not self._policy.ranks_deadlines
            if is_in_place or not self._will_miss(request, _LIKELY):
                return None
            request.mark_late()
            self.queue.reprioritize(request.request_id)
        return None

    def _is_judged_now(self, request: Request) -> bool:
        return request.deadline is not None and (self._step_id + request.arrival) % _JUDGED_EVERY == 0

    def _will_miss(self, request: Request, guess: _Guess, before: Sequence[Request] = ()) -> bool:
        """True if a request misses its deadline, even if it is as short as guessed."""
        needed_s = self._finish_s(request, guess, before)
        return needed_s is not None and self._clock() + needed_s > (request.deadline or math.inf)

    def _finish_s(self, request: Request, guess: _Guess, before: Sequence[Request]) -> float | None:
        """Seconds until a request as short as guessed has ended, behind those before it; None while unknown.

        Where all seats are wanted it shares its steps with as many as there are; else others may end at once.
        """
        config, pace = self.config, self.decoder.tokens_a_step
        places = config.max_num_seqs
        is_full = max(len(before), len(self.running) + len(self.queue)) >= places
        is_running = request.status is RequestStatus.RUNNING
        num_left = request.num_tokens - request.num_computed_tokens
        work = ReplyWork(
            num_to_compute=num_left if is_running else self.running.lookup.num_to_compute(request),
            tokens_a_chunk=min(config.max_prefill_tokens, config.max_num_batched_tokens),
            num_steps=self.replies.remaining(request, guess.share, pace, only_own=guess.only_own),
            num_beside=places - 1 if is_full else 0,
        )
        ahead = before if is_full else ()
        steps_before = [self.replies.remaining(other, _HALF.share, pace) for other in ahead]
        return self.rates.finish_s(work, steps_before, places)

    def explain(self, request_id: str) -> RequestExplanation | None:
        """How a request stands and why it waits; None if it has ended. O(waiting)."""
        request = self._find(request_id)
        if request is None:
            return None
        drafting = self.decoder.drafting_of(request)
        return explain(request, self.queue, self.running, self._policy.name, drafting)

    def _find(self, request_id: str) -> Request | None:
        return self.queue.get(request_id) or self.running.get(request_id)

    def step(self) -> BatchDecision:
        """Decide what to compute next. Empty if there is no work, or if all it did was to preempt."""
        assert not self._in_flight, "the last decision is neither committed nor abandoned"
        plan = self._planner.plan(self._step_id + 1)
        moves = self.running.block_moves(plan.items) if plan.items else NO_MOVES
        return self._decide(plan.items, moves, plan.budget, plan.preempted)

    def step_ahead(self, decision: BatchDecision) -> BatchDecision | None:
        """Decide the step behind the one in flight, before its result; None if not now: see `plan_ahead`."""
        assert len(self._in_flight) == 1, "a step ahead follows the only one in flight"
        items = self._planner.plan_ahead(self._oldest(decision))
        if items is None:
            return None
        moves = self.running.block_moves_ahead(items)
        return self._decide(items, moves, TokenBudget(0, 0, 0, num_decode_tokens=len(items)))

    def sampling_ahead(self, decision: BatchDecision) -> SamplingInputs:
        """What a step ahead that is drawn later draws by, once the step before it is committed."""
        step = self._oldest(decision)
        assert decision.inputs is not None, "it computes nothing"
        return sampling_now(decision.inputs, step.items, self.running.sampling)

    def _decide(
        self,
        items: list[ScheduledItem],
        moves: BlockMoves,
        budget: TokenBudget,
        preempted: Sequence[tuple[str, bool]] = (),
    ) -> BatchDecision:
        self._step_id += 1
        decision = BatchDecision(
            step_id=self._step_id,
            scheduled=tuple(item.scheduled for item in items),
            inputs=build_step_inputs(items, self.kv, self.running.sampling, moves) if items else None,
            num_decode_tokens=budget.num_decode_tokens,
            num_prefill_tokens=budget.num_prefill_tokens,
            num_draft_tokens=budget.num_draft_tokens,
            preempted=tuple(request_id for request_id, _ in preempted),
            swapped=tuple(request_id for request_id, swapped in preempted if swapped),
        )
        if items:
            self._in_flight.append(InFlightStep(decision, items, moves))
        return decision

    def commit(self, decision: BatchDecision, rows: SampledRows) -> list[CommittedToken]:
        """Take the step's result: a token, or an error, for each sampled row whose request still runs.

        A request that ends by it is finished on return; a failed row ends its request alone, with ERROR.
        """
        step = self._oldest(decision)
        self._in_flight.popleft()
        self._planner.search.passed()
        if self._ended:
            self._release_ended(step.ended_but_good(rows))
        self.running.confirm_block_moves()
        self._planner.allow_more()
        committed: list[CommittedToken] = []
        for item, own in zip(step.items, step.rows, strict=True):
            if item.request.status is not RequestStatus.RUNNING:
                continue  # it ended while the step ran
            if own:
                committed += self._commit_rows(item, own, rows)
            else:
                item.request.advance_to(item.scheduled.first_position + item.scheduled.num_tokens)
        return committed

    def _commit_rows(self, item: ScheduledItem, own: range, rows: SampledRows) -> list[CommittedToken]:
        """Commit what a request's own rows hold, and end it or get it ready to go on."""
        (request_id, first, count, _, num_drafts), request, drafted, *_ = item
        committed = append_rows(request, own, rows)
        reason = committed[-1].finish_reason
        has_failed = reason is FinishReason.ERROR
        num_tokens = len(committed) - has_failed
        request.advance_to(first + count - num_drafts + max(0, num_tokens - 1))
        if has_failed:
            self.kv.mark_kv_bad(request_id)
        else:
            self.running.lookup.publish(request)
            if self.kv.mark_kv_good(request_id):
                self.queue.unhold(request_id)
        self._policy.charge(request, 0, num_tokens)
        self.decoder.commit(request, drafted, num_tokens)
        if any(row in own for row in (*rows.spoiled_rows, *(rows.row_errors or ()))):
            self.kv.mark_kv_suspect(request_id)
            if reason is None:  # rows behind its tokens are not finite: their NaN would spoil later sums
                self.decoder.give_up(request_id)
                self.running.preempt(request, may_swap=False)
                self._planner.requeue([request])
        elif reason is None and num_drafts:
            self.running.release_draft_room(request)
        if reason is not None:
            self._end(request, reason)
        return committed

    def abandon(self, decision: BatchDecision) -> list[Request]:
        """Drop a step that gave no result, and one behind it; nothing counts as computed.

        Its requests that still run are returned, and scheduled again. The device must be done with both.
        """
        requests = [item.request for item in self._oldest(decision).items]
        requests = [request for request in requests if request.status is RequestStatus.RUNNING]
        steps = list(self._in_flight)
        self._in_flight.clear()
        self._release_ended()
        for request in requests:
            self.kv.mark_kv_suspect(request.request_id)
            self.kv.snapshots.drop_pending(request.request_id)
            self.kv.hold_state(request.request_id, None)
        for request_id in chain.from_iterable(self.running.undo_block_moves(step.moves) for step in steps):
            lost = self.queue.remove(request_id)
            assert lost is not None, f"{request_id} is on the host and does not wait"
            lost.recompute_from(0)
            self.queue.add(lost)
        return requests

    def isolate(self, decision: BatchDecision) -> list[Request]:
        """Drop a step whose pass raised, and end, with ERROR, the requests found to blame; they are returned.

        Until they are found the next steps try parts of its requests, from their last whole blocks on: the
        pass may have left values that are not finite in the others. State that cannot be rewound begins anew.
        """
        requests = self.abandon(decision)
        blamed = self._planner.search.failed(requests)
        for request in requests:
            if self.kv.keeps_state:
                if request not in blamed and not self.running.restart(request):
                    self.running.preempt(request, may_swap=False)
                    self._planner.requeue([request])
                continue
            num_good = request.num_computed_tokens // self.kv.block_size
            request.recompute_from(num_good * self.kv.block_size)
            self.kv.scrub(self.kv.block_ids(request.request_id)[num_good:])
        for request in blamed:
            self.kv.mark_kv_bad(request.request_id)
            self._end(request, FinishReason.ERROR)
        return blamed

    def preempt_for_memory(self, decision: BatchDecision) -> None:
        """Drop a step whose pass ran out of device memory, to retry with less.

        The lower-ranked half of its requests is preempted, and the next step gets at most half its tokens;
        each commit raises that limit by one. Where state cannot be rewound, all of them are computed again.
        """
        items = self._oldest(decision).items
        requests = sorted((item.request for item in items), key=self._policy.key)
        self.abandon(decision)
        self._planner.allow_less(decision.num_tokens // 2)
        if not self.kv.keeps_state:
            lower = [r for r in requests[(len(requests) + 1) // 2 :] if self.running.may_preempt(r)]
        else:
            lower = [r for r in requests if r.status is RequestStatus.RUNNING]
        for request in lower:
            self.running.preempt(request, may_swap=False)  # the device has no memory for it just now
        self._planner.requeue(lower)

    def _oldest(self, decision: BatchDecision) -> InFlightStep:
        """The step of this decision, which must be the next to complete."""
        is_next = bool(self._in_flight) and self._in_flight[0].decision is decision
        assert is_next, "this decision is not the one in flight"
        return self._in_flight[0]

    def _is_in_flight(self, request_id: str) -> bool:
        """True if the device may still write into the blocks of this request."""
        return any(request_id in step.request_ids for step in self._in_flight)

    def _release_ended(self, good: Collection[str] = ()) -> None:
        """Free what ended requests held, once no step computes for them; the KV of the `good` is good."""
        ended, self._ended = self._ended, []
        for request_id in ended:
            if self._is_in_flight(request_id):
                self._ended.append(request_id)
                continue
            if request_id in good:
                self.kv.mark_kv_good(request_id)
            self.kv.free(request_id)
            self._forget(request_id)

    def _end(self, request: Request, reason: FinishReason) -> None:
        """End a running request; its blocks are kept while the device may still write them."""
        self.running.remove(request)
        request.finish(reason)
        is_reply = not (request.scores_only or is_read_ahead(request.request_id))
        if is_reply and reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.DEADLINE):
            self.replies.observe(request)
        self._ended.append(request.request_id)
        if self._is_in_flight(request.request_id):
            self.kv.mark_kv_suspect(request.request_id)
        else:
            self._release_ended()

    def _forget(self, request_id: str) -> None:
        """This request has ended: free its host blocks, and return those held for it to their places."""
        self.decoder.close(request_id)
        self.kv.host.release(request_id)
        self.queue.unhold(request_id)
        if self.running.lookup.disk is not None:
            self.running.lookup.disk.forget(request_id)
