"""BatchRunner: answers the lines of open batches in seats that nobody else needs. Event-loop thread only.

What runs is known only here. The store knows what is answered, so that a restart goes on from there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from server.api.batches.line_call import LineCaller
from server.api.batches.line_scan import InputLost, LineScan, read_body
from server.api.batches.records import Line, StoredBatch
from server.api.batches.seats import LinePace, Seats
from server.api.batches.state import BatchState
from server.api.batches.store import BatchStore, answer_line
from server.http.errors import ApiError

log = logging.getLogger("slipstream.server")

_LINES_READ = 64  # of a job at once
_MAX_SENT_BACK = 3  # times, after which a line keeps its seat
_PAUSE_S = 5.0  # after the disk or the database has failed
_LOST = {"code": "input_lost", "message": "The request can no longer be read from the input file."}


@dataclass(slots=True, eq=False)
class Job:
    """An open batch here: which of its lines wait, and how many run."""

    batch: StoredBatch
    waiting: deque[Line] = field(default_factory=deque)
    last_read: int = 0  # line of the file, up to which lines were taken from the store
    is_read: bool = False  # to the end
    num_running: int = 0
    num_unanswered: int = 0
    sent_back: Counter[int] = field(default_factory=Counter)  # times, by line

    @classmethod
    def of(cls, batch: StoredBatch) -> Job:
        """A batch as the store knows it."""
        return cls(batch, num_unanswered=batch.total - batch.completed - batch.failed)

    @property
    def is_ended(self) -> bool:
        """True when no line waits or runs."""
        return self.is_read and not self.waiting and not self.num_running


@dataclass(frozen=True, slots=True)
class RunningLine:
    """A line that has a seat."""

    job: Job
    line: Line
    task: asyncio.Task[None]


class BatchRunner:
    """One task that fills free seats, wakes with every change, and ends what is over.

    `max_line_bytes` is the limit of a request's body. `counts` gets the lines by how they end.
    """

    def __init__(
        self, state: BatchState, seats: Seats, caller: LineCaller, counts: Counter[str], max_line_bytes: int
    ) -> None:
        self._state = state
        self._seats = seats
        self._caller = caller
        self._max_line_bytes = max_line_bytes
        self.pace = LinePace(caller.clock)
        self._counts = counts
        self._jobs: dict[str, Job] = {}
        self._scans: dict[str, asyncio.Task[None]] = {}
        self._running: dict[asyncio.Task[None], RunningLine] = {}
        self._keeping: set[asyncio.Task[None]] = set()  # have their reply: too late to send them back
        self._wake = asyncio.Event()
        self._paused_until = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def num_running(self) -> int:
        """Lines that run now."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Lines of open batches that have no answer and do not run."""
        return sum(job.num_unanswered for job in self._jobs.values()) - len(self._running)

    @property
    def jobs(self) -> list[Job]:
        """The open batches, the earliest to expire first."""
        return sorted(self._jobs.values(), key=lambda job: job.batch.expires_at)

    def start(self) -> None:
        """Go on with what an earlier server has left open. Safe to call twice."""
        if self._task is not None and not self._task.done():
            return
        self._task = asyncio.create_task(self._run(), name="slipstream-batches")

    async def stop(self) -> None:
        """Let every line go; those without an answer are asked again after the next start."""
        tasks = [*self._running, *self._scans.values()]
        if self._task is not None:
            tasks.append(self._task)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def take(self, batch: StoredBatch) -> None:
        """A batch was made or has changed."""
        job = self._jobs.get(batch.id)
        if job is None:
            self._jobs[batch.id] = Job.of(batch)
        else:
            job.batch = batch
        self.wake()

    def wake(self) -> None:
        """Something has changed: seats may be free, or needed."""
        if self._jobs:
            self._wake.set()

    async def _run(self) -> None:
        try:
            found = await self._state.run(BatchStore.open_batches)
        except ApiError as error:
            log.warning("batches do not run: %s", error)
            return
        for batch in found:
            self._jobs.setdefault(batch.id, Job.of(batch))
        while True:
            self._wake.clear()
            try:
                await self._settle()
                await self._fill()
            except ApiError as error:
                self._pause(_PAUSE_S, error)
            await self._rest()

    @property
    def _is_paused(self) -> bool:
        return self._paused_until > time.monotonic()

    def _pause(self, seconds: float, reason: ApiError | None = None) -> None:
        if reason is not None:
            log.warning("batches pause for %g s: %s", seconds, reason)
        self._paused_until = max(self._paused_until, time.monotonic() + seconds)

    async def _rest(self) -> None:
        """Until something changes, a pause is over, or a window ends."""
        now = time.time()
        ends = [job.batch.ends_by - now for job in self._jobs.values()]
        pause_s = self._paused_until - time.monotonic()
        due_s = min([*(end for end in ends if end > 0), *([pause_s] if pause_s > 0 else [])], default=None)
        with suppress(TimeoutError):
            async with asyncio.timeout(due_s):
                await self._wake.wait()

    # What becomes of batches.

    async def _settle(self) -> None:
        """Start validations; end the batches that are over."""
        for job in self.jobs:
            batch = job.batch
            ending = _ending_of(job)
            if ending is not None:
                self._let_go(job)
                if not job.num_running:
                    await self._end(job, ending)
            elif batch.status == "validating" and batch.id not in self._scans and not self._is_paused:
                scan = asyncio.create_task(self._validate(job))
                self._scans[batch.id] = scan
                scan.add_done_callback(partial(self._on_scanned, batch.id))

    def _let_go(self, job: Job) -> None:
        for running in self._running.values():
            if running.job is job and running.task not in self._keeping:
                running.task.cancel()
        scan = self._scans.get(job.batch.id)
        if scan is not None:
            scan.cancel()

    async def _end(self, job: Job, ending: str) -> None:
        """Write the files. Raises ApiError, and then it is tried again."""
        batch = job.batch
        if ending == "completed":
            await self._state.run(lambda store: store.change_batch(batch.id, "finalizing"))
        batch = await self._state.run(lambda store: store.end_batch(batch.id, ending))
        if ending != "completed":
            self._counts[ending] += job.num_unanswered
        self._jobs.pop(batch.id, None)
        log.info(
            "batch %s has ended: %s",
            batch.id,
            batch.status,
            extra={"lines": batch.total, "completed": batch.completed, "failed": batch.failed},
        )

    async def _validate(self, job: Job) -> None:
        batch = job.batch
        path = await self._state.run(lambda store: store.path(batch.input_file_id))
        scan = LineScan(path, batch.endpoint, self._max_line_bytes)
        begun = await self._state.run(lambda store: store.clear_lines(batch.id))
        while begun.in_progress_at is None and not scan.is_over:
            await self._state.run(partial(_scan_more, batch_id=batch.id, scan=scan))
        if scan.errors:
            await self._state.run(lambda store: store.clear_lines(batch.id))
            await self._state.run(lambda store: store.change_batch(batch.id, "failed", scan.errors_json()))
            self._jobs.pop(batch.id, None)
            log.info("batch %s has failed: %d lines are wrong", batch.id, len(scan.errors))
        else:
            begun = await self._state.run(lambda store: store.begin(batch.id))
            job.num_unanswered = begun.total - begun.completed - begun.failed
            if job.batch.status == "validating":
                job.batch = begun

    def _on_scanned(self, batch_id: str, task: asyncio.Task[None]) -> None:
        self._scans.pop(batch_id, None)
        if not task.cancelled():
            error = task.exception()
            if isinstance(error, ApiError):
                self._pause(_PAUSE_S, error)
            elif error is not None:
                log.error("a batch could not be validated", exc_info=error)
                self._pause(_PAUSE_S)
        self.wake()

    # What becomes of lines.

    async def _fill(self) -> None:
        """Give free seats to lines, and take back what others need."""
        self._send_back(len(self._running) - self._most())
        while len(self._running) < self._most():
            found = await self._next()
            if found is None:
                return
            if len(self._running) < self._most():
                self._begin(*found)
            else:
                found[0].waiting.appendleft(found[1])

    def _most(self) -> int:
        if self._is_paused:
            return 0
        return self._seats.most(is_urgent=self._is_urgent())

    def _is_urgent(self) -> bool:
        """True if at the measured pace a window would be missed."""
        num_lines, now = 0, time.time()
        for job in self.jobs:
            num_lines += job.num_unanswered
            needed_s = self.pace.needed_s(num_lines)
            if needed_s is not None and num_lines and needed_s > job.batch.ends_by - now:
                return True
        return False

    def _send_back(self, num_lines: int) -> None:
        """Take the seats of the newest lines, but of none that was sent back too often."""
        if num_lines <= 0 or self._is_paused:
            return
        for running in reversed(list(self._running.values())):
            is_kept = running.job.sent_back[running.line.number] >= _MAX_SENT_BACK
            if is_kept or running.task in self._keeping:
                continue
            running.job.sent_back[running.line.number] += 1
            running.task.cancel()
            num_lines -= 1
            if not num_lines:
                return

    async def _next(self) -> tuple[Job, Line] | None:
        """The next line of the batch that expires first. Raises ApiError."""
        for job in self.jobs:
            if job.batch.status != "in_progress" or _ending_of(job) is not None:
                continue
            if not job.waiting and not job.is_read:
                await self._read(job)
            if job.waiting:
                return job, job.waiting.popleft()
        return None

    async def _read(self, job: Job) -> None:
        batch_id, after = job.batch.id, job.last_read
        lines = await self._state.run(lambda store: store.unanswered(batch_id, after, _LINES_READ))
        job.is_read = len(lines) < _LINES_READ
        if lines:
            job.last_read = lines[-1].number
        elif not job.num_running:
            self.wake()  # it had none left: it ends
        job.waiting.extend(lines)

    def _begin(self, job: Job, line: Line) -> None:
        task = asyncio.create_task(self._answer(job, line))
        self._running[task] = RunningLine(job, line, task)
        job.num_running += 1
        self.pace.begin()
        task.add_done_callback(self._on_left)

    async def _answer(self, job: Job, line: Line) -> None:
        batch = job.batch
        try:
            body = await self._state.run(lambda store: read_body(store.path(batch.input_file_id), line))
        except InputLost:
            answer, is_good = answer_line(line.custom_id, None, _LOST), False
        else:
            reply = await self._caller.ask(batch.endpoint, body, batch.tenant)
            if not reply.is_final:
                self._pause(reply.retry_after_s)
                raise asyncio.CancelledError
            answer, is_good = answer_line(line.custom_id, reply.response()), 200 <= reply.status < 300
        task = asyncio.current_task()
        assert task is not None
        self._keeping.add(task)
        await self._keep(job, line, answer, is_good=is_good)

    async def _keep(self, job: Job, line: Line, answer: bytes, *, is_good: bool) -> None:
        is_new = await self._state.run(
            lambda store: store.answer(job.batch.id, line.number, answer, is_good=is_good)
        )
        if is_new:
            job.num_unanswered -= 1
            self._counts["completed" if is_good else "failed"] += 1

    def _on_left(self, task: asyncio.Task[None]) -> None:
        running = self._running.pop(task)
        self._keeping.discard(task)
        job = running.job
        job.num_running -= 1
        is_answered = not task.cancelled() and task.exception() is None
        self.pace.end(is_answered=is_answered)
        if is_answered:
            job.sent_back.pop(running.line.number, None)
        else:
            job.waiting.appendleft(running.line)
            error = None if task.cancelled() else task.exception()
            if isinstance(error, ApiError):
                self._pause(_PAUSE_S, error)
            elif error is not None:
                log.error("a line of a batch could not be answered", exc_info=error)
                self._pause(_PAUSE_S)
        self.wake()


def _ending_of(job: Job) -> str | None:
    """The status that a batch is to end with now; None while it goes on."""
    batch = job.batch
    if batch.status == "cancelling":
        return "cancelled"
    if batch.status == "finalizing" or (batch.status == "in_progress" and job.is_ended):
        return "completed"
    if batch.status == "in_progress" and batch.ends_by <= time.time():
        return "expired"  # not while it is validated: each line is told that it was not answered
    return None


def _scan_more(store: BatchStore, *, batch_id: str, scan: LineScan) -> None:
    lines = scan.read()
    if not scan.errors:
        store.add_lines(batch_id, lines)
