"""RunAhead: has drafts made, beside the target's passes or before them, and never lets them be in the way.

One micro-step of one drafter is out at a time, in an executor of one thread; what comes next is decided on
the event loop when it is back. So nobody has to be cancelled: a request that has ended is not asked about
again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from engine.plan.metrics.batch_metrics import BatchMetrics
from engine.plan.speculation.circuit_breaker import CircuitBreaker
from engine.plan.speculation.draft_answers import read_answers
from engine.plan.speculation.drafter import Drafter, DraftJob, DraftResult
from engine.plan.speculation.schedule_choice import ScheduleChooser
from engine.plan.speculation.speculative_decoder import SpeculativeDecoder

log = logging.getLogger("slipstream.speculation")

_PATIENCE_S = 0.5  # a micro-step is waited for that long, or as long as a step of the target takes
_HANGING_S = 30.0  # after that it is said that one does not come back
_NOTHING = DraftResult((), 0.0)


@dataclass(slots=True)
class _Flight:
    """A micro-step that is out since `started`; its result is an exception if it failed."""

    index: int
    jobs: list[DraftJob]
    future: asyncio.Future[DraftResult | Exception]
    started: float
    is_hanging: bool = False


class RunAhead:
    """Runs the drafters of one SpeculativeDecoder. Every method is for the event-loop thread.

    Before a step: `choose_arm`, then `draft_once` until it says False, or `draft_inline` if the step was
    launched ahead. While the target computes: `beside_step`. After its commit: `after_step`. With nothing to
    do: `rest`. Cheap drafters are called on the spot, unless `schedule` is "async"; the others as the
    schedule says, which "auto" finds out by measuring. Those that read the target's features have nothing to
    read while it computes: where others run ahead, they are waited for.

    Nothing that a drafter does is raised here. What it gets wrong, or raises, is forgotten, and after three
    times in a row the drafter is left alone for a while. One that is slow is waited for once, and then no
    more until it was quick again; it goes on beside the target. One that never comes back keeps its thread
    and stops the others that need it.
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
        self._is_quick = [True for _ in drafters]
        self._arm: str = schedule
        self._chooser: ScheduleChooser | None = None
        self._readers = frozenset(i for i, drafter in drafters if drafter.reads_features)
        if schedule == "auto":
            self._arm = "sync"
            can_run_ahead = not self._readers.issuperset(self._remote)
            if self._remote:
                self._chooser = ScheduleChooser(
                    ("off", "sync", "async") if can_run_ahead else ("off", "sync")
                )
        config = decoder.config
        self._num_probabilities = None if config.verification == "match" else config.vocab_size
        self._flight: _Flight | None = None
        self._patience_s = _PATIENCE_S
        self._has_read = False  # drafters that are behind have had their turn before this step
        self._is_resting = False
        self._is_stopped = False

    # Around a step.

    def choose_arm(self, num_seqs: int) -> None:
        """A step is to be prepared: decide how its drafts are made."""
        decoder = self._decoder
        self._has_read = self._is_resting = False
        if self._chooser is not None:
            self._arm = self._chooser.arm(num_seqs)
        decoder.waited_s = 0.0
        decoder.awaited = self._awaited()
        self._patience_s = max(_PATIENCE_S, decoder.costs.seconds(max(1, num_seqs), max(1, num_seqs)) or 0.0)

    async def draft_once(self) -> bool:
        """Draft what must be there before the next step; False when all of it is, or is not waited for.

        What is still out from before is waited for first.
        """
        self.draft_inline()
        awaited = self._decoder.awaited
        if not awaited:
            return False
        flight = self._flight or self._start(awaited, ahead=False)
        if flight is None or flight.index not in awaited or not self._is_quick[flight.index]:
            return False
        begin = self._clock()
        done, _ = await asyncio.wait([flight.future], timeout=self._patience_s)
        waited_s = self._clock() - begin
        self._decoder.waited_s += waited_s
        if not done:
            self._is_quick[flight.index] = False
            return False
        if self._decoder.is_reading(flight.index, flight.jobs):
            self._has_read = True
        elif flight.jobs:
            self._decoder.waits[flight.index].observe(len(flight.jobs), len(flight.jobs), waited_s)
        return True

    def draft_inline(self) -> None:
        """Draft what is drafted on the spot: all there is to do beside a step that was launched ahead."""
        for index in self._inline:
            self._draft_inline(index)

    def beside_step(self) -> None:
        """The target's pass has begun: let the drafter run beside it."""
        if self._arm == "async":
            self._start(self._ahead(), ahead=True)

    def after_step(self, num_seqs: int, num_committed: int, seconds: float) -> None:
        """A step has been committed; `seconds` are from before its drafts to here.

        `num_seqs` is 0 for a step with prefill, which tells nothing about drafts.
        """
        if num_seqs:
            self._decoder.observe_pace(num_seqs, num_committed, seconds)
            if self._chooser is not None:
                self._chooser.observe(num_seqs, num_committed, seconds)
        if self._flight is not None:
            self._note_hanging(self._flight)
        self.beside_step()

    def rest(self) -> None:
        """There is nothing to do: let the drafters forget what has ended."""
        self._is_resting = True
        for index in self._inline:
            self._close_inline(index)
        self._forget()

    def stop(self) -> None:
        """Ask for nothing more; what is out is not waited for."""
        self._is_stopped = True
        if self._flight is not None:
            self._flight.future.cancel()

    # On the spot.

    def _draft_inline(self, index: int) -> None:
        self._close_inline(index)
        if self._breakers[index].is_open:
            return
        jobs = self._decoder.jobs(index, ahead=False)
        if jobs:
            self._take(index, jobs, self._call(index, (), jobs))

    def _close_inline(self, index: int) -> None:
        closed = self._decoder.take_closed(index)
        if closed:
            self._take(index, [], self._call(index, closed, []))

    def _call(self, index: int, closed: Sequence[str], jobs: Sequence[DraftJob]) -> DraftResult | Exception:
        return _micro_step(self._decoder.drafters[index], closed, jobs, self._num_probabilities)

    # In the draft thread.

    def _awaited(self) -> frozenset[int]:
        """The drafters that a step waits for."""
        if self._arm == "sync":
            return frozenset(self._remote)
        return self._readers.intersection(self._remote) if self._arm == "async" else frozenset()

    def _ahead(self) -> frozenset[int]:
        """The drafters that run ahead when any does."""
        return frozenset(self._remote) - self._readers

    def _start(self, indices: frozenset[int], *, ahead: bool) -> _Flight | None:
        """Send a micro-step of one of these off; None if one is out already, or they have nothing to do."""
        if self._flight is not None:
            return None
        for index in self._remote:
            if index not in indices or self._breakers[index].is_open:
                continue
            jobs = self._decoder.jobs(index, ahead=ahead, may_read=ahead or not self._has_read)
            if jobs:
                return self._send(index, jobs, self._decoder.take_closed(index))
        self._forget()
        return None

    def _forget(self) -> None:
        """If no micro-step is out, have the first drafter that has anything to forget do so."""
        for index in self._remote if self._flight is None else ():
            closed = self._decoder.take_closed(index)
            if closed:
                self._send(index, [], closed)
                return

    def _send(self, index: int, jobs: list[DraftJob], closed: Sequence[str]) -> _Flight | None:
        if self._is_stopped:
            return None
        loop = asyncio.get_running_loop()
        try:
            future = loop.run_in_executor(self._executor, self._call, index, closed, jobs)
        except RuntimeError as error:  # there is no thread to be had
            self._fail(index, jobs, error)
            return None
        flight = self._flight = _Flight(index, jobs, future, self._clock())
        future.add_done_callback(lambda _: self._land(flight))
        return flight

    def _land(self, flight: _Flight) -> None:
        self._flight = None
        if flight.future.cancelled():
            return
        error = flight.future.exception()
        result = flight.future.result() if error is None else error
        self._is_quick[flight.index] = self._clock() - flight.started <= self._patience_s
        self._take(flight.index, flight.jobs, result)
        if self._arm == "async":
            self._start(self._ahead(), ahead=True)
        elif self._is_resting:
            self._forget()

    def _note_hanging(self, flight: _Flight) -> None:
        seconds = self._clock() - flight.started
        if seconds >= _HANGING_S and not flight.is_hanging:
            flight.is_hanging = True
            self._metrics.engine_errors["drafter"] += 1
            method = self._decoder.drafters[flight.index].method
            log.warning("the %s drafter has not answered for %.0f s and keeps its thread", method, seconds)

    # What comes back.

    def _take(self, index: int, jobs: Sequence[DraftJob], result: DraftResult | BaseException) -> None:
        """Put the answers of a micro-step on the tapes; whatever they are, nothing is raised."""
        if isinstance(result, BaseException):
            self._fail(index, jobs, result)
            return
        if not jobs:
            return
        try:
            answers = read_answers(jobs, result, self._decoder.config.vocab_size)
        except ValueError as error:
            self._fail(index, jobs, error)
            return
        self._metrics.draft_duration.observe(answers.seconds)
        self._decoder.stats.draft_s += answers.seconds
        self._decoder.stats.dropped["error"] += answers.num_unfit_tokens
        for job, draft in answers.fitting:
            self._decoder.put(index, job, draft)
        if answers.fault is None:
            self._breakers[index].succeed()
        else:
            self._fail(index, answers.unfit, ValueError(answers.fault))

    def _fail(self, index: int, jobs: Sequence[DraftJob], error: BaseException) -> None:
        """A drafter failed, which costs no request anything but speed."""
        self._metrics.engine_errors["drafter"] += 1
        self._decoder.lose(index, jobs)
        method = self._decoder.drafters[index].method
        if self._breakers[index].fail():
            log.warning("the %s drafter keeps failing (%s) and is left alone for a while", method, error)
        else:
            log.debug("the %s drafter failed", method, exc_info=error)


def _micro_step(
    drafter: Drafter, closed: Sequence[str], jobs: Sequence[DraftJob], num_probabilities: int | None
) -> DraftResult | Exception:
    """What the drafter answers, or raises: some exceptions no future can hold.

    `num_probabilities` is the length of the distribution that each draft comes with; None without any.
    """
    try:
        if closed:
            drafter.close(closed)
        result = drafter.draft(jobs) if jobs else _NOTHING
        if num_probabilities is not None:
            from engine.compute.drafters.draft_probabilities import check_probabilities  # torch

            check_probabilities(result, num_probabilities)
    except Exception as error:
        return error
    return result
