"""ContinuousBatcher: decides each step's work and takes back what came of it.

Owns every request from `add` to its end, and the KV accounting. Loop thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from engine.errors import ContextLengthExceeded
from engine.plan.kv.paged_kv_manager import PagedKvManager
from engine.plan.request import FinishReason, Request, RequestStatus
from engine.plan.scheduling.ahead import plan_ahead
from engine.plan.scheduling.batch_config import BatchConfig
from engine.plan.scheduling.committed_token import CommittedToken, append_rows
from engine.plan.scheduling.cost_model import CostModel
from engine.plan.scheduling.deadlines import Load, earliest_finish_s
from engine.plan.scheduling.draft_slots import choose_drafts
from engine.plan.scheduling.explanation import explain
from engine.plan.scheduling.flights import Flight, Flights
from engine.plan.scheduling.policy import SchedulingPolicy
from engine.plan.scheduling.preemption import MeasuredSwapCost, PreemptionPolicy
from engine.plan.scheduling.request_queue import RequestQueue
from engine.plan.scheduling.running_set import RunningSet
from engine.plan.scheduling.step_inputs import NO_MOVES, BlockMoves, build_step_inputs, next_tokens
from engine.plan.scheduling.step_planner import StepPlanner
from engine.plan.speculation.draft_tape import DraftedToken
from engine.plan.speculation.speculative_decoder import SpeculativeDecoder
from engine.plan.step_records import BatchDecision, RequestExplanation, SampledRows


class ContinuousBatcher:
    """Iteration-level batching: each step every running request advances by what it has not computed yet.

    There is no prefill phase and no decode phase. A step schedules `num_tokens - num_computed_tokens` of each
    request within one budget: one token for each request that lacks only its newest, then chunks of the
    others in policy order, admitting waiting requests on the way. A preempted request is computed again from
    its first token, or brought back from the host, before any request that has not run yet.

    What two requests have in common is computed once. A waiting request whose next block a running one is
    computing, or which forks from one that has not computed the prompt yet, is held until that one is done
    or gone, and does not stand in the way of those behind it.

    Protocol: `step`; if its decision is not empty, exactly one of `commit`, `abandon` and
    `preempt_for_memory`, all of which land it, before the next `step`. Where the device can have a second
    step before it gives back the first, `step_ahead` may decide it meanwhile; it lands after the first, in
    the same ways, and is dropped with the first if that fails. `add` and `finish` may come at any time.

    Progress: while there is work, of two successive steps at least one schedules something, because what
    could not fit even alone is refused by `add`, and the oldest running request is never preempted.
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
        self.costs = CostModel()  # whoever runs the steps tells it what they took
        self._policy = policy
        self._clock = clock
        self._queue = RequestQueue(policy)
        cost = MeasuredSwapCost(self.costs, config.kv_block_bytes)
        preemption = PreemptionPolicy(config.preemption, config.max_preemptions, cost)
        self._running = RunningSet(config.max_num_seqs, kv, policy, clock, preemption, config.prefix_caching)
        self._marks = self._running.marks
        self._planner = StepPlanner(config, self._queue, self._running, policy, self.costs, self._requeue)
        self._step_id = 0
        self._preempted: list[tuple[Request, bool]] = []  # since the last decision; True if by swap
        self._flights = Flights()

    # What there is.

    @property
    def num_running(self) -> int:
        """Requests that hold KV blocks and take part in steps."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait, preempted ones included."""
        return len(self._queue)

    @property
    def num_swapped(self) -> int:
        """Waiting requests whose KV is on the host."""
        return self.kv.num_swapped

    @property
    def num_waiting_tokens(self) -> int:
        """Known tokens of the waiting requests."""
        return self._queue.num_tokens

    @property
    def has_work(self) -> bool:
        """True while any request has not ended."""
        return len(self._running) > 0 or len(self._queue) > 0

    # Requests come and go.

    def add(self, request: Request) -> None:
        """Queue a new request. Raises ContextLengthExceeded if it could not fit even alone."""
        limit = min(self.config.max_model_len, self.kv.max_tokens_per_seq)
        if request.max_num_tokens > limit:
            raise ContextLengthExceeded(
                limit=limit,
                prompt_tokens=request.num_prompt_tokens,
                max_tokens=request.sampling.max_tokens,
                param="max_tokens" if request.num_prompt_tokens < limit else "prompt",
            )
        assert self._running.get(request.request_id) is None, f"{request.request_id} runs already"
        self._queue.add(request)

    def finish(self, request_id: str, reason: FinishReason) -> Request | None:
        """End a request wherever it is; None if it has ended before.

        Its blocks are free at once, or, while a step is in flight, when that step lands.
        """
        request = self._queue.remove(request_id)
        if request is not None:
            request.finish(reason)
            self._leave_nothing(request_id)
            return request
        request = self._running.get(request_id)
        if request is not None:
            self._end(request, reason)
        return request

    def reprioritize(
        self, request_id: str, *, priority: int | None = None, deadline: float | None = None
    ) -> bool:
        """Give a request another priority or deadline from the next step on; False if it has ended.

        None leaves as it is what there is.
        """
        request = self._find(request_id)
        if request is None:
            return False
        request.reprioritize(priority, deadline)
        if request_id in self._queue:
            self._queue.reprioritize(request_id)
        return True

    def reset_prefix_cache(self) -> int:
        """Forget the contents of all blocks that nobody uses; how many they were."""
        return self.kv.reset_prefix_cache()

    # What is to be expected.

    def can_meet(self, request: Request) -> bool:
        """False when a request not added yet cannot end by its deadline even if all goes well from now on.

        Judged by `costs`, and by what drafts bring where they do well; nothing is impossible while that is
        unknown. O(waiting), with a deadline.
        """
        if request.deadline is None:
            return True
        load = Load(
            num_to_compute=self._running.lookup.num_to_compute(request),
            running=list(self._running),
            ahead=self._queue.ahead_of(request) if self._policy.ranks_newcomers else (),
            max_num_seqs=self.config.max_num_seqs,
            max_prefill_tokens=min(self.config.max_prefill_tokens, self.config.max_num_batched_tokens),
        )
        needed = earliest_finish_s(request, load, self.costs)
        if needed is None:
            return True
        return self._clock() + needed / self.decoder.best_tokens_a_step <= request.deadline

    def explain(self, request_id: str) -> RequestExplanation | None:
        """How a request stands and why it waits; None if it has ended. O(waiting)."""
        request = self._find(request_id)
        if request is None:
            return None
        return explain(request, self._queue, self._running, self.config.max_num_seqs, self._policy.name)

    def _find(self, request_id: str) -> Request | None:
        return self._queue.get(request_id) or self._running.get(request_id)

    # One step.

    def step(self) -> BatchDecision:
        """Decide what to compute next. Empty if there is no work, or if all it did was to preempt."""
        assert not self._flights, "the last decision is neither committed nor abandoned"
        self._step_id += 1
        plan = self._planner.plan(self._step_id)
        for request in plan.newcomers:
            self.decoder.open(request)
        budget = plan.budget
        verified = choose_drafts(self.decoder, plan.decodes, budget, self._running)
        with_drafts = {cargo.scheduled.request_id for cargo in verified}
        cargo = [next_tokens(request) for request in plan.decodes if request.request_id not in with_drafts]
        cargo += [next_tokens(request, count) for request, count in plan.chunks]
        cargo += verified
        moves = self._running.block_moves() if cargo else NO_MOVES
        decision = BatchDecision(
            step_id=self._step_id,
            scheduled=tuple(item.scheduled for item in cargo),
            inputs=build_step_inputs(cargo, self.kv, self._running.sampling, moves) if cargo else None,
            num_decode_tokens=budget.num_decode_tokens,
            num_prefill_tokens=budget.num_prefill_tokens,
            num_draft_tokens=budget.num_draft_tokens,
            preempted=tuple(request.request_id for request, _ in self._preempted),
            swapped=tuple(request.request_id for request, swapped in self._preempted if swapped),
        )
        self._preempted.clear()
        if cargo:
            self._flights.take_off(Flight(decision, cargo, moves))
        return decision

    def step_ahead(self, decision: BatchDecision) -> BatchDecision | None:
        """Decide the step behind the only one in flight now, before it lands; None if that has to wait.

        It computes nothing but the tokens that the flying step draws; see `plan_ahead`. It waits for a
        request that could be admitted, too. Commits give the same tokens with and without.
        """
        assert len(self._flights) == 1, "a step ahead follows the only one in flight"
        flight = self._flights.oldest(decision)
        if self._planner.next_in_queue() is not None:
            return None
        cargo = plan_ahead(flight, self._running, self.decoder, self._planner.max_decodes)
        if cargo is None:
            return None
        self._step_id += 1
        moves = BlockMoves(scrub=self._marks.take_scrub_blocks())
        ahead = BatchDecision(
            step_id=self._step_id,
            scheduled=tuple(item.scheduled for item in cargo),
            inputs=build_step_inputs(cargo, self.kv, self._running.sampling, moves),
            num_decode_tokens=len(cargo),
            num_prefill_tokens=0,
        )
        self._flights.take_off(Flight(ahead, cargo, moves))
        return ahead

    # What came of it.

    def commit(self, decision: BatchDecision, rows: SampledRows) -> list[CommittedToken]:
        """Take the step's result: a token, or an error, for each sampled row whose request still runs.

        What ends by it is finished on return; a failed row ends its request alone, with ERROR.
        """
        flight = self._flights.land(decision)
        left = self._flights.take_left()
        if left:
            self._release(left, flight.found_good(rows))
        self._running.confirm_block_moves()
        self._planner.allow_more()
        committed: list[CommittedToken] = []
        row = 0
        for (_, first, count, samples, num_drafts), request, drafted, _ in flight.cargo:
            if request.status is RequestStatus.RUNNING:  # else it was ended while the step ran
                request.advance_to(first + count - num_drafts)
                if samples:
                    committed += self._take_rows(request, range(row, row + num_drafts + 1), rows, drafted)
            row += (num_drafts + 1) * samples
        return committed

    def _take_rows(
        self, request: Request, own: range, rows: SampledRows, drafted: Sequence[DraftedToken]
    ) -> list[CommittedToken]:
        """Commit what a request's own rows hold, and end it or get it ready to go on."""
        committed = append_rows(request, own, rows)
        reason = committed[-1].finish_reason
        has_failed = reason is FinishReason.ERROR
        num_tokens = len(committed) - has_failed
        if has_failed:
            self._marks.mark_kv_bad(request.request_id)
        if num_tokens:
            request.advance_to(request.num_computed_tokens + num_tokens - 1)
            if not has_failed:
                self._running.lookup.publish(request)
                if self._marks.mark_kv_good(request.request_id):
                    self._queue.let_go(request.request_id)
            self._policy.charge(request, 0, num_tokens)
        self.decoder.settle(request, drafted, num_tokens)
        if any(row in own for row in (*rows.spoiled_rows, *(rows.row_errors or ()))):
            self._marks.mark_kv_suspect(request.request_id)
            if reason is None:
                self._compute_again(request)
        elif reason is None and len(own) > 1:
            self._running.release_draft_room(request)
        if reason is not None:
            self._end(request, reason)
        return committed

    def _compute_again(self, request: Request) -> None:
        """Rows behind a request's tokens were spoiled: compute it again, and draft for it no more.

        What rejected drafts leave is written before it is read again, but where it may be NaN that is not
        enough: it spoils a sum even at weight zero.
        """
        self.decoder.give_up(request.request_id)
        self._running.preempt(request, may_swap=False)
        self._requeue([request])

    def abandon(self, decision: BatchDecision, *, fail: bool) -> list[Request]:
        """Drop a step that gave no result, and one behind it; nothing counts as computed.

        `fail` ends, with ERROR, all its requests that still run, and returns them; otherwise they are
        scheduled again. The device must be done with both.
        """
        aboard = [cargo.request for cargo in self._flights.oldest(decision).cargo]
        aboard = [request for request in aboard if request.status is RequestStatus.RUNNING]
        flights = self._flights.land_all()
        self._release(self._flights.take_left())
        for request in aboard:
            self._marks.mark_kv_suspect(request.request_id)
        for flight in flights:
            self._undo_moves(flight.moves)
        if not fail:
            return []
        for request in aboard:
            self._marks.mark_kv_bad(request.request_id)
            self._end(request, FinishReason.ERROR)
        return aboard

    def _undo_moves(self, moves: BlockMoves) -> None:
        for request_id in self._running.undo_block_moves(moves):
            lost = self._queue.remove(request_id)
            assert lost is not None, f"{request_id} is on the host and does not wait"
            lost.recompute_from(0)
            self._queue.add(lost)

    def preempt_for_memory(self, decision: BatchDecision) -> None:
        """Drop a step whose pass ran out of device memory, to retry with less.

        The lower-ranked half of its requests is preempted, and the next step gets half its tokens at most,
        but one; that limit rises by one with each commit. Those whose state cannot be cut back to before the
        pass are all computed again.
        """
        flight = self._flights.oldest(decision)
        aboard = sorted((cargo.request for cargo in flight.cargo), key=self._policy.key)
        self.abandon(decision, fail=False)
        self._planner.allow_less(decision.num_tokens // 2)
        lower = [r for r in aboard[(len(aboard) + 1) // 2 :] if self._running.may_preempt(r)]
        if not self.kv.can_rewind:
            lower = [r for r in aboard if r.status is RequestStatus.RUNNING]
        for request in lower:
            self._running.preempt(request, may_swap=False)  # the device has no memory for it just now
        self._requeue(lower)

    def _requeue(self, preempted: list[Request]) -> None:
        for request in preempted:
            self.decoder.pause(request.request_id)
            swapped = request.status is RequestStatus.SWAPPED
            self._queue.add(request)
            self._queue.let_go(request.request_id)
            self._preempted.append((request, swapped))

    def _release(self, left: Sequence[str], good: Collection[str] = ()) -> None:
        """These have ended, and no flight carries them any more; the `good` left no bad values."""
        for request_id in left:
            if request_id in good:
                self._marks.mark_kv_good(request_id)
            self._marks.release(request_id)
            self._leave_nothing(request_id)

    def _end(self, request: Request, reason: FinishReason) -> None:
        """End a running request; while a step in flight carries it the device may still write its blocks."""
        self._running.remove(request)
        request.finish(reason)
        if self._flights.carry(request.request_id):
            self._marks.mark_kv_suspect(request.request_id)
            self._flights.keep(request.request_id)
        else:
            self._marks.release(request.request_id)
            self._leave_nothing(request.request_id)

    def _leave_nothing(self, request_id: str) -> None:
        """This request has ended: free its host blocks, and let go those that were held for it."""
        self.decoder.close(request_id)
        self.kv.drop_from_host(request_id)
        self._queue.let_go(request_id)
