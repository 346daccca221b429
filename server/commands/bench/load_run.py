"""The load itself: requests sent in a closed or an open loop until their number or the time is up."""

from __future__ import annotations

import asyncio
from time import perf_counter

from server.commands.bench.arrivals import due_times, indices
from server.commands.bench.live_counts import LiveCounts
from server.commands.bench.plan import Load
from server.commands.bench.prompts import Prompts
from server.commands.bench.record import Failure, RequestRecord
from server.commands.bench.request import StreamNotes
from server.commands.remote.failures import Refused, RemoteError
from server.commands.remote.http_client import HttpClient

_FIRST_BACKOFF_S, _LONGEST_WAIT_S = 0.5, 120.0


class LoadRun:
    """One run against one server. `records` holds every measured request from the moment it is due."""

    def __init__(self, client: HttpClient, path: str, prompts: Prompts, load: Load) -> None:
        self.counts = LiveCounts()
        self.records: list[RequestRecord] = []
        self.started = self.ended = 0.0
        self._client = client
        self._path = path
        self._prompts = prompts
        self._load = load

    async def warm_up(self) -> None:
        """Send the requests that are not measured, as many at a time as the load's closed loop would.

        Raises RemoteError when the first of them fails: then nothing would be measured either.
        """
        numbers = iter(range(-1, -1 - self._load.num_warmups, -1))
        num_workers = min(self._load.num_warmups, self._load.concurrency or 1)

        async def work() -> None:
            for index in numbers:
                record = RequestRecord(index, due=perf_counter())
                await self._send(record, self._prompts.body(index), LiveCounts())

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(num_workers):
                    group.create_task(work())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def run(self) -> None:
        """Send all requests and wait for their ends. Cancelled, it leaves those in flight cut off."""
        self.started = perf_counter()
        try:
            await (self._open_loop() if self._load.rate is not None else self._closed_loop())
        finally:
            self.ended = perf_counter()

    async def _closed_loop(self) -> None:
        numbers = indices(self._load)
        duration_s = self._load.duration_s

        async def work() -> None:
            for index in numbers:
                if duration_s is not None and perf_counter() - self.started >= duration_s:
                    return
                body = self._prompts.body(index)
                await self._measure(RequestRecord(index, due=perf_counter()), body)

        num_workers = min(self._load.concurrency or 1, self._load.num_requests or 65536)
        async with asyncio.TaskGroup() as group:
            for _ in range(num_workers):
                group.create_task(work())

    async def _open_loop(self) -> None:
        async with asyncio.TaskGroup() as group:
            for index, at in enumerate(due_times(self._load)):
                body = self._prompts.body(index)
                due = self.started + at
                # Late by whatever this loop was busy with: `due` stays what it was.
                await asyncio.sleep(max(0.0, due - perf_counter()))
                group.create_task(self._measure(RequestRecord(index, due), body))

    async def _measure(self, record: RequestRecord, body: bytes) -> None:
        self.records.append(record)
        self.counts.num_in_flight += 1
        try:
            async with asyncio.timeout(self._load.timeout_s):
                await self._try(record, body)
        except TimeoutError:
            message = f"no complete reply within {self._load.timeout_s:g} s"
            record.failure = Failure("timeout", message)
        except RemoteError as error:
            asked = error.retry_after_s if isinstance(error, Refused) else None
            record.failure = Failure(error.kind, str(error), asked)
        finally:
            self.counts.num_in_flight -= 1
            self.counts.num_done += record.succeeded
            self.counts.num_failed += record.failure is not None

    async def _try(self, record: RequestRecord, body: bytes) -> None:
        """Send it until it is not refused, or for the last time. Raises RemoteError."""
        while True:
            try:
                await self._send(record, body, self.counts)
                return
            except Refused as refusal:
                if record.num_retries >= self._load.max_retries or not refusal.is_retryable:
                    raise
                wait_s = refusal.retry_after_s
                if wait_s is None:
                    wait_s = _FIRST_BACKOFF_S * 2**record.num_retries
                record.num_retries += 1
                await asyncio.sleep(min(wait_s, _LONGEST_WAIT_S))

    async def _send(self, record: RequestRecord, body: bytes, counts: LiveCounts) -> None:
        notes = StreamNotes(counts)
        record.sent = perf_counter()
        await self._client.exchange("POST", self._path, body, notes)
        ended = perf_counter()
        notes.read_into(record)
        record.ended = ended
