"""EngineReplica: one engine behind our ASGI application, called through a Serve handle, not a socket."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from ray import serve
from starlette.types import Message, Scope

from config import PlannedFault, Settings
from deploy.ray.router import KV_USAGE
from deploy.ray.scaling import QUEUE_DEPTH
from engine import EngineState, build_engine, freeze_heap, prepare_process
from server.observability.logs import adopt_library_loggers, configure_logging

log = logging.getLogger("slipstream.ray")

REPLICA_HEADER = b"x-slipstream-replica"
LAST_EVENTS_S = 2  # for the errors of a dead engine to be read


@dataclass(frozen=True, slots=True)
class WholeReply:
    """One replica's whole reply to a call that goes to all of them."""

    replica: str
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class EngineReplica:
    """What Ray Serve starts N times. Every method runs on one event loop, which is the engine's own."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, settings: Settings, faults: Sequence[PlannedFault] = ()
    ) -> None:
        """Load the model; the replica takes requests once this returns. Raises StartRefused."""
        prepare_process()
        configure_logging(settings.log)
        from server.app import build_app

        adopt_library_loggers()
        self._name = str(serve.get_replica_context().replica_id.unique_id)
        self._settings = settings
        self._engine = build_engine(settings, faults)
        self._app = build_app(settings, self._engine, is_public=True)  # Ray decides where it listens
        await self._engine.start()
        freeze_heap()
        self._calls: set[asyncio.Task[None]] = set()
        self._death = asyncio.create_task(self._leave_when_dead())

    async def answer(
        self, scope: Scope, body: bytes, *, keys: tuple[bytes, ...] = ()
    ) -> AsyncIterator[list[Message]]:
        """The application's reply to one HTTP request, message by message as they come.

        What is ready at the same time comes together. `keys` are for the router. Closing the iterator is the
        client's leaving.
        """
        call = _Call(body)
        task = asyncio.create_task(self._app(scope, call.receive, call.send))
        task.add_done_callback(lambda _: call.messages.put_nowait(None))
        self._calls.add(task)
        try:
            while batch := await call.next_batch():
                yield [self._marked(message) for message in batch]
            await task
        finally:
            task.cancel()
            await asyncio.wait({task})
            self._calls.discard(task)

    async def answer_whole(self, scope: Scope, body: bytes) -> WholeReply:
        """The whole reply to a call that goes to every replica."""
        messages = [message async for batch in self.answer(scope, body) for message in batch]
        start = messages[0]
        content = b"".join(message.get("body", b"") for message in messages[1:])
        return WholeReply(self._name, start["status"], start["headers"], content)

    def _marked(self, message: Message) -> Message:
        """The start of a reply names the replica. Ray's proxy adds the request id itself."""
        if message["type"] != "http.response.start":
            return message
        headers = [each for each in message["headers"] if each[0].lower() != b"x-request-id"]
        return {**message, "headers": [*headers, (REPLICA_HEADER, self._name.encode("ascii"))]}

    async def _leave_when_dead(self) -> None:
        """End the process with a dead engine: nothing else tells Ray's routers at once."""
        await self._engine.wait_dead()
        log.error("the engine is dead; the replica ends")
        if self._calls:
            await asyncio.wait(self._calls, timeout=LAST_EVENTS_S)
        os._exit(1)

    # What Ray Serve calls by these names; async, so that it is on the loop and not in a thread of its own.

    async def check_health(self) -> None:
        """Raises when the engine is dead or hung: Ray then replaces the replica."""
        if self._engine.state is EngineState.DEAD:
            raise RuntimeError(f"the engine is dead: {self._engine.fault}")

    async def record_routing_stats(self) -> dict[str, float]:
        """What the routers see."""
        return {KV_USAGE: self._engine.gauges().kv_cache_usage_ratio}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaling policy sees."""
        gauges = self._engine.gauges()
        return {QUEUE_DEPTH: float(gauges.num_requests_running + gauges.num_requests_waiting)}

    async def __del__(self) -> None:
        """Called by Ray once no request is left."""
        self._death.cancel()
        await self._engine.drain(self._settings.server.drain_timeout)
        await self._engine.stop()


class _Call:
    """The ASGI ends of one request: the body once, then nothing; what is sent waits to be taken."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.messages: asyncio.Queue[Message | None] = asyncio.Queue()

    async def receive(self) -> Message:
        if self._body is None:  # whoever leaves cancels the application's task
            await asyncio.get_running_loop().create_future()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        self.messages.put_nowait(message)

    async def next_batch(self) -> list[Message]:
        """All messages there are, waiting for one; empty at the end."""
        batch: list[Message] = []
        while not batch or not self.messages.empty():
            message = await self.messages.get()
            if message is None:
                self.messages.put_nowait(None)
                break
            batch.append(message)
        return batch
