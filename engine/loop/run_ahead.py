"""RunAhead: has drafts made before the target's passes or beside them, so that the target waits little.

One micro-step of one drafter is out at a time, in an executor of one thread; the event loop decides the next
one when it is back. So nothing is cancelled: a request that has ended is not part of the next micro-step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

from engine.loop.draft_task import DrafterEntry, DraftTask, ExpectedDrafts
from engine.plan.metrics.batch_metrics import BatchMetrics
from engine.plan.speculation.drafter import (
    Drafter,
    DraftJob,
    DraftResult,
    TellingDrafter,
    UnreadChains,
    read_answers,
)
from engine.plan.speculation.drafter_link import CircuitBreaker
from engine.plan.speculation.drafting_state import DrafterState, DraftingState
from engine.plan.speculation.schedule_choice import ScheduleChooser
from engine.plan.speculation.speculative_decoder import DraftSource, SpeculativeDecoder

log = logging.getLogger("slipstream.speculation")

_PATIENCE_S = 0.5  # that a step waits for a micro-step, or as long as a step of the target takes
_HANGING_S = 30.0  # after which a micro-step that is still out is reported


class RunAhead:
    """Runs the drafters of one SpeculativeDecoder. Every method is for the event-loop thread.

    Before a step: `choose_arm`, then `draft_once` until it returns False, or `draft_inline` if the step was
    launched ahead. While the target computes: `beside_step`. Before its commit: `settle`, after it:
    `after_step`. With nothing to do: `rest`. Cheap drafters are called inline, unless `schedule` is "async";
    the others run as the schedule says, which "auto" chooses by measuring. Of those that run ahead, one that
    reads the target's features is waited for wherever there is no draft: where the target drew what it had
    bet on, the next drafts are there. So are all where lanes are kept, since drafts for several outcomes are
    seldom missing.

    No fault of a drafter is raised here: what it gets wrong is dropped, and after three faults in a row it is
    left alone for a while. A step waits once for a slow drafter, and again only after it was quick. One that
    never returns keeps its thread, and stops the others that need it.
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
        config = decoder.config
        entries = self._entries = [DrafterEntry(link, CircuitBreaker(clock)) for link in decoder.links]
        never_inline = config.schedule == "async"
        self._remote = [entry for entry in entries if never_inline or not entry.link.drafter.is_cheap]
        self._inline = [entry for entry in entries if entry not in self._remote]
        self._ahead = [entry for entry in self._remote if entry.link.goes_on]
        self._readers = [entry for entry in self._remote if entry.link.drafter.reads_features]
        self._awaited: list[DrafterEntry] = []
        self._is_before_step = False  # and may be waiting for drafts
        self._arm: str = config.schedule
        self._chooser: ScheduleChooser | None = None
        self._is_choosing = False  # the chooser, if there is one, named this step's arm
        has_lanes = any(source.max_num_lanes for source in decoder.sources)
        if config.schedule == "auto":
            self._arm = "sync"
            ahead = ("async", "lanes") if has_lanes else ("async",)
            if self._remote:
                self._chooser = ScheduleChooser(("off", "sync", *ahead) if self._ahead else ("off", "sync"))
        elif config.schedule == "async" and has_lanes:
            self._arm = "lanes"
        self._num_probabilities = None if config.verification == "match" else config.vocab_size
        self._task: DraftTask | None = None
        self._expected: ExpectedDrafts | None = None
        self._step_ends: float | None = None  # when it should, while one runs
        self._patience_s = _PATIENCE_S
        self._has_read = False  # drafters that are behind have had their turn before this step
        self._is_resting = False
        self._is_stopped = False

    # Around a step.

    def choose_arm(self, num_seqs: int) -> None:
        """Decide how the drafts of the next step are made."""
        decoder = self._decoder
        self._has_read = self._is_resting = False
        # Where nobody is drafted for, or no draft has room, all arms are alike: there is nothing to compare.
        is_any = any(entry.link.has_clients for entry in self._remote)
        self._is_choosing = is_any and not decoder.is_crowded_out
        if self._chooser is not None and self._is_choosing:
            self._arm = self._chooser.arm(num_seqs)
        self._awaited = {"async": self._readers, "off": []}.get(self._arm, self._remote)
        self._is_before_step = True
        step_s = decoder.costs.seconds(max(1, num_seqs), max(1, num_seqs)) or 0.0
        awaited = [entry.link for entry in self._awaited if self._is_fit(entry)]
        ahead = None
        if self._runs_ahead:  # one that takes longer than a step keeps none from being launched ahead
            ahead = [each.link for each in self._ahead if self._is_fit(each) and each.seconds <= step_s]
        not_asked = [each.link for each in self._remote] if self._arm == "off" else ()
        decoder.begin_step(awaited, ahead=ahead, keeps_lanes=self._arm == "lanes", not_asked=not_asked)
        self._patience_s = max(_PATIENCE_S, step_s)

    async def draft_once(self) -> bool:
        """Draft what the next step waits for, what is still out first; False when all of it is there."""
        began = self._clock()
        self.draft_inline()
        self._decoder.gain.note_waited(self._clock() - began)
        if not self.is_awaited:
            return False
        is_begun = self._task is not None
        task = self._task or self._start(self._awaited, ahead=False)
        if task is None or not task.entry.is_quick:
            return False
        if task.entry not in self._awaited and not task.entry.link.drafter.is_cheap:
            return False
        begin = self._clock()
        news: list[asyncio.Future[Any]] = [task.future]
        if task.told is not None and not is_begun:
            news.append(task.told)
        done, _ = await asyncio.wait(news, timeout=self._patience_s, return_when=asyncio.FIRST_COMPLETED)
        if done and task.future not in done:
            self._expect(task, begin)
            return False
        waited_s, self._expected = self._clock() - begin, None  # nothing has come of an earlier one
        self._decoder.gain.note_waited(waited_s)
        if not done:
            task.entry.is_quick = False
            return False
        if task.entry.link.is_reading(task.jobs):
            self._has_read = True
        elif task.jobs and not is_begun:
            task.entry.link.note_waited(len(task.jobs), waited_s)
        return True

    def _expect(self, task: DraftTask, begin: float) -> None:
        """Have the step verify drafts that are on their way; it began to wait for them at `begin`."""
        assert task.told is not None
        task.entry.link.expect(task.jobs, task.told.result())
        self._expected = ExpectedDrafts(task, begin, self._clock())

    async def settle(self, pass_s: float | None) -> None:
        """Have the drafts known that a step verified before they were read, if it did: it is to be committed.

        It took the device `pass_s`, None if it failed. A drafter that still does not say that they are there
        is not waited for: they are dropped.
        """
        expected, self._expected = self._expected, None
        if expected is None:
            return
        task = expected.task
        if pass_s is not None and (waited_s := expected.waited_s(self._clock(), pass_s)):
            self._decoder.gain.note_waited(waited_s)
            task.entry.link.note_waited(len(task.jobs), waited_s)
        done, _ = await asyncio.wait([task.future], timeout=self._patience_s)
        if not done:
            task.entry.is_quick = False
            task.entry.link.give_up(task.jobs)

    def draft_inline(self) -> None:
        """Run the inline drafters: the only ones beside a step that was launched ahead."""
        for entry in self._inline:
            self._close_inline(entry)
            jobs = [] if entry.breaker.is_open else entry.link.jobs(ahead=False)
            if jobs:
                self._take(entry, jobs, self._micro_step(entry.link.drafter, (), jobs))

    def beside_step(self, step_s: float | None = None) -> None:
        """The target's step has begun and should take `step_s`, None if unknown: run a drafter beside it."""
        now = self._clock()
        self._step_ends = None if step_s is None else now + step_s
        if self._expected is not None:
            self._expected.launched = now
        self._is_before_step = False
        self._go_on()

    def after_step(self, num_seqs: int, num_committed: int, seconds: float) -> None:
        """A step was committed `seconds` after its drafting began; `num_seqs` is 0 if it had prefill."""
        if num_seqs:
            self._decoder.observe_pace(num_seqs, num_committed, seconds)
            if self._chooser is not None and self._is_choosing:
                self._chooser.observe(num_seqs, num_committed, seconds)
        if self._task is not None:
            self._note_hanging(self._task)
        self._step_ends, self._is_before_step = None, True
        self._go_on()

    def rest(self) -> None:
        """There is nothing to do: have the drafters close what has ended."""
        self._is_resting = True
        for entry in self._inline:
            self._close_inline(entry)
        self._close_remote()

    def _is_fit(self, entry: DrafterEntry) -> bool:
        """Whether it can be asked: it has not just failed, and no other hangs and keeps the thread."""
        return not (entry.breaker.is_open or (self._task is not None and self._task.is_hanging))

    @property
    def is_awaited(self) -> bool:
        """Whether steps wait for drafts that another thread makes, as long as the chosen arm holds."""
        return bool(self._awaited) and not self._decoder.is_crowded_out

    @property
    def _runs_ahead(self) -> bool:
        return self._arm in ("async", "lanes")

    def state(self) -> DraftingState:
        """Who drafts at this instant, when, and why not."""
        decoder = self._decoder
        drafters = tuple(map(self._state_of, self._entries, decoder.sources))
        why_off = decoder.why_off
        if why_off is None and all(drafter.why_off for drafter in drafters):
            why_off = drafters[0].why_off
        return DraftingState(decoder.rules, decoder.config.schedule, drafters, why_off)

    def _state_of(self, entry: DrafterEntry, source: DraftSource) -> DrafterState:
        schedule = self._schedule_of(entry)
        why_off = self._decoder.why_off or self._why_off(entry, schedule)
        schedule = schedule if why_off is None else "off"
        return DrafterState(source.drafter.method, source.max_tokens, schedule, why_off)

    def _schedule_of(self, entry: DrafterEntry) -> str:
        """What holds for it, trials aside."""
        if entry in self._inline:
            return "inline"
        arm = self._arm if self._chooser is None else self._chooser.chosen or self._decoder.config.schedule
        arm = "async" if arm == "lanes" else arm
        return "sync" if arm == "async" and entry not in self._ahead else arm

    def _why_off(self, entry: DrafterEntry, schedule: str) -> str | None:
        if entry.breaker.is_open:
            return "It has failed several times in a row and is left alone for a while."
        if entry in self._remote and self._task is not None and self._task.is_hanging:
            return "A drafter has not answered for long and keeps the thread."
        if schedule == "off":
            return "Steps without it are faster, as measured; it is tried now and then."
        return None

    def stop(self) -> None:
        """Submit no more micro-steps; the one that is out is not waited for."""
        self._is_stopped = True
        if self._task is not None:
            self._task.future.cancel()

    # Micro-steps.

    def _micro_step(
        self,
        drafter: Drafter,
        closed: Sequence[str],
        jobs: Sequence[DraftJob],
        tell: Callable[[UnreadChains], None] | None = None,
    ) -> DraftResult | Exception:
        """The drafter's answers, or what it raised: some exceptions cannot be set on a future."""
        try:
            if closed:
                drafter.close(closed)
            if tell is not None and isinstance(drafter, TellingDrafter):
                result = drafter.draft_and_tell(jobs, tell)
            else:
                result = drafter.draft(jobs) if jobs else DraftResult((), 0.0)
            if self._num_probabilities is not None:
                from engine.compute.drafters.draft_probabilities import check_probabilities  # torch

                check_probabilities(result, self._num_probabilities)
        except Exception as error:
            return error
        return result

    def _close_inline(self, entry: DrafterEntry) -> None:
        closed = entry.link.take_closed()
        if closed:
            self._take(entry, [], self._micro_step(entry.link.drafter, closed, []))

    def _close_remote(self) -> None:
        """If no micro-step is out, have the first drafter that has anything to close do so."""
        for entry in self._remote if self._task is None else ():
            closed = entry.link.take_closed()
            if closed:
                self._submit(entry, [], closed)
                return

    def _go_on(self) -> None:
        """Have a drafter run ahead, if they do: before a step only where it waits for none."""
        if self._runs_ahead and not (self._is_before_step and self._awaited):
            self._start(self._ahead, ahead=True)

    def _start(self, entries: Iterable[DrafterEntry], *, ahead: bool) -> DraftTask | None:
        """Submit a micro-step of one of these; None if one is out already, or they have nothing to do."""
        if self._task is not None:
            return None
        for entry in entries:
            if entry.breaker.is_open:
                continue
            jobs = entry.link.jobs(ahead=ahead, may_read=ahead or not self._has_read)
            if jobs:
                return self._submit(entry, jobs, entry.link.take_closed(), ahead=ahead)
        self._close_remote()
        return None

    def _submit(
        self, entry: DrafterEntry, jobs: list[DraftJob], closed: Sequence[str], *, ahead: bool = False
    ) -> DraftTask | None:
        if self._is_stopped:
            return None
        loop, started, drafter = asyncio.get_running_loop(), self._clock(), entry.link.drafter
        told: asyncio.Future[UnreadChains] | None = None
        if entry.tells and jobs and not ahead and entry.link.may_be_unread(jobs):
            told = loop.create_future()

        def tell(chains: UnreadChains) -> None:
            assert told is not None
            loop.call_soon_threadsafe(told.set_result, chains)

        work = partial(self._micro_step, drafter, closed, jobs, None if told is None else tell)
        try:
            future = loop.run_in_executor(self._executor, work)
        except RuntimeError as error:  # no thread can be started
            self._fail(entry, jobs, error)
            return None
        task = self._task = DraftTask(entry, jobs, future, started, told)
        future.add_done_callback(lambda _: self._complete(task))
        return task

    def _complete(self, task: DraftTask) -> None:
        self._task = None
        if task.told is not None:
            task.entry.link.withdraw(task.jobs)  # the answers come in their places
        if task.future.cancelled():
            return
        error = task.future.exception()
        result = task.future.result() if error is None else error
        seconds = self._clock() - task.started
        task.entry.seconds = seconds
        task.entry.is_quick = seconds <= self._patience_s
        self._take(task.entry, task.jobs, result)
        if self._is_resting:
            self._close_remote()
        elif self._runs_ahead and not self._would_keep_from_more(seconds):
            self._go_on()

    def _would_keep_from_more(self, seconds: float) -> bool:
        """Whether a micro-step of `seconds`, begun now, is likelier to cost the next round than to serve it.

        Where all that was drafted comes true, what is done of it before the step ends was won. Else the
        drafter is kept from the new tokens until the rest is done.
        """
        if self._step_ends is None:
            return False
        rounds = self._decoder.stats.run_ahead
        misses = (rounds["miss"] + rounds["lane"]) / max(1, rounds.total())
        return self._step_ends - self._clock() < seconds * misses

    def _note_hanging(self, task: DraftTask) -> None:
        seconds = self._clock() - task.started
        if seconds >= _HANGING_S and not task.is_hanging:
            task.is_hanging = True
            self._metrics.count_error("drafter")
            method = task.entry.link.drafter.method
            log.warning("the %s drafter has not answered for %.0f s and keeps its thread", method, seconds)

    # Answers.

    def _take(
        self, entry: DrafterEntry, jobs: Sequence[DraftJob], result: DraftResult | BaseException
    ) -> None:
        """Put the answers of a micro-step on the tapes; whatever they are, nothing is raised."""
        if isinstance(result, BaseException):
            self._fail(entry, jobs, result)
            return
        if not jobs:
            return
        try:
            answers = read_answers(jobs, result, self._decoder.config.vocab_size)
        except ValueError as error:
            self._fail(entry, jobs, error)
            return
        self._metrics.draft_duration.observe(answers.seconds)
        entry.link.take(answers)
        if answers.fault is None:
            entry.breaker.succeed()
        else:
            self._fail(entry, answers.unfit, ValueError(answers.fault))

    def _fail(self, entry: DrafterEntry, jobs: Sequence[DraftJob], error: BaseException) -> None:
        """A drafter failed, which costs no request anything but speed."""
        self._metrics.count_error("drafter")
        entry.link.lose(jobs)
        method = entry.link.drafter.method
        if entry.breaker.fail():
            log.warning("the %s drafter keeps failing (%s) and is left alone for a while", method, error)
        else:
            log.debug("the %s drafter failed", method, exc_info=error)
