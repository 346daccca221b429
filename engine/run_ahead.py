"""RunAhead: has drafts made, beside the target's passes or before them, and never lets them be in the way.

One micro-step of one drafter is out at a time, in an executor of one thread; what comes next is decided on the
event loop when it is back. So nobody has to be cancelled: a request that has ended is not asked about again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from engine.batch_metrics import BatchMetrics
from engine.speculation.circuit_breaker import CircuitBreaker
from engine.speculation.drafter import Draft, Drafter, DraftJob, DraftResult
from engine.speculation.schedule_choice import ScheduleChooser
from engine.speculation.speculative_decoder import SpeculativeDecoder, fault_of

log = logging.getLogger("slipstream.speculation")

_SMOOTHING = 0.1  # of the newest micro-step in what one takes
_PATIENCE_S = 1.0  # a micro-step that takes longer is not waited for, and counts as a failure


class RunAhead:
    """Runs the drafters of one SpeculativeDecoder. Every method is for the event-loop thread.

    Before a step: `draft_once` until it says False. While the target computes: `beside_step`. After its
    commit: `after_step`. With nothing to do: `rest`. Cheap drafters are called on the spot, unless
    `schedule` is "async"; the others as the schedule says, which "auto" finds out by measuring.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        executor: Executor,
        metrics: BatchMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._decoder = decoder
        self._executor = executor
        self._metrics = metrics
        self._clock = clock
        schedule = decoder.config.schedule
        drafters = list(enumerate(decoder.drafters))
        self._inline = [] if schedule == "async" else [i for i, drafter in drafters if drafter.is_cheap]
        self._remote = [i for i, _ in drafters if i not in self._inline]
        self._breakers = [CircuitBreaker(clock) for _ in drafters]
        self._arm: str = schedule
        self._chooser: ScheduleChooser | None = None
        if schedule == "auto":
            self._arm = "sync"
            if self._remote:
                self._chooser = ScheduleChooser(("off", "sync", "async"))
        self._flying: asyncio.Future[DraftResult] | None = None
        self._is_overdue = False  # what is flying is waited for no more
        self._has_read = False  # a drafter that is behind has had its turn before this step
        self._stopped = False

    # Around a step.

    def choose_arm(self, num_seqs: int) -> None:
        """A step is to be prepared: decide how its drafts are made."""
        self._has_read = False
        self._decoder.waited_s = 0.0
        if self._chooser is not None:
            self._arm = self._chooser.arm(num_seqs)

    async def draft_once(self) -> bool:
        """Draft what must be there before the next step; False when all of it is, or will not come."""
        for index in self._inline:
            self._draft_inline(index)
        if self._arm != "sync" or not self._start(ahead=False):
            return False
        assert self._flying is not None
        started = self._clock()
        done, _ = await asyncio.wait([self._flying], timeout=_PATIENCE_S)
        self._decoder.waited_s += self._clock() - started
        self._is_overdue = not done
        return bool(done)

    def beside_step(self) -> None:
        """The target's pass has begun: let the drafter run beside it."""
        if self._arm == "async":
            self._start(ahead=True)

    def after_step(self, num_seqs: int, num_committed: int, seconds: float) -> None:
        """A step has been committed; `seconds` are from before its drafts to here.

        `num_seqs` is 0 for a step with prefill, which tells nothing about drafts.
        """
        if num_seqs:
            self._decoder.observe_pace(num_seqs, num_committed, seconds)
            if self._chooser is not None:
                self._chooser.observe(num_seqs, num_committed, seconds)
        self.beside_step()

    def rest(self) -> None:
        """There is nothing to do: let the drafters forget what has ended."""
        for index in self._inline:
            self._close_inline(index)
        if self._flying is None:
            self._forget()

    def stop(self) -> None:
        """Ask for nothing more; what is out is not waited for."""
        self._stopped = True

    # On the spot.

    def _draft_inline(self, index: int) -> None:
        self._close_inline(index)
        if self._breakers[index].is_open:
            return
        jobs = self._decoder.jobs(index, ahead=False)
        if not jobs:
            return
        try:
            result = self._decoder.drafters[index].draft(jobs)
        except Exception as error:
            self._fail(index, jobs, error)
        else:
            self._take(index, jobs, result)

    def _close_inline(self, index: int) -> None:
        closed = self._decoder.take_closed(index)
        if closed:
            try:
                self._decoder.drafters[index].close(closed)
            except Exception as error:
                self._fail(index, (), error)

    # In the draft thread.

    def _start(self, *, ahead: bool) -> bool:
        """Send a micro-step off; False if one is out already, or nobody has anything to do."""
        if self._flying is not None or self._stopped:
            return False
        for index in self._remote:
            if self._breakers[index].is_open:
                continue
            jobs = self._decoder.jobs(index, ahead=ahead)
            if not ahead and self._decoder.all_behind(index, jobs):
                jobs, self._has_read = [] if self._has_read else jobs, True
            if jobs:
                self._send(index, jobs)
                return True
        self._forget()
        return False

    def _forget(self) -> None:
        """Have the first drafter that has anything to forget do so."""
        for index in self._remote:
            closed = None if self._stopped else self._decoder.take_closed(index)
            if closed:
                self._send(index, [], closed)
                return

    def _send(self, index: int, jobs: list[DraftJob], closed: Sequence[str] | None = None) -> None:
        closed = self._decoder.take_closed(index) if closed is None else closed
        drafter = self._decoder.drafters[index]
        loop = asyncio.get_running_loop()
        flying = self._flying = loop.run_in_executor(self._executor, _micro_step, drafter, closed, jobs)
        flying.add_done_callback(lambda future: self._land(index, jobs, future))

    def _land(self, index: int, jobs: list[DraftJob], future: asyncio.Future[DraftResult]) -> None:
        self._flying = None
        was_overdue, self._is_overdue = self._is_overdue, False
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            self._take(index, jobs, future.result())
            error = TimeoutError(f"a micro-step took longer than {_PATIENCE_S} s") if was_overdue else None
        if error is not None:
            self._fail(index, jobs, error)
        if self._arm == "async":
            self._start(ahead=True)

    # What comes back.

    def _take(self, index: int, jobs: Sequence[DraftJob], result: DraftResult) -> None:
        if not jobs:
            return
        self._metrics.draft_duration.observe(result.draft_s)
        self._decoder.stats.draft_s += result.draft_s
        if index in self._remote:
            waits = self._decoder.step_waits_s
            exposed_s = result.draft_s if self._arm == "sync" else 0.0
            waits[index] += _SMOOTHING * (exposed_s - waits[index])
        drafts = {draft.request_id: draft for draft in result.drafts}
        wrong: list[DraftJob] = []
        for job in jobs:
            nothing = Draft(job.request.request_id, job.epoch, job.next_position, ())
            draft = drafts.get(job.request.request_id, nothing)
            fault = fault_of(job, draft, self._decoder.config.vocab_size)
            if fault is None:
                self._decoder.put(index, job, draft)
            else:
                wrong.append(job)
                self._decoder.stats.dropped["error"] += len(draft.token_ids)
                error = ValueError(fault)
        if wrong:
            self._fail(index, wrong, error)
        else:
            self._breakers[index].succeed()

    def _fail(self, index: int, jobs: Sequence[DraftJob], error: BaseException) -> None:
        """A drafter failed, which costs no request anything but speed."""
        self._metrics.engine_errors["drafter"] += 1
        self._decoder.lose(index, jobs)
        method = self._decoder.drafters[index].method
        if self._breakers[index].fail():
            log.warning("the %s drafter keeps failing (%s) and is left alone for a while", method, error)
        else:
            log.debug("the %s drafter failed", method, exc_info=error)


def _micro_step(drafter: Drafter, closed: Sequence[str], jobs: Sequence[DraftJob]) -> DraftResult:
    if closed:
        drafter.close(closed)
    return drafter.draft(jobs) if jobs else DraftResult((), 0.0)
