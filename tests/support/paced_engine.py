"""A fake engine that decodes in steps: a step gives the next streams in turn a token, as a batch does."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from engine import GenerationRequest, OutputDelta
from tests.support.fake_engine import FakeEngine, FakeStream


@dataclass
class PacedEngine(FakeEngine):
    """Streams wait for their tokens on a future each, as for the real loop. Run it with `stepping`."""

    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    crowd: int = 0  # how many streams must wait at once to set `crowded`
    crowded: asyncio.Event = field(default_factory=asyncio.Event)

    def submit(self, request: GenerationRequest) -> FakeStream:
        stream = PacedStream(self, request)
        self.streams.append(stream)
        return stream

    @asynccontextmanager
    async def stepping(self, batch_size: int, step_s: float) -> AsyncIterator[None]:
        """Step every `step_s` seconds; each step lets up to `batch_size` of the waiting streams go on."""
        stepper = asyncio.create_task(self._step_forever(batch_size, step_s))
        try:
            yield
        finally:
            stepper.cancel()

    async def _step_forever(self, batch_size: int, step_s: float) -> None:
        while True:
            await asyncio.sleep(step_s)
            for _ in range(min(batch_size, len(self.waiting))):
                future = self.waiting.popleft()
                if not future.done():
                    future.set_result(None)


class PacedStream(FakeStream):
    """Its next token comes with a step."""

    async def __anext__(self) -> OutputDelta:
        engine = self.engine
        assert isinstance(engine, PacedEngine)
        future = asyncio.get_running_loop().create_future()
        engine.waiting.append(future)
        if len(engine.waiting) == engine.crowd:
            engine.crowded.set()
        await future
        return await super().__anext__()
